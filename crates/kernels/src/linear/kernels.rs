//! The kernels of each type of element.

use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::pack::pack_weight;
use super::task::{Product, run};
use super::weight::{PackedWeight, unpack_rows};
use crate::cpu::Tier;
use crate::error::Error;
use crate::number::Number;

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used.
pub trait ProductKernels: Number {
    /// Initialises an output. The product was checked before it was made, and nobody else can make one.
    fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]);
    /// [`PackedWeight::new`].
    ///
    /// # Errors
    /// As there.
    fn pack(rows: &[Self], shape: (usize, usize), tier: Tier) -> Result<PackedWeight, Error>;
    /// [`PackedWeight::unpack_rows`].
    ///
    /// # Errors
    /// As there.
    fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error>;
}

macro_rules! multiply {
    ($($type:ty),*) => {
        $(impl ProductKernels for $type {
            fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]) {
                run(product, output)
            }

            fn pack(rows: &[Self], shape: (usize, usize), tier: Tier) -> Result<PackedWeight, Error> {
                pack_weight(rows, shape, tier)
            }

            fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error> {
                unpack_rows(weight, outputs)
            }
        })*
    };
}

multiply!(f32, bf16, f16);

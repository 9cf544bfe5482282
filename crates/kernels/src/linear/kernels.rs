//! The kernels of each type of element.

use half::{bf16, f16};

use super::{PackedWeight, Product, WeightOutputs, WeightRows, pack_weight, run, unpack_weight};
use crate::number::Number;

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used. What they take is checked before it is made, and nobody else can make it.
pub trait ProductKernels: Number {
    /// A product with a weight.
    fn multiply(product: &Product<Self>);
    /// A weight in the order in which products read it; `None` if memory is short.
    fn pack(rows: &WeightRows<Self>) -> Option<PackedWeight>;
    /// Rows of a packed weight; `None` if memory is short.
    fn unpack(rows: &WeightOutputs) -> Option<Vec<Self>>;
}

macro_rules! multiply {
    ($($type:ty),*) => {
        $(impl ProductKernels for $type {
            fn multiply(product: &Product<Self>) {
                run(product)
            }

            fn pack(rows: &WeightRows<Self>) -> Option<PackedWeight> {
                pack_weight(rows)
            }

            fn unpack(rows: &WeightOutputs) -> Option<Vec<Self>> {
                unpack_weight(rows)
            }
        })*
    };
}

multiply!(f32, bf16, f16);

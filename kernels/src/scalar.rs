//! The kernels for each type of element, compiled in this package: generic code would be compiled again, and perhaps without
//! optimisation, wherever it is used.

use half::{bf16, f16};

use crate::flash::{self, Problem};
use crate::linear::{self, PackedWeight, Projection};
use crate::{Element, Tier};

/// The types that tensors hold: f32, bf16 and f16.
pub trait Scalar: Element + linear::Packable {
    #[doc(hidden)]
    fn attend(problem: Problem<Self>, tier: Tier) -> Option<Vec<Self>>;
    #[doc(hidden)]
    fn project(projection: Projection<Self>) -> Option<Vec<Self>>;
    #[doc(hidden)]
    fn pack(rows: &[Self], shape: (usize, usize), tier: Tier) -> Option<PackedWeight>;
    #[doc(hidden)]
    fn unpack(weight: &PackedWeight) -> Option<Vec<Self>>;
}

macro_rules! scalar {
    ($($scalar:ty),*) => {$(
        impl Scalar for $scalar {
            fn attend(problem: Problem<Self>, tier: Tier) -> Option<Vec<Self>> {
                flash::run_generic(problem, tier)
            }

            fn project(projection: Projection<Self>) -> Option<Vec<Self>> {
                projection.run_generic()
            }

            fn pack(rows: &[Self], shape: (usize, usize), tier: Tier) -> Option<PackedWeight> {
                PackedWeight::new_generic(rows, shape, tier)
            }

            fn unpack(weight: &PackedWeight) -> Option<Vec<Self>> {
                weight.unpack_generic()
            }
        }
    )*};
}

scalar!(f32, bf16, f16);

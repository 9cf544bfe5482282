//! The kernels of each type of element.

use half::{bf16, f16};

use super::{BackwardCall, Call, run, run_backward};
use crate::cpu::Tier;
use crate::number::Number;

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used. Calls are checked before they are made, and nobody else can make one.
pub trait AttentionKernels: Number {
    /// Attention; `None` if memory is short.
    fn attend(call: &Call<Self>, tier: Tier) -> Option<()>;
    /// Attention to keys and values of 8 bits.
    fn attend_q8(call: &Call<Self, u8>, tier: Tier) -> Option<()>;
    /// The backward pass.
    fn attend_backward(call: &BackwardCall<Self>, tier: Tier) -> Option<()>;
}

macro_rules! attend {
    ($($type:ty),*) => {
        $(impl AttentionKernels for $type {
            fn attend(call: &Call<Self>, tier: Tier) -> Option<()> {
                run(call, tier)
            }

            fn attend_q8(call: &Call<Self, u8>, tier: Tier) -> Option<()> {
                run(call, tier)
            }

            fn attend_backward(call: &BackwardCall<Self>, tier: Tier) -> Option<()> {
                run_backward(call, tier)
            }
        })*
    };
}

attend!(f32, bf16, f16);

//! Attention: the description of a call, the choice of its kernels and their launches.

mod arguments;
mod backward;
mod call;
mod checks;
mod ci_programs;
mod forward;
mod plan;

use crate::arguments::AttentionArguments;
use crate::device::KernelArguments;

// SAFETY: the passes take addresses from operands, and sizes and strides from the checks of `AttentionCall::sizes`.
unsafe impl KernelArguments for AttentionArguments {}

pub(crate) use ci_programs::entries;

pub use call::{
    AttentionCall, BackwardInputs, Dropout, DropoutSeed, FirstPosition, ForwardOutput, Gradients, Intervals, KeyRanges,
    KvScales, OutputLayout, PackedSequences, RequestedGradients, RequestedResults, ScoreModifiers,
};
pub use plan::{BackwardKernel, Kernel, is_available};

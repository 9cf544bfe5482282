//! Attention: the description of a call, the choice of its kernels and their launches.

mod backward;
mod call;
mod forward;
mod plan;

pub use call::{
    AttentionCall, BackwardInputs, Dropout, DropoutSeed, FirstPosition, ForwardOutput, Gradients, Intervals, KeyRanges,
    KvScales, OutputLayout, PackedSequences, RequestedGradients, ScoreModifiers,
};
pub use plan::{BackwardKernel, Kernel, is_available};

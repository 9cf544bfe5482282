#![expect(dead_code, reason = "the attention kernels are not called yet")]
#![doc = include_str!("../README.md")]

mod arguments;
mod attention;
mod capability;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod compile;
mod delta;
mod device;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod disk_cache;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod hash;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod nvrtc;
mod program;
mod rows;
mod source;
mod specialization;
mod tiles;
mod unsupported;

pub use attention::{
    AttentionCall, BackwardInputs, BackwardKernel, Dropout, DropoutSeed, FirstPosition, ForwardOutput, Gradients,
    Intervals, Kernel, KeyRanges, KvScales, OutputLayout, PackedSequences, RequestedGradients, ScoreModifiers,
    is_available,
};
pub use capability::{Capability, Limits};
pub use delta::{DeltaCall, DeltaGradients, DeltaKernel, DeltaResults};
pub use rows::{
    Activation, ConvolutionCall, ConvolutionGradients, ConvolutionResults, GatedNormCall, GatedNormGradients,
};
pub use unsupported::Unsupported;

#![doc = include_str!("../README.md")]

mod arguments;
mod attention;
mod capability;
mod catalogue;
#[cfg(any(feature = "cuda", test))]
mod compile;
#[cfg(test)]
mod cpp;
mod delta;
mod device;
#[cfg(any(feature = "cuda", test))]
mod disk_cache;
mod element;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod failure;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod hash;
#[cfg(any(feature = "cuda", test))]
mod nvrtc;
#[cfg(any(feature = "cuda", test))]
mod private_files;
mod program;
mod rows;
mod source;
#[cfg(test)]
mod source_sizes;
mod specialization;
mod tiles;
mod unsupported;
mod warnings;

pub use attention::{
    AttentionCall, BackwardInputs, BackwardKernel, Dropout, DropoutSeed, FirstPosition, ForwardOutput, Gradients,
    Intervals, Kernel, KeyRanges, KvScales, OutputLayout, PackedSequences, RequestedGradients, RequestedResults,
    ScoreModifiers, is_available,
};
pub use capability::{Capability, Limits};
pub use catalogue::{CatalogueEntry, CatalogueKernel};
pub use delta::{DeltaCall, DeltaGradients, DeltaKernel, DeltaResults};
pub use device::launches_of_thread;
#[cfg(feature = "emulator")]
pub use device::without_programs;
pub use rows::{
    Activation, AngleRows, ConvolutionCall, ConvolutionGradients, ConvolutionResults, DeltaGates, DeltaGatesCall,
    GateCall, GateGradients, GatedNormCall, GatedNormGradients, LinearParameters, LinearRowsCall, NormCall,
    NormGradients, NormParameterGradients, QuantizeRowsCall, RotationCall, RowCodes,
};
pub use unsupported::Unsupported;
pub use warnings::warn_of_each_text;

/// Returns the programs that continuous integration compiles for a device with some limits: the ones that it would run
/// for the usual head dimensions and each score modifier.
pub fn catalogue(limits: &Limits) -> Vec<CatalogueEntry> {
    [attention::entries(limits), delta::entries(limits), rows::entries()].concat()
}

/// Returns the macros of programs that together have every row of the tables of tiles, as options of a C++ compiler.
/// The tests on the emulator run them, since a device takes the first row that fits it.
pub fn options_of_every_tile() -> Vec<Vec<String>> {
    // What is 0 is so by default.
    let is_needed = |option: &String| !option.ends_with("=0") || option.starts_with("-DELEMENT");
    tiles::programs_of_every_row().iter().map(|program| program.define_options().filter(is_needed).collect()).collect()
}

/// Returns the source of a program of the [`catalogue`](fn@catalogue), as NVRTC compiles it.
///
/// # Panics
/// If there is no such source.
pub fn source_text(name: &str) -> String {
    source::assemble(name)
}

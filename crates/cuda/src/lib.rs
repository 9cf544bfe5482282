#![doc = include_str!("../README.md")]

mod arguments;
mod attention;
mod capability;
mod ci_programs;
#[cfg(any(feature = "cuda", test))]
mod compile;
mod delta;
mod device;
mod element;
mod given;
mod kernel_pointers;
mod kernel_struct;
mod memory_layout;
#[cfg(any(feature = "cuda", test))]
mod nvrtc;
mod program;
mod rows;
mod source;
mod specialization;
mod tiles;
mod unsupported;

use std::path::Path;
use std::{fs, io};

use candle_core::Device;

pub use attention::{
    BackwardInputs, BackwardKernel, CudaAttention, CudaCall, ForwardKernel, ForwardOutput, is_available,
};
pub use candle_attention_call::{
    AttentionDims, BoundedKeys, Dropout, DropoutMask, FirstPosition, Intervals, KvCodeFormat, KvPages, KvScales,
    OutputLayout, PackedLengths, PerInput, RequestedGradients, RequestedResults, ScoreModifiers,
};
pub use candle_attention_device::warn_of_each_text;
pub use capability::{Capability, Limits};
pub use ci_programs::{CiKernel, CiProgram};
pub use delta::{CudaDeltaCall, CudaDeltaGradients, DeltaKernel, DeltaResults};
pub use device::{DeviceChecks, first_use, kernels_version, launches_of_thread};
#[cfg(feature = "emulator")]
pub use device::{NewDevice, SourceFault, emulator_bytes_of_thread, fault_of_thread, on_new_device, without_programs};
pub use rows::{
    Activation, AngleRows, CodedLinear, CodedNumbers, CodedValues, CodedWeight, ConvolutionCall, ConvolutionGradients,
    ConvolutionResults, DeltaGates, DeltaGatesCall, DequantizeCall, GateCall, GateGradients, GatedNormCall,
    GatedNormGradients, HostCodes, LinearCodesCall, LinearParameters, LinearRowsCall, NormCall, NormGradients,
    NormParameterGradients, QuantizeRowsCall, RotationCall, RowCodes,
};
pub use unsupported::Unsupported;

/// Returns the name of a device that runs kernels, with its compute capability and the compiler.
///
/// # Errors
/// If no kernels run there.
pub fn device_name(device: &Device) -> Result<String, Unsupported> {
    Ok(device::KernelDevice::of(device)?.name())
}

/// The parts that the Metal kernels have in common with these: the struct of arguments, its text, the checks of a call,
/// files of the source, and the machine of the emulator. They are not for users.
#[doc(hidden)]
pub mod shared {
    pub use crate::arguments::{AttentionArguments, SMALL_BLOCK_THREADS};
    pub use crate::attention::{CallSizes, InputAddresses, layout_strides, row_strides};
    #[cfg(feature = "emulator")]
    pub use crate::device::{CpuMemory, cpu_memory, emulator};
    pub use crate::device::{KernelArguments, check_dtype};
    pub use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, Pointee, RowStrides};
    pub use crate::kernel_struct::{CppType, KernelStruct, StructDefinition, StructHeader};
    pub use crate::program::Define;
    pub use crate::rows::{
        ForwardRows, ForwardRowsLaunch, GateArguments, GatedNormArguments, LinearCodesArguments, LinearRowsArguments,
        NormArguments, RotationArguments,
    };
    pub use crate::source::{join_files, shared_file};
    pub use crate::specialization::ModifierGradients;
}

/// Returns the programs that continuous integration compiles for a device with some limits: the ones that it would run
/// for the usual head dimensions and each score modifier.
pub fn ci_programs(limits: &Limits) -> Vec<CiProgram> {
    [attention::entries(limits), delta::entries(limits), rows::entries()].concat()
}

/// Returns the macros of programs that together have every row of the tables of tiles, as options of a C++ compiler.
/// The tests on the emulator run them, since a device takes the first row that fits it.
pub fn options_of_every_tile() -> Vec<Vec<String>> {
    tiles::programs_of_every_row().iter().map(|program| program.define_options().collect()).collect()
}

/// Returns all macros of the program with some constants, as options of a C++ compiler: of attention, such as
/// `-DHEAD_DIM=64 -DFORWARD_WARPS=2`, or of the delta rule, such as `-DKEY_WIDTH=64 -DSCAN_WARPS=2`. Constants that are
/// not given have a default. The tests on the emulator run such programs.
///
/// # Errors
/// For a constant that does not exist, and for some that kernels cannot have together.
pub fn all_options(given: &str) -> Result<Vec<String>, String> {
    let is_delta_rule = given.contains("-DKEY_WIDTH=");
    let program = if is_delta_rule { delta::program_of_options(given)? } else { tiles::program_of_options(given)? };
    Ok(program.define_options().collect())
}

/// Writes the headers of the kernels that are printed from structs in Rust into a folder, which is made if necessary. A
/// C++ compiler finds the other files in `kernels/`.
///
/// # Errors
/// If a file cannot be written.
pub fn write_headers(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let smallest = Limits::of_capability(Capability { major: 8, minor: 0 });
    for header in ci_programs(&smallest).iter().flat_map(CiProgram::headers) {
        fs::write(folder.join(header.name), header.text)?;
    }
    Ok(())
}

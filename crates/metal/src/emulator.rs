//! Launches on the emulator, for tests: kernels run on a CPU, over copies of the tensors.
//!
//! A C++ compiler makes one library for each element type. The other constants of a program are read at run time, so
//! that few libraries are compiled; the tests in `emulator/` compile them as constants, as Metal does.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_attention_cuda::shared::emulator::{
    EmulatedLaunch, EmulatedProgram, Region, compile, compiler, hash_files, target_folder,
};
use candle_attention_cuda::shared::{CpuMemory, Define, cpu_memory};
use candle_attention_cuda::{SourceFault, fault_of_thread};
use candle_attention_device::Fnv;
use candle_core::op::BackpropOp;
use candle_core::{Device, Result, Storage, Tensor, bail};

use crate::bindings::LaunchArguments;
use crate::launch::{MetalLaunch, launches_of_thread};
use crate::operands::MetalOperands;
use crate::source::KernelSource;

/// The constants that a library is compiled for.
const COMPILED: [&str; 2] = ["ELEMENT", "ELEMENT_BYTES"];

/// The options of libraries. Arrays whose sizes are read at run time are an extension of the compiler.
const OPTIONS: [&str; 8] =
    ["-std=gnu++17", "-O1", "-fno-exceptions", "-fno-strict-aliasing", "-fPIC", "-w", "-DEMULATOR", "-DKERNEL_SET=7"];

/// The libraries by the options of their constants.
static LIBRARIES: LazyLock<Mutex<HashMap<Vec<String>, Arc<EmulatedProgram>>>> = LazyLock::new(Mutex::default);

/// Runs kernels one after the other, and copies the results to a device.
///
/// # Errors
/// If the library does not compile.
///
/// # Panics
/// For a fault that the emulator finds: a caller would take the reference path after an error, and no test would fail.
pub(crate) fn run<A: LaunchArguments>(
    launches: &[MetalLaunch],
    arguments: &A,
    operands: MetalOperands,
    device: &Device,
) -> Result<Vec<Tensor>> {
    let mut regions = Vec::new();
    for input in &operands.inputs {
        let CpuMemory { address, bytes } = cpu_memory(&input.copy)?;
        regions.push(Region { name: input.name, address, bytes, is_input: true });
    }
    for output in &operands.outputs {
        let CpuMemory { address, bytes } = cpu_memory(&output.copy)?;
        regions.push(Region { name: output.name, address, bytes, is_input: false });
    }
    for launch in launches {
        let constants: Vec<i64> = read_at_run_time(&launch.defines).map(|define| define.value).collect();
        let emulated = EmulatedLaunch {
            kernel: launch.kernel,
            blocks: launch.groups as u64,
            threads: launch.threads as u32,
            shared_bytes: launch.shared_bytes as u32,
            regions: &regions,
            constants: &constants,
            order: (launches_of_thread() % 3) as u32,
        };
        if let Err(fault) = library(launch)?.launch(&emulated, &arguments.of_launch(launch)) {
            panic!("the emulator found a fault: {fault}");
        }
    }
    let outputs = operands.outputs.into_iter().map(|output| {
        Tensor::from_storage(Storage::Cpu(output.copy), output.shape, BackpropOp::none(), false).to_device(device)
    });
    outputs.collect()
}

/// Compiles the libraries of some launches.
///
/// # Errors
/// If one does not compile.
pub(crate) fn prepare(launches: &[MetalLaunch]) -> Result<()> {
    launches.iter().try_for_each(|launch| library(launch).map(|_| ()))
}

/// Returns the constants that a library reads at run time. A library has the kernels of all sets.
fn read_at_run_time(defines: &[Define]) -> impl Iterator<Item = &Define> {
    defines.iter().filter(|define| !COMPILED.contains(&define.name) && define.name != "KERNEL_SET")
}

/// Returns the library for the kernel and the constants of a program, which is compiled unless it is there.
fn library(launch: &MetalLaunch) -> Result<Arc<EmulatedProgram>> {
    let defines = &launch.defines;
    let compiled = defines.iter().filter(|define| COMPILED.contains(&define.name));
    let options: Vec<String> = compiled.map(|define| format!("-D{}={}", define.name, define.value)).collect();
    let fault = fault_of_thread();
    let mut key = options.clone();
    key.push(format!("{:?}", KernelSource::of_kernel(launch.kernel)));
    key.extend(fault.map(|known| format!("{known:?}")));
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = libraries.get(&key) {
        return Ok(library.clone());
    }
    let opened = Arc::new(EmulatedProgram::open(&build(&options, launch.kernel, &constants_header(defines), fault)?)?);
    libraries.insert(key, opened.clone());
    Ok(opened)
}

/// Returns a header that defines the constants that are read at run time.
fn constants_header(defines: &[Define]) -> String {
    let read: Vec<_> = read_at_run_time(defines).collect();
    let mut text =
        format!("const int CONSTANT_COUNT = {};\nstatic i64 run_time_constants[CONSTANT_COUNT];\n", read.len());
    for (index, define) in read.iter().enumerate() {
        text += &format!("#define {} ((int)run_time_constants[{index}])\n", define.name);
    }
    text
}

/// Compiles a library unless it is there, and returns its path.
fn build(options: &[String], kernel: &str, constants: &str, fault: Option<SourceFault>) -> Result<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_cuda = package.join("../cuda/emulator");
    let right = KernelSource::of_kernel(kernel).text();
    let text = match fault {
        Some(fault) if right.matches(fault.text).count() == 1 => right.replace(fault.text, fault.replacement),
        Some(fault) => bail!("the Metal kernels do not have {:?} once", fault.text),
        None => right,
    };
    let mut hash = Fnv::new();
    hash.add_text(&compiler());
    hash.add_text(&text);
    hash.add_text(constants);
    OPTIONS.iter().for_each(|option| hash.add_text(option));
    options.iter().for_each(|option| hash.add_text(option));
    hash_files(&package.join("emulator"), &mut hash)?;
    hash_files(&of_cuda, &mut hash)?;
    let folder = target_folder(package).join("emulator").join(format!("metal-{:032x}", hash.value()));
    let library = folder.join("kernels.so");
    if library.exists() {
        return Ok(library);
    }
    // Other processes may compile the same library.
    let sources = folder.join(format!("sources-{}", process::id()));
    fs::create_dir_all(&sources)?;
    fs::write(sources.join("kernels.metal"), text)?;
    fs::write(sources.join("run_time_constants.h"), constants)?;
    let mut command = Command::new(compiler());
    command.args(OPTIONS).args(options).arg("-shared");
    for include in [&sources, &package.join("emulator"), &of_cuda] {
        command.arg("-I").arg(include);
    }
    compile(command, &package.join("emulator/library.cpp"), &library)?;
    Ok(library)
}

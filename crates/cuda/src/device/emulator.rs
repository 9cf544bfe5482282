//! Kernels on the emulator, which runs their source on a CPU. A C++ compiler makes a library of each program when it is
//! first used, and the libraries are kept in the target folder.

use std::collections::HashMap;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{Error, Result, bail};
use libloading::Library;

use super::launch::{GridDimensions, KernelArguments, Launch};
use crate::hash::Fnv;
use crate::program::Program;
use crate::unsupported::Unsupported;

/// Memory that a launch may access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub name: &'static str,
    pub address: u64,
    pub bytes: usize,
}

/// The functions that `emulator/library.cpp` exports.
struct Functions {
    launch: unsafe extern "C" fn(*const c_char, u32, u32, u32, u32, u32, *const c_void) -> c_int,
    add_buffer: unsafe extern "C" fn(*const c_void, usize, *const c_char),
    clear_buffers: unsafe extern "C" fn(),
    error: unsafe extern "C" fn() -> *const c_char,
}

/// The library of a program.
pub(crate) struct EmulatedProgram {
    functions: Functions,
    /// The functions are in its memory.
    _library: Library,
}

/// Held by a launch: the machine that is emulated is one.
static MACHINE: Mutex<()> = Mutex::new(());

/// Returns the library of a program.
///
/// # Errors
/// If it does not compile or load.
pub(super) fn load(program: &Program) -> Result<Arc<EmulatedProgram>> {
    static PROGRAMS: OnceLock<Mutex<HashMap<Program, Arc<EmulatedProgram>>>> = OnceLock::new();
    let mut programs = PROGRAMS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = programs.get(program) {
        return Ok(known.clone());
    }
    let loaded = Arc::new(EmulatedProgram::open(&build(program)?)?);
    programs.insert(program.clone(), loaded.clone());
    Ok(loaded)
}

impl EmulatedProgram {
    fn open(path: &Path) -> Result<Self> {
        // SAFETY: the library was compiled from this package's sources, whose declarations the types repeat; loading it
        // runs no code.
        unsafe {
            let library = Library::new(path).map_err(Error::wrap)?;
            let functions = Functions {
                launch: *library.get(b"emulator_launch\0").map_err(Error::wrap)?,
                add_buffer: *library.get(b"emulator_add_buffer\0").map_err(Error::wrap)?,
                clear_buffers: *library.get(b"emulator_clear_buffers\0").map_err(Error::wrap)?,
                error: *library.get(b"emulator_error\0").map_err(Error::wrap)?,
            };
            Ok(Self { functions, _library: library })
        }
    }

    /// Runs a kernel.
    ///
    /// # Errors
    /// For an access outside of the regions, and for every other fault that the emulator finds.
    pub fn launch<A: KernelArguments>(
        &self,
        launch: &Launch,
        grid: GridDimensions,
        regions: &[Region],
        arguments: &A,
    ) -> Result<()> {
        let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        let Functions { launch: run, add_buffer, clear_buffers, error } = &self.functions;
        let name = CString::new(launch.kernel).map_err(Error::wrap)?;
        let GridDimensions { x, y, z } = grid;
        let (threads, shared_bytes) = (launch.threads as u32, launch.shared_bytes as u32);
        // SAFETY: the regions are memory of operands that the caller keeps locked, the emulator checks every access
        // against them, and the argument is the struct that the kernel takes.
        unsafe {
            clear_buffers();
            for region in regions {
                let region_name = CString::new(region.name).map_err(Error::wrap)?;
                add_buffer(region.address as *const c_void, region.bytes, region_name.as_ptr());
            }
            let code = run(name.as_ptr(), x, y, z, threads, shared_bytes, (&raw const *arguments).cast());
            if code != 0 {
                bail!("[{}] {}", launch.kernel, CStr::from_ptr(error()).to_string_lossy())
            }
        }
        Ok(())
    }
}

/// Returns the name of the C++ compiler.
fn compiler() -> String {
    env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// Checks, once, that the C++ compiler starts.
///
/// # Errors
/// If it does not.
pub(super) fn check_compiler() -> std::result::Result<(), Unsupported> {
    static STARTS: OnceLock<bool> = OnceLock::new();
    let starts = || Command::new(compiler()).arg("--version").output().is_ok_and(|output| output.status.success());
    if *STARTS.get_or_init(starts) {
        return Ok(());
    }
    Err(Unsupported::new(format!("the emulator needs a C++ compiler, and {} does not start", compiler())))
}

/// Returns the path of a program's library, which is compiled unless it is there.
fn build(program: &Program) -> Result<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiler = compiler();
    let mut options: Vec<String> =
        ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-DEMULATOR"].map(String::from).into();
    options.extend(program.define_options());

    let mut hash = Fnv::new();
    hash.add_text(&compiler);
    hash.add_text(program.root);
    options.iter().for_each(|option| hash.add_text(option));
    for folder in ["kernels", "emulator"] {
        hash_files(&package.join(folder), &mut hash)?;
    }
    let folder = target_folder(package).join("emulator");
    let path = folder.join(format!("{:032x}.so", hash.value()));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(&folder)?;
    let temporary = folder.join(format!("{:032x}.{}.new", hash.value(), process::id()));
    let root = package.join("emulator").join(emulator_file(program));
    let output = Command::new(&compiler)
        .args(&options)
        .arg("-I")
        .arg(package.join("kernels"))
        .arg("-I")
        .arg(package.join("emulator"))
        .arg("-o")
        .arg(&temporary)
        .arg(root)
        .output();
    let output = output.map_err(|error| Error::msg(format!("the C++ compiler {compiler} does not start: {error}")))?;
    if !output.status.success() {
        bail!("{compiler} {options:?} failed: {}", String::from_utf8_lossy(&output.stderr))
    }
    fs::rename(&temporary, &path)?;
    Ok(path)
}

/// Returns the file of `emulator/` that makes a library of a program.
fn emulator_file(program: &Program) -> &'static str {
    match program.root {
        "convolution.cu" => "convolution_library.cpp",
        "delta_gates.cu" => "delta_gates_library.cpp",
        "delta.cu" => "delta_library.cpp",
        "gate.cu" => "gate_library.cpp",
        "gated_norm.cu" => "gated_norm_library.cpp",
        "norm.cu" => "norm_library.cpp",
        "rotation.cu" => "rotation_library.cpp",
        _ => "library.cpp",
    }
}

/// Adds the texts of the files in a folder to a hash.
fn hash_files(folder: &Path, hash: &mut Fnv) -> Result<()> {
    let mut paths =
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        if path.is_file() {
            hash.add_bytes(&fs::read(path)?);
        }
    }
    Ok(())
}

/// Returns the folder for what is built.
fn target_folder(package: &Path) -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| package.join("../../target"), PathBuf::from)
}

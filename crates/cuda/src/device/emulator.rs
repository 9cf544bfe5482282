//! Kernels on the emulator, which runs their source on a CPU. A C++ compiler makes a library of each program when it is
//! first used, and the libraries are kept in the target folder.

use std::cell::RefCell;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use candle_attention_device::{Failure, Fnv};
use candle_core::{Error, Result, bail};
use libloading::Library;

use super::launch::KernelArguments;
use super::new_device::{SourceFault, fault_of_thread};
use super::programs::{LoadResult, Programs};
use crate::kernel_struct::StructHeader;
use crate::program::{Define, Program};
use crate::unsupported::Unsupported;

/// Memory that a launch may access.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// The name in messages.
    pub name: &'static str,
    /// The address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
    /// Whether kernels may only read it.
    pub is_input: bool,
}

/// A launch of a kernel of a library.
#[derive(Debug, Clone, Copy)]
pub struct EmulatedLaunch<'a> {
    /// The name of the kernel.
    pub kernel: &'a str,
    /// The number of blocks.
    pub blocks: u64,
    /// The number of threads of a block.
    pub threads: u32,
    /// The number of bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// The memory that the kernel may access.
    pub regions: &'a [Region],
    /// The constants of a library that reads them at run time; else none.
    pub constants: &'a [i64],
    /// The number of one of three orders of blocks and threads, from 0.
    pub order: u32,
}

/// The functions that `emulator/library.cpp` exports.
struct EmulatorFunctions {
    launch: unsafe extern "C" fn(*const c_char, u64, u32, u32, *const c_void, u32) -> c_int,
    add_buffer: unsafe extern "C" fn(*const c_void, usize, *const c_char, c_int),
    clear_buffers: unsafe extern "C" fn(),
    error: unsafe extern "C" fn() -> *const c_char,
    /// The function of a library that reads its constants at run time.
    set_constants: Option<unsafe extern "C" fn(*const i64)>,
}

/// The library of a program.
pub struct EmulatedProgram {
    functions: EmulatorFunctions,
    /// The functions are in its memory.
    _library: Library,
}

/// Held by a launch: the machine that is emulated is one.
static MACHINE: Mutex<()> = Mutex::new(());

static PROGRAMS: LazyLock<Programs<EmulatedProgram>> = LazyLock::new(Programs::default);

/// Returns the library of a program.
///
/// # Errors
/// If it does not compile or load.
pub(super) fn load(program: &Program) -> LoadResult<EmulatedProgram> {
    if let Some(failure) = failure_of_thread() {
        return Err(failure);
    }
    let fault = fault_of_thread();
    let program = &with_fault(program, fault);
    let open = || EmulatedProgram::open(&build(program, fault)?).map(Arc::new);
    PROGRAMS.get_or_make(program.clone(), || open().map_err(|error: Error| Failure::lasting(error.to_string())))
}

/// Returns a program under another name if its source has a fault.
fn with_fault(program: &Program, fault: Option<SourceFault>) -> Program {
    let mut named = program.clone();
    named.defines.extend(fault.map(|known| Define { name: "SOURCE_FAULT", value: known.number() }));
    named
}

thread_local! {
    /// The failure of all programs that the thread loads.
    static FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// Runs a function in which no program loads on the current thread, to test what callers do then.
pub fn without_programs<T>(reason: &str, run: impl FnOnce() -> T) -> T {
    FAILURE.replace(Some(Failure::lasting(reason)));
    let result = run();
    FAILURE.take();
    result
}

/// Returns the failure of every program, if the current thread runs [`without_programs`].
fn failure_of_thread() -> Option<Failure> {
    FAILURE.with_borrow(Clone::clone)
}

/// Returns the failure of a program that an earlier call could not load. `program` is called only if there is any.
pub(super) fn known_failure(program: impl FnOnce() -> Option<Program>) -> Option<Failure> {
    let named = || program().map(|own| with_fault(&own, fault_of_thread()));
    failure_of_thread().or_else(|| PROGRAMS.known_failure(named))
}

impl EmulatedProgram {
    /// Loads a library that [`compile`] made.
    ///
    /// # Errors
    /// If it is none.
    pub fn open(path: &Path) -> Result<Self> {
        // SAFETY: the library was compiled from this package's sources, whose declarations the types repeat; loading it
        // runs no code.
        unsafe {
            let library = Library::new(path).map_err(Error::wrap)?;
            let functions = EmulatorFunctions {
                launch: *library.get(b"emulator_launch\0").map_err(Error::wrap)?,
                add_buffer: *library.get(b"emulator_add_buffer\0").map_err(Error::wrap)?,
                clear_buffers: *library.get(b"emulator_clear_buffers\0").map_err(Error::wrap)?,
                error: *library.get(b"emulator_error\0").map_err(Error::wrap)?,
                set_constants: library.get(b"emulator_set_constants\0").ok().map(|symbol| *symbol),
            };
            Ok(Self { functions, _library: library })
        }
    }

    /// Runs a kernel.
    ///
    /// # Errors
    /// For an access outside of the regions, and for every other fault that the emulator finds.
    pub fn launch<A: KernelArguments>(&self, launch: &EmulatedLaunch, arguments: &A) -> Result<()> {
        let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        let EmulatorFunctions { launch: run, add_buffer, clear_buffers, error, set_constants } = &self.functions;
        let &EmulatedLaunch { kernel, blocks, threads, shared_bytes, regions, constants, order } = launch;
        let name = CString::new(kernel).map_err(Error::wrap)?;
        // SAFETY: the regions are memory of operands that the caller keeps locked, the emulator checks every access
        // against them, and the argument is the struct that the kernel takes. The caller has a constant for each that
        // the library reads.
        unsafe {
            if let Some(set_constants) = set_constants {
                set_constants(constants.as_ptr());
            }
            clear_buffers();
            for region in regions {
                let region_name = CString::new(region.name).map_err(Error::wrap)?;
                add_buffer(region.address as *const c_void, region.bytes, region_name.as_ptr(), region.is_input.into());
            }
            let code = run(name.as_ptr(), blocks, threads, shared_bytes, (&raw const *arguments).cast(), order);
            if code != 0 {
                bail!("[{kernel}] {}", CStr::from_ptr(error()).to_string_lossy())
            }
        }
        Ok(())
    }
}

/// Returns the name of the C++ compiler.
pub fn compiler() -> String {
    env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// Checks, once, that the C++ compiler starts.
///
/// # Errors
/// If it does not.
pub fn check_compiler() -> std::result::Result<(), Unsupported> {
    static STARTS: OnceLock<bool> = OnceLock::new();
    let starts = || Command::new(compiler()).arg("--version").output().is_ok_and(|output| output.status.success());
    if *STARTS.get_or_init(starts) {
        return Ok(());
    }
    Err(Unsupported::new(format!("the emulator needs a C++ compiler, and {} does not start", compiler())))
}

/// The options of libraries and of the precompiled header. With these limits, a library compiles in half of the time,
/// and kernels run nearly as fast.
const OPTIONS: [&str; 7] = ["-std=c++17", "-O1", "-finline-limit=20", "-fno-exceptions", "-fPIC", "-w", "-DEMULATOR"];

/// Returns the path of a program's library, which is compiled unless it is there.
fn build(program: &Program, fault: Option<SourceFault>) -> Result<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = target_folder(package).join("emulator");
    let kernels = match fault {
        Some(fault) => fault.write_sources(&package.join("kernels"), &libraries)?,
        None => package.join("kernels"),
    };
    let defines: Vec<String> = program.define_options().collect();
    let headers = program.arguments.headers();
    let mut hash = hash_of_options()?;
    hash.add_text(program.root);
    defines.iter().for_each(|option| hash.add_text(option));
    headers.iter().for_each(|header| hash.add_text(&header.text));
    hash_files(&kernels, &mut hash)?;
    let library = libraries.join(format!("{:032x}.so", hash.value()));
    if library.exists() {
        return Ok(library);
    }
    let mut command = command_of_compiler(&kernels);
    command.arg("-shared").args(&defines).arg(format!("-DKERNEL_SOURCE=\"{}\"", program.root));
    command.arg("-I").arg(write_headers(&headers)?);
    if let Ok(header) = precompiled_header() {
        command.arg("-include").arg(header);
    }
    compile(command, &package.join("emulator/library.cpp"), &library)?;
    Ok(library)
}

/// Writes headers into a folder that has only these, unless they are there, and returns it.
fn write_headers(headers: &[StructHeader]) -> Result<PathBuf> {
    // Threads of a process share the names of temporary files.
    static LOCK: Mutex<()> = Mutex::new(());
    let _one_at_a_time = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let mut hash = Fnv::new();
    for header in headers {
        hash.add_text(&header.name);
        hash.add_text(&header.text);
    }
    let libraries = target_folder(Path::new(env!("CARGO_MANIFEST_DIR"))).join("emulator");
    let folder = libraries.join(format!("headers-{:032x}", hash.value()));
    fs::create_dir_all(&folder)?;
    for header in headers {
        let path = folder.join(&header.name);
        if !path.exists() {
            let temporary = folder.join(format!("{}.{}.new", header.name, process::id()));
            fs::write(&temporary, &header.text)?;
            fs::rename(&temporary, &path)?;
        }
    }
    Ok(folder)
}

/// Returns a header that includes the emulator. The compiler finds its precompiled form in the same folder, and all
/// programs share it.
///
/// # Errors
/// If it does not compile.
fn precompiled_header() -> Result<PathBuf> {
    static LOCK: Mutex<()> = Mutex::new(());
    let _one_at_a_time = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let libraries = target_folder(Path::new(env!("CARGO_MANIFEST_DIR"))).join("emulator");
    let folder = libraries.join(format!("{:032x}", hash_of_options()?.value()));
    let header = folder.join("all.h");
    let precompiled = folder.join("all.h.gch");
    if !precompiled.exists() {
        fs::create_dir_all(&folder)?;
        fs::write(&header, "#include \"cuda_on_cpu.h\"\n")?;
        let mut command = command_of_compiler(&Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels"));
        command.args(["-x", "c++-header"]);
        compile(command, &header, &precompiled)?;
    }
    Ok(header)
}

/// Returns a hash of the compiler, the options and the emulator's files.
fn hash_of_options() -> Result<Fnv> {
    let mut hash = Fnv::new();
    hash.add_text(&compiler());
    OPTIONS.iter().for_each(|option| hash.add_text(option));
    hash_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("emulator"), &mut hash)?;
    Ok(hash)
}

/// Returns a command of the compiler that finds the kernels in a folder.
fn command_of_compiler(kernels: &Path) -> Command {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(compiler());
    command.args(OPTIONS);
    for folder in [kernels, &package.join("emulator")] {
        command.arg("-I").arg(folder);
    }
    command
}

/// Compiles a file. The result appears as a whole, since other processes may compile the same file.
///
/// # Errors
/// If it does not compile.
pub fn compile(mut command: Command, source: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = to.with_extension(format!("{}.new", process::id()));
    command.arg("-o").arg(&temporary).arg(source);
    let output = command.output();
    let output = output.map_err(|error| Error::msg(format!("the C++ compiler {command:?} does not start: {error}")))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr))
    }
    fs::rename(&temporary, to)?;
    Ok(())
}

/// Adds the texts of the files in a folder to a hash.
///
/// # Errors
/// If one cannot be read.
pub fn hash_files(folder: &Path, hash: &mut Fnv) -> Result<()> {
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
pub fn target_folder(package: &Path) -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| package.join("../../target"), PathBuf::from)
}

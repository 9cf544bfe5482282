//! NVRTC, NVIDIA's compiler for CUDA C++ as a library, which is loaded when the first kernel is compiled.
//!
//! cudarc has bindings of NVRTC, but a program that uses them does not start on a machine without the library. Loaded
//! here, a missing library is a reason to take another path.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::LazyLock;

use candle_attention_device::{Attempt, Failure};
use libloading::Library;

use crate::capability::Capability;
use crate::unsupported::Unsupported;

/// The oldest version that is used: options and instructions of the kernels are newer than 11.
const OLDEST: NvrtcVersion = NvrtcVersion { major: 12, minor: 0 };

/// The major versions whose files are looked for, in this order unless the driver is older.
const MAJOR_VERSIONS: [i32; 2] = [13, 12];

/// The codes of failures that may pass: memory is missing, or the library of builtins, which is a separate file.
const PASSING_CODES: [c_int; 2] = [NVRTC_ERROR_OUT_OF_MEMORY, NVRTC_ERROR_BUILTIN_OPERATION_FAILURE];
const NVRTC_ERROR_OUT_OF_MEMORY: c_int = 1;
const NVRTC_ERROR_BUILTIN_OPERATION_FAILURE: c_int = 7;

/// A version of NVRTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NvrtcVersion {
    pub major: i32,
    pub minor: i32,
}

impl fmt::Display for NvrtcVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

type RawProgram = *mut c_void;

/// The functions of NVRTC that are called, as nvrtc.h declares them.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    architecture_count: unsafe extern "C" fn(*mut c_int) -> c_int,
    architectures: unsafe extern "C" fn(*mut c_int) -> c_int,
    create: unsafe extern "C" fn(
        *mut RawProgram,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut RawProgram) -> c_int,
    compile: unsafe extern "C" fn(RawProgram, c_int, *const *const c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(RawProgram, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(RawProgram, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(RawProgram, *mut usize) -> c_int,
    log: unsafe extern "C" fn(RawProgram, *mut c_char) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Functions {
    /// Looks the functions up in a library.
    fn of(library: &Library) -> Result<Self, libloading::Error> {
        // SAFETY: nvrtc.h declares the names with these types, in every version since 11.2.
        unsafe {
            Ok(Self {
                version: *library.get(b"nvrtcVersion\0")?,
                architecture_count: *library.get(b"nvrtcGetNumSupportedArchs\0")?,
                architectures: *library.get(b"nvrtcGetSupportedArchs\0")?,
                create: *library.get(b"nvrtcCreateProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *library.get(b"nvrtcGetCUBIN\0")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
                log: *library.get(b"nvrtcGetProgramLog\0")?,
                error_text: *library.get(b"nvrtcGetErrorString\0")?,
            })
        }
    }
}

/// The loaded library.
pub(crate) struct Nvrtc {
    functions: Functions,
    version: NvrtcVersion,
    /// The architectures that it compiles for, as 10 times the major version and the minor version.
    architectures: Vec<u32>,
    /// The functions are in the memory of the first; the second is the library that it needs, if it was opened here.
    _libraries: [Option<Library>; 2],
}

impl Nvrtc {
    /// Returns the library of the process, which is kept once it was found. `driver_major` is the major version of CUDA
    /// that the driver supports: code of a newer compiler might not load.
    ///
    /// # Errors
    /// If there is none, or only one that is too old.
    pub fn of_process(driver_major: i32) -> Result<&'static Self, Failure> {
        static NVRTC: LazyLock<Attempt<&'static Nvrtc>> = LazyLock::new(Attempt::default);
        // A library may be installed later.
        let find = || Self::find(&candidates(driver_major)).map_err(|reason| Failure::passing(reason.reason()));
        NVRTC.get_or_make(|| find().map(|nvrtc| &*Box::leak(Box::new(nvrtc))))
    }

    /// Opens the first of the files that can be opened.
    fn find(candidates: &[PathBuf]) -> Result<Self, Unsupported> {
        let mut problem = None;
        for path in candidates {
            // SAFETY: loading NVRTC runs no code but its own initialisation.
            let Ok(library) = (unsafe { Library::new(path) }) else { continue };
            match Self::new(library, path) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(error) => problem = problem.or(Some(format!("{}: {error}", path.display()))),
            }
        }
        Err(Unsupported::new(match problem {
            Some(problem) => format!("NVRTC, which compiles the kernels, cannot be used: {problem}"),
            None => "NVRTC, which compiles the kernels, was not found (libnvrtc of CUDA 12 or 13)".into(),
        }))
    }

    /// Returns NVRTC over a library that was opened at `path`.
    fn new(library: Library, path: &Path) -> Result<Self, Unsupported> {
        let functions =
            Functions::of(&library).map_err(|_| Unsupported::new("it lacks functions that NVRTC has since 11.2"))?;
        let mut version = NvrtcVersion { major: 0, minor: 0 };
        // SAFETY: two valid pointers.
        let code = unsafe { (functions.version)(&raw mut version.major, &raw mut version.minor) };
        if code != 0 {
            return Err(Unsupported::new(format!("the request for its version failed with code {code}")));
        }
        if version < OLDEST {
            return Err(Unsupported::new(format!("it has version {version}, expected at least {OLDEST}")));
        }
        let architectures = architectures(&functions);
        let builtins = builtins(path, version);
        Ok(Self { functions, version, architectures, _libraries: [Some(library), builtins] })
    }

    /// Returns the name and the version of the compiler.
    pub fn name(&self) -> String {
        format!("NVRTC {}", self.version)
    }

    /// Returns the architecture to compile for, such as `sm_90`: the newest one that runs on a device. Code of a lower
    /// minor version runs on a device of the same major version.
    ///
    /// # Errors
    /// If the compiler is older than the device.
    pub fn architecture(&self, device: Capability) -> Result<String, Unsupported> {
        let newest = device.major * 10 + device.minor;
        let fits = |&number: &u32| number / 10 == device.major && number <= newest;
        match self.architectures.iter().copied().filter(fits).max() {
            Some(number) => Ok(format!("sm_{number}")),
            None => Err(Unsupported::new(format!(
                "NVRTC {} does not compile for the device's compute capability {device}",
                self.version
            ))),
        }
    }

    /// Compiles a source to machine code.
    ///
    /// # Errors
    /// If the source or the options have an error, with the compiler's log; or if memory or a file is missing.
    pub fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, Failure> {
        let c_text = |text: &str| CString::new(text).map_err(|error| Failure::lasting(format!("{error} in {text:?}")));
        let source = c_text(source)?;
        let options = options.iter().map(|option| c_text(option)).collect::<Result<Vec<_>, _>>()?;
        let option_pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = ProgramGuard { nvrtc: self, program: ptr::null_mut() };
        let Functions { create, compile, cubin_size, cubin, .. } = &self.functions;
        // SAFETY: the pointers are valid for the call; the texts live until the program is destroyed at the end of this
        // function, and the buffer has the size that the library said.
        unsafe {
            let program_pointer = &raw mut program.program;
            let name = c"attention.cu".as_ptr();
            self.check(create(program_pointer, source.as_ptr(), name, 0, ptr::null(), ptr::null()))?;
            let status = compile(program.program, options.len() as c_int, option_pointers.as_ptr());
            if status != 0 {
                return Err(self.failure(status, &program.log()));
            }
            let mut size = 0;
            self.check(cubin_size(program.program, &raw mut size))?;
            let mut code = vec![0u8; size];
            self.check(cubin(program.program, code.as_mut_ptr().cast()))?;
            Ok(code)
        }
    }

    /// Returns an error for a code other than 0.
    fn check(&self, code: c_int) -> Result<(), Failure> {
        if code == 0 { Ok(()) } else { Err(self.failure(code, "")) }
    }

    /// Returns the failure of an error code, with the compiler's log.
    fn failure(&self, code: c_int, log: &str) -> Failure {
        let reason = [&self.name(), "cannot compile the CUDA kernels:", &self.error_text(code), log].join(" ");
        Failure { reason: reason.trim_end().into(), is_lasting: !PASSING_CODES.contains(&code) }
    }

    /// Returns the name of an error code.
    fn error_text(&self, code: c_int) -> String {
        // SAFETY: the library returns a constant text for every number.
        unsafe { CStr::from_ptr((self.functions.error_text)(code)) }.to_string_lossy().into_owned()
    }
}

/// A program of the library, which is destroyed at the end of the scope.
struct ProgramGuard<'a> {
    nvrtc: &'a Nvrtc,
    program: RawProgram,
}

impl ProgramGuard<'_> {
    /// Returns the messages of the compiler.
    fn log(&self) -> String {
        let mut size = 0;
        let Functions { log_size, log, .. } = &self.nvrtc.functions;
        // SAFETY: the program exists, and the buffer has the size that the library said.
        unsafe {
            if log_size(self.program, &raw mut size) != 0 {
                return String::new();
            }
            let mut text = vec![0u8; size];
            if log(self.program, text.as_mut_ptr().cast()) != 0 {
                return String::new();
            }
            String::from_utf8_lossy(&text).trim_end_matches('\0').to_string()
        }
    }
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program exists and is not used again. An error would change nothing.
            unsafe { (self.nvrtc.functions.destroy)(&raw mut self.program) };
        }
    }
}

/// Returns the architectures that a library compiles for.
fn architectures(functions: &Functions) -> Vec<u32> {
    let mut count = 0;
    // SAFETY: a valid pointer.
    if unsafe { (functions.architecture_count)(&raw mut count) } != 0 {
        return Vec::new();
    }
    let mut numbers = vec![0 as c_int; count.max(0) as usize];
    // SAFETY: the buffer has the number of entries that the library said.
    if unsafe { (functions.architectures)(numbers.as_mut_ptr()) } != 0 {
        return Vec::new();
    }
    numbers.into_iter().filter_map(|number| number.try_into().ok()).collect()
}

/// Returns the files that may be NVRTC: by name, which the system looks for, and in the folder of the toolkit. Files of
/// the driver's own version come first: it may load no code of a newer one.
fn candidates(driver_major: i32) -> Vec<PathBuf> {
    let mut majors = MAJOR_VERSIONS;
    majors.sort_by_key(|&major| major != driver_major);
    let mut names = Vec::new();
    for major in majors {
        if cfg!(windows) {
            names.push(format!("nvrtc64_{major}0_0.dll"));
        } else {
            names.push(format!("libnvrtc.so.{major}"));
        }
    }
    if !cfg!(windows) {
        names.push("libnvrtc.so".into());
    }
    let folders = toolkit_folders();
    let mut paths = Vec::new();
    for name in names {
        paths.push(PathBuf::from(&name));
        paths.extend(folders.iter().map(|folder| folder.join(&name)));
    }
    paths
}

/// Returns the folders of the toolkit in which libraries are.
fn toolkit_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(env::var_os(variable).map(PathBuf::from));
    }
    if !cfg!(windows) {
        folders.push("/usr/local/cuda".into());
    }
    let inner_folders: &[&str] = if cfg!(windows) { &["bin"] } else { &["lib64", "lib"] };
    folders.iter().flat_map(|folder| inner_folders.iter().map(|inner| folder.join(inner))).collect()
}

/// Opens the library that NVRTC opens by name when it compiles, from the folder in which NVRTC was found: the system
/// need not find it there by itself. `None` if NVRTC was found by its name, or there is no such file.
fn builtins(nvrtc: &Path, version: NvrtcVersion) -> Option<Library> {
    let folder = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let NvrtcVersion { major, minor } = version;
    #[cfg(windows)]
    let name = format!("nvrtc-builtins64_{major}{minor}.dll");
    #[cfg(not(windows))]
    let name = format!("libnvrtc-builtins.so.{major}.{minor}");
    // SAFETY: the library has data and no code that runs when it is loaded.
    unsafe { Library::new(folder.join(name)) }.ok()
}

#[cfg(test)]
mod tests {
    use candle_attention_device::DiskCache;

    use super::*;
    use crate::element::ElementType;
    use crate::specialization::Specialization;
    use crate::tiles::{ForwardLength, ForwardTile};
    use crate::{compile, program};

    /// Returns the library, or says that a test was skipped.
    fn nvrtc(test: &str) -> Option<&'static Nvrtc> {
        match Nvrtc::of_process(MAJOR_VERSIONS[0]) {
            Ok(nvrtc) => Some(nvrtc),
            Err(reason) => {
                println!("skipped {test}: {}", reason.reason);
                None
            }
        }
    }

    /// Returns a program of one kernel.
    fn forward_program() -> program::Program {
        let specialization = Specialization::plain(ElementType::Bf16, 64, 64);
        let tile = ForwardTile::choose(&specialization, ForwardLength::Other, 99 * 1024).expect("a tile");
        tile.program(&specialization)
    }

    #[test]
    fn missing_nvrtc_is_a_reason_and_no_panic() {
        let reason = Nvrtc::find(&["/no/such/libnvrtc.so.13".into()]).err().expect("no library");
        assert!(reason.reason().contains("was not found"), "{reason}");
    }

    #[test]
    fn nvrtc_without_its_functions_is_a_reason_and_no_panic() {
        // The C library is there on every Linux, and is no NVRTC.
        if cfg!(target_os = "linux") {
            let reason = Nvrtc::find(&["libc.so.6".into()]).err().expect("no NVRTC");
            assert!(reason.reason().contains("libc.so.6: it lacks functions"), "{reason}");
        }
    }

    #[test]
    fn nvrtc_compiles_forward_kernel_to_machine_code_and_disk_cache_keeps_it() -> std::io::Result<()> {
        let Some(nvrtc) = nvrtc("nvrtc_compiles_forward_kernel") else { return Ok(()) };
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(folder.path());
        let architecture = nvrtc.architecture(Capability { major: 8, minor: 0 }).expect("sm_80");
        assert_eq!(architecture, "sm_80");
        let code = compile::compile(nvrtc, &cache, &architecture, &forward_program()).expect("machine code");
        assert_eq!(&code[..4], b"\x7fELF");
        let name = b"attention_forward";
        assert!(code.windows(name.len()).any(|bytes| bytes == name));
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
        assert_eq!(compile::compile(nvrtc, &cache, &architecture, &forward_program()), Ok(code));
        Ok(())
    }

    #[test]
    fn nvrtc_reports_errors_of_the_source() {
        let Some(nvrtc) = nvrtc("nvrtc_reports_errors_of_the_source") else { return };
        let failure = nvrtc.compile("no source", &["--gpu-architecture=sm_80".into()]).expect_err("an error");
        let reason = failure.reason;
        assert!(reason.contains("NVRTC_ERROR_COMPILATION") && reason.contains("attention.cu"), "{reason}");
        assert!(failure.is_lasting);
        let of_option = nvrtc.compile("", &["--no-such-option".into()]).expect_err("an error");
        assert!(of_option.reason.contains("NVRTC_ERROR_INVALID_OPTION"), "{of_option:?}");
    }

    #[test]
    fn missing_memory_and_missing_builtins_are_passing_failures() {
        let Some(nvrtc) = nvrtc("missing_memory_and_missing_builtins_are_passing_failures") else { return };
        let is_lasting = |code| nvrtc.failure(code, "").is_lasting;
        assert!(!is_lasting(NVRTC_ERROR_OUT_OF_MEMORY) && !is_lasting(NVRTC_ERROR_BUILTIN_OPERATION_FAILURE));
        assert!(is_lasting(5) && is_lasting(6), "an invalid option, and an error of the source");
        let reason = nvrtc.failure(7, "nvrtc: error: failed to open libnvrtc-builtins.so.13.0.\n").reason;
        let expected = "cannot compile the CUDA kernels: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE nvrtc: error: failed to";
        assert!(reason.contains(expected), "{reason}");
    }

    #[test]
    fn candidates_of_the_drivers_version_come_first() {
        let of_driver =
            |major| candidates(major).iter().map(|path| path.to_string_lossy().into_owned()).collect::<Vec<_>>();
        if cfg!(target_os = "linux") {
            let first_of = |names: &[String], name: &str| names.iter().position(|path| path.ends_with(name));
            let names = of_driver(12);
            assert_eq!(names[0], "libnvrtc.so.12");
            let last = names.iter().rposition(|path| path.ends_with("libnvrtc.so.12"));
            assert!(last > Some(0) && last < first_of(&names, "libnvrtc.so.13"), "{names:?}");
            assert_eq!(of_driver(13)[0], "libnvrtc.so.13");
        }
    }

    #[test]
    fn architecture_is_the_newest_that_the_device_runs() {
        let Some(nvrtc) = nvrtc("architecture_is_the_newest_that_the_device_runs") else { return };
        let of_device = |major, minor| nvrtc.architecture(Capability { major, minor });
        assert_eq!(of_device(9, 0).as_deref(), Ok("sm_90"));
        // Code for 9.0 runs on a device of 9.9, if there ever is one.
        assert_eq!(of_device(9, 9).as_deref(), Ok("sm_90"));
        let reason = of_device(99, 0).expect_err("a device of the future");
        assert!(reason.reason().contains("compute capability 99.0"), "{reason}");
    }
}

//! Compiled kernels in a folder of the user, so that a later process need not compile them.
//!
//! A file is one compiled program. Its name is a hash of the source, the options and the compiler's version; its first
//! line is a header with a checksum of the rest, which notices damage. A file is written under a temporary name and
//! renamed, so that other processes read all of it or nothing. No fault of the folder or of a file costs more than the
//! time to compile again.
//!
//! The driver runs what a file contains. So the folder and its files are read only if nobody but the user can write
//! them: the module [`private_files`](crate::private_files) checks it.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::hash::Fnv;
use crate::private_files::{FileProblem, check_folder, create_folder, read_file};
use crate::warnings::warn_of_each_text;

/// The environment variable that names the folder. An empty value turns the cache off.
const VARIABLE: &str = "CANDLE_ATTENTION_CACHE";

const HEADER: &str = "candle-attention kernel 1";

/// Everything on which a compiled program depends.
pub(crate) struct CacheKey<'a> {
    /// The source as the compiler reads it.
    pub source: &'a str,
    /// The compiler's options, with the architecture.
    pub options: &'a [String],
    /// The name and the version of the compiler.
    pub compiler: &'a str,
}

impl CacheKey<'_> {
    /// Returns the name of the program's file.
    fn file_name(&self) -> String {
        let mut hash = Fnv::new();
        hash.add_text(self.compiler);
        for option in self.options {
            hash.add_text(option);
        }
        hash.add_text(self.source);
        format!("{:032x}.cubin", hash.value())
    }
}

/// A folder of compiled programs, or no folder.
pub(crate) struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// Returns the cache of the user.
    #[cfg(feature = "cuda")]
    pub fn of_user() -> Self {
        Self::of_environment(|variable| std::env::var_os(variable))
    }

    /// Returns the cache that environment variables name: the folder of `CANDLE_ATTENTION_CACHE`, or
    /// `candle-attention` in the system's folder for files that can be made again.
    fn of_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        match variable(VARIABLE) {
            Some(folder) if folder.is_empty() => Self { folder: None },
            Some(folder) => Self { folder: Some(folder.into()) },
            None => Self { folder: system_folder(variable).map(|folder| folder.join("candle-attention")) },
        }
    }

    /// Returns the cache in a folder, which need not exist yet.
    #[cfg(test)]
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// Returns the compiled program of a key; `None` if there is none, or none that can be used.
    pub fn read(&self, key: &CacheKey) -> Option<Vec<u8>> {
        let folder = self.folder.as_ref()?;
        let path = folder.join(key.file_name());
        let bytes = match check_folder(folder).and_then(|()| read_file(&path)) {
            Ok(bytes) => bytes,
            Err(problem) => {
                report(&problem);
                return None;
            }
        };
        let program = checked(&bytes);
        if program.is_none() {
            log::debug!("the compiled kernel {} is damaged and will be compiled again", path.display());
        }
        program
    }

    /// Stores the compiled program of a key, if the folder can be written.
    pub fn write(&self, key: &CacheKey, program: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(problem) = write_file(folder, &key.file_name(), program) {
            report(&problem);
        }
    }
}

/// Logs why a compiled kernel is not read or stored: a warning, once, if others can write the folder or the file.
fn report(problem: &FileProblem) {
    match problem {
        FileProblem::NotPrivate(reason) => {
            warn_of_each_text(&format!("compiled kernels are neither read nor kept: {reason}"));
        }
        FileProblem::Io(error) if error.kind() == io::ErrorKind::NotFound => {}
        FileProblem::Io(error) => log::debug!("a compiled kernel is neither read nor kept: {error}"),
    }
}

/// Returns the user's folder for files that can be made again.
fn system_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if cfg!(windows) {
        return folder("LOCALAPPDATA");
    }
    if cfg!(target_os = "macos") {
        return folder("HOME").map(|home| home.join("Library").join("Caches"));
    }
    // The specification of XDG says that relative paths are ignored.
    match folder("XDG_CACHE_HOME").filter(|path| path.is_absolute()) {
        Some(path) => Some(path),
        None => folder("HOME").map(|home| home.join(".cache")),
    }
}

/// Returns the first line of a file, with the line break.
fn header(program: &[u8]) -> String {
    let mut hash = Fnv::new();
    hash.add_bytes(program);
    format!("{HEADER} {} bytes {:032x}\n", program.len(), hash.value())
}

/// Returns the program in a file if the header fits.
fn checked(bytes: &[u8]) -> Option<Vec<u8>> {
    let end = bytes.iter().position(|&byte| byte == b'\n')?;
    let (found, program) = bytes.split_at(end + 1);
    (found == header(program).as_bytes()).then(|| program.to_vec())
}

/// Writes a file under a random temporary name in the folder and renames it.
fn write_file(folder: &Path, name: &str, program: &[u8]) -> Result<(), FileProblem> {
    create_folder(folder)?;
    check_folder(folder)?;
    // A file that exists, and a link, is not opened: the next random name is tried.
    let mut temporary = tempfile::Builder::new().prefix(name).suffix(".new").tempfile_in(folder)?;
    temporary.write_all(&[header(program).as_bytes(), program].concat())?;
    temporary.persist(folder.join(name)).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, thread};

    fn key<'a>(source: &'a str, options: &'a [String]) -> CacheKey<'a> {
        CacheKey { source, options, compiler: "test 1.0" }
    }

    /// Returns the only file of a folder.
    fn only_file(folder: &Path) -> io::Result<PathBuf> {
        let mut files = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
        let file = files.next().expect("a file")?;
        assert!(files.next().is_none(), "more than one file");
        Ok(file)
    }

    /// Returns the folder for environment variables.
    fn folder_of(variables: &[(&str, &str)]) -> Option<PathBuf> {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        DiskCache::of_environment(value).folder
    }

    #[test]
    fn cache_variable_names_the_folder_or_turns_the_cache_off() {
        let home = ("HOME", "/home/me");
        assert_eq!(folder_of(&[(VARIABLE, "/kernels"), home]), Some("/kernels".into()));
        assert_eq!(folder_of(&[(VARIABLE, ""), home]), None);
        assert_eq!(folder_of(&[]), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn cache_is_in_the_folder_of_xdg_or_of_home() {
        let home = ("HOME", "/home/me");
        assert_eq!(folder_of(&[home]), Some("/home/me/.cache/candle-attention".into()));
        assert_eq!(folder_of(&[home, ("XDG_CACHE_HOME", "/caches")]), Some("/caches/candle-attention".into()));
        let relative = ("XDG_CACHE_HOME", "relative");
        assert_eq!(folder_of(&[home, relative]), Some("/home/me/.cache/candle-attention".into()));
        assert_eq!(folder_of(&[relative]), None);
    }

    #[test]
    fn stored_program_is_read_by_its_key_alone() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(&folder.path().join("new").join("folder"));
        let options = ["-DA=1".to_string(), "-DB=2".to_string()];
        cache.write(&key("source", &options), b"program\nof two lines");
        assert_eq!(cache.read(&key("source", &options)).as_deref(), Some(&b"program\nof two lines"[..]));
        assert_eq!(cache.read(&key("source ", &options)), None);
        assert_eq!(cache.read(&key("source", &options[..1])), None);
        assert_eq!(cache.read(&CacheKey { compiler: "test 1.1", ..key("source", &options) }), None);
        Ok(())
    }

    #[test]
    fn damaged_files_are_not_read_and_are_written_again() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(folder.path());
        let program = vec![7u8; 1000];
        cache.write(&key("source", &[]), &program);
        let file = only_file(folder.path())?;
        let whole = fs::read(&file)?;
        let flipped = |at: usize| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        };
        let foreign = b"not a kernel".to_vec();
        let damaged = [whole[..500].to_vec(), Vec::new(), flipped(3), flipped(whole.len() - 1), foreign];
        for bytes in damaged {
            fs::write(&file, bytes)?;
            assert_eq!(cache.read(&key("source", &[])), None);
            cache.write(&key("source", &[]), &program);
            assert_eq!(cache.read(&key("source", &[])), Some(program.clone()));
        }
        Ok(())
    }

    #[test]
    fn disk_cache_in_unwritable_folder_returns_no_error() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        // A file with the folder's name stops every user, root too.
        let file = folder.path().join("file");
        fs::write(&file, b"")?;
        let without_folder = DiskCache::in_folder(&file);
        without_folder.write(&key("source", &[]), b"program");
        assert_eq!(without_folder.read(&key("source", &[])), None);
        // A folder with the name of a program's file.
        let cache = DiskCache::in_folder(folder.path());
        fs::create_dir(folder.path().join(key("source", &[]).file_name()))?;
        cache.write(&key("source", &[]), b"program");
        assert_eq!(cache.read(&key("source", &[])), None);
        Ok(())
    }

    /// Returns a cache in a folder with one program.
    #[cfg(unix)]
    fn folder_with_a_program() -> io::Result<(DiskCache, tempfile::TempDir)> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(folder.path());
        cache.write(&key("source", &[]), b"program");
        assert_eq!(cache.read(&key("source", &[])).as_deref(), Some(&b"program"[..]));
        Ok((cache, folder))
    }

    #[test]
    #[cfg(unix)]
    fn new_cache_folder_and_its_files_are_of_the_user_alone() -> io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir()?;
        let folder = parent.path().join("new");
        DiskCache::in_folder(&folder).write(&key("source", &[]), b"program");
        let mode = |path: &Path| fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o777);
        assert_eq!((mode(&folder)?, mode(&only_file(&folder)?)?), (0o700, 0o600));
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn program_that_others_can_write_is_not_read() -> io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
        for mode in [0o770, 0o702, 0o777] {
            let (cache, folder) = folder_with_a_program()?;
            set_mode(folder.path(), mode)?;
            assert_eq!(cache.read(&key("source", &[])), None, "folder of mode {mode:o}");
            cache.write(&key("other", &[]), b"program");
            only_file(folder.path())?;
            let (other_cache, other_folder) = folder_with_a_program()?;
            set_mode(&only_file(other_folder.path())?, mode)?;
            assert_eq!(other_cache.read(&key("source", &[])), None, "file of mode {mode:o}");
            // It is replaced.
            other_cache.write(&key("source", &[]), b"program");
            assert_eq!(other_cache.read(&key("source", &[])).as_deref(), Some(&b"program"[..]));
        }
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn links_in_the_place_of_programs_are_neither_read_nor_followed() -> io::Result<()> {
        let (cache, folder) = folder_with_a_program()?;
        let file = only_file(folder.path())?;
        let elsewhere = tempfile::tempdir()?;
        let target = elsewhere.path().join("target");
        fs::rename(&file, &target)?;
        let whole = fs::read(&target)?;
        std::os::unix::fs::symlink(&target, &file)?;
        assert_eq!(cache.read(&key("source", &[])), None);
        cache.write(&key("source", &[]), b"another program");
        assert_eq!(cache.read(&key("source", &[])).as_deref(), Some(&b"another program"[..]));
        assert_eq!(fs::read(&target)?, whole, "the target of the link");
        Ok(())
    }

    /// Links the temporary names that earlier versions used, by the number of the process, to another file.
    #[test]
    #[cfg(unix)]
    fn links_of_temporary_names_are_not_followed() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let elsewhere = tempfile::tempdir()?;
        let target = elsewhere.path().join("target");
        fs::write(&target, b"target")?;
        let name = key("source", &[]).file_name();
        for number in 0..100 {
            let link = folder.path().join(format!("{name}.{}.{number}.new", std::process::id()));
            std::os::unix::fs::symlink(&target, link)?;
        }
        DiskCache::in_folder(folder.path()).write(&key("source", &[]), b"program");
        assert_eq!(fs::read(&target)?, b"target");
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn fifo_in_the_place_of_a_program_does_not_block() -> io::Result<()> {
        let (cache, folder) = folder_with_a_program()?;
        let file = only_file(folder.path())?;
        fs::remove_file(&file)?;
        let path = std::ffi::CString::new(file.as_os_str().as_encoded_bytes()).expect("no zero");
        // SAFETY: a text that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        assert_eq!(cache.read(&key("source", &[])), None);
        cache.write(&key("source", &[]), b"program");
        assert_eq!(cache.read(&key("source", &[])).as_deref(), Some(&b"program"[..]));
        Ok(())
    }

    #[test]
    fn cache_without_a_folder_stores_nothing() {
        let cache = DiskCache { folder: None };
        cache.write(&key("source", &[]), b"program");
        assert_eq!(cache.read(&key("source", &[])), None);
    }

    #[test]
    fn readers_see_whole_programs_while_others_write() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let programs: Vec<Vec<u8>> = (0..4u8).map(|n| vec![n; 20_000]).collect();
        DiskCache::in_folder(folder.path()).write(&key("source", &[]), &programs[0]);
        thread::scope(|scope| {
            for program in &programs {
                let cache = DiskCache::in_folder(folder.path());
                scope.spawn(move || {
                    for _ in 0..20 {
                        cache.write(&key("source", &[]), program);
                    }
                });
            }
            let cache = DiskCache::in_folder(folder.path());
            for _ in 0..50 {
                let found = cache.read(&key("source", &[]));
                assert!(found.is_some_and(|program| programs.contains(&program)));
            }
        });
        // No temporary file is left.
        only_file(folder.path())?;
        Ok(())
    }
}

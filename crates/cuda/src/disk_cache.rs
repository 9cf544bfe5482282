//! Compiled kernels in a folder of the user, so that a later process need not compile them.
//!
//! A file is one compiled program. Its name is a hash of the source, the options and the compiler's version; its first
//! line is a header with a checksum of the rest. A file is written under a temporary name and renamed, so that other
//! processes read all of it or nothing. No fault of the folder or of a file costs more than the time to compile again.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hash::Fnv;

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
        let path = self.folder.as_ref()?.join(key.file_name());
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    log::debug!("cannot read the compiled kernel {}: {error}", path.display());
                }
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
        if let Err(error) = write_file(folder, &key.file_name(), program) {
            log::debug!("cannot store a compiled kernel in {}: {error}", folder.display());
        }
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

/// Writes a file under a temporary name in the folder and renames it.
fn write_file(folder: &Path, name: &str, program: &[u8]) -> io::Result<()> {
    // Threads of one process write different files, and so do processes.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    fs::create_dir_all(folder)?;
    let temporary = folder.join(format!("{name}.{}.{number}.new", process::id()));
    let written = fs::write(&temporary, [header(program).as_bytes(), program].concat())
        .and_then(|()| fs::rename(&temporary, folder.join(name)));
    if written.is_err() {
        // The file may not exist.
        fs::remove_file(&temporary).ok();
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

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

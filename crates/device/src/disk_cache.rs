//! Compiled kernels and results of checks in a folder of the user, so that a later process need not compile or check
//! again.
//!
//! The caller names a file, by a hash of everything on which it depends. Its first line is a header with a checksum of
//! the rest, which notices damage. A file is written under a temporary name and renamed, so that other processes read
//! all of it or nothing. A fault of the folder or of a file costs the time to make the file again, and nothing else.
//!
//! The driver runs what a compiled kernel contains. So the folder and its files are read only if nobody but the user
//! can write them: the module [`private_files`](crate::private_files) checks it.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::file_lock::FileLock;
use crate::hash::Fnv;
use crate::private_files::{FileProblem, check_folder, create_folder, read_file};
use crate::warnings::warn_of_each_text;

/// The environment variable that names the folder. An empty value turns the cache off.
const VARIABLE: &str = "CANDLE_ATTENTION_CACHE";

const HEADER: &str = "candle-attention kernel 1";

/// A folder of the user for files that can be made again, or no folder.
#[derive(Debug)]
pub struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// Returns the cache of the user.
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
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// Returns a cache that stores nothing.
    pub fn without_folder() -> Self {
        Self { folder: None }
    }

    /// Returns the content of a file; `None` if there is none, or none that can be used.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let folder = self.folder.as_ref()?;
        let path = folder.join(name);
        let bytes = match check_folder(folder).and_then(|()| read_file(&path)) {
            Ok(bytes) => bytes,
            Err(problem) => {
                report(&problem);
                return None;
            }
        };
        let content = checked(&bytes);
        if content.is_none() {
            log::debug!("the file {} is damaged and will be made again", path.display());
        }
        content
    }

    /// Returns the content of a file, which `make` makes unless it is there. Other processes and threads that need the
    /// same file meanwhile wait for it, where the folder can be written.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn read_or_make<E>(&self, name: &str, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        if let Some(content) = self.read(name) {
            return Ok(content);
        }
        let lock = self.folder.as_ref().and_then(|folder| FileLock::wait(folder, name));
        // Another process may have had the lock before.
        if lock.is_some()
            && let Some(content) = self.read(name)
        {
            return Ok(content);
        }
        let content = make()?;
        self.write(name, &content);
        Ok(content)
    }

    /// Stores the content of a file, if the folder can be written.
    pub fn write(&self, name: &str, content: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(problem) = write_file(folder, name, content) {
            report(&problem);
        }
    }
}

/// Logs why a file is not read or stored: a warning, once, if others can write the folder or the file.
fn report(problem: &FileProblem) {
    match problem {
        FileProblem::NotPrivate(reason) => {
            warn_of_each_text(&format!("files of the cache folder are neither read nor kept: {reason}"));
        }
        FileProblem::Io(error) if error.kind() == io::ErrorKind::NotFound => {}
        FileProblem::Io(error) => log::debug!("a file of the cache folder is neither read nor kept: {error}"),
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
fn header(content: &[u8]) -> String {
    let mut hash = Fnv::new();
    hash.add_bytes(content);
    format!("{HEADER} {} bytes {:032x}\n", content.len(), hash.value())
}

/// Returns the content of a file if the header fits.
fn checked(bytes: &[u8]) -> Option<Vec<u8>> {
    let end = bytes.iter().position(|&byte| byte == b'\n')?;
    let (found, content) = bytes.split_at(end + 1);
    (found == header(content).as_bytes()).then(|| content.to_vec())
}

/// Writes a file under a random temporary name in the folder and renames it.
fn write_file(folder: &Path, name: &str, content: &[u8]) -> Result<(), FileProblem> {
    create_folder(folder)?;
    check_folder(folder)?;
    // A file that exists, and a link, is not opened: the next random name is tried.
    let mut temporary = tempfile::Builder::new().prefix(name).suffix(".new").tempfile_in(folder)?;
    temporary.write_all(&[header(content).as_bytes(), content].concat())?;
    temporary.persist(folder.join(name)).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;
    use std::{fs, thread};

    /// The name of the file of most tests.
    const NAME: &str = "0123.cubin";

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
    fn stored_program_is_read_by_its_name_alone() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(&folder.path().join("new").join("folder"));
        cache.write(NAME, b"program\nof two lines");
        assert_eq!(cache.read(NAME).as_deref(), Some(&b"program\nof two lines"[..]));
        assert_eq!(cache.read("0124.cubin"), None);
        Ok(())
    }

    #[test]
    fn damaged_files_are_not_read_and_are_written_again() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(folder.path());
        let program = vec![7u8; 1000];
        cache.write(NAME, &program);
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
            assert_eq!(cache.read(NAME), None);
            cache.write(NAME, &program);
            assert_eq!(cache.read(NAME), Some(program.clone()));
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
        without_folder.write(NAME, b"program");
        assert_eq!(without_folder.read(NAME), None);
        // A folder with the name of a program's file.
        let cache = DiskCache::in_folder(folder.path());
        fs::create_dir(folder.path().join(NAME))?;
        cache.write(NAME, b"program");
        assert_eq!(cache.read(NAME), None);
        Ok(())
    }

    /// Returns a cache in a folder with one program.
    #[cfg(unix)]
    fn folder_with_a_program() -> io::Result<(DiskCache, tempfile::TempDir)> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(folder.path());
        cache.write(NAME, b"program");
        assert_eq!(cache.read(NAME).as_deref(), Some(&b"program"[..]));
        Ok((cache, folder))
    }

    #[test]
    #[cfg(unix)]
    fn new_cache_folder_and_its_files_are_of_the_user_alone() -> io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir()?;
        let folder = parent.path().join("new");
        DiskCache::in_folder(&folder).write(NAME, b"program");
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
            assert_eq!(cache.read(NAME), None, "folder of mode {mode:o}");
            cache.write("other.cubin", b"program");
            only_file(folder.path())?;
            let (other_cache, other_folder) = folder_with_a_program()?;
            set_mode(&only_file(other_folder.path())?, mode)?;
            assert_eq!(other_cache.read(NAME), None, "file of mode {mode:o}");
            // It is replaced.
            other_cache.write(NAME, b"program");
            assert_eq!(other_cache.read(NAME).as_deref(), Some(&b"program"[..]));
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
        assert_eq!(cache.read(NAME), None);
        cache.write(NAME, b"another program");
        assert_eq!(cache.read(NAME).as_deref(), Some(&b"another program"[..]));
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
        for number in 0..100 {
            let link = folder.path().join(format!("{NAME}.{}.{number}.new", std::process::id()));
            std::os::unix::fs::symlink(&target, link)?;
        }
        DiskCache::in_folder(folder.path()).write(NAME, b"program");
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
        assert_eq!(cache.read(NAME), None);
        cache.write(NAME, b"program");
        assert_eq!(cache.read(NAME).as_deref(), Some(&b"program"[..]));
        Ok(())
    }

    #[test]
    fn cache_without_a_folder_stores_nothing() {
        let cache = DiskCache::without_folder();
        cache.write(NAME, b"program");
        assert_eq!(cache.read(NAME), None);
    }

    #[test]
    fn program_that_many_need_at_once_is_made_by_one_of_them() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (made, barrier) = (AtomicUsize::new(0), Barrier::new(8));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    // A separate process would have another cache too.
                    let cache = DiskCache::in_folder(folder.path());
                    barrier.wait();
                    let content = cache.read_or_make(NAME, || {
                        made.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_millis(50));
                        Ok::<_, io::Error>(b"program".to_vec())
                    });
                    assert_eq!(content.expect("a program"), b"program");
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
        // No lock is left.
        only_file(folder.path())?;
        Ok(())
    }

    #[test]
    fn program_that_cannot_be_made_is_an_error_and_made_by_the_next() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let cache = DiskCache::in_folder(folder.path());
        assert_eq!(cache.read_or_make(NAME, || Err("no memory")), Err("no memory"));
        assert_eq!(cache.read_or_make(NAME, || Ok::<_, &str>(b"program".to_vec())).as_deref(), Ok(&b"program"[..]));
        // Without a folder, everybody makes it.
        let without_folder = DiskCache::without_folder();
        assert_eq!(without_folder.read_or_make(NAME, || Ok::<_, &str>(vec![1])), Ok(vec![1]));
        Ok(())
    }

    #[test]
    fn readers_see_whole_programs_while_others_write() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let programs: Vec<Vec<u8>> = (0..4u8).map(|n| vec![n; 20_000]).collect();
        DiskCache::in_folder(folder.path()).write(NAME, &programs[0]);
        thread::scope(|scope| {
            for program in &programs {
                let cache = DiskCache::in_folder(folder.path());
                scope.spawn(move || {
                    for _ in 0..20 {
                        cache.write(NAME, program);
                    }
                });
            }
            let cache = DiskCache::in_folder(folder.path());
            for _ in 0..50 {
                let found = cache.read(NAME);
                assert!(found.is_some_and(|program| programs.contains(&program)));
            }
        });
        // No temporary file is left.
        only_file(folder.path())?;
        Ok(())
    }
}

//! A lock that processes of a user share while one of them makes a file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::private_files::{check_folder, create_folder};

/// The time after which a process does not wait any longer: another one may have been stopped while it had the lock.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The time between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// A lock, which is released when it is dropped. Its file is removed then: a process that still waits for it finds what
/// this one has made.
#[derive(Debug)]
pub(crate) struct FileLock {
    path: PathBuf,
    _file: File,
}

impl FileLock {
    /// Waits for the lock of a file in a folder of the user; `None` after a minute, and if it cannot be written.
    pub fn wait(folder: &Path, name: &str) -> Option<Self> {
        create_folder(folder).ok()?;
        check_folder(folder).ok()?;
        let path = folder.join(format!("{name}.lock"));
        let file = open(&path)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(Self { path, _file: file }),
                Err(TryLockError::WouldBlock) if start.elapsed() < LONGEST_WAIT => thread::sleep(PAUSE),
                Err(_) => return None,
            }
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Nothing depends on it: a file that stays is locked again.
        let _ = fs::remove_file(&self.path);
    }
}

/// Opens the file of a lock, for the user alone. A link is not followed, and a pipe is not waited for.
fn open(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    }
    options.open(path).ok()
}

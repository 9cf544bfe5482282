//! Files and folders that nobody but the user can write.
//!
//! On Unix, the owner and the permissions are checked. On other systems, the folder of the user is trusted.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

/// The reason why a file or a folder is not used.
#[derive(Debug)]
pub(crate) enum FileProblem {
    /// Somebody else can have written it: the sentence says what was found.
    NotPrivate(String),
    /// The file or folder cannot be read or written.
    Io(io::Error),
}

impl From<io::Error> for FileProblem {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Creates a folder and those above it, for the user alone. A folder that exists stays as it is.
pub(crate) fn create_folder(folder: &Path) -> io::Result<()> {
    #[cfg_attr(not(unix), expect(unused_mut, reason = "other systems have no mode"))]
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

/// Checks that a folder is the user's, and that nobody else can write into it.
///
/// # Errors
/// If it is not, or if there is no such folder.
pub(crate) fn check_folder(folder: &Path) -> Result<(), FileProblem> {
    #[cfg(unix)]
    {
        // Somebody else could turn a link of his own to another folder at any time.
        let link = Access::of(&fs::symlink_metadata(folder)?);
        let target = Access::of(&fs::metadata(folder)?);
        let user = user();
        let problem = target.problem(user).or_else(|| link.problem_of_owner(user));
        if let Some(problem) = problem {
            return Err(FileProblem::NotPrivate(format!("the folder {} {problem}", folder.display())));
        }
    }
    #[cfg(not(unix))]
    fs::metadata(folder)?;
    Ok(())
}

/// Returns the bytes of a file that nobody but the user can have written. A link is not followed, and a file that is no
/// regular one, such as a pipe, is not waited for.
///
/// # Errors
/// If there is none.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>, FileProblem> {
    let mut options = fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let mut file = options.open(path).map_err(|error| open_problem(path, error))?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(FileProblem::NotPrivate(format!("{} is no regular file", path.display())));
    }
    #[cfg(unix)]
    if let Some(problem) = Access::of(&metadata).problem(user()) {
        return Err(FileProblem::NotPrivate(format!("the file {} {problem}", path.display())));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the reason why a file cannot be opened.
fn open_problem(path: &Path, error: io::Error) -> FileProblem {
    #[cfg(unix)]
    if error.raw_os_error() == Some(libc::ELOOP) {
        return FileProblem::NotPrivate(format!("{} is a symbolic link", path.display()));
    }
    #[cfg(not(unix))]
    log::trace!("{}: {error}", path.display());
    FileProblem::Io(error)
}

/// The owner and the permissions of a file or a folder.
#[cfg(unix)]
#[derive(Debug, Clone, Copy)]
struct Access {
    owner: u32,
    mode: u32,
}

#[cfg(unix)]
impl Access {
    fn of(metadata: &fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self { owner: metadata.uid(), mode: metadata.mode() }
    }

    /// Returns why somebody else than a user can write here; `None` if nobody can.
    fn problem(self, user: u32) -> Option<String> {
        let others_write = 0o022;
        if self.mode & others_write != 0 {
            let mode = self.mode & 0o7777;
            return Some(format!("has mode {mode:o}, by which others can write it: expected 700 or 600"));
        }
        self.problem_of_owner(user)
    }

    /// Returns that the owner is another user, if so.
    fn problem_of_owner(self, user: u32) -> Option<String> {
        (self.owner != user).then(|| format!("belongs to user {}, expected {user}", self.owner))
    }
}

/// Returns the number of the user whose rights the process has.
#[cfg(unix)]
fn user() -> u32 {
    // SAFETY: the function has no conditions.
    unsafe { libc::geteuid() }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_of_others_is_a_problem() {
        let private = Access { owner: 1000, mode: 0o100_600 };
        assert_eq!(private.problem(1000), None);
        assert_eq!(Access { mode: 0o40_755, ..private }.problem(1000), None, "others only read");
        assert_eq!(private.problem(0).as_deref(), Some("belongs to user 1000, expected 0"));
        let problem = |mode| Access { mode, ..private }.problem(1000).expect("a problem");
        assert!(problem(0o40_770).starts_with("has mode 770"));
        assert!(problem(0o100_602).starts_with("has mode 602"));
    }

    #[test]
    fn file_and_folder_of_another_user_are_a_problem() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("file");
        fs::write(&file, b"bytes")?;
        let other = user() + 1;
        // Only root can change the owner of a file.
        if std::os::unix::fs::chown(&file, Some(other), None).is_err() {
            return Ok(());
        }
        assert!(matches!(read_file(&file), Err(FileProblem::NotPrivate(_))));
        assert!(check_folder(folder.path()).is_ok());
        std::os::unix::fs::chown(folder.path(), Some(other), None)?;
        assert!(matches!(check_folder(folder.path()), Err(FileProblem::NotPrivate(_))));
        Ok(())
    }
}

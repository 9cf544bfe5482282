//! The cache on disk, as all Hugging Face libraries lay it out:
//!
//! ```text
//! models--organisation--name/refs/main                      the commit that a branch was at
//! models--organisation--name/snapshots/<commit>/config.json the file, most often a link into blobs/
//! models--organisation--name/.no_exist/<commit>/config.json a mark: this commit is known not to have the file
//! ```
//!
//! hf-hub can look here too, but only with an HTTP client, which it cannot set up on a machine without certificates: the
//! very place where offline mode is at home.

use std::path::{Path, PathBuf};

/// A model's part of the cache.
pub(super) struct Cache {
    folder: PathBuf,
}

/// What the cache knows about a file at a revision.
#[derive(Debug, PartialEq)]
pub(super) enum Cached {
    /// The file is here.
    Found(PathBuf),
    /// The revision does not have the file.
    Absent,
    /// Nothing is known.
    Unknown,
}

impl Cache {
    /// The part of the model `id`, whose name has been checked.
    pub(super) fn new(cache_dir: &Path, id: &str) -> Self {
        Self { folder: cache_dir.join(format!("models--{}", id.replace('/', "--"))) }
    }

    /// The model's folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Looks for `file` at a branch or a tag, in the commit that it was last known to be at, or at a full commit.
    pub(super) fn find(&self, revision: &str, file: &str) -> Cached {
        let known = || std::fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let commit = if is_commit(revision) { Some(revision.to_string()) } else { known() };
        let Some(commit) = commit.as_deref().map(str::trim).filter(|commit| !commit.is_empty()) else {
            return Cached::Unknown;
        };
        let path = self.folder.join("snapshots").join(commit).join(file);
        if path.exists() {
            return Cached::Found(path);
        }
        let mark = self.folder.join(".no_exist").join(commit).join(file);
        if mark.exists() { Cached::Absent } else { Cached::Unknown }
    }
}

/// Whether a revision is a full commit, whose files never change.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_found_known_to_be_absent_or_unknown() -> std::io::Result<()> {
        let dir = tempfile::TempDir::new()?;
        let cache = Cache::new(dir.path(), "org/name");
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let folder = dir.path().join("models--org--name");
        for below in ["refs/refs/pr", "snapshots/short", ".no_exist/short", &format!("snapshots/{commit}")] {
            fs::create_dir_all(folder.join(below))?;
        }
        fs::write(folder.join("refs/main"), "short\n")?;
        fs::write(folder.join("refs/empty"), "\n")?;
        fs::write(folder.join("refs/refs/pr/1"), commit)?;
        fs::write(folder.join("snapshots/short/a"), "")?;
        fs::write(folder.join(".no_exist/short/b"), "")?;
        fs::write(folder.join("snapshots").join(commit).join("c"), "")?;

        assert_eq!(cache.find("main", "a"), Cached::Found(folder.join("snapshots/short/a")));
        assert_eq!(cache.find("main", "b"), Cached::Absent);
        assert_eq!(cache.find("main", "c"), Cached::Unknown);
        assert_eq!(cache.find("refs/pr/1", "c"), cache.find(commit, "c"));
        assert_eq!(cache.find(commit, "c"), Cached::Found(folder.join("snapshots").join(commit).join("c")));
        for revision in ["empty", "v1", "short"] {
            assert_eq!(cache.find(revision, "a"), Cached::Unknown, "{revision}");
        }
        Ok(())
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_a_blob_that_is_gone_is_no_file() -> std::io::Result<()> {
        let dir = tempfile::TempDir::new()?;
        let cache = Cache::new(dir.path(), "name");
        let snapshot = dir.path().join("models--name/snapshots/0123456789abcdef0123456789abcdef01234567");
        fs::create_dir_all(&snapshot)?;
        std::os::unix::fs::symlink("../../blobs/gone", snapshot.join("a"))?;
        assert_eq!(cache.find("0123456789abcdef0123456789abcdef01234567", "a"), Cached::Unknown);
        Ok(())
    }
}

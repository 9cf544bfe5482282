//! One fetch: look-ups in the model's folder in the cache, and downloads.
//!
//! The cache on disk has the layout of all Hugging Face libraries:
//!
//! ```text
//! models--organisation--name/refs/main                      the commit that a branch was at
//! models--organisation--name/snapshots/<commit>/config.json the file, most often a link into blobs/
//! models--organisation--name/.no_exist/<commit>/config.json a mark: this commit is known not to have the file
//! ```
//!
//! hf-hub can look there too, but only with an HTTP client, which it cannot create on a machine without certificates,
//! and such a machine is where offline mode is used.

use std::path::{Path, PathBuf};

use candle_core::{Error, Result};
use hf_hub::HFError;

use super::HubModel;
use super::request::{RequestFailure, watched};
use super::server::Hub;
use super::settings::HubSettings;

/// A model at a revision, opened for look-ups.
pub(super) struct Session<'a> {
    pub(super) model: &'a HubModel,
    pub(super) settings: HubSettings,
    /// The model's folder in the cache.
    pub(super) folder: PathBuf,
    /// The server; `None` offline.
    pub(super) hub: Option<Hub>,
    /// The revision of the model, or its commit once that is known.
    revision: String,
    /// Whether the first file was found, so that the model and the revision exist.
    pub(super) is_pinned: bool,
}

/// The state of a file at a revision in the cache.
#[derive(Debug, PartialEq)]
pub(super) enum Cached {
    Found(PathBuf),
    /// The revision does not have the file.
    Absent,
    Unknown,
}

impl<'a> Session<'a> {
    /// Reads the environment and, online, creates a client of hf-hub. It makes no request.
    pub(super) fn open(model: &'a HubModel) -> Result<Self> {
        let requested = model.settings.clone();
        let mut settings = HubSettings::read(|name| std::env::var(name).ok(), std::env::home_dir())?;
        settings.hides_progress |= requested.hides_progress;
        settings.endpoint = requested.endpoint.or(settings.endpoint);
        settings.token = requested.token.or(settings.token);
        settings.offline = settings.offline.or(requested.offline);
        let Some(cache_dir) = requested.cache_dir.or(settings.cache_dir.take()) else {
            return Err(Error::Msg(format!("[hub] {model}: there is no home folder for the cache; set HF_HOME")));
        };
        let hub = if settings.offline.is_some() { None } else { Some(Hub::open(model, &settings, &cache_dir)?) };
        let folder = cache_dir.join(format!("models--{}", model.id.replace('/', "--")));
        Ok(Self { model, settings, folder, hub, revision: model.revision.clone(), is_pinned: false })
    }

    /// Finds the file that every model has, and fixes all further look-ups to the commit that it came from: a branch
    /// may move between two files, and what is in the cache for a commit is never requested again. Returns the commit
    /// too.
    pub(super) fn pin(&mut self, file: &str) -> Result<(PathBuf, String)> {
        let path = self.require(file)?;
        let Some(commit) = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned())
        else {
            return Err(self.error(file, &format!("hf-hub returned {path:?}, which is in no snapshot")));
        };
        if is_commit(&commit) {
            self.revision.clone_from(&commit);
        }
        self.is_pinned = true;
        Ok((path, commit))
    }

    /// Finds a file that has to be there, as [`Session::find`] does.
    pub(super) fn require(&self, file: &str) -> Result<PathBuf> {
        self.find(file)?.ok_or_else(|| self.missing(file))
    }

    /// Returns the path of a file in the cache, and downloads it if necessary; `None` where the repository does not
    /// have it or, offline, where the cache does not.
    pub(super) fn find(&self, file: &str) -> Result<Option<PathBuf>> {
        match (&self.hub, self.cached(file)) {
            (None, Cached::Found(path)) => Ok(Some(path)),
            (None, _) => Ok(None),
            (Some(_), Cached::Found(path)) if is_commit(&self.revision) => Ok(Some(path)),
            (Some(_), Cached::Absent) if is_commit(&self.revision) => Ok(None),
            (Some(hub), cached) => self.download(hub, file, cached),
        }
    }

    /// Looks for `file` at a branch or a tag, in the commit that it was last known to be at, or at a full commit.
    pub(super) fn cached(&self, file: &str) -> Cached {
        let known = || std::fs::read_to_string(self.folder.join("refs").join(&self.revision)).unwrap_or_default();
        let commit = if is_commit(&self.revision) { self.revision.clone() } else { known().trim().to_string() };
        if commit.is_empty() {
            return Cached::Unknown;
        }
        let at = |kind: &str| self.folder.join(kind).join(&commit).join(file);
        let path = at("snapshots");
        if path.exists() {
            return Cached::Found(path);
        }
        if at(".no_exist").exists() { Cached::Absent } else { Cached::Unknown }
    }

    fn download(&self, hub: &Hub, file: &str, cached: Cached) -> Result<Option<PathBuf>> {
        let repo = hub.repo.clone();
        let revision = self.revision.clone();
        let name = file.to_string();
        let answer = watched(file, &self.settings, move |events| {
            repo.download_file().filename(name).revision(revision).progress(events).send()
        });
        match (answer, cached) {
            (Ok((path, None)), _) => Ok(Some(path)),
            (Ok((path, Some(announced))), _) => self.check_size(hub, file, &path, announced).map(|()| Some(path)),
            (Err(RequestFailure::Hub(HFError::EntryNotFound { .. })), _) => Ok(None),
            // As hf-hub does where there is no connection.
            (Err(RequestFailure::NoAnswer(_)), Cached::Found(path)) => Ok(Some(path)),
            (Err(failure), _) => Err(self.error(file, &self.explain(hub, &failure))),
        }
    }

    /// Removes a file from the cache that has another size than the server announced. hf-hub 1.0 does not check the
    /// status of the response, so that the page of an error can be stored under the name of the file, where every later
    /// fetch would find it.
    fn check_size(&self, hub: &Hub, file: &str, path: &Path, announced: u64) -> Result<()> {
        let io = |e: std::io::Error| self.error(file, &self.explain(hub, &RequestFailure::Hub(HFError::Io(e))));
        let found = std::fs::metadata(path).map_err(io)?.len();
        if found == announced {
            return Ok(());
        }
        let blob = std::fs::canonicalize(path).map_err(io)?;
        std::fs::remove_file(path).map_err(io)?;
        if blob.exists() {
            std::fs::remove_file(&blob).map_err(io)?;
        }
        let endpoint = &hub.endpoint;
        let what = format!("{endpoint} announced {announced} bytes and sent {found}, which were not kept; try again");
        Err(self.error(file, &what))
    }
}

/// Returns whether a revision is a full commit, whose files never change.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

//! One fetch at work: a model at a revision, its part of the cache, and hf-hub's handle on it.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{Error, Result};
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync, RepoTypeModel, split_id};

use super::HubModel;
use super::cache::{Cache, Cached, is_commit};
use super::message;
use super::settings::Settings;
use super::watch::{Silence, Watch};

/// Three more tries after a failure that may pass (no connection, 429, 5xx), with at most 0.4 + 0.8 + 1.6 s between them:
/// a machine without a network hears about it in seconds, a hub that hiccups is given time.
const RETRIES: usize = 3;
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// A model at a revision, opened for look-ups.
pub(super) struct Session<'a> {
    pub(super) model: &'a HubModel,
    pub(super) cache: Cache,
    pub(super) source: Source,
    settings: Settings,
    /// The revision to look at: the one asked for, and the commit it stands for once that is known.
    revision: String,
    /// Whether the first file was found, and with it that the model and the revision exist.
    pub(super) pinned: bool,
}

/// Where a file comes from that is not in the cache.
pub(super) enum Source {
    /// From nowhere; the half sentence says what asks for that.
    Offline(&'static str),
    Hub(Hub),
}

/// The model on a server.
pub(super) struct Hub {
    repo: HFRepositorySync<RepoTypeModel>,
    pub(super) endpoint: String,
}

impl<'a> Session<'a> {
    /// Reads the environment and, online, sets hf-hub up; asks nothing of the network.
    pub(super) fn open(model: &'a HubModel) -> Result<Self> {
        let mut settings = Settings::from_env()?;
        settings.progress &= model.progress && std::io::stderr().is_terminal();
        let cache_dir = match (&model.cache_dir, Settings::cache_dir()) {
            (Some(cache_dir), _) => cache_dir.clone(),
            (None, Some(cache_dir)) => cache_dir,
            (None, None) => {
                return Err(Error::Msg(format!("[hub] {model}: there is no home folder for the cache; set HF_HOME")));
            }
        };
        let source = match settings.offline {
            Some(why) => Source::Offline(why),
            None if model.offline => Source::Offline("offline mode was asked for"),
            None => Source::Hub(Hub::open(model, &cache_dir)?),
        };
        let cache = Cache::new(&cache_dir, &model.id);
        Ok(Self { model, cache, source, settings, revision: model.revision.clone(), pinned: false })
    }

    /// Finds the file that every model has, and fixes all further look-ups to the commit that it came from: a branch may
    /// move between two files, and what is in the cache for a commit is never asked for again. Returns the commit too.
    pub(super) fn pin(&mut self, file: &str) -> Result<(PathBuf, String)> {
        let path = self.require(file)?;
        let commit = path
            .parent()
            .and_then(Path::file_name)
            .map(|name| name.to_string_lossy().into_owned())
            .ok_or_else(|| self.error(file, &format!("hf-hub gave {path:?}, which is in no snapshot")))?;
        if is_commit(&commit) {
            self.revision.clone_from(&commit);
        }
        self.pinned = true;
        Ok((path, commit))
    }

    /// As [`Session::find`], for a file that has to be there.
    pub(super) fn require(&self, file: &str) -> Result<PathBuf> {
        self.find(file)?.ok_or_else(|| self.missing(file))
    }

    /// The path of a file in the cache, downloaded where needed; `None` where the repository does not have it or, offline,
    /// where the cache does not.
    pub(super) fn find(&self, file: &str) -> Result<Option<PathBuf>> {
        match &self.source {
            Source::Offline(_) => match self.cached(file) {
                Cached::Found(path) => Ok(Some(path)),
                Cached::Absent | Cached::Unknown => Ok(None),
            },
            Source::Hub(hub) if is_commit(&self.revision) => match self.cached(file) {
                Cached::Found(path) => Ok(Some(path)),
                Cached::Absent => Ok(None),
                Cached::Unknown => self.download(hub, file),
            },
            Source::Hub(hub) => self.download(hub, file),
        }
    }

    /// What the cache knows about a file at the session's revision.
    pub(super) fn cached(&self, file: &str) -> Cached {
        self.cache.find(&self.revision, file)
    }

    fn download(&self, hub: &Hub, file: &str) -> Result<Option<PathBuf>> {
        let watch = Watch::new(file, self.settings, self.settings.progress);
        let (repo, revision, name) = (hub.repo.clone(), self.revision.clone(), file.to_string());
        let progress = watch.clone();
        let work = move || repo.download_file().filename(name).revision(revision).progress(progress).send();
        match watch.over(work) {
            Ok(Ok(path)) => {
                if let Some(size) = watch.announced() {
                    self.check_size(hub, file, &path, size)?;
                }
                Ok(Some(path))
            }
            Ok(Err(HFError::EntryNotFound { .. })) => Ok(None),
            Ok(Err(e)) => Err(self.explain(hub, file, &e)),
            // What hf-hub does when there is no connection, it would do here: the cache is better than nothing.
            Err(silence @ Silence::NoAnswer(_)) => match self.cached(file) {
                Cached::Found(path) => Ok(Some(path)),
                Cached::Absent | Cached::Unknown => Err(self.explain_silence(hub, file, &silence)),
            },
            Err(silence) => Err(self.explain_silence(hub, file, &silence)),
        }
    }

    /// hf-hub 1.0 does not look at the status of the answer that carries the file, so the page of an error can end up in
    /// the cache under the file's name. Such a file is taken out again, or every later fetch would find it there.
    fn check_size(&self, hub: &Hub, file: &str, path: &Path, announced: u64) -> Result<()> {
        let io = |e: std::io::Error| self.explain(hub, file, &HFError::Io(e));
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

    /// Whether the hub knows the model, as far as it says.
    pub(super) fn exists(&self, hub: &Hub) -> Option<bool> {
        let watch = Watch::new("", self.settings, false);
        let repo = hub.repo.clone();
        watch.over(move || repo.exists().send()).ok()?.ok()
    }
}

impl Hub {
    fn open(model: &HubModel, cache_dir: &Path) -> Result<Self> {
        let failed = |what: &str| Error::Msg(format!("[hub] {model}: {what}"));
        let setup = |e: HFError| failed(&format!("hf-hub could not be set up: {}", message::line(&e)));

        let mut builder =
            HFClient::builder().retry_max_attempts(RETRIES).retry_base_delay(RETRY_DELAY).cache_dir(cache_dir);
        if let Some(endpoint) = &model.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(token) = &model.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(|e| match e {
            HFError::Url(e) => failed(&format!("the endpoint is no URL ({e}); correct HF_ENDPOINT")),
            e => setup(e),
        })?;
        let endpoint = client.endpoint().to_string();
        if !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            let what =
                format!("the endpoint {endpoint:?} begins with neither https:// nor http://; correct HF_ENDPOINT");
            return Err(failed(&what));
        }
        let (owner, name) = split_id(&model.id);
        let repo = HFClientSync::from_inner(client).map_err(setup)?.model(owner, name);
        Ok(Self { repo, endpoint })
    }
}

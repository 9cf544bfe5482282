//! One fetch: the model's folder in the cache, hf-hub's client, and the texts of errors.
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
use std::time::Duration;

use candle_core::{Error, Result};
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync, RepoTypeModel, split_id};

use super::HubModel;
use super::request::{Failure, watched};
use super::settings::Settings;

/// The number of retries after a failure that may be temporary (no connection, 429, 5xx), with at most 0.4 + 0.8 + 1.6
/// s between them: without a network the error comes within seconds, and a busy hub has time to recover.
const RETRIES: usize = 3;
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// A model at a revision, opened for look-ups.
pub(super) struct Session<'a> {
    model: &'a HubModel,
    settings: Settings,
    /// The model's folder in the cache.
    folder: PathBuf,
    /// The server; `None` offline.
    hub: Option<Hub>,
    /// The revision of the model, or its commit once that is known.
    revision: String,
    /// Whether the first file was found, and with it that the model and the revision exist.
    is_pinned: bool,
}

/// The model on a server.
struct Hub {
    repo: HFRepositorySync<RepoTypeModel>,
    endpoint: String,
}

/// The state of a file at a revision in the cache.
#[derive(Debug, PartialEq)]
enum Cached {
    Found(PathBuf),
    /// The revision does not have the file.
    Absent,
    Unknown,
}

impl<'a> Session<'a> {
    /// Reads the environment and, online, creates a client of hf-hub. It makes no request.
    pub(super) fn open(model: &'a HubModel) -> Result<Self> {
        let requested = model.settings.clone();
        let mut settings = Settings::read(|name| std::env::var(name).ok(), std::env::home_dir())?;
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
    fn cached(&self, file: &str) -> Cached {
        let known = || std::fs::read_to_string(self.folder.join("refs").join(&self.revision)).unwrap_or_default();
        let commit = if is_commit(&self.revision) { self.revision.clone() } else { known().trim().to_string() };
        let at = |kind: &str| self.folder.join(kind).join(&commit).join(file);
        match (at("snapshots"), at(".no_exist")) {
            _ if commit.is_empty() => Cached::Unknown,
            (path, _) if path.exists() => Cached::Found(path),
            (_, mark) if mark.exists() => Cached::Absent,
            _ => Cached::Unknown,
        }
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
            (Err(Failure::Hub(HFError::EntryNotFound { .. })), _) => Ok(None),
            // As hf-hub does where there is no connection.
            (Err(Failure::NoAnswer(_)), Cached::Found(path)) => Ok(Some(path)),
            (Err(failure), _) => Err(self.error(file, &self.explain(hub, &failure))),
        }
    }

    /// Removes a file from the cache that has another size than the server announced. hf-hub 1.0 does not check the
    /// status of the response, so that the page of an error can be stored under the name of the file, where every later
    /// fetch would find it.
    fn check_size(&self, hub: &Hub, file: &str, path: &Path, announced: u64) -> Result<()> {
        let io = |e: std::io::Error| self.error(file, &self.explain(hub, &Failure::Hub(HFError::Io(e))));
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

    /// Returns an error about `file` in one line, since text from a server is shown in a terminal.
    pub(super) fn error(&self, file: &str, what: &str) -> Error {
        message(&format!("{file} of {}: {what}", self.model))
    }

    /// Returns the error for a file, or for several alternatives, that is neither in the cache nor, online, on the hub.
    pub(super) fn missing(&self, file: &str) -> Error {
        let id = &self.model.id;
        let revision = &self.model.revision;
        let Some(Hub { endpoint, repo }) = &self.hub else {
            let folder = self.folder.display();
            let why = self.settings.offline.unwrap_or_default();
            let what =
                format!("not in the cache {folder}, and {why}, so nothing was requested; fetch it once while online");
            return self.error(file, &what);
        };
        let what = if self.is_pinned || self.cached(file) == Cached::Absent {
            format!("{endpoint}/{id} has no such file at {revision}")
        } else {
            let repo = repo.clone();
            match watched("", &self.settings, move |_| repo.exists().send()) {
                Ok((true, _)) => format!("{endpoint}/{id} has no revision {revision}, or not this file in it"),
                Ok((false, _)) => format!("{endpoint} has no model {id}; check the id"),
                _ => format!(
                    "{endpoint} has no model {id} that may be read, or no revision {revision}; check both, and for a \
                     private model set HF_TOKEN"
                ),
            }
        };
        self.error(file, &format!("not found: {what}"))
    }

    /// Describes why a request failed.
    fn explain(&self, Hub { endpoint, .. }: &Hub, failure: &Failure) -> String {
        let in_brackets = |text: Option<&str>| text.map(|text| format!(" ({text})")).unwrap_or_default();
        let id = &self.model.id;
        let folder = self.folder.display();
        let unreachable = |what: String| {
            format!("{what}, and it is not in the cache {folder}; check the network, the proxy and HF_ENDPOINT")
        };
        let error = match failure {
            Failure::NoAnswer(waited) => return unreachable(format!("no answer from {endpoint} in {waited:?}")),
            Failure::Stalled { bytes, waited } => {
                return format!(
                    "the download from {endpoint} stalled for {waited:?} after {bytes} bytes; try again \
                     (HF_HUB_DOWNLOAD_TIMEOUT sets the limit in seconds)"
                );
            }
            Failure::Broken(why) => return why.clone(),
            Failure::Hub(error) => error,
        };
        match error {
            HFError::AuthRequired { context } | HFError::Forbidden { context } => {
                let status = context.status.as_u16();
                match context.error_code.as_deref() {
                    Some("GatedRepo") => format!(
                        "the model is gated ({status}); accept its terms at {endpoint}/{id}, then set HF_TOKEN to a \
                         token of that account"
                    ),
                    Some("RepoNotFound") | None if status == 401 => format!(
                        "{endpoint} answered 401: there is no such model, or it is private, or HF_TOKEN is not valid; \
                         check the id, and set HF_TOKEN to a token that may read it"
                    ),
                    code => format!(
                        "{endpoint} answered {status}{}: HF_TOKEN is missing or may not read it; set it to a token \
                         that may",
                        in_brackets(code)
                    ),
                }
            }
            HFError::RateLimited { retry_after, .. } => format!(
                "{endpoint} answers too many requests (429); try again {}, or set HF_TOKEN for a higher limit",
                retry_after.map_or("later".to_string(), |delay| format!("in {} s", delay.as_secs()))
            ),
            HFError::Http { context } => {
                let server = in_brackets(context.server_message.as_deref());
                format!("{endpoint} answered {}{server}; try again later", context.status)
            }
            HFError::Request { source, .. } if source.is_connect() || source.is_timeout() => {
                unreachable(format!("no connection to {endpoint} ({})", root(source)))
            }
            HFError::Request { source, .. } => {
                format!("the connection to {endpoint} broke off ({}); try again", root(source))
            }
            HFError::Io(e) => format!("the cache {folder} could not be read or written: {e}"),
            e => with_root(e),
        }
    }
}

impl Hub {
    fn open(model: &HubModel, settings: &Settings, cache_dir: &Path) -> Result<Self> {
        let failed = |what: &str| message(&format!("{model}: {what}"));
        let setup = |e: HFError| match e {
            HFError::Url(e) => failed(&format!("the endpoint is no URL ({e}); correct HF_ENDPOINT")),
            e => failed(&format!("hf-hub could not be set up: {}", with_root(&e))),
        };
        let server = settings.endpoint.as_deref().unwrap_or("https://huggingface.co");
        let mut builder = HFClient::builder()
            .retry_max_attempts(RETRIES)
            .retry_base_delay(RETRY_DELAY)
            .cache_dir(cache_dir)
            .endpoint(server);
        if let Some(token) = &settings.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(setup)?;
        let endpoint = client.endpoint().to_string();
        if !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            return Err(failed("the endpoint begins with neither https:// nor http://; correct HF_ENDPOINT"));
        }
        let (owner, name) = split_id(&model.id);
        let repo = HFClientSync::from_inner(client).map_err(setup)?.model(owner, name);
        Ok(Self { repo, endpoint })
    }
}

/// Returns whether a revision is a full commit, whose files never change.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Returns an error in one line, without control characters and without the credentials of an address.
fn message(text: &str) -> Error {
    Error::Msg(format!("[hub] {}", without_credentials(&text.replace(|c: char| c.is_control(), " "))))
}

/// Removes the credentials before the `@` of addresses: `https://name:secret@host` becomes `https://host`.
pub(super) fn without_credentials(text: &str) -> String {
    let mut parts = text.split("://");
    let mut shown = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let end = part.find(|c: char| c.is_whitespace() || c == '"').unwrap_or(part.len());
        let host = part[..end].rfind('@').map_or(0, |at| at + 1);
        shown = format!("{shown}://{}", &part[host..]);
    }
    shown
}

/// Returns the text of an error with its innermost cause, since reqwest's own text is only that a request failed.
fn with_root(error: &(dyn std::error::Error + 'static)) -> String {
    let outer = error.to_string();
    let inner = root(error);
    if outer.contains(&inner) { outer } else { format!("{outer} ({inner})") }
}

fn root(error: &(dyn std::error::Error + 'static)) -> String {
    error.source().map_or_else(|| error.to_string(), root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_errors_show_no_credentials() {
        for (text, shown) in [
            ("at https://user:secret@host:8080/a, and http://b", "at https://host:8080/a, and http://b"),
            ("\"http://t(o),k'en@host\" e@mail", "\"http://host\" e@mail"),
            ("https://a:b/c@d@host?x", "https://host?x"),
            ("no address", "no address"),
        ] {
            assert_eq!(without_credentials(text), shown);
        }
    }
}

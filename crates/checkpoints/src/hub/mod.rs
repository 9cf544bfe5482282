//! Checkpoints from the [Hugging Face hub](https://huggingface.co): fetches the files of a model into the usual cache.
//! It needs the feature `hub`.
//!
//! ```no_run
//! use candle_attention::hub::HubModel;
//!
//! # fn main() -> candle_core::Result<()> {
//! let checkpoint = HubModel::new("google-bert/bert-base-uncased")?.fetch()?;
//! let config = std::fs::read_to_string(&checkpoint.config)?;
//! println!("{} bytes of config, weights in {:?}", config.len(), checkpoint.weights);
//! # Ok(())
//! # }
//! ```
//!
//! A large model is split into shards. For one layer, only its shards need to be fetched:
//!
//! ```no_run
//! # use candle_attention::hub::HubModel;
//! # fn main() -> candle_core::Result<()> {
//! let checkpoint = HubModel::new("Qwen/Qwen2.5-7B@main")?
//!     .with_tensors("model.layers.0.self_attn")
//!     .fetch()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Environment
//!
//! | variable | meaning |
//! | --- | --- |
//! | `HF_HUB_CACHE` | the folder of the cache; else the folder `hub` in `HF_HOME` |
//! | `HF_HOME` | the folder of all libraries of Hugging Face; by default `~/.cache/huggingface` |
//! | `HF_ENDPOINT` | another server than `https://huggingface.co`; credentials in it are never printed |
//! | `HF_TOKEN`, `HF_TOKEN_PATH` | the token for private and gated models; else the file `token` in `HF_HOME` |
//! | `HF_HUB_DISABLE_IMPLICIT_TOKEN` | no token except that of [`HubModel::with_token`] |
//! | `HF_HUB_OFFLINE` | 1, ON, YES or TRUE in any case: the cache only, no request at all |
//! | `TRANSFORMERS_OFFLINE` | the same as `HF_HUB_OFFLINE`, if that is unset |
//! | `HF_HUB_ETAG_TIMEOUT` | seconds to wait for the first answer about a file, all tries together; 30 by default |
//! | `HF_HUB_DOWNLOAD_TIMEOUT` | seconds that a download may stall; 60 by default, five times that from xet storage |
//! | `HF_HUB_DISABLE_PROGRESS_BARS` | no progress bars, which are drawn on stderr if that is a terminal |
//! | `HF_HUB_DISABLE_TELEMETRY` | no report of a transfer's speed to xet storage (read by hf-xet) |
//!
//! # Online and offline
//!
//! The first file determines the commit, and the others are fetched from that commit, so that a branch that moves
//! meanwhile does not mix two versions. Files of a commit that are in the cache are not requested again: a second fetch
//! makes one request, and a fetch of a full commit makes none. Without an answer from the hub, the commit that the
//! cache has for the revision is used, as in Python's huggingface_hub.

mod errors;
mod request;
mod server;
mod session;
mod settings;
mod text;

use std::fmt;
use std::path::PathBuf;

use candle_core::{Error, Result};

use crate::files::ShardIndex;
use session::Session;
use settings::HubSettings;
use text::without_credentials;

/// The names of weights, the preferred one first, and for an index the extension of its shards.
const WEIGHTS: [(&str, Option<&str>); 4] = [
    ("model.safetensors", None),
    ("model.safetensors.index.json", Some(".safetensors")),
    ("pytorch_model.bin", None),
    ("pytorch_model.bin.index.json", Some(".bin")),
];
/// The length of the longest id that the hub allows, in characters, both parts together.
const MAX_ID_LEN: usize = 96;

/// A model on the hub at a revision.
///
/// All methods set options; [`HubModel::fetch`] makes the requests.
#[derive(Clone)]
pub struct HubModel {
    id: String,
    revision: String,
    tensors: Option<String>,
    files: Vec<String>,
    settings: HubSettings,
}

/// The files of a model, all in the cache and of one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubFiles {
    /// The commit of the files, which is the name of their folder in the cache.
    pub commit: String,
    /// `config.json`.
    pub config: PathBuf,
    /// `tokenizer.json`; `None` where the model has none or, offline, where the cache has none.
    pub tokenizer: Option<PathBuf>,
    /// The files of [`HubModel::with_file`] that the model has or, offline, the cache, in the order in which they were
    /// named.
    pub files: Vec<PathBuf>,
    /// The weights, never empty: one file, or the shards in the order of their names. Either all are `.safetensors` or
    /// all are PyTorch's `.bin`.
    pub weights: Vec<PathBuf>,
}

impl HubModel {
    /// Names a model by its id, `organisation/name` or `name`, optionally with a revision:
    /// `organisation/name@revision`. Without one, it is the branch `main`. It makes no request.
    ///
    /// # Errors
    ///
    /// The id or the revision breaks the hub's rules: empty, a character that is not allowed, more than one slash,
    /// `..`, and so on.
    pub fn new(id: &str) -> Result<Self> {
        let (id, revision) = id.split_once('@').unwrap_or((id, "main"));
        check("model id", id, id_fault(id), "`name` or `organisation/name`, as in `google-bert/bert-base-uncased`")?;
        Self {
            id: id.to_string(),
            revision: String::new(),
            tensors: None,
            files: Vec::new(),
            settings: HubSettings::default(),
        }
        .with_revision(revision)
    }

    /// Sets the branch, tag or commit; `main` by default. Only a full commit of 40 digits needs no request once it is
    /// in the cache.
    ///
    /// # Errors
    ///
    /// The name breaks git's rules for the names of branches and tags.
    pub fn with_revision(mut self, revision: &str) -> Result<Self> {
        check("revision", revision, revision_fault(revision), "a branch, a tag or a commit, as in `main`")?;
        self.revision = revision.to_string();
        Ok(self)
    }

    /// Sets the tensors that are needed. Of a sharded checkpoint, only the shards with tensors of that name or below it
    /// are fetched: `model.layers.0.self_attn` means `model.layers.0.self_attn.q_proj.weight`, not
    /// `model.layers.0.self_attn_norm.weight`. Weights in one file are fetched whole.
    #[must_use]
    pub fn with_tensors(mut self, prefix: &str) -> Self {
        self.tensors = Some(prefix.to_string());
        self
    }

    /// Adds a file that is fetched too if the model has it, such as `generation_config.json` or
    /// `1_Pooling/config.json`. In the cache it is in the folder of `config.json`, under its own path.
    ///
    /// # Errors
    ///
    /// The path is empty or leads out of the model.
    pub fn with_file(mut self, path: &str) -> Result<Self> {
        check("file", path, file_fault(path), "a path within the model, as in `1_Pooling/config.json`")?;
        self.files.push(path.to_string());
        Ok(self)
    }

    /// Sets the folder of the cache (the one with the `models--` folders). By default the environment names it.
    #[must_use]
    pub fn with_cache_dir(mut self, cache_dir: impl Into<PathBuf>) -> Self {
        self.settings.cache_dir = Some(cache_dir.into());
        self
    }

    /// Sets the server. By default it is `HF_ENDPOINT` or `https://huggingface.co`.
    #[must_use]
    pub fn with_endpoint(mut self, endpoint: &str) -> Self {
        self.settings.endpoint = Some(endpoint.to_string());
        self
    }

    /// Sets the token. By default it is `HF_TOKEN` or the token stored by `hf auth login`.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.settings.token = Some(token.to_string());
        self
    }

    /// Uses the cache only and makes no request, as `HF_HUB_OFFLINE` does. Nothing overrides that variable.
    #[must_use]
    pub fn offline(mut self) -> Self {
        self.settings.offline = Some("offline mode is on");
        self
    }

    /// Draws no progress bar, as `HF_HUB_DISABLE_PROGRESS_BARS` does.
    #[must_use]
    pub fn without_progress(mut self) -> Self {
        self.settings.hides_progress = true;
        self
    }

    /// Finds the model's files in the cache, and downloads the missing ones.
    ///
    /// # Errors
    ///
    /// One line that begins with `[hub]` and names the file and the model: no such model, revision or file; a gated or
    /// private model and no token for it; no answer from the hub; offline and not in the cache; a cache that cannot be
    /// written; an index whose shards are not in the model's own folder, or none of whose tensors has the requested
    /// name.
    pub fn fetch(&self) -> Result<HubFiles> {
        let mut session = Session::open(self)?;
        let (config, commit) = session.pin("config.json")?;
        let tokenizer = session.find("tokenizer.json")?;
        let files = self.files.iter().filter_map(|file| session.find(file).transpose()).collect::<Result<_>>()?;
        let weights = self.weights(&session)?;
        Ok(HubFiles { commit, config, tokenizer, files, weights })
    }

    fn weights(&self, session: &Session<'_>) -> Result<Vec<PathBuf>> {
        for (name, extension) in WEIGHTS {
            let Some(path) = session.find(name)? else { continue };
            let Some(extension) = extension else { return Ok(vec![path]) };
            let faulty = |fault: String| session.error(name, &fault);
            let index = ShardIndex::read(&path, extension).map_err(faulty)?;
            let shards = index.shards(self.tensors.as_deref()).map_err(faulty)?;
            return shards.into_iter().map(|shard| session.require(shard)).collect();
        }
        Err(session.missing(&WEIGHTS.map(|(name, _)| name).join(", ")))
    }
}

/// Returns an error for a name with a fault. Model ids, revisions and file names become parts of a URL and of a path in
/// the cache, so that they are checked before any request.
fn check(what: &str, value: &str, fault: Option<String>, expected: &str) -> Result<()> {
    match fault {
        None => Ok(()),
        Some(fault) => Err(Error::Msg(format!("[hub] the {what} {value:?} {fault}; expected {expected}"))),
    }
}

/// Returns the first fault of a model id by the hub's own rules (`validate_repo_id` of huggingface_hub).
fn id_fault(id: &str) -> Option<String> {
    let slashes = id.matches('/').count();
    let any_part = |is_bad: fn(&str) -> bool| id.split('/').any(is_bad);
    if id.is_empty() {
        return Some("is empty".into());
    }
    if slashes > 1 {
        return Some(format!("has {slashes} slashes, where one is the most"));
    }
    if any_part(str::is_empty) {
        return Some("has nothing on one side of its slash".into());
    }
    if let Some(bad) = id.chars().find(|&c| !(c.is_ascii_alphanumeric() || "-_./".contains(c))) {
        return Some(format!("has {bad:?}, where only letters, digits, `-`, `_` and `.` are allowed"));
    }
    if any_part(|part| part.starts_with(['-', '.']) || part.ends_with(['-', '.'])) {
        return Some("has a part that begins or ends with `-` or `.`".into());
    }
    for bad in ["--", ".."] {
        if id.contains(bad) {
            return Some(format!("has `{bad}`"));
        }
    }
    if id.ends_with(".git") {
        return Some("ends with `.git`".into());
    }
    if id.len() > MAX_ID_LEN {
        return Some(format!("has {} characters, where {MAX_ID_LEN} is the most", id.len()));
    }
    None
}

/// Returns the first fault of a branch, tag or commit by git's rules for the names of refs (`git help
/// check-ref-format`).
fn revision_fault(revision: &str) -> Option<String> {
    if revision.is_empty() {
        return Some("is empty".into());
    }
    if let Some(bad) = revision.chars().find(|&c| c.is_whitespace() || c.is_control() || "\\~^:?*[".contains(c)) {
        return Some(format!("has {bad:?}"));
    }
    if revision.contains("..") {
        return Some("has `..`".into());
    }
    if revision.split('/').any(|part| part.is_empty() || part.starts_with('.')) {
        return Some("has a part between slashes that is empty or begins with `.`".into());
    }
    None
}

/// Returns the first fault of the name of a file in a model, which may be in a folder there.
fn file_fault(name: &str) -> Option<String> {
    if let Some(bad) = name.chars().find(|&c| c.is_control() || "\\:".contains(c)) {
        return Some(format!("has {bad:?}"));
    }
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Some("has a part between slashes that is empty, `.` or `..`".into());
    }
    None
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.revision)
    }
}

/// Shows no secrets: neither the token nor credentials of the endpoint.
impl fmt::Debug for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubModel")
            .field("id", &self.id)
            .field("revision", &self.revision)
            .field("endpoint", &self.settings.endpoint.as_deref().map(without_credentials))
            .field("has_token", &self.settings.token.is_some())
            .field("offline", &self.settings.offline.is_some())
            .finish_non_exhaustive()
    }
}

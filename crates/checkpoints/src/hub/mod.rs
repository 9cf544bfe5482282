//! Checkpoints from the [Hugging Face hub](https://huggingface.co): what is needed to run one attention layer of a
//! model, fetched into the usual cache. The feature `hub` has it.
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
//! A large model is split into shards; where only one layer is wanted, only its shards need to be fetched:
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
//! | `HF_HUB_CACHE` | where the cache is; else the folder `hub` in `HF_HOME` |
//! | `HF_HOME` | where all libraries of Hugging Face keep things; by default `~/.cache/huggingface` |
//! | `HF_ENDPOINT` | another server than `https://huggingface.co`; credentials in it are never printed |
//! | `HF_TOKEN`, `HF_TOKEN_PATH` | the token for private and gated models; else the file `token` in `HF_HOME` |
//! | `HF_HUB_DISABLE_IMPLICIT_TOKEN` | no token but that of [`HubModel::with_token`] |
//! | `HF_HUB_OFFLINE` | 1, ON, YES or TRUE in any case: the cache only, no request at all |
//! | `TRANSFORMERS_OFFLINE` | the same, where `HF_HUB_OFFLINE` is unset |
//! | `HF_HUB_ETAG_TIMEOUT` | seconds to wait for the first answer about a file, all tries together; 30 by default |
//! | `HF_HUB_DOWNLOAD_TIMEOUT` | seconds that a download may stand still; 60 by default, five times that from xet storage |
//! | `HF_HUB_DISABLE_PROGRESS_BARS` | no progress bars, which are drawn on stderr where that is a terminal |
//! | `HF_HUB_DISABLE_TELEMETRY` | no report of a transfer's speed to xet storage (read by hf-xet) |
//!
//! # Online, and not
//!
//! The commit is settled with the first file, and the others are fetched from that commit: a branch that moves
//! meanwhile does not mix two versions. What the cache holds for a commit is not asked for again, so a second fetch
//! makes one request, and one for a full commit makes none. Without an answer from the hub, the cache's own idea of the
//! revision is used, as Python's huggingface_hub does.

mod request;
mod session;

use std::fmt;
use std::path::PathBuf;

use candle_core::{Error, Result};

use crate::files::ShardIndex;
use session::{Session, Settings, without_credentials};

/// The names that weights go by, best first; of an index, the extension of the shards that it names.
const WEIGHTS: [(&str, Option<&str>); 4] = [
    ("model.safetensors", None),
    ("model.safetensors.index.json", Some(".safetensors")),
    ("pytorch_model.bin", None),
    ("pytorch_model.bin.index.json", Some(".bin")),
];
/// The longest id that the hub gives out, in characters, both parts together.
const MAX_ID_LEN: usize = 96;

/// A model on the hub at a revision.
///
/// All methods only set what is to be done; [`HubModel::fetch`] does it.
#[derive(Clone)]
pub struct HubModel {
    id: String,
    revision: String,
    tensors: Option<String>,
    files: Vec<String>,
    settings: Settings,
}

/// The files of a model, all in the cache and of one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubFiles {
    /// The commit that the files are of; the name of their folder in the cache.
    pub commit: String,
    /// `config.json`.
    pub config: PathBuf,
    /// `tokenizer.json`; `None` where the model has none or, offline, where the cache has none.
    pub tokenizer: Option<PathBuf>,
    /// Those of [`HubModel::with_file`] that the model has or, offline, the cache, in the order in which they were
    /// named.
    pub files: Vec<PathBuf>,
    /// The weights, never empty: one file, or the shards in the order of their names. Either all are `.safetensors` or
    /// all are PyTorch's `.bin`.
    pub weights: Vec<PathBuf>,
}

impl HubModel {
    /// The model of that id, `organisation/name` or `name`, optionally with a revision: `organisation/name@revision`.
    /// Without one, the branch `main` is meant. Nothing is requested yet.
    ///
    /// # Errors
    ///
    /// The id or the revision breaks the hub's rules: empty, a character that may not stand there, more than one slash,
    /// `..`, and so on.
    pub fn new(id: &str) -> Result<Self> {
        let (id, revision) = id.split_once('@').unwrap_or((id, "main"));
        check("model id", id, id_faults(id), "`name` or `organisation/name`, as in `google-bert/bert-base-uncased`")?;
        Self {
            id: id.to_string(),
            revision: String::new(),
            tensors: None,
            files: Vec::new(),
            settings: Settings::default(),
        }
        .with_revision(revision)
    }

    /// Takes a branch, a tag or a commit instead of `main`. Only a full commit of 40 digits needs no request once
    /// cached.
    ///
    /// # Errors
    ///
    /// The name breaks git's rules for the names of branches and tags.
    pub fn with_revision(mut self, revision: &str) -> Result<Self> {
        check("revision", revision, revision_faults(revision), "a branch, a tag or a commit, as in `main`")?;
        self.revision = revision.to_string();
        Ok(self)
    }

    /// Fetches, of a sharded checkpoint, only the shards with tensors of that name or below it:
    /// `model.layers.0.self_attn` means `model.layers.0.self_attn.q_proj.weight`, not
    /// `model.layers.0.self_attn_norm.weight`. Weights in one file are fetched whole all the same.
    #[must_use]
    pub fn with_tensors(mut self, prefix: &str) -> Self {
        self.tensors = Some(prefix.to_string());
        self
    }

    /// Fetches a further file too where the model has it, as `generation_config.json` or `1_Pooling/config.json`: in
    /// the cache it is in the folder of `config.json`, under its own path.
    ///
    /// # Errors
    ///
    /// The path is empty or leads out of the model.
    pub fn with_file(mut self, path: &str) -> Result<Self> {
        check("file", path, file_faults(path), "a path within the model, as in `1_Pooling/config.json`")?;
        self.files.push(path.to_string());
        Ok(self)
    }

    /// Uses that cache folder (the one with the `models--` folders) rather than the one that the environment names.
    #[must_use]
    pub fn with_cache_dir(mut self, cache_dir: impl Into<PathBuf>) -> Self {
        self.settings.cache_dir = Some(cache_dir.into());
        self
    }

    /// Asks that server rather than `HF_ENDPOINT` or `https://huggingface.co`.
    #[must_use]
    pub fn with_endpoint(mut self, endpoint: &str) -> Self {
        self.settings.endpoint = Some(endpoint.to_string());
        self
    }

    /// Uses that token rather than `HF_TOKEN` or the one stored by `hf auth login`.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.settings.token = Some(token.to_string());
        self
    }

    /// Takes only what is in the cache and makes no request, as `HF_HUB_OFFLINE` does. Nothing overrides that variable.
    #[must_use]
    pub fn offline(mut self) -> Self {
        self.settings.offline = Some("offline mode was asked for");
        self
    }

    /// Draws no progress bar, as `HF_HUB_DISABLE_PROGRESS_BARS` does.
    #[must_use]
    pub fn without_progress(mut self) -> Self {
        self.settings.hides_progress = true;
        self
    }

    /// Finds the model's files in the cache, and downloads into it what is missing there.
    ///
    /// # Errors
    ///
    /// One line that begins with `[hub]` and names the file and the model: no such model, revision or file; a gated or
    /// private model and no token for it; no answer from the hub; offline and not in the cache; a cache that cannot be
    /// written; an index whose shards are not in the model's own folder, or none of whose tensors has the name asked
    /// for.
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

/// Model ids, revisions and file names end up in a URL and in a path of the cache, so each is checked before anything
/// is requested: the first fault that is there is an error.
fn check<const N: usize>(what: &str, value: &str, faults: [(bool, String); N], expected: &str) -> Result<()> {
    match faults.into_iter().find(|(is_there, _)| *is_there) {
        None => Ok(()),
        Some((_, fault)) => Err(Error::Msg(format!("[hub] the {what} {value:?} {fault}; expected {expected}"))),
    }
}

/// What a model id may not be by the hub's own rules (`validate_repo_id` of huggingface_hub).
fn id_faults(id: &str) -> [(bool, String); 9] {
    let slashes = id.matches('/').count();
    let bad = id.chars().find(|&c| !(c.is_ascii_alphanumeric() || "-_./".contains(c)));
    let any_part = |is_bad: fn(&str) -> bool| id.split('/').any(is_bad);
    let has_bad_end = any_part(|part| part.starts_with(['-', '.']) || part.ends_with(['-', '.']));
    [
        (id.is_empty(), "is empty".into()),
        (slashes > 1, format!("has {slashes} slashes, where one is the most")),
        (any_part(str::is_empty), "has nothing on one side of its slash".into()),
        (
            bad.is_some(),
            format!("has {:?}, where only letters, digits, `-`, `_` and `.` may stand", bad.unwrap_or(' ')),
        ),
        (has_bad_end, "has a part that begins or ends with `-` or `.`".into()),
        (id.contains("--"), "has `--`".into()),
        (id.contains(".."), "has `..`".into()),
        (id.ends_with(".git"), "ends with `.git`".into()),
        (id.len() > MAX_ID_LEN, format!("has {} characters, where {MAX_ID_LEN} is the most", id.len())),
    ]
}

/// What a branch, tag or commit may not be by git's rules for the names of refs (`git help check-ref-format`).
fn revision_faults(revision: &str) -> [(bool, String); 4] {
    let bad = revision.chars().find(|&c| c.is_whitespace() || c.is_control() || "\\~^:?*[".contains(c));
    let has_bad_part = revision.split('/').any(|part| part.is_empty() || part.starts_with('.'));
    [
        (revision.is_empty(), "is empty".into()),
        (bad.is_some(), format!("has {:?}", bad.unwrap_or(' '))),
        (revision.contains(".."), "has `..`".into()),
        (has_bad_part, "has a part between slashes that is empty or begins with `.`".into()),
    ]
}

/// What the name of a file within a model, which may be in folders of it, may not be.
fn file_faults(name: &str) -> [(bool, String); 2] {
    let bad = name.chars().find(|&c| c.is_control() || "\\:".contains(c));
    let leads_away = name.split('/').any(|part| matches!(part, "" | "." | ".."));
    [
        (bad.is_some(), format!("has {:?}", bad.unwrap_or(' '))),
        (leads_away, "has a part between slashes that is empty, `.` or `..`".into()),
    ]
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.revision)
    }
}

/// Without secrets: neither the token nor credentials of the endpoint.
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

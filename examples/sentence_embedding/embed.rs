//! Sentences through the model in batches, and their hidden states to one vector each, as the checkpoint's files of
//! sentence-transformers say.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Context, DType, Result, Tensor, bail};
use rayon::prelude::*;
use serde_json::Value;

use crate::common::{EXAMPLE, read_json, read_optional};
use crate::model::Encoder;
use crate::texts::{TOKENIZER, max_tokens};

const MODULES: &str = "modules.json";
const PROMPTS: &str = "config_sentence_transformers.json";
/// The names that sentence-transformers has given the settings of its first module.
const SETTINGS: [&str; 3] =
    ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"];
/// All files of a checkpoint on the hub, none of which it needs. The pooling is the second of the modules.
pub const FILES: [&str; 7] =
    [MODULES, "1_Pooling/config.json", PROMPTS, TOKENIZER, SETTINGS[0], SETTINGS[1], SETTINGS[2]];

/// What sentences have become.
pub struct Embeddings {
    /// (N, E) in f32, in the order of the sentences.
    pub vectors: Tensor,
    /// The number of tokens of each sentence.
    pub lens: Vec<usize>,
    /// How many of the sentences were cut.
    pub cut: usize,
}

/// What makes vectors of sentences.
pub struct Embedder<'a> {
    pub model: &'a Encoder,
    pub tokenizer: &'a SimpleTokenizer,
    pub recipe: &'a Recipe,
    /// Sentences that go through the model at a time.
    pub batch: usize,
}

impl Embedder<'_> {
    /// The vectors of the sentences; `done` is told how many of them there are.
    ///
    /// # Errors
    /// As the model, and for a sentence without a token.
    pub fn embed(&self, sentences: &[String], done: &mut dyn FnMut(usize, usize)) -> Result<Embeddings> {
        let &Self { model, tokenizer, recipe, batch } = self;
        let (mut vectors, mut lens, mut cut) = (Vec::new(), Vec::new(), 0);
        for batch in sentences.chunks(batch) {
            let encodings = batch.par_iter().map(|sentence| recipe.encode(tokenizer, sentence));
            let encodings = encodings.collect::<Result<Vec<_>>>()?;
            let texts: Vec<_> = encodings.iter().map(|encoding| encoding.ids.as_slice()).collect();
            let (hidden, mut start) = (model.forward(&texts)?, 0);
            for encoding in &encodings {
                let len = encoding.ids.len();
                vectors.push(pool(&hidden.narrow(0, start, len)?, recipe.pooling)?);
                lens.push(len);
                start += len;
                cut += usize::from(encoding.num_truncated > 0);
            }
            done(lens.len(), sentences.len());
        }
        let vectors = Tensor::stack(&vectors, 0)?;
        Ok(Embeddings { vectors: if recipe.normalize { normalized(&vectors)? } else { vectors }, lens, cut })
    }
}

/// The vector (E,) of one sentence's hidden states (T, E).
fn pool(hidden: &Tensor, pooling: Pooling) -> Result<Tensor> {
    match pooling {
        Pooling::Mean => hidden.to_dtype(DType::F32)?.mean(0),
        Pooling::Cls => hidden.get(0)?.to_dtype(DType::F32),
    }
}

/// Vectors (N, E) at length 1; one of zeros stays zeros.
pub fn normalized(vectors: &Tensor) -> Result<Tensor> {
    // The floor of PyTorch's `normalize`.
    let norms = vectors.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12)?;
    vectors.broadcast_div(&norms)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of the hidden states of all tokens.
    Mean,
    /// The hidden state of the first token.
    Cls,
}

#[derive(Debug)]
pub struct Recipe {
    pub pooling: Pooling,
    pub normalize: bool,
    /// Where the two come from.
    pub said_by: String,
    /// The most tokens of a text; what is longer is cut.
    pub max_tokens: Option<usize>,
    pub lowercase: bool,
    /// Stands in front of every text.
    pub prompt: String,
}

impl Recipe {
    /// `positions` is the most tokens that the model has positions for.
    pub fn read(folder: &Path, positions: Option<usize>) -> Result<Self> {
        let settings = SETTINGS.iter().map(|name| read_optional(&folder.join(name)));
        let settings = settings.collect::<Result<Vec<_>>>()?.into_iter().find(|json| !json.is_null());
        let settings = settings.unwrap_or(Value::Null);
        let max_tokens = match &settings["max_seq_length"] {
            Value::Null => max_tokens(folder, positions)?,
            most => match most.as_u64() {
                Some(most) if most > 0 => usize::try_from(most).ok(),
                _ => bail!("[{EXAMPLE}] max_seq_length is {most}, expected a number of tokens"),
            },
        };
        let (pooling, normalize, said_by) = steps(folder)?;
        let lowercase = settings["do_lower_case"].as_bool().unwrap_or(false);
        Ok(Self { pooling, normalize, said_by, max_tokens, lowercase, prompt: prompt(folder)? })
    }

    /// A sentence as tokens.
    pub fn encode(&self, tokenizer: &SimpleTokenizer, sentence: &str) -> Result<Encoding> {
        let text = format!("{}{sentence}", self.prompt);
        let encoding = tokenizer.encode(&if self.lowercase { text.to_lowercase() } else { text })?;
        if encoding.ids.is_empty() {
            bail!("[{EXAMPLE}] {sentence:?} has no token")
        }
        Ok(encoding)
    }
}

/// Pooling, normalisation, and which files say so. A module has a kind, which is the last name in the path of a Python
/// class, and a folder.
fn steps(folder: &Path) -> Result<(Pooling, bool, String)> {
    let json = read_optional(&folder.join(MODULES))?;
    let Some(modules) = json.as_array() else {
        return Ok((Pooling::Mean, true, format!("assumed, since there is no {MODULES}")));
    };
    let text = |module: &'_ Value, key: &str| module[key].as_str().unwrap_or_default().to_string();
    let classes: Vec<_> = modules.iter().map(|module| text(module, "type")).collect();
    let kinds: Vec<_> = classes.iter().filter_map(|class| class.rsplit('.').next()).collect();
    let normalize = match kinds[..] {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        _ => {
            bail!("[{EXAMPLE}] {MODULES} has {}, expected Transformer, Pooling and perhaps Normalize", kinds.join(", "))
        }
    };
    let (beside, pooling) = (text(&modules[0], "path"), text(&modules[1], "path"));
    if !beside.is_empty() {
        bail!("[{EXAMPLE}] {MODULES} has its Transformer in {beside:?}, expected it beside {MODULES}")
    }
    let path = format!("{pooling}/config.json");
    let pooling = pooling_of(&path, &read_json(&folder.join(&path))?)?;
    Ok((pooling, normalize, format!("as {path} and {MODULES} say")))
}

/// The one mode of a Pooling module: by its name, or by a flag for each mode, of which that of the mean is on by
/// default.
fn pooling_of(path: &str, json: &Value) -> Result<Pooling> {
    let flags = json.as_object().into_iter().flatten().filter(|(_, on)| **on == Value::Bool(true));
    let mut modes: Vec<_> = flags.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).collect();
    match &json["pooling_mode"] {
        Value::Null if json["pooling_mode_mean_tokens"].is_null() => modes.push("mean_tokens"),
        Value::Null => {}
        mode => modes = vec![mode.as_str().unwrap_or("several modes")],
    }
    match modes[..] {
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Ok(Pooling::Cls),
        _ => bail!("[{EXAMPLE}] {path} pools by {}, expected mean or cls", modes.join(" and ")),
    }
}

/// What the checkpoint puts in front of every text unless told otherwise: as a rule nothing.
fn prompt(folder: &Path) -> Result<String> {
    let json = read_optional(&folder.join(PROMPTS))?;
    let Some(name) = json["default_prompt_name"].as_str() else { return Ok(String::new()) };
    let prompt = json["prompts"][name].as_str();
    let missing = || format!("[{EXAMPLE}] {PROMPTS} has no prompt {name:?}, which it names as the default");
    prompt.map(str::to_string).with_context(missing)
}

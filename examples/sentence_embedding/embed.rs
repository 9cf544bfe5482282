//! Runs sentences through the model in batches, and pools their hidden states to one vector each, as described by the
//! checkpoint's files of sentence-transformers.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer, SpecialTokens};
use candle_core::{Context, DType, Result, Tensor, bail};
use rayon::prelude::*;
use serde_json::Value;

use crate::common::{EXAMPLE, read_json, read_optional};
use crate::model::Encoder;
use crate::texts::{TOKENIZER, max_tokens};

const MODULES: &str = "modules.json";
const PROMPTS: &str = "config_sentence_transformers.json";
/// The file names of the settings of the first module in versions of sentence-transformers.
const SETTINGS: [&str; 3] =
    ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"];
/// The files of a checkpoint on the hub, all of which are optional. The pooling is the second of the modules.
pub const FILES: [&str; 7] =
    [MODULES, "1_Pooling/config.json", PROMPTS, TOKENIZER, SETTINGS[0], SETTINGS[1], SETTINGS[2]];

/// The embeddings of sentences.
pub struct Embeddings {
    /// The vectors (N, E) in f32, in the order of the sentences.
    pub vectors: Tensor,
    /// The number of tokens of each sentence.
    pub lens: Vec<usize>,
    /// The number of sentences that were cut.
    pub cut: usize,
}

/// A model with the settings to embed sentences.
pub struct Embedder<'a> {
    pub model: &'a Encoder,
    pub tokenizer: &'a SimpleTokenizer,
    pub recipe: &'a Recipe,
    /// The number of sentences that go through the model at a time.
    pub batch: usize,
}

impl Embedder<'_> {
    /// Computes the vectors of the sentences; `done` is called with the number of sentences done and in all.
    ///
    /// # Errors
    /// As the model, and if a sentence has no token.
    pub fn embed(&self, sentences: &[String], done: &mut dyn FnMut(usize, usize)) -> Result<Embeddings> {
        let &Self { model, tokenizer, recipe, batch } = self;
        let mut vectors = Vec::new();
        let mut lens = Vec::new();
        let mut cut = 0;
        let unpooled = recipe.num_unpooled(tokenizer)?;
        for chunk in sentences.chunks(batch) {
            let encodings = chunk.par_iter().map(|sentence| recipe.encode(tokenizer, sentence));
            let encodings = encodings.collect::<Result<Vec<_>>>()?;
            let texts: Vec<_> = encodings.iter().map(|encoding| encoding.ids.as_slice()).collect();
            let hidden = model.forward(&texts)?;
            let mut start = 0;
            for encoding in &encodings {
                let len = encoding.ids.len();
                vectors.push(pool(&hidden.narrow(0, start, len)?, recipe.steps.pooling, unpooled)?);
                lens.push(len);
                start += len;
                cut += usize::from(encoding.num_truncated > 0);
            }
            done(lens.len(), sentences.len());
        }
        let stacked = Tensor::stack(&vectors, 0)?;
        Ok(Embeddings { vectors: if recipe.steps.normalize { normalized(&stacked)? } else { stacked }, lens, cut })
    }
}

/// Pools one sentence's hidden states (T, E) to its vector (E,). A mean is over all tokens but the first `unpooled`.
fn pool(hidden: &Tensor, pooling: Pooling, unpooled: usize) -> Result<Tensor> {
    match pooling {
        Pooling::Mean => {
            let len = hidden.dim(0)?;
            if unpooled >= len {
                bail!("[{EXAMPLE}] a sentence of {len} tokens has none after its prompt's {unpooled} to pool")
            }
            hidden.narrow(0, unpooled, len - unpooled)?.to_dtype(DType::F32)?.mean(0)
        }
        Pooling::Cls => hidden.get(0)?.to_dtype(DType::F32),
    }
}

/// Normalises vectors (N, E) to length 1; zeros stay zeros.
pub fn normalized(vectors: &Tensor) -> Result<Tensor> {
    // The smallest norm in PyTorch's `normalize`.
    let norms = vectors.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12)?;
    vectors.broadcast_div(&norms)
}

/// The way from the hidden states of tokens to the vector of a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of the hidden states of all tokens.
    Mean,
    /// The hidden state of the first token.
    Cls,
}

/// The settings of a checkpoint.
#[derive(Debug)]
pub struct Recipe {
    pub steps: Steps,
    /// The most tokens of a text; longer texts are cut.
    pub max_tokens: Option<usize>,
    pub lowercase: bool,
    /// The text before every sentence, if the checkpoint names one.
    pub prompt: Option<String>,
}

impl Recipe {
    /// Reads the files of a checkpoint. `positions` is the most tokens that the model has positions for.
    pub fn read(folder: &Path, positions: Option<usize>) -> Result<Self> {
        let mut settings = Value::Null;
        for name in SETTINGS {
            if settings.is_null() {
                settings = read_optional(&folder.join(name))?;
            }
        }
        let max_tokens = match &settings["max_seq_length"] {
            Value::Null => max_tokens(folder, positions)?,
            most => match most.as_u64() {
                Some(most) if most > 0 => usize::try_from(most).ok(),
                _ => bail!("[{EXAMPLE}] max_seq_length is {most}, expected a number of tokens"),
            },
        };
        let lowercase = settings["do_lower_case"].as_bool().unwrap_or(false);
        Ok(Self { steps: Steps::read(folder)?, max_tokens, lowercase, prompt: prompt(folder)? })
    }

    /// Tokenizes a sentence.
    pub fn encode(&self, tokenizer: &SimpleTokenizer, sentence: &str) -> Result<Encoding> {
        let text = format!("{}{sentence}", self.prompt.as_deref().unwrap_or_default());
        let encoding = tokenizer.encode(&self.letters(text))?;
        if encoding.ids.is_empty() {
            bail!("[{EXAMPLE}] {sentence:?} has no token")
        }
        Ok(encoding)
    }

    /// Lowers the letters of a text if the checkpoint says so.
    fn letters(&self, text: String) -> String {
        if self.lowercase { text.to_lowercase() } else { text }
    }

    /// Returns the number of tokens at the beginning of each sentence that are not pooled: 0 if the prompt is pooled,
    /// or else the prompt's tokens with a special token before them and without one after them, as
    /// sentence-transformers counts them.
    fn num_unpooled(&self, tokenizer: &SimpleTokenizer) -> Result<usize> {
        let Some(prompt) = self.prompt.as_ref().filter(|_| !self.steps.includes_prompt) else { return Ok(0) };
        let ids = tokenizer.encode(&self.letters(prompt.clone()))?.ids;
        let Some(last) = ids.last() else { return Ok(0) };
        let decoded = tokenizer.decode_with(&[*last], SpecialTokens::With)?;
        let is_special = tokenizer.decode_with(&[*last], SpecialTokens::Without)? != decoded;
        Ok(ids.len() - usize::from(is_special))
    }
}

/// The steps after the model.
#[derive(Debug)]
pub struct Steps {
    pub pooling: Pooling,
    /// Whether a mean is also over the tokens of the prompt.
    pub includes_prompt: bool,
    pub normalize: bool,
    /// The files that define the steps, for the report.
    pub source: String,
}

impl Steps {
    /// Reads the modules of a checkpoint. A module has a kind, the last name in the path of a Python class, and a
    /// folder.
    fn read(folder: &Path) -> Result<Self> {
        let json = read_optional(&folder.join(MODULES))?;
        let Some(modules) = json.as_array() else {
            let source = format!("assumed, since there is no {MODULES}");
            return Ok(Self { pooling: Pooling::Mean, includes_prompt: true, normalize: true, source });
        };
        let text = |module: &'_ Value, key: &str| module[key].as_str().unwrap_or_default().to_string();
        let classes: Vec<_> = modules.iter().map(|module| text(module, "type")).collect();
        let kinds: Vec<_> = classes.iter().filter_map(|class| class.rsplit('.').next()).collect();
        let normalize = match kinds[..] {
            ["Transformer", "Pooling"] => false,
            ["Transformer", "Pooling", "Normalize"] => true,
            _ => {
                let found = kinds.join(", ");
                bail!("[{EXAMPLE}] {MODULES} has {found}, expected Transformer, Pooling and perhaps Normalize")
            }
        };
        let transformer = text(&modules[0], "path");
        if !transformer.is_empty() {
            bail!(
                "[{EXAMPLE}] {MODULES} has its Transformer in {transformer:?}, expected it in the folder of {MODULES}"
            )
        }
        let path = format!("{}/config.json", text(&modules[1], "path"));
        let settings = read_json(&folder.join(&path))?;
        let pooling = pooling(&path, &settings)?;
        let includes_prompt = match &settings["include_prompt"] {
            Value::Null => true,
            Value::Bool(flag) => *flag,
            other => bail!("[{EXAMPLE}] include_prompt of {path} is {other}, expected true or false"),
        };
        Ok(Self { pooling, includes_prompt, normalize, source: format!("as {path} and {MODULES} say") })
    }
}

/// Returns the mode of a Pooling module, which has its name, a list of names, or a flag for each mode. The flag of the
/// mean is on by default.
fn pooling(path: &str, json: &Value) -> Result<Pooling> {
    let unknown = |mode: &Value| format!("[{EXAMPLE}] pooling_mode of {path} is {mode}, expected mean or cls");
    let mut modes = Vec::new();
    match &json["pooling_mode"] {
        Value::Null => {
            let flags = json.as_object().into_iter().flatten().filter(|(_, on)| **on == Value::Bool(true));
            modes.extend(flags.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")));
            if json["pooling_mode_mean_tokens"].is_null() {
                modes.push("mean_tokens");
            }
        }
        Value::Array(list) => {
            for mode in list {
                modes.push(mode.as_str().with_context(|| unknown(&json["pooling_mode"]))?);
            }
        }
        mode => modes.push(mode.as_str().with_context(|| unknown(mode))?),
    }
    match modes[..] {
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Ok(Pooling::Cls),
        [] => bail!("[{EXAMPLE}] {path} pools by nothing, expected mean or cls"),
        _ => bail!("[{EXAMPLE}] {path} pools by {}, expected mean or cls", modes.join(" and ")),
    }
}

/// Returns the prompt before every text, if there is a default one.
fn prompt(folder: &Path) -> Result<Option<String>> {
    let json = read_optional(&folder.join(PROMPTS))?;
    let Some(name) = json["default_prompt_name"].as_str() else { return Ok(None) };
    let missing = || format!("[{EXAMPLE}] {PROMPTS} has no prompt {name:?}, which it names as the default");
    json["prompts"][name].as_str().with_context(missing).map(|prompt| Some(prompt.to_string()))
}

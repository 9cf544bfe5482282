//! The settings of a whole checkpoint: texts before each text, by name, and the measure of similarity.

use std::path::Path;

use candle_attention::text::{SimpleTokenizer, SpecialTokens};
use candle_core::{Result, Tensor, bail};
use serde_json::Value;

use super::fields::Fields;
use super::layers::normalized;
use super::transformer::TransformerSettings;
use crate::common::EXAMPLE;

pub const PROMPTS: &str = "config_sentence_transformers.json";

/// The measure of similarity of two vectors; larger is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Similarity {
    Cosine,
    Dot,
    Euclidean,
    Manhattan,
}

impl Similarity {
    /// Computes the similarities (N, N) of all pairs of vectors (N, E).
    pub fn of(self, vectors: &Tensor) -> Result<Tensor> {
        let differences = || vectors.unsqueeze(1)?.broadcast_sub(&vectors.unsqueeze(0)?);
        match self {
            Self::Cosine => {
                let unit = normalized(vectors)?;
                unit.matmul(&unit.t()?)
            }
            Self::Dot => vectors.matmul(&vectors.t()?),
            Self::Euclidean => differences()?.sqr()?.sum(2)?.sqrt()?.neg(),
            Self::Manhattan => differences()?.abs()?.sum(2)?.neg(),
        }
    }

    /// Returns the name that is printed.
    pub fn shown(self) -> &'static str {
        match self {
            Self::Cosine => "cosine similarity",
            Self::Dot => "dot product",
            Self::Euclidean => "negative distance",
            Self::Manhattan => "negative Manhattan distance",
        }
    }
}

/// The settings in `config_sentence_transformers.json`.
pub struct CheckpointSettings {
    fields: Fields,
    pub similarity: Similarity,
    /// The width at which vectors are cut.
    pub dimensions: Option<usize>,
}

impl CheckpointSettings {
    /// Reads the file; one that is missing has no settings.
    pub fn read(folder: &Path) -> Result<Self> {
        let fields = Fields::read(folder, PROMPTS)?;
        fields.only(&[
            "__version__",
            "model_type",
            "prompts",
            "default_prompt_name",
            "similarity_fn_name",
            "truncate_dim",
        ])?;
        if !matches!(fields.text("model_type")?, None | Some("SentenceTransformer")) {
            return fields.fail("model_type", "\"SentenceTransformer\"");
        }
        let similarity = match fields.text("similarity_fn_name")? {
            None | Some("cosine") => Similarity::Cosine,
            Some("dot") => Similarity::Dot,
            Some("euclidean") => Similarity::Euclidean,
            Some("manhattan") => Similarity::Manhattan,
            Some(_) => return fields.fail("similarity_fn_name", "cosine, dot, euclidean or manhattan"),
        };
        let dimensions = fields.count("truncate_dim", "dimensions")?;
        Ok(Self { fields, similarity, dimensions })
    }

    /// Returns the given prompt, or else the one of this name, or else the default one, if there is one.
    pub fn prompt(&self, given: Option<&str>, name: Option<&str>) -> Result<Option<String>> {
        prompt(&self.fields, given, name)
    }
}

/// Returns the given prompt, or else the one of this name in the settings, or else the default one, if there is one.
///
/// # Errors
/// If there is no prompt of the name.
pub fn prompt(fields: &Fields, given: Option<&str>, name: Option<&str>) -> Result<Option<String>> {
    if let Some(given) = given {
        return Ok(Some(given.to_string()));
    }
    let named = name.or(fields.text("default_prompt_name")?);
    let Some(wanted) = named else { return Ok(None) };
    let prompts = fields.get("prompts");
    match &prompts[wanted] {
        Value::String(prompt) => Ok(Some(prompt.clone())),
        Value::Null if name.is_none() => {
            bail!("[{EXAMPLE}] {} has no prompt {wanted:?}, which it names as the default", fields.file())
        }
        Value::Null => {
            let known: Vec<_> = prompts.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
            let known = if known.is_empty() {
                "it has none".to_string()
            } else {
                format!("expected one of {}", known.join(", "))
            };
            bail!("[{EXAMPLE}] {} has no prompt {wanted:?}, {known}", fields.file())
        }
        other => bail!("[{EXAMPLE}] the prompt {wanted:?} of {} is {other}, expected a text", fields.file()),
    }
}

/// Returns the number of tokens of a prompt at the beginning of a text: the prompt's tokens with a special token before
/// them and without one after them, as sentence-transformers counts them.
pub fn num_prompt_tokens(prompt: &str, settings: &TransformerSettings, tokenizer: &SimpleTokenizer) -> Result<usize> {
    // sentence-transformers counts the empty prompt as no prompt.
    if prompt.is_empty() {
        return Ok(0);
    }
    let ids = tokenizer.encode(&settings.letters(prompt))?.ids;
    let Some(last) = ids.last() else { return Ok(0) };
    let decoded = tokenizer.decode_with(&[*last], SpecialTokens::With)?;
    let is_special = tokenizer.decode_with(&[*last], SpecialTokens::Without)? != decoded;
    Ok(ids.len() - usize::from(is_special))
}

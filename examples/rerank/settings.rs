//! The settings of a cross-encoder: the files of sentence-transformers, or its config.json alone.

use std::path::{Path, PathBuf};

use candle_attention::text::SimpleTokenizer;
use candle_core::{Context, Result, bail};
use serde_json::Value;

use crate::common::{EXAMPLE, read_json};
use crate::embedding::fields::Fields;
use crate::embedding::modules::{self, MODULES};
use crate::embedding::prompts::{PROMPTS, prompt};
use crate::embedding::transformer::TransformerSettings;

/// The names of the activations that are known. Scores are the numbers before it; the report also has their sigmoid.
const ACTIVATIONS: [&str; 2] = ["Sigmoid", "Identity"];

/// The model type of models with a vector for each token.
pub const LATE: &str = "MultiVectorEncoder";

/// The kind of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreKind {
    /// A head of sequence classification.
    Classifier,
    /// The logit of a token after the last one, less that of another token if there is one.
    Tokens { yes: u32, no: Option<u32> },
}

/// The settings of a cross-encoder.
pub struct Settings {
    /// The folder of the model, below that of the checkpoint.
    pub model: PathBuf,
    pub transformer: TransformerSettings,
    /// Whether the checkpoint lists its modules.
    pub has_modules: bool,
    /// The kind of head in the list of modules; `None` if there is no list.
    kind: Option<ScoreKind>,
    prompts: Fields,
}

impl Settings {
    /// Reads the settings in a checkpoint's folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let prompts = Fields::read(folder, PROMPTS)?;
        match prompts.text("model_type")? {
            None | Some("CrossEncoder") => {}
            Some(LATE) => return prompts.fail("model_type", "\"CrossEncoder\" without --late"),
            Some(_) => return prompts.fail("model_type", "\"CrossEncoder\""),
        }
        prompts.only(&["__version__", "model_type", "prompts", "default_prompt_name", "activation_fn"])?;
        if prompts.text("activation_fn")?.is_some_and(|class| !is_known_activation(class)) {
            return prompts.fail("activation_fn", "Sigmoid or Identity");
        }
        let Some(modules) = modules::read(folder, None)? else {
            let transformer = TransformerSettings::read(folder)?;
            return Ok(Self { model: PathBuf::new(), transformer, has_modules: false, kind: None, prompts });
        };
        let kinds: Vec<_> = modules.iter().map(|module| module.kind.as_str()).collect();
        let kind = match kinds[..] {
            ["Transformer"] => ScoreKind::Classifier,
            ["Transformer", "LogitScore"] => read_tokens(folder, &modules[1].file("config.json"))?,
            _ => bail!(
                "[{EXAMPLE}] {MODULES} has {}, expected Transformer, or Transformer and LogitScore",
                kinds.join(", ")
            ),
        };
        let model = modules[0].path.clone();
        let transformer = TransformerSettings::read(&folder.join(&model))?;
        let task = if kind == ScoreKind::Classifier { "sequence-classification" } else { "text-generation" };
        transformer.require(task, "logits")?;
        transformer.refuse_expansion()?;
        Ok(Self { model, transformer, has_modules: true, kind: Some(kind), prompts })
    }

    /// Returns the kind of the head. Without modules it is a head of sequence classification, and for a model of
    /// language the logits of the tokens "yes" and "no".
    ///
    /// # Errors
    /// If the activation in `config.json` is not known, or if there are no such tokens.
    pub fn kind(&self, config: &Value, tokenizer: &SimpleTokenizer) -> Result<ScoreKind> {
        let new = &config["sentence_transformers"]["activation_fn"];
        let old = &config["sbert_ce_default_activation_function"];
        if let Some(class) = new.as_str().or(old.as_str()).filter(|class| !is_known_activation(class)) {
            bail!("[{EXAMPLE}] the activation in config.json is {class:?}, expected Sigmoid or Identity")
        }
        if let Some(kind) = self.kind {
            return Ok(kind);
        }
        if !config["architectures"][0].as_str().is_some_and(|class| class.ends_with("ForCausalLM")) {
            return Ok(ScoreKind::Classifier);
        }
        let id = |token: &str| {
            let found = tokenizer.token_to_id(token);
            found.with_context(|| format!("[{EXAMPLE}] the tokenizer has no token {token:?}, expected yes and no"))
        };
        Ok(ScoreKind::Tokens { yes: id("yes")?, no: Some(id("no")?) })
    }

    /// Returns the given prompt, or else the one of this name, or else the default one, if there is one.
    pub fn prompt(&self, given: Option<&str>, name: Option<&str>) -> Result<Option<String>> {
        prompt(&self.prompts, given, name)
    }
}

/// Reads the tokens of the module LogitScore.
fn read_tokens(folder: &Path, file: &str) -> Result<ScoreKind> {
    let fields = Fields::of(file, read_json(&folder.join(file))?)?;
    fields.only(&["true_token_id", "false_token_id", "module_input_name"])?;
    if !matches!(fields.text("module_input_name")?, None | Some("causal_logits")) {
        return fields.fail("module_input_name", "\"causal_logits\"");
    }
    let id = |key: &str| match fields.get(key) {
        Value::Null => Ok(None),
        value => match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            None => fields.fail(key, "the id of a token"),
            id => Ok(id),
        },
    };
    match id("true_token_id")? {
        None => fields.fail("true_token_id", "the id of a token"),
        Some(yes) => Ok(ScoreKind::Tokens { yes, no: id("false_token_id")? }),
    }
}

/// Returns whether a class of Python is one of the known activations.
fn is_known_activation(class: &str) -> bool {
    ACTIVATIONS.contains(&class.rsplit('.').next().unwrap_or_default())
}

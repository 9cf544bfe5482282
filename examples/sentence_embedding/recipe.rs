//! What a checkpoint says about sentences, in the files of sentence-transformers: how hidden states become one vector,
//! and what happens to a text before it is tokens.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::Value;

use crate::common::read_json;
use crate::texts::{TOKENIZER, max_tokens};

pub const EXAMPLE: &str = "sentence_embedding";
const MODULES: &str = "modules.json";
const PROMPTS: &str = "config_sentence_transformers.json";
/// The names that sentence-transformers has given the settings of its first module.
const SETTINGS: [&str; 3] =
    ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"];
/// All files, none of which a checkpoint needs, beside those that modules.json names.
pub const FILES: [&str; 6] = [MODULES, PROMPTS, TOKENIZER, SETTINGS[0], SETTINGS[1], SETTINGS[2]];

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
        let settings = SETTINGS.iter().map(|name| optional(folder, name)).find(|json| !matches!(json, Ok(Value::Null)));
        let settings = settings.transpose()?.unwrap_or(Value::Null);
        let max_tokens = match &settings["max_seq_length"] {
            Value::Null => max_tokens(EXAMPLE, folder, positions)?,
            most => match most.as_u64() {
                Some(most) if most > 0 => usize::try_from(most).ok(),
                _ => bail!("[{EXAMPLE}] max_seq_length is {most}, expected a number of tokens"),
            },
        };
        let (pooling, normalize, said_by) = steps(folder)?;
        let lowercase = settings["do_lower_case"].as_bool().unwrap_or(false);
        Ok(Self { pooling, normalize, said_by, max_tokens, lowercase, prompt: prompt(folder)? })
    }
}

/// A step of modules.json: its kind, which is the last name in the path of a Python class, and the folder of its files.
struct Module {
    kind: String,
    folder: String,
}

/// The steps of modules.json, `None` where there is no such file.
fn modules(folder: &Path) -> Result<Option<Vec<Module>>> {
    let json = optional(folder, MODULES)?;
    let text = |module: &Value, key: &str| module[key].as_str().unwrap_or_default().to_string();
    let module = |module: &Value| Module {
        kind: text(module, "type").rsplit('.').next().unwrap_or_default().into(),
        folder: text(module, "path"),
    };
    Ok(if json.is_null() { None } else { Some(json.as_array().into_iter().flatten().map(module).collect()) })
}

/// The files that modules.json names.
pub fn module_files(folder: &Path) -> Result<Vec<String>> {
    let modules = modules(folder)?.unwrap_or_default();
    let pooling = modules.iter().filter(|module| module.kind == "Pooling");
    Ok(pooling.map(|module| format!("{}/config.json", module.folder)).collect())
}

/// Pooling, normalisation, and which files say so.
fn steps(folder: &Path) -> Result<(Pooling, bool, String)> {
    let Some(modules) = modules(folder)? else {
        return Ok((Pooling::Mean, true, format!("assumed, since there is no {MODULES}")));
    };
    let kinds: Vec<_> = modules.iter().map(|module| module.kind.as_str()).collect();
    let normalize = match kinds[..] {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        _ => {
            bail!("[{EXAMPLE}] {MODULES} has {}, expected Transformer, Pooling and perhaps Normalize", kinds.join(", "))
        }
    };
    if !modules[0].folder.is_empty() {
        bail!("[{EXAMPLE}] {MODULES} has its Transformer in {:?}, expected it beside {MODULES}", modules[0].folder)
    }
    let path = format!("{}/config.json", modules[1].folder);
    let pooling = pooling_of(&path, &read_json(EXAMPLE, &folder.join(&path))?)?;
    Ok((pooling, normalize, format!("as {path} and {MODULES} say")))
}

/// The one mode of a Pooling module: by its name, or by a flag for each mode, of which that of the mean is on by
/// default.
fn pooling_of(path: &str, json: &Value) -> Result<Pooling> {
    let mut modes: Vec<String> = match &json["pooling_mode"] {
        Value::Null => {
            let flags = json.as_object().into_iter().flatten().filter(|(_, on)| **on == Value::Bool(true));
            flags.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).map(str::to_string).collect()
        }
        Value::String(mode) => vec![mode.clone()],
        modes => vec![modes.to_string()],
    };
    if json["pooling_mode"].is_null() && json["pooling_mode_mean_tokens"].is_null() {
        modes.push("mean_tokens".into());
    }
    match modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Ok(Pooling::Cls),
        _ => bail!("[{EXAMPLE}] {path} pools by {}, expected mean or cls", modes.join(" and ")),
    }
}

/// What the checkpoint puts in front of every text unless told otherwise: as a rule nothing.
fn prompt(folder: &Path) -> Result<String> {
    let json = optional(folder, PROMPTS)?;
    let Some(name) = json["default_prompt_name"].as_str() else { return Ok(String::new()) };
    match json["prompts"][name].as_str() {
        Some(prompt) => Ok(prompt.into()),
        None => bail!("[{EXAMPLE}] {PROMPTS} has no prompt {name:?}, which it names as the default"),
    }
}

/// A file's JSON, null where there is no such file.
fn optional(folder: &Path, name: &str) -> Result<Value> {
    let path = folder.join(name);
    if path.is_file() { read_json(EXAMPLE, &path) } else { Ok(Value::Null) }
}

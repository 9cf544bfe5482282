//! The older files of models with a vector for each token: PyLate's, and the files of ColBERT's own code.

use std::path::{Path, PathBuf};

use candle_attention::weights::Checkpoint;
use candle_core::{DType, Device, Result, bail};
use serde_json::{Map, Value, json};

use crate::common::{EXAMPLE, read_optional};
use crate::embedding::fields::Fields;
use crate::embedding::pipeline::Steps;
use crate::embedding::prompts::PROMPTS;
use crate::embedding::transformer::{Expansion, TransformerSettings};
use crate::late_settings::{Backbone, KEYS, LateSettings, TokenMask, listed, refuse_default_prompt, words};

/// The settings that only PyLate writes.
const PYLATE: [&str; 9] = [
    "query_prefix",
    "document_prefix",
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "skiplist_words",
];

/// The file of ColBERT's own code, the class of its models, and the weight of the projection.
pub const METADATA: &str = "artifact.metadata";
const COLBERT: &str = "HF_ColBERT";
const PROJECTION: &str = "linear.weight";

/// The number of tokens of a question with its expansion, if the files have none.
const QUESTION_TOKENS: usize = 32;

/// Returns whether the settings are PyLate's.
pub fn is_pylate(settings: &Fields) -> Result<bool> {
    Ok(match settings.text("model_type")? {
        Some("ColBERT") => true,
        None | Some("SentenceTransformer") => PYLATE.into_iter().any(|key| settings.has(key)),
        Some(_) => false,
    })
}

/// Reads PyLate's settings. Its modules are the model and projections; vectors are normalised after them.
pub fn pylate(folder: &Path, settings: &Fields, device: &Device) -> Result<LateSettings> {
    settings.only(&[&KEYS[..], &PYLATE].concat())?;
    refuse_default_prompt(settings)?;
    let is_mean = match settings.text("similarity_fn_name")? {
        None | Some("MaxSim" | "maxsim" | "cosine" | "dot") => false,
        Some("meanmaxsim") => true,
        Some(_) => return settings.fail("similarity_fn_name", "MaxSim or meanmaxsim"),
    };
    let modules = listed(folder)?;
    let Backbone { model, mut transformer, after } = Backbone::read(folder, &modules)?;
    let expansion = pylate_expansion(settings)?;
    // The older settings of an expansion have its length as that of questions.
    let is_length_of_expansion = expansion.is_some() && !settings.has("query_expansion");
    let query_tokens = if is_length_of_expansion { None } else { settings.count("query_length", "tokens")? };
    transformer.expansion = transformer.expansion.or(expansion);
    transformer.query_tokens = transformer.query_tokens.or(query_tokens);
    transformer.document_tokens = transformer.document_tokens.or(settings.count("document_length", "tokens")?);
    let skipped = match settings.get("skiplist_words") {
        Value::Null => punctuation(),
        list => words(list),
    };
    let mut markers = Vec::new();
    let mut prompts = settings.section("prompts")?.into_object();
    for (key, side) in [("query_prefix", "query"), ("document_prefix", "document")] {
        let Some(prefix) = settings.text(key)? else { continue };
        let own = prompts.get(side).and_then(Value::as_str).unwrap_or_default();
        let rest = own.strip_prefix(prefix).unwrap_or(own);
        prompts.insert(side.to_string(), format!("{prefix}{rest}").into());
        markers.push(prefix.to_string());
    }
    Ok(LateSettings {
        model,
        transformer,
        mask: TokenMask::in_passages(skipped),
        steps: Steps::on_tokens(folder, after, device)?.normalized(),
        prompts: prompts_of(prompts)?,
        markers,
        is_mean,
    })
}

/// Reads how PyLate's questions are expanded: by default up to a number of tokens, which also cuts them.
fn pylate_expansion(settings: &Fields) -> Result<Option<Expansion>> {
    if settings.has("query_expansion") {
        return Expansion::read(settings);
    }
    if !settings.flag("do_query_expansion", true)? {
        return Ok(None);
    }
    let attends = match settings.has("attend_to_expansion_tokens") {
        true => settings.flag("attend_to_expansion_tokens", false)?,
        false => settings.flag("attend_to_mask_tokens", false)?,
    };
    let length = settings.count("query_length", "tokens")?.unwrap_or(QUESTION_TOKENS);
    Ok(Some(Expansion { length, cuts: true, attends, token: None }))
}

/// Returns whether a folder has a model of ColBERT's own code.
pub fn is_colbert(folder: &Path) -> Result<bool> {
    let config = read_optional(&folder.join("config.json"))?;
    Ok(config["architectures"].as_array().into_iter().flatten().any(|class| class == COLBERT))
}

/// Reads the settings of ColBERT's own code. The projection is among the weights of the model.
pub fn colbert(folder: &Path, device: &Device) -> Result<LateSettings> {
    // Most other settings are about training and the index.
    let metadata = Fields::read(folder, METADATA)?;
    if !matches!(metadata.text("similarity")?, None | Some("cosine")) {
        return metadata.fail("similarity", "\"cosine\"");
    }
    if !matches!(metadata.text("interaction")?, None | Some("colbert")) {
        return metadata.fail("interaction", "\"colbert\"");
    }
    let projection = Checkpoint::open(folder)?.var_builder(DType::F32, device)?.get_unchecked(PROJECTION)?;
    let (width, _) = projection.dims2()?;
    if let Some(dim) = metadata.count("dim", "numbers")?
        && dim != width
    {
        bail!("[{EXAMPLE}] dim of {METADATA} is {dim}, but {PROJECTION} has {width} rows")
    }
    let mut transformer = TransformerSettings::read(folder)?;
    transformer.document_tokens = metadata.count("doc_maxlen", "tokens")?;
    transformer.expansion = Some(Expansion {
        length: metadata.count("query_maxlen", "tokens")?.unwrap_or(QUESTION_TOKENS),
        cuts: true,
        attends: metadata.flag("attend_to_mask_tokens", false)?,
        token: None,
    });
    let mut markers = Vec::new();
    let mut prompts = Map::new();
    for (key, side, usual) in [("query_token_id", "query", "[unused0]"), ("doc_token_id", "document", "[unused1]")] {
        let marker = format!("{} ", metadata.text(key)?.unwrap_or(usual));
        prompts.insert(side.to_string(), marker.clone().into());
        markers.push(marker);
    }
    let skipped = if metadata.flag("mask_punctuation", true)? { punctuation() } else { Vec::new() };
    Ok(LateSettings {
        model: PathBuf::new(),
        transformer,
        mask: TokenMask::in_passages(skipped),
        steps: Steps::projection(projection).normalized(),
        prompts: prompts_of(prompts)?,
        markers,
        is_mean: false,
    })
}

/// Returns the characters that are not scored if the files have no list, each as a token.
fn punctuation() -> Vec<String> {
    ('!'..='~').filter(char::is_ascii_punctuation).map(String::from).collect()
}

/// Returns the settings of prompts.
fn prompts_of(prompts: Map<String, Value>) -> Result<Fields> {
    Fields::of(PROMPTS, json!({ "prompts": prompts }))
}

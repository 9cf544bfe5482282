//! The settings of the first module, the model: the greatest number of tokens, and changes of letters.

use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, bail};
use serde_json::{Map, Value};

use super::fields::Fields;
use crate::common::EXAMPLE;

/// The file names of the settings in versions of sentence-transformers, after the models that they were first for.
pub const SETTINGS: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// Sections of arguments of transformers' classes, with their newer names.
const ARGUMENTS: [&str; 6] =
    ["model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"];
/// Arguments that do not change vectors beyond the rounding of their dtype, which is chosen on the command line.
const HARMLESS: [&str; 12] = [
    "add_pooling_layer",
    "attn_implementation",
    "code_revision",
    "dtype",
    "padding_side",
    "revision",
    "torch_dtype",
    "trust_remote_code",
    "unpad_inputs",
    "use_fast",
    "use_flash_attn",
    "use_memory_efficient_attention",
];

/// The settings of a model of texts.
#[derive(Debug, Clone, Default)]
pub struct TransformerSettings {
    /// The most tokens of a text.
    pub max_tokens: Option<usize>,
    pub lowercase: bool,
    /// The most tokens of a text with the task "query", and with the task "document".
    pub query_tokens: Option<usize>,
    pub document_tokens: Option<usize>,
}

impl TransformerSettings {
    /// Reads the first of the files that is in the module's folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let name = SETTINGS.into_iter().find(|name| folder.join(name).is_file()).unwrap_or(SETTINGS[0]);
        let fields = Fields::read(folder, name)?;
        let mut known = vec![
            "max_seq_length",
            "do_lower_case",
            "transformer_task",
            "modality_config",
            "module_output_name",
            "processing_kwargs",
            "unpad_inputs",
            "query_length",
            "document_length",
            "query_expansion",
        ];
        known.extend(ARGUMENTS);
        fields.only(&known)?;
        for section in ARGUMENTS {
            refuse_others(name, section, fields.get(section), &HARMLESS)?;
        }
        refuse_others(name, "processing_kwargs", fields.get("processing_kwargs"), &[])?;
        if !matches!(fields.text("transformer_task")?, None | Some("feature-extraction")) {
            return fields.fail("transformer_task", "\"feature-extraction\"");
        }
        if !fields.get("query_expansion").is_null() {
            return fields.fail("query_expansion", "none, since it is for models with a vector for each token");
        }
        if fields.get("modality_config").get("message").is_some() {
            bail!("[{EXAMPLE}] modality_config of {name} has \"message\", a chat template, expected \"text\" alone")
        }
        let output = &fields.get("modality_config")["text"]["method_output_name"];
        if !output.is_null() && output != "last_hidden_state" {
            bail!("[{EXAMPLE}] method_output_name of {name} is {output}, expected \"last_hidden_state\"")
        }
        Ok(Self {
            max_tokens: fields.count("max_seq_length", "tokens")?,
            lowercase: fields.flag("do_lower_case", false)?,
            query_tokens: fields.count("query_length", "tokens")?,
            document_tokens: fields.count("document_length", "tokens")?,
        })
    }

    /// Tokenizes a text after a prompt, with letters lowered if the checkpoint says so.
    ///
    /// # Errors
    /// As the tokenizer, and if there is no token.
    pub fn encode(&self, tokenizer: &SimpleTokenizer, prompt: Option<&str>, text: &str) -> Result<Encoding> {
        let encoding = tokenizer.encode(&self.letters(&format!("{}{text}", prompt.unwrap_or_default())))?;
        if encoding.ids.is_empty() {
            bail!("[{EXAMPLE}] {text:?} has no token")
        }
        Ok(encoding)
    }

    /// Lowers the letters of a text if the checkpoint says so, one by one as tokenizers do.
    pub fn letters(&self, text: &str) -> String {
        if self.lowercase { text.chars().flat_map(char::to_lowercase).collect() } else { text.to_string() }
    }
}

/// Checks that the keys of a section are among these; null has none.
fn refuse_others(file: &str, section: &str, json: &Value, known: &[&str]) -> Result<()> {
    let empty = Map::new();
    for (key, value) in json.as_object().unwrap_or(&empty) {
        if !known.contains(&key.as_str()) {
            bail!("[{EXAMPLE}] {section} of {file} has {key}: {value}, which is not known")
        }
    }
    Ok(())
}

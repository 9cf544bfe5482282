//! The settings of the first module, the model: its task, the greatest number of tokens, changes of letters, and how a
//! chat template is called.

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

/// The section with the variables of a chat template, and its keys that are no variables.
const TEMPLATE: &str = "chat_template";
const SUFFIX: &str = "restore_suffix";
const SIZES: [&str; 4] = ["padding", "truncation", "max_length", "return_tensors"];

/// How a chat template is called.
#[derive(Debug, Clone, Default)]
pub struct TemplateSettings {
    /// Whether the content of a message is a list of parts; otherwise it is a text. With `None` the template's text
    /// decides.
    pub is_structured: Option<bool>,
    /// Variables of the template.
    pub variables: Map<String, Value>,
    /// Whether a text that is cut ends with the tokens that the template puts after every text.
    pub restores_suffix: bool,
}

/// Tokens after a question, up to a number of tokens in all.
#[derive(Debug, Clone)]
pub struct Expansion {
    pub length: usize,
    /// Whether a longer question is cut at `length`.
    pub cuts: bool,
    /// Whether tokens attend to the expansion.
    pub attends: bool,
    /// The token; by default the one of the tokenizer that masks words, or else its end of a text.
    pub token: Option<String>,
}

/// The settings of a model of texts.
#[derive(Debug, Clone)]
pub struct TransformerSettings {
    /// The name of the file.
    file: &'static str,
    /// The task of the model, such as "feature-extraction" or "sequence-classification".
    pub task: Option<String>,
    /// The name of the output that the modules after the model compute on.
    output: Option<String>,
    /// How a chat template makes texts, if the settings say that one does.
    pub template: Option<TemplateSettings>,
    /// The tokens after a question, for models with a vector for each token.
    pub expansion: Option<Expansion>,
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
            fields.section(section)?.only(&HARMLESS)?;
        }
        let processing = fields.section("processing_kwargs")?;
        processing.only(&[TEMPLATE])?;
        let modalities = fields.section("modality_config")?;
        modalities.only(&["text", "message"])?;
        let kind = if modalities.get("message").is_null() { "text" } else { "message" };
        Ok(Self {
            file: name,
            task: fields.text("transformer_task")?.map(str::to_string),
            output: modalities.section(kind)?.text("method_output_name")?.map(str::to_string),
            expansion: Expansion::read(&fields)?,
            template: template(&modalities, &processing)?,
            max_tokens: fields.count("max_seq_length", "tokens")?,
            lowercase: fields.flag("do_lower_case", false)?,
            query_tokens: fields.count("query_length", "tokens")?,
            document_tokens: fields.count("document_length", "tokens")?,
        })
    }

    /// Checks that the model has this task and this output, if the settings name them.
    pub fn require(&self, task: &str, output: &str) -> Result<()> {
        if let Some(other) = self.task.as_ref().filter(|own| *own != task) {
            bail!("[{EXAMPLE}] transformer_task of {} is {other:?}, expected {task:?}", self.file)
        }
        if let Some(other) = self.output.as_ref().filter(|own| *own != output) {
            bail!("[{EXAMPLE}] method_output_name of {} is {other:?}, expected {output:?}", self.file)
        }
        Ok(())
    }

    /// Checks that questions have no tokens after them.
    pub fn refuse_expansion(&self) -> Result<()> {
        match self.expansion {
            None => Ok(()),
            Some(_) => bail!(
                "[{EXAMPLE}] query_expansion of {} is for models with a vector for each token, expected none",
                self.file
            ),
        }
    }

    /// Checks that texts are not made by a chat template.
    pub fn refuse_template(&self) -> Result<()> {
        match self.template {
            None => Ok(()),
            Some(_) => bail!(
                "[{EXAMPLE}] modality_config of {} has \"message\", a chat template, expected \"text\" alone",
                self.file
            ),
        }
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

impl Expansion {
    /// Reads the section of the tokens after a question; `None` if it is missing or null.
    pub fn read(fields: &Fields) -> Result<Option<Self>> {
        let name = "query_expansion";
        if fields.get(name).is_null() {
            return Ok(None);
        }
        let own = fields.section(name)?;
        own.only(&["strategy", "length", "attend", "token"])?;
        let cuts = match own.text("strategy")? {
            Some("fixed") => true,
            Some("min") => false,
            _ => return own.fail("strategy", "\"fixed\" or \"min\""),
        };
        let Some(length) = own.count("length", "tokens")? else { return own.fail("length", "a number of tokens") };
        let token = own.text("token")?.map(str::to_string);
        Ok(Some(Self { length, cuts, attends: own.flag("attend", false)?, token }))
    }
}

/// Reads how a chat template is called; `None` if messages are no modality of the model. `processing` has variables.
fn template(modalities: &Fields, processing: &Fields) -> Result<Option<TemplateSettings>> {
    if modalities.get("message").is_null() {
        return Ok(None);
    }
    let is_structured = match modalities.section("message")?.text("format")? {
        None | Some("auto") => None,
        Some("flat") => Some(false),
        Some("structured") => Some(true),
        Some(other) => bail!("[{EXAMPLE}] the format {other:?} in {} is not known", modalities.file()),
    };
    let mut variables = processing.section(TEMPLATE)?.into_object();
    let restores_suffix = variables.remove(SUFFIX).is_none_or(|flag| flag != false);
    if let Some(size) = SIZES.into_iter().find(|size| variables.contains_key(*size)) {
        bail!("[{EXAMPLE}] {TEMPLATE} in {} has {size}, which is not supported", processing.file())
    }
    Ok(Some(TemplateSettings { is_structured, variables, restores_suffix }))
}

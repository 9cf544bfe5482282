//! The settings of a model with a vector for each token, in the files of sentence-transformers.

use std::path::{Path, PathBuf};

use candle_attention::text::{SimpleTokenizer, SpecialTokens};
use candle_core::{Context, Device, Error, Result, bail};
use serde_json::{Value, json};

use crate::common::{EXAMPLE, read_json};
use crate::embedding::fields::Fields;
use crate::embedding::modules::{self, MODULES, Module};
use crate::embedding::pipeline::Steps;
use crate::embedding::prompts::{PROMPTS, prompt};
use crate::embedding::transformer::TransformerSettings;
use crate::older_late;
use crate::settings::LATE;
use crate::texts::tokenizer;

/// The module that says which tokens are scored.
const MASK: &str = "MultiVectorMask";

/// The settings of a whole checkpoint that both sentence-transformers and PyLate write.
pub const KEYS: [&str; 5] = ["__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"];

/// The settings of a model with a vector for each token.
pub struct LateSettings {
    /// The folder of the model, below that of the checkpoint.
    pub model: PathBuf,
    pub transformer: TransformerSettings,
    pub mask: TokenMask,
    /// The modules after the model.
    pub steps: Steps,
    /// The texts before questions and passages, by name.
    pub prompts: Fields,
    /// Texts that are one token each if they are in the vocabulary, with or without what follows their first word.
    pub markers: Vec<String>,
    /// Whether a score is the mean over the question's tokens.
    pub is_mean: bool,
}

/// The tokens that are not scored.
pub struct TokenMask {
    pub words: Vec<String>,
    pub in_questions: bool,
    pub in_passages: bool,
}

impl LateSettings {
    /// Reads the settings in a checkpoint's folder.
    pub fn read(folder: &Path, device: &Device) -> Result<Self> {
        let settings = Fields::read(folder, PROMPTS)?;
        let model_type = settings.text("model_type")?;
        if model_type == Some(LATE) {
            return Self::of_modules(folder, settings, device);
        }
        if older_late::is_pylate(&settings)? {
            return older_late::pylate(folder, &settings, device);
        }
        if model_type.is_none() && older_late::is_colbert(folder)? {
            return older_late::colbert(folder, device);
        }
        settings.fail("model_type", &format!("{LATE:?} with --late"))
    }

    /// Reads the modules that `modules.json` lists.
    fn of_modules(folder: &Path, prompts: Fields, device: &Device) -> Result<Self> {
        prompts.only(&KEYS)?;
        refuse_default_prompt(&prompts)?;
        let is_mean = match prompts.text("similarity_fn_name")? {
            None | Some("maxsim") => false,
            Some("meanmaxsim") => true,
            Some(_) => return prompts.fail("similarity_fn_name", "maxsim or meanmaxsim"),
        };
        let (masks, others): (Vec<Module>, Vec<Module>) =
            listed(folder)?.into_iter().partition(|module| module.kind == MASK);
        let [mask] = &masks[..] else { bail!("[{EXAMPLE}] {MODULES} has {} {MASK}, expected one", masks.len()) };
        let mask = TokenMask::read(folder, &mask.file("config.json"))?;
        let Backbone { model, transformer, after } = Backbone::read(folder, &others)?;
        let steps = Steps::on_tokens(folder, after, device)?;
        Ok(Self { model, transformer, mask, steps, prompts, markers: Vec::new(), is_mean })
    }

    /// Returns the given prompt, or else the one of this name, or else the one before questions, if there is one.
    pub fn question_prompt(&self, given: Option<&str>, name: Option<&str>) -> Result<Option<String>> {
        if given.is_none() && name.is_none() {
            return Ok(self.side_prompt("query"));
        }
        prompt(&self.prompts, given, name)
    }

    /// Returns the prompt of one side, questions or passages, if there is one.
    pub fn side_prompt(&self, side: &str) -> Option<String> {
        self.prompts.get("prompts")[side].as_str().map(str::to_string)
    }

    /// Loads the tokenizer in the folder of the model, with markers as single tokens.
    pub fn tokenizer(&self, folder: &Path) -> Result<SimpleTokenizer> {
        let mut own = tokenizer(folder)?;
        if self.markers.is_empty() {
            return Ok(own);
        }
        let mut json = read_json(&folder.join("tokenizer.json"))?;
        for marker in &self.markers {
            let word = marker.split_whitespace().next().unwrap_or_default();
            let named = [marker.as_str(), word].into_iter().find_map(|name| Some((name, own.token_to_id(name)?)));
            let Some((name, id)) = named else { continue };
            if own.encode_with(name, SpecialTokens::Without)?.tokens == [name] {
                continue;
            }
            add_token(&mut json, name, id)?;
            own = SimpleTokenizer::from_bytes(json.to_string())?;
        }
        Ok(own)
    }
}

/// The first of a list of modules, the model.
pub struct Backbone<'a> {
    pub model: PathBuf,
    pub transformer: TransformerSettings,
    /// The modules after it.
    pub after: &'a [Module],
}

impl<'a> Backbone<'a> {
    /// Reads the settings of the model.
    pub fn read(folder: &Path, modules: &'a [Module]) -> Result<Self> {
        let Some((first, after)) = modules.split_first().filter(|(first, _)| first.kind == "Transformer") else {
            bail!("[{EXAMPLE}] {MODULES} does not begin with Transformer")
        };
        let transformer = TransformerSettings::read(&folder.join(&first.path))?;
        transformer.require("feature-extraction", "last_hidden_state")?;
        transformer.refuse_template()?;
        Ok(Self { model: first.path.clone(), transformer, after })
    }
}

impl TokenMask {
    /// Reads the settings of the module, in a file below the checkpoint's folder.
    fn read(folder: &Path, file: &str) -> Result<Self> {
        let fields = Fields::of(file, read_json(&folder.join(file))?)?;
        fields.only(&["skiplist_words", "skiplist_tasks", "keep_only_token_ids"])?;
        if !fields.get("keep_only_token_ids").is_null() {
            return fields.fail("keep_only_token_ids", "none");
        }
        let tasks = fields.get("skiplist_tasks");
        let has = |task: &str| tasks.as_array().into_iter().flatten().any(|name| name == task);
        Ok(Self {
            words: words(fields.get("skiplist_words")),
            in_questions: has("query"),
            in_passages: has("document") || tasks.is_null(),
        })
    }

    /// Makes the mask of older files: words that are not scored in passages.
    pub fn in_passages(words: Vec<String>) -> Self {
        Self { words, in_questions: false, in_passages: true }
    }
}

/// Returns the texts in a list.
pub fn words(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
}

/// Reads the list of modules.
pub fn listed(folder: &Path) -> Result<Vec<Module>> {
    modules::read(folder, None)?.with_context(|| format!("[{EXAMPLE}] there is no {MODULES}"))
}

/// Checks that no prompt is before both questions and passages.
pub fn refuse_default_prompt(settings: &Fields) -> Result<()> {
    if settings.text("default_prompt_name")?.is_some() {
        return settings.fail("default_prompt_name", "none, since questions and passages have their own");
    }
    Ok(())
}

/// Adds a token of the vocabulary to those that a tokenizer finds before it splits and normalises a text.
fn add_token(tokenizer: &mut Value, token: &str, id: u32) -> Result<()> {
    let Some(added) = tokenizer["added_tokens"].as_array_mut() else {
        return Err(Error::Msg(format!("[{EXAMPLE}] tokenizer.json has no list added_tokens, expected one")));
    };
    added.retain(|other| other["content"] != token);
    added.push(json!({
        "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    }));
    Ok(())
}

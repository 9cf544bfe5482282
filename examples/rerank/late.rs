//! Late interaction (ColBERT, Khattab and Zaharia 2020, arXiv:2004.12832): question and passage are read apart, and
//! each has a vector for each token. The score is the sum over the question's tokens of the largest dot product with a
//! token of the passage (MaxSim).

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Context, D, Device, Result, Tensor, bail};
use rayon::prelude::*;
use serde_json::Value;

use crate::common::{EXAMPLE, read_json, read_optional};
use crate::embedding::fields::Fields;
use crate::embedding::modules::{self, MODULES, Module};
use crate::embedding::pipeline::Steps;
use crate::embedding::pooling::parts;
use crate::embedding::prompts::{PROMPTS, prompt};
use crate::embedding::transformer::{Expansion, TransformerSettings};
use crate::model::Encoder;
use crate::settings::LATE;
use crate::texts::{TOKENIZER, cutting, max_tokens, special_token, tokenizer};

/// The module that says which tokens are scored.
const MASK: &str = "MultiVectorMask";

/// The settings of a model with a vector for each token.
pub struct LateSettings {
    /// The folder of the model, below that of the checkpoint.
    pub model: PathBuf,
    transformer: TransformerSettings,
    mask: Fields,
    steps: Steps,
    prompts: Fields,
    /// Whether a score is the mean over the question's tokens.
    is_mean: bool,
}

impl LateSettings {
    /// Reads the settings in a checkpoint's folder.
    pub fn read(folder: &Path, device: &Device) -> Result<Self> {
        let prompts = Fields::read(folder, PROMPTS)?;
        if prompts.text("model_type")? != Some(LATE) {
            return prompts.fail("model_type", &format!("{LATE:?} with --late"));
        }
        prompts.only(&["__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name"])?;
        if prompts.text("default_prompt_name")?.is_some() {
            return prompts.fail("default_prompt_name", "none, since questions and passages have their own");
        }
        let is_mean = match prompts.text("similarity_fn_name")? {
            None | Some("maxsim") => false,
            Some("meanmaxsim") => true,
            Some(_) => return prompts.fail("similarity_fn_name", "maxsim or meanmaxsim"),
        };
        let all = modules::read(folder, None)?.with_context(|| format!("[{EXAMPLE}] there is no {MODULES}"))?;
        let (masks, others): (Vec<Module>, Vec<Module>) = all.into_iter().partition(|module| module.kind == MASK);
        let Some((first, after)) = others.split_first().filter(|(first, _)| first.kind == "Transformer") else {
            bail!("[{EXAMPLE}] {MODULES} does not begin with Transformer")
        };
        let [mask] = &masks[..] else { bail!("[{EXAMPLE}] {MODULES} has {} {MASK}, expected one", masks.len()) };
        let file = mask.file("config.json");
        let fields = Fields::of(&file, read_json(&folder.join(&file))?)?;
        fields.only(&["skiplist_words", "skiplist_tasks", "keep_only_token_ids"])?;
        if !fields.get("keep_only_token_ids").is_null() {
            return fields.fail("keep_only_token_ids", "none");
        }
        let transformer = TransformerSettings::read(&folder.join(&first.path))?;
        transformer.require("feature-extraction", "last_hidden_state")?;
        transformer.refuse_template()?;
        let steps = Steps::on_tokens(folder, after, device)?;
        Ok(Self { model: first.path.clone(), transformer, mask: fields, steps, prompts, is_mean })
    }

    /// Returns the given prompt, or else the one of this name, or else the one before questions, if there is one.
    pub fn question_prompt(&self, given: Option<&str>, name: Option<&str>) -> Result<Option<String>> {
        if given.is_none() && name.is_none() {
            return Ok(self.side_prompt("query"));
        }
        prompt(&self.prompts, given, name)
    }

    /// Returns the prompt of one side, questions or passages, if there is one.
    fn side_prompt(&self, side: &str) -> Option<String> {
        self.prompts.get("prompts")[side].as_str().map(str::to_string)
    }
}

/// A model with a vector for each token.
pub struct Late<'a> {
    model: &'a Encoder,
    settings: &'a LateSettings,
    questions: SimpleTokenizer,
    pub passages: SimpleTokenizer,
    /// The most tokens of a passage.
    pub most: Option<usize>,
    /// The id of the token after questions, if they are expanded.
    expansion: Option<u32>,
    /// The ids of tokens that are not scored, in questions and in passages.
    skipped: HashSet<u32>,
    skips_questions: bool,
    skips_passages: bool,
}

impl<'a> Late<'a> {
    /// Reads the tokenizer in the folder of a model.
    pub fn read(folder: &Path, settings: &'a LateSettings, model: &'a Encoder) -> Result<Self> {
        let own = &settings.transformer;
        let most = max_tokens(own.max_tokens, folder, model.max_tokens)?;
        let of_questions = match &own.expansion {
            Some(Expansion { length, cuts: true, .. }) => Some(*length),
            Some(Expansion { length, .. }) => own.query_tokens.or(most).map(|tokens| tokens.max(*length)),
            None => own.query_tokens.or(most),
        };
        let of_passages = own.document_tokens.or(most);
        let whole = tokenizer(folder)?;
        let passages = cutting(whole.clone(), of_passages)?;
        let json = read_optional(&folder.join(TOKENIZER))?;
        let mut expansion = None;
        if let Some(Expansion { token, .. }) = &own.expansion {
            if json["padding_side"] == "left" {
                bail!("[{EXAMPLE}] questions are expanded on the left, expected the right")
            }
            let special = special_token(&json["mask_token"]).or(special_token(&json["eos_token"]));
            let named = token.as_deref().or(special);
            let Some(name) = named else {
                bail!("[{EXAMPLE}] questions are expanded, and {TOKENIZER} has no mask_token and no eos_token")
            };
            let id = passages.token_to_id(name);
            let unknown = || format!("[{EXAMPLE}] questions are expanded by {name:?}, which is not in the vocabulary");
            expansion = Some(id.with_context(unknown)?);
        }
        let words = settings.mask.get("skiplist_words").as_array().into_iter().flatten().filter_map(Value::as_str);
        let skipped = words.filter_map(|word| passages.token_to_id(word)).collect();
        let tasks = settings.mask.get("skiplist_tasks");
        let has = |task: &str| tasks.as_array().into_iter().flatten().any(|name| name == task);
        Ok(Self {
            model,
            settings,
            questions: cutting(whole, of_questions)?,
            passages,
            most: of_passages,
            expansion,
            skipped,
            skips_questions: has("query"),
            skips_passages: has("document") || tasks.is_null(),
        })
    }

    /// Computes the vectors (T, E) of the tokens of a question that are scored.
    pub fn question(&self, question: &str, prompt: Option<&str>) -> Result<Tensor> {
        let mut ids = self.settings.transformer.encode(&self.questions, prompt, question)?.ids;
        let mut attended = ids.len();
        if let (Some(expansion), Some(id)) = (&self.settings.transformer.expansion, self.expansion) {
            ids.resize(ids.len().max(expansion.length), id);
            if expansion.attends {
                attended = ids.len();
            }
        }
        let vectors = self.settings.steps.forward(&self.model.forward_attended(&ids, attended)?)?;
        self.scored(&vectors, &ids, self.skips_questions)
    }

    /// Tokenizes passages after the prompt for them.
    pub fn encode(&self, passages: &[String]) -> Result<Vec<Encoding>> {
        let prompt = self.settings.side_prompt("document");
        let Self { passages: tokenizer, settings: LateSettings { transformer, .. }, .. } = self;
        passages.par_iter().map(|passage| transformer.encode(tokenizer, prompt.as_deref(), passage)).collect()
    }

    /// Computes the scores of passages for a question with these vectors (T, E).
    pub fn scores(&self, question: &Tensor, passages: &[&[u32]]) -> Result<Vec<f32>> {
        let hidden = self.model.forward(passages)?;
        let vectors = self.settings.steps.forward(&hidden)?;
        let lens: Vec<_> = passages.iter().map(|ids| ids.len()).collect();
        let mut scores = Vec::with_capacity(passages.len());
        for (ids, of_tokens) in passages.iter().zip(parts(&vectors, &lens)?) {
            let own = self.scored(&of_tokens, ids, self.skips_passages)?;
            let nearest = question.matmul(&own.t()?)?.max(D::Minus1)?;
            let score = if self.settings.is_mean { nearest.mean_all()? } else { nearest.sum_all()? };
            scores.push(score.to_scalar()?);
        }
        Ok(scores)
    }

    /// Returns the vectors of the tokens that are scored.
    fn scored(&self, vectors: &Tensor, ids: &[u32], skips: bool) -> Result<Tensor> {
        let rows = 0..ids.len() as u32;
        let rows: Vec<u32> = rows.filter(|&row| !(skips && self.skipped.contains(&ids[row as usize]))).collect();
        if rows.is_empty() {
            bail!("[{EXAMPLE}] a text has no token that is scored")
        }
        vectors.index_select(&Tensor::new(rows, vectors.device())?, 0)
    }
}

//! Late interaction (ColBERT, Khattab and Zaharia 2020, arXiv:2004.12832): question and passage are read apart, and
//! each has a vector for each token. The score is the sum over the question's tokens of the largest dot product with a
//! token of the passage (MaxSim).

use std::collections::HashSet;
use std::path::Path;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Context, D, Result, Tensor, bail};
use rayon::prelude::*;

use crate::common::{EXAMPLE, read_optional};
use crate::embedding::pooling::parts;
use crate::embedding::transformer::Expansion;
use crate::late_settings::LateSettings;
use crate::model::Encoder;
use crate::texts::{TOKENIZER, cutting, max_tokens, special_token};

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
        let whole = settings.tokenizer(folder)?;
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
        let skipped = settings.mask.words.iter().filter_map(|word| passages.token_to_id(word)).collect();
        Ok(Self {
            model,
            settings,
            questions: cutting(whole, of_questions)?,
            passages,
            most: of_passages,
            expansion,
            skipped,
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
        self.scored(&vectors, &ids, self.settings.mask.in_questions)
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
            let own = self.scored(&of_tokens, ids, self.settings.mask.in_passages)?;
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

//! Runs sentences through the model and the modules after it, in batches of sentences of about the same length.

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use crate::common::EXAMPLE;
use crate::embedding::pipeline::Pipeline;
use crate::embedding::prompts::num_prompt_tokens;
use crate::model::Encoder;

/// The embeddings of sentences.
pub struct Embeddings {
    /// The vectors (N, E) in f32, in the order of the sentences.
    pub vectors: Tensor,
    /// The number of tokens of each sentence.
    pub lens: Vec<usize>,
    /// The number of sentences that were cut.
    pub cut: usize,
}

/// A model with the modules after it.
pub struct Embedder<'a> {
    pub model: &'a Encoder,
    pub tokenizer: &'a SimpleTokenizer,
    pub pipeline: &'a Pipeline,
    /// The text before every sentence, if there is one.
    pub prompt: Option<&'a str>,
    /// The number of sentences that go through the model at a time.
    pub batch: usize,
}

impl Embedder<'_> {
    /// Tokenizes a sentence after the prompt.
    pub fn encode(&self, sentence: &str) -> Result<Encoding> {
        self.pipeline.settings.encode(self.tokenizer, self.prompt, sentence)
    }

    /// Computes the vectors of the sentences; `done` is called with the number of sentences done and in all.
    ///
    /// # Errors
    /// As the model, and if a sentence has no token.
    pub fn embed(&self, sentences: &[String], done: &mut dyn FnMut(usize, usize)) -> Result<Embeddings> {
        let &Self { tokenizer, prompt, .. } = self;
        let settings = &self.pipeline.settings;
        let encodings = sentences.par_iter().map(|sentence| settings.encode(tokenizer, prompt, sentence));
        let encodings = encodings.collect::<Result<Vec<_>>>()?;
        let unpooled = self.num_unpooled()?;
        // A batch has texts of about one length, so that no thread waits for a long one.
        let mut order: Vec<usize> = (0..encodings.len()).collect();
        order.sort_by_key(|&sentence| encodings[sentence].ids.len());
        let mut batches = Vec::new();
        let mut num_done = 0;
        for chosen in order.chunks(self.batch) {
            let texts: Vec<_> = chosen.iter().map(|&sentence| encodings[sentence].ids.as_slice()).collect();
            let lens: Vec<_> = texts.iter().map(|ids| ids.len()).collect();
            batches.push(self.pipeline.forward(&self.model.forward(&texts)?, &lens, unpooled)?);
            num_done += chosen.len();
            done(num_done, sentences.len());
        }
        let Some(first) = batches.first() else { bail!("[{EXAMPLE}] there is no text") };
        let mut rows = vec![0u32; order.len()];
        for (row, &sentence) in order.iter().enumerate() {
            rows[sentence] = row as u32;
        }
        let rows = Tensor::new(rows, first.device())?;
        Ok(Embeddings {
            vectors: Tensor::cat(&batches, 0)?.index_select(&rows, 0)?,
            lens: encodings.iter().map(|encoding| encoding.ids.len()).collect(),
            cut: encodings.iter().filter(|encoding| encoding.num_truncated > 0).count(),
        })
    }

    /// Returns the number of tokens at the beginning of each sentence that are not pooled: the prompt's tokens, unless
    /// the prompt is pooled too.
    fn num_unpooled(&self) -> Result<usize> {
        match (self.prompt, self.pipeline.pooling()) {
            (Some(prompt), Some(pooling)) if !pooling.includes_prompt => {
                num_prompt_tokens(prompt, &self.pipeline.settings, self.tokenizer)
            }
            _ => Ok(0),
        }
    }
}

//! Runs sentences through the model and the modules after it, in batches of sentences of about the same length.

use std::num::NonZeroUsize;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, Tensor};
use rayon::prelude::*;

use crate::chat::ChatTexts;
use crate::embedding::pipeline::Pipeline;
use crate::embedding::prompts::num_prompt_tokens;
use crate::model::Encoder;
use crate::texts::in_batches;

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
    pub sentences: Sentences<'a>,
    /// The number of sentences that go through the model at a time.
    pub batch: NonZeroUsize,
}

/// The way in which sentences become tokens.
pub struct Sentences<'a> {
    pub tokenizer: &'a SimpleTokenizer,
    pub pipeline: &'a Pipeline,
    /// The text before every sentence, if there is one.
    pub prompt: Option<&'a str>,
    /// The chat template that makes texts of sentences and the prompt, if there is one.
    pub chat: Option<ChatTexts<'a>>,
}

impl Sentences<'_> {
    /// Tokenizes a sentence with the prompt.
    pub fn encode(&self, sentence: &str) -> Result<Encoding> {
        match &self.chat {
            Some(chat) => chat.encode(sentence),
            None => self.pipeline.settings.encode(self.tokenizer, self.prompt, sentence),
        }
    }

    /// Returns the number of tokens at the beginning of each sentence that are not pooled: the prompt's tokens, unless
    /// the prompt is pooled too, as that of a chat template is.
    fn num_unpooled(&self) -> Result<usize> {
        let Pipeline { pooling, settings, .. } = self.pipeline;
        match self.prompt {
            Some(prompt) if !pooling.includes_prompt && self.chat.is_none() => {
                num_prompt_tokens(prompt, settings, self.tokenizer)
            }
            _ => Ok(0),
        }
    }

    /// Returns the description of the prompt in reports.
    pub fn shown_prompt(&self) -> String {
        match self.prompt {
            None | Some("") => String::new(),
            Some(prompt) if self.chat.is_some() => format!(", each after {prompt:?} as the system's message"),
            Some(prompt) if self.pipeline.pooling.includes_prompt => format!(", each after {prompt:?}"),
            Some(prompt) => format!(", each after {prompt:?}, which is not pooled"),
        }
    }
}

impl Embedder<'_> {
    /// Computes the vectors of the sentences; `done` is called with the number of sentences done and in all.
    ///
    /// # Errors
    /// As the model, and if a sentence has no token.
    pub fn embed(&self, sentences: &[String], done: &mut dyn FnMut(usize, usize)) -> Result<Embeddings> {
        let own = &self.sentences;
        let encodings = sentences.par_iter().map(|sentence| own.encode(sentence)).collect::<Result<Vec<_>>>()?;
        let unpooled = own.num_unpooled()?;
        let vectors = in_batches(&encodings, self.batch, done, |batch| {
            let texts: Vec<_> = batch.iter().map(|sentence| sentence.ids.as_slice()).collect();
            let lens: Vec<_> = texts.iter().map(|ids| ids.len()).collect();
            let vectors = own.pipeline.forward(&self.model.forward(&texts)?, &lens, unpooled)?;
            (0..batch.len()).map(|row| vectors.get(row)).collect()
        })?;
        Ok(Embeddings {
            vectors: Tensor::stack(&vectors, 0)?,
            lens: encodings.iter().map(|encoding| encoding.ids.len()).collect(),
            cut: encodings.iter().filter(|encoding| encoding.num_truncated > 0).count(),
        })
    }
}

//! Sentences through the model in batches, and their hidden states to one vector each.

use std::sync::mpsc;
use std::thread;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{DType, Result, Tensor, bail};

use crate::model::Encoder;
use crate::recipe::{Pooling, Recipe};

/// Batches of tokens that are ready while the model computes another.
const READY: usize = 2;

/// What sentences have become.
pub struct Embeddings {
    /// (N, E) in f32, in the order of the sentences.
    pub vectors: Tensor,
    /// The number of tokens of each sentence.
    pub lens: Vec<usize>,
    /// How many of the sentences were cut.
    pub cut: usize,
}

/// What makes vectors of sentences.
pub struct Embedder<'a> {
    pub model: &'a Encoder,
    pub tokenizer: &'a SimpleTokenizer,
    pub recipe: &'a Recipe,
    /// Sentences that go through the model at a time.
    pub batch: usize,
}

impl Embedder<'_> {
    /// The vectors of the sentences, which are tokenised on another thread while the model computes; `done` is told how
    /// many of them there are.
    ///
    /// # Errors
    /// As the model, and for a sentence without a token.
    pub fn embed(&self, sentences: &[String], done: &mut dyn FnMut(usize, usize)) -> Result<Embeddings> {
        let &Self { model, tokenizer, recipe, batch } = self;
        let (mut vectors, mut lens, mut cut) = (Vec::new(), Vec::new(), 0);
        thread::scope(|scope| {
            let (sender, batches) = mpsc::sync_channel(READY);
            scope.spawn(move || {
                for (i, sentences) in sentences.chunks(batch).enumerate() {
                    // The other end is gone after an error.
                    if sender.send(tokens(sentences, i * batch, tokenizer, recipe)).is_err() {
                        break;
                    }
                }
            });
            for encodings in batches {
                let encodings = encodings?;
                let texts: Vec<_> = encodings.iter().map(|encoding| encoding.ids.as_slice()).collect();
                let hidden = model.forward(&texts)?;
                let mut start = 0;
                for len in texts.iter().map(|text| text.len()) {
                    vectors.push(pool(&hidden.narrow(0, start, len)?, recipe.pooling)?);
                    lens.push(len);
                    start += len;
                }
                cut += encodings.iter().filter(|encoding| encoding.num_truncated > 0).count();
                done(lens.len(), sentences.len());
            }
            Ok::<_, candle_core::Error>(())
        })?;
        let vectors = Tensor::stack(&vectors, 0)?;
        Ok(Embeddings { vectors: if recipe.normalize { normalized(&vectors)? } else { vectors }, lens, cut })
    }
}

/// A batch of sentences as tokens; `first` is the index of the first of them.
pub fn tokens(
    sentences: &[String],
    first: usize,
    tokenizer: &SimpleTokenizer,
    recipe: &Recipe,
) -> Result<Vec<Encoding>> {
    let encode = |(i, sentence): (usize, &String)| {
        let text = format!("{}{sentence}", recipe.prompt);
        let encoding = tokenizer.encode(&if recipe.lowercase { text.to_lowercase() } else { text })?;
        if encoding.ids.is_empty() {
            bail!("[sentence_embedding] sentence {} has no token", first + i + 1)
        }
        Ok(encoding)
    };
    sentences.iter().enumerate().map(encode).collect()
}

/// The vector (E,) of one sentence's hidden states (T, E).
fn pool(hidden: &Tensor, pooling: Pooling) -> Result<Tensor> {
    match pooling {
        Pooling::Mean => hidden.to_dtype(DType::F32)?.mean(0),
        Pooling::Cls => hidden.get(0)?.to_dtype(DType::F32),
    }
}

/// Vectors (N, E) at length 1; one of zeros stays zeros.
pub fn normalized(vectors: &Tensor) -> Result<Tensor> {
    // The floor of PyTorch's `normalize`.
    let norms = vectors.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12)?;
    vectors.broadcast_div(&norms)
}

//! Sentences through the model in batches, and their hidden states to one vector each.

use candle_attention::text::SimpleTokenizer;
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use crate::model::Encoder;
use crate::recipe::{Pooling, Recipe};

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
    /// The vectors of the sentences; `done` is told how many of them there are.
    ///
    /// # Errors
    /// As the model, and for a sentence without a token.
    pub fn embed(&self, sentences: &[String], done: &mut dyn FnMut(usize, usize)) -> Result<Embeddings> {
        let &Self { model, tokenizer, recipe, batch } = self;
        let (mut vectors, mut lens, mut cut) = (Vec::new(), Vec::new(), 0);
        for batch in sentences.chunks(batch) {
            let encodings = batch.par_iter().map(|sentence| recipe.encode(tokenizer, sentence));
            let encodings = encodings.collect::<Result<Vec<_>>>()?;
            let texts: Vec<_> = encodings.iter().map(|encoding| encoding.ids.as_slice()).collect();
            let (hidden, mut start) = (model.forward(&texts)?, 0);
            for encoding in &encodings {
                let len = encoding.ids.len();
                vectors.push(pool(&hidden.narrow(0, start, len)?, recipe.pooling)?);
                lens.push(len);
                start += len;
                cut += usize::from(encoding.num_truncated > 0);
            }
            done(lens.len(), sentences.len());
        }
        let vectors = Tensor::stack(&vectors, 0)?;
        Ok(Embeddings { vectors: if recipe.normalize { normalized(&vectors)? } else { vectors }, lens, cut })
    }
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

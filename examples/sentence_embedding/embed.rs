//! Sentences through the model in batches, and their hidden states to one vector each.

use candle_attention::text::SimpleTokenizer;
use candle_core::{DType, Device, IndexOp, Result, Tensor, bail};
use indicatif::ProgressBar;

use crate::model::Encoder;
use crate::recipe::{Pooling, Recipe};

/// Sentences as tokens.
pub struct Tokens {
    pub ids: Vec<Vec<u32>>,
    /// How many of the sentences were cut.
    pub cut: usize,
}

impl Tokens {
    /// # Errors
    /// For a sentence without a token.
    pub fn of(sentences: &[String], tokenizer: &SimpleTokenizer, recipe: &Recipe) -> Result<Self> {
        let mut tokens = Self { ids: Vec::with_capacity(sentences.len()), cut: 0 };
        for (i, sentence) in sentences.iter().enumerate() {
            let text = format!("{}{sentence}", recipe.prompt);
            let encoding = tokenizer.encode(&if recipe.lowercase { text.to_lowercase() } else { text })?;
            if encoding.ids.is_empty() {
                bail!("[sentence_embedding] sentence {} has no token", i + 1)
            }
            tokens.cut += usize::from(encoding.num_truncated > 0);
            tokens.ids.push(encoding.ids);
        }
        Ok(tokens)
    }
}

/// The vectors (N, E) of the sentences in f32, in their order.
///
/// # Errors
/// As the model.
pub fn embed(
    model: &Encoder,
    ids: &[Vec<u32>],
    recipe: &Recipe,
    (batch, device): (usize, &Device),
    bar: &ProgressBar,
) -> Result<Tensor> {
    // Neighbours in length share a batch, so that little of it is padding.
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&sentence| std::cmp::Reverse(ids[sentence].len()));
    bar.set_length(ids.len() as u64);
    let mut vectors = vec![None; ids.len()];
    for batch in order.chunks(batch) {
        let lens: Vec<usize> = batch.iter().map(|&sentence| ids[sentence].len()).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let rows = batch.iter().flat_map(|&sentence| {
            let padding = longest - ids[sentence].len();
            ids[sentence].iter().copied().chain(std::iter::repeat_n(0, padding))
        });
        let padded = Tensor::from_vec(rows.collect::<Vec<_>>(), (batch.len(), longest), device)?;
        let hidden = model.forward(&padded, &lens)?;
        for (row, (&sentence, &len)) in batch.iter().zip(&lens).enumerate() {
            vectors[sentence] = Some(pool(&hidden.i((row, ..len))?, recipe.pooling)?);
        }
        bar.inc(batch.len() as u64);
    }
    let vectors = Tensor::stack(&vectors.into_iter().flatten().collect::<Vec<_>>(), 0)?;
    if recipe.normalize { normalized(&vectors) } else { Ok(vectors) }
}

/// The vector (E,) of one sentence's hidden states (T, E), without padding.
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

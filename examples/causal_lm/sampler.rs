//! Chooses the next token.

use candle_attention::TorchSeed;
use candle_core::{DType, Result, Tensor};
use candle_nn::ops::softmax_last_dim;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy)]
pub enum Sampling {
    /// The likeliest.
    Greedy,
    /// Drawn from the likeliest tokens that have the probability `top_p` together.
    TopP { temperature: f64, top_p: f64 },
}

/// Draws the tokens of one sequence.
pub struct Sampler {
    sampling: Sampling,
    rng: TorchSeed,
}

impl Sampler {
    pub fn new(sampling: Sampling, seed: u64) -> Self {
        Self { sampling, rng: TorchSeed::new(seed) }
    }

    /// A token from its logits (V,).
    pub fn sample(&self, logits: &Tensor) -> Result<u32> {
        let logits = logits.to_dtype(DType::F32)?;
        let Sampling::TopP { temperature, top_p } = self.sampling else {
            return logits.argmax(0)?.to_scalar();
        };
        let probabilities: Vec<f32> = softmax_last_dim(&(logits / temperature)?)?.to_vec1()?;
        let mut candidates: Vec<_> = (0u32..).zip(probabilities).collect();
        candidates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        // The sum of the probabilities up to each token, to the first that reaches `top_p`.
        let mut sum = 0.0;
        let sums = candidates.iter().map(|&(_, p)| {
            sum += f64::from(p);
            sum
        });
        let mut sums: Vec<_> = sums.collect();
        sums.truncate(sums.partition_point(|&sum| sum < top_p) + 1);
        let total = sums.last().copied().unwrap_or_default();
        let drawn = f64::from(self.rng.rand(1)?.to_vec1::<f32>()?[0]) * total;
        let chosen = sums.partition_point(|&sum| sum <= drawn).min(sums.len() - 1);
        Ok(candidates[chosen].0)
    }
}

//! A factor on queries that grows with their positions.

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::Positions;

/// A factor on each query by its position p, `1 + beta · ln(1 + floor((p + first) / interval))`, so that the weights of
/// long contexts stay sharp: Llama 4's attention temperature, Ministral 3 (<https://arxiv.org/abs/2501.19399>).
///
/// ```
/// use candle_attention::{MultiHeadAttentionConfig, QueryScaling};
/// let scaling = QueryScaling { beta: 0.1, interval: 8192, first: 1 };
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_query_scaling(scaling);
/// cfg.validate().expect("the numbers fit together");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryScaling {
    /// How fast the factor grows (`attn_scale`, `llama_4_scaling_beta`).
    pub beta: f64,
    /// The positions that have one factor (`floor_scale`, `original_max_position_embeddings`).
    pub interval: usize,
    /// The number that the first position counts as: 1 in Llama 4, 0 in Ministral 3.
    #[serde(default)]
    pub first: usize,
}

impl QueryScaling {
    /// Checks the numbers.
    ///
    /// # Errors
    /// Says what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        if !(self.beta as f32).is_finite() {
            bail!("[query_scaling] beta is {}, expected a finite number", self.beta)
        }
        if self.interval == 0 || self.interval > u32::MAX as usize {
            bail!("[query_scaling] interval is {}, expected 1 to {}", self.interval, u32::MAX)
        }
        if self.first > u32::MAX as usize {
            bail!("[query_scaling] first is {}, expected at most {}", self.first, u32::MAX)
        }
        Ok(())
    }

    /// The factors (1, 1, T, 1), or (B, 1, T, 1) where sequences have positions of their own; `None` where all are 1.
    pub(crate) fn factors(&self, positions: &Positions, dtype: DType, device: &Device) -> Result<Option<Tensor>> {
        if positions.length().saturating_add(self.first) <= self.interval {
            return Ok(None);
        }
        let factor = |&position: &u32| {
            let turns = (position as usize).saturating_add(self.first) / self.interval;
            1.0 + self.beta * (turns as f64).ln_1p()
        };
        let factors: Vec<f64> = positions.entries().iter().map(factor).collect();
        let factors = Tensor::from_vec(factors, (positions.rows(), 1, positions.per_sequence(), 1), &Device::Cpu)?;
        factors.to_dtype(dtype)?.to_device(device).map(Some)
    }
}

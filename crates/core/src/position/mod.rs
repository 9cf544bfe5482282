//! Positions: rotary embeddings of queries and keys (`rope`), a factor on queries that grows with their positions, and
//! score modifiers, a file each: biases by distance (`alibi`, `relative_bias`) and relative positions by content
//! (`content`).

mod alibi;
mod content;
mod relative_bias;
mod rope;

pub use alibi::{AlibiConfig, alibi_slopes};
pub use content::{ContentPositions, DisentangledConfig, RelativeEmbeddings};
pub use relative_bias::{RelativeBias, RelativeBiasConfig};
pub use rope::{
    METAL_ROTATION_CASE, ROTATION_CASE, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle, RotaryEmbedding,
};

pub(crate) use alibi::alibi;
pub(crate) use content::{ContentScores, KeysByHeads, LayerSpecs, content_specs};
pub(crate) use rope::{Rotation, score_factor};

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::mask::AttentionMask;
use crate::sdpa::{PackedSequences, SdpaOptions};
use candle_attention_modules::base::{Dim, Expect, accumulation_dtype, check_memory, number, to_device};
use candle_attention_modules::linear::Projections;

/// The first position that f32, in which angles are computed, cannot tell from its neighbour.
const END: usize = 1 << 24;

/// The position of each token of a call: (T,) for all sequences, or (B, T).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Positions {
    /// Row by row, T for all sequences or B · T.
    pub entries: Vec<u32>,
    /// T.
    pub t: usize,
    /// The largest entry + 1; 0 without entries.
    pub length: usize,
}

impl Positions {
    /// Returns T positions from each offset on. There is one offset for all sequences, or one for each.
    pub(crate) fn starting_at(offsets: &[usize], t: usize) -> Result<Self> {
        let largest = offsets.iter().copied().max().unwrap_or(0);
        if largest.checked_add(t).is_none_or(|length| length > END) {
            bail!("[rope] positions from {largest} on, {t} of them, reach {END}, from where f32 cannot tell them apart")
        }
        Self::of_each(offsets.iter().flat_map(|&offset| offset..offset + t), t)
    }

    /// Returns a position for each of T tokens of each sequence, row by row.
    pub(crate) fn of_each(positions: impl IntoIterator<Item = usize>, t: usize) -> Result<Self> {
        let mut entries = Vec::new();
        let mut length = 0;
        for position in positions {
            if position >= END {
                bail!("[rope] position {position} is past {}, from where f32 cannot tell them apart", END - 1)
            }
            length = length.max(position + 1);
            entries.push(position as u32);
        }
        Ok(Self { entries, t, length })
    }

    /// Reads an integer tensor (T,) or (B, T); `name` names it in errors.
    pub(crate) fn from_tensor(name: &str, positions: &Tensor, b: usize, t: usize) -> Result<Self> {
        let [b, t_dim] = [Dim::Named("B", b), Dim::Named("T", t)];
        let positions = Expect::many("rope", name, positions).shape_of(&[&[t_dim], &[b, t_dim]])?;
        Self::of_each(positions.counts()?, t)
    }

    /// Returns B, or 1 if all sequences have the same positions.
    pub(crate) fn rows(&self) -> usize {
        self.entries.len().checked_div(self.t).unwrap_or(1)
    }

    /// Returns the positions of sequence `b`.
    pub(crate) fn of_sequence(&self, b: usize) -> &[u32] {
        let start = if self.entries.len() == self.t { 0 } else { b * self.t };
        &self.entries[start..start + self.t]
    }

    /// Returns the first position of each sequence, or of all, if the positions count up from it by one.
    pub(super) fn starts(&self) -> Option<Vec<u32>> {
        let mut rows = self.entries.chunks(self.t.max(1));
        let is_run = |row: &[u32]| row.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        rows.clone().all(is_run).then(|| rows.by_ref().map(|row| row[0]).collect())
    }
}

/// The latest computed value with its key: all layers of a model ask for the same value in turn.
type Latest<K, V> = Mutex<Option<(K, V)>>;

/// Returns the latest value if `is_same` is true for its key; otherwise computes a value, and stores it if `key`
/// returns a key for it.
///
/// A value that is tracked for gradients must not be stored: training changes a variable in place, and the stored value
/// would be outdated.
fn latest<K, V: Clone>(
    latest: &Latest<K, V>,
    is_same: impl FnOnce(&K) -> bool,
    compute: impl FnOnce() -> Result<V>,
    key: impl FnOnce(&V) -> Option<K>,
) -> Result<V> {
    let latest = || latest.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((latest_key, value)) = &*latest()
        && is_same(latest_key)
    {
        return Ok(value.clone());
    }
    // Not under the lock: a thread that computes may steal work that needs the same lock.
    let value = compute()?;
    *latest() = key(&value).map(|key| (key, value.clone()));
    Ok(value)
}

/// Returns the entries of a table (N, H) at the indices, which are listed in a shape (..), by head: (H, ..), in the
/// dtype in which scores are computed.
fn gathered(op: &str, table: &Tensor, indices: impl Iterator<Item = usize>, shape: &[usize]) -> Result<Tensor> {
    let dtype = accumulation_dtype(table.dtype());
    let device = table.device();
    let dims = [&table.dims()[1..], shape].concat();
    let bytes = [dims.as_slice(), &[dtype.size_in_bytes()]].concat();
    check_memory(op, format_args!("a bias of {dims:?}"), &bytes)?;
    if shape.contains(&0) {
        return Tensor::zeros(dims, dtype, device);
    }
    let indices = Tensor::from_iter(indices.map(|index| index as u32), device)?;
    // By head first, so that the gathered entries are in the order of scores.
    table.to_dtype(dtype)?.t()?.contiguous()?.index_select(&indices, 1)?.reshape(dims)
}

/// Attention temperature tuning of Llama 4 and Ministral 3 (<https://arxiv.org/abs/2501.19399>): a query at position p
/// is multiplied by `1 + beta · ln(1 + floor((p + first) / interval))`, so that the attention weights of long contexts
/// stay sharp. Positions count within each sequence, without padding on the left, unless the call sets them.
///
/// ```
/// use candle_attention::{MultiHeadAttentionConfig, AttentionTemperature};
/// let scaling = AttentionTemperature { beta: 0.1, interval: 8192, first: 1 };
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_attention_temperature(scaling);
/// cfg.validate().expect("the numbers fit together");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionTemperature {
    /// The growth of the factor (`attn_scale`, `llama_4_scaling_beta`).
    pub beta: f64,
    /// The number of consecutive positions with the same factor (`floor_scale`, `original_max_position_embeddings`).
    pub interval: usize,
    /// The number of the first position: 1 in Llama 4, 0 in Ministral 3.
    #[serde(default)]
    pub first: usize,
}

impl AttentionTemperature {
    /// Checks that every number is in its range.
    ///
    /// # Errors
    /// Names the number, what was found and what was expected.
    pub fn validate(&self) -> Result<()> {
        const OP: &str = "attention_temperature";
        number::expect(OP, "beta", self.beta, |beta: f64| (beta as f32).is_finite(), "a finite number")?;
        number::within(OP, "interval", self.interval, 1..=u32::MAX as usize)?;
        number::within(OP, "first", self.first, 0..=u32::MAX as usize)
    }

    /// Returns the factors (1, 1, T, 1), or (B, 1, T, 1) if sequences have different positions; `None` if all are 1.
    pub(crate) fn factors(&self, positions: &Positions, dtype: DType, device: &Device) -> Result<Option<Tensor>> {
        if positions.length.saturating_add(self.first) <= self.interval {
            return Ok(None);
        }
        let factor = |&position: &u32| {
            let turns = (position as usize).saturating_add(self.first) / self.interval;
            1.0 + self.beta * (turns as f64).ln_1p()
        };
        let factors: Vec<f64> = positions.entries.iter().map(factor).collect();
        let factors = Tensor::from_vec(factors, (positions.rows(), 1, positions.t, 1), &Device::Cpu)?;
        to_device(&factors.to_dtype(dtype)?, device).map(Some)
    }
}

/// The heads of keys and values.
#[derive(Debug, Clone)]
pub(crate) struct KeyValueHeads {
    /// (B, H_kv, T_kv, D).
    pub keys: Tensor,
    /// (B, H_kv, T_kv, D_v).
    pub values: Tensor,
}

/// The arguments of attention that score modifiers may change.
pub(crate) struct ScoreArguments {
    /// (B, H, T_q, D).
    pub q: Tensor,
    pub mask: AttentionMask,
    /// The options, whose scale is set.
    pub options: SdpaOptions,
    /// Scores by content that are added to the products of queries and keys.
    pub content_scores: Option<ContentScores>,
}

/// The facts about a call on which score modifiers depend.
pub(crate) struct CallContext<'a> {
    /// The positions of the queries and keys, for a layer with a modifier that depends on them.
    pub positions: Option<QueryKeyPositions<'a>>,
    /// Whether the caller passed positions.
    pub has_given_positions: bool,
    /// Whether the tokens of the call are the nodes of trees, whose indices are not their positions.
    pub has_tree: bool,
    pub packed: Option<&'a PackedSequences>,
    pub projections: &'a Projections,
    /// Whether it is a call of training.
    pub train: bool,
    /// The first input that relative positions by content do not support, for an error.
    pub unsupported_by_content: Option<&'static str>,
}

/// The positions of the queries, and of all keys that they may attend to.
#[derive(Clone, Copy)]
pub(crate) struct QueryKeyPositions<'a> {
    pub queries: &'a Positions,
    pub keys: &'a Positions,
}

/// A part of a layer that changes its attention scores: a bias, relative positions, a window.
pub(crate) trait ScoreTerm: Debug + Send + Sync {
    /// Changes the arguments of attention. `kv` are the call's heads of keys and values, or `None` if the queries
    /// attend to a cache.
    ///
    /// # Errors
    /// For calls that the modifier does not support.
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()>;
}

/// A score modifier that clones of a layer share.
pub(crate) type SharedTerm = Arc<dyn ScoreTerm>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_begin_at_each_offset() -> Result<()> {
        let each = Positions::starting_at(&[3, 0], 2)?;
        assert_eq!((each.entries.as_slice(), each.t, each.length), ([3, 4, 0, 1].as_slice(), 2, 5));
        let tensor = Tensor::new(&[[3i64, 4], [0, 1]], &Device::Cpu)?;
        assert_eq!(each, Positions::from_tensor("positions", &tensor, 2, 2)?);
        assert_eq!(Positions::starting_at(&[7], 0)?.length, 0);
        assert_eq!(Positions::starting_at(&[END - 2], 2)?.length, END);
        Ok(())
    }

    #[test]
    fn positions_of_2_to_the_24_and_more_are_an_error() {
        for offset in [END - 1, usize::MAX] {
            let error = Positions::starting_at(&[0, offset], 2).expect_err("too far").to_string();
            assert!(
                error.starts_with(&format!("[rope] positions from {offset} on, 2 of them, reach 16777216")),
                "{error}"
            );
        }
    }
}

//! Rotary embeddings of queries and keys, and the positions of one call.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::RopeConfig;
use super::angles::Tables;
use super::rotate::Rotation;
use crate::sdpa::FLOATS;
use crate::size::fits_in_memory;

/// The cosines and sines of a [`RopeConfig`] for heads of one width, and the rotation of queries and keys by them.
///
/// Cosines and sines are computed once, in f32, and kept in a table that grows with the positions; a clone shares it.
/// A model makes one for all layers that have the same config:
///
/// ```
/// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, RotaryEmbedding};
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let rope = RopeConfig::new(10_000.0);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_rope(rope.clone());
/// let rotary = RotaryEmbedding::new(&rope, cfg.head_dim())?;
/// let layers = (0..2).map(|i| MultiHeadAttention::new(&cfg, vb.pp(i))?.with_rotary(rotary.clone()));
/// let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
/// # assert_eq!(layers.len(), 2);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    tables: Arc<Tables>,
}

impl RotaryEmbedding {
    /// For heads of width `head_dim`. Nothing is computed yet.
    ///
    /// # Errors
    /// As [`RopeConfig::validate`].
    pub fn new(config: &RopeConfig, head_dim: usize) -> Result<Self> {
        config.validate(head_dim)?;
        Ok(Self { tables: Arc::new(Tables::new(config, head_dim)) })
    }

    /// What the tables were made for.
    pub fn config(&self) -> &RopeConfig {
        self.tables.config()
    }

    /// D, the width of a head.
    pub fn head_dim(&self) -> usize {
        self.tables.head_dim()
    }

    /// Queries or keys (B, H, T, D) rotated by integer positions (T,) or (B, T), in the same shape and dtype. The rotation
    /// is computed in f32 (f64 for f64). Differentiable.
    ///
    /// # Errors
    /// For another rank, width or dtype, for a result that does not fit in memory, and for positions of another shape, below 0, or of 2^24 and more, where f32 cannot
    /// tell them apart.
    pub fn apply(&self, xs: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let (b, t) = self.check(xs)?;
        self.rotate(xs, &Positions::from_tensor("positions", positions, b, t)?)
    }

    /// [`apply`](Self::apply) at the positions `offset`, `offset + 1` and so on.
    ///
    /// # Errors
    /// As that.
    pub fn apply_from(&self, xs: &Tensor, offset: usize) -> Result<Tensor> {
        let (_, t) = self.check(xs)?;
        self.rotate(xs, &Positions::starting_at(&[offset], t)?)
    }

    fn rotate(&self, xs: &Tensor, positions: &Positions) -> Result<Tensor> {
        self.at(positions).apply(&xs.transpose(1, 2)?)?.transpose(1, 2)
    }

    /// The rotation of one call, whose tensors have their sequences before their heads.
    pub(crate) fn at(&self, positions: &Positions) -> Rotation {
        let config = self.config();
        Rotation::new(self.tables.rows(positions), positions.per_sequence(), config.style())
    }

    /// B and T.
    fn check(&self, xs: &Tensor) -> Result<(usize, usize)> {
        let d = self.head_dim();
        let (b, t) = match *xs.dims() {
            [b, _, t, width] if width == d => (b, t),
            ref other => {
                bail!("[rope] xs have shape {other:?}, expected (B, H, T, D) with D = {d}")
            }
        };
        if !FLOATS.contains(&xs.dtype()) {
            bail!("[rope] xs have dtype {:?}, expected F32, F16, BF16 or F64", xs.dtype())
        }
        if !fits_in_memory(&[xs.dims(), &[xs.dtype().size_in_bytes()]].concat()) {
            bail!("[rope] xs of shape {:?} are too large to address or allocate", xs.dims())
        }
        Ok((b, t))
    }
}

/// The first position that f32, in which angles are computed, cannot tell from its neighbour.
const END: usize = 1 << 24;

/// The position of each token of a call: (T,) for all sequences, or (B, T).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Positions {
    /// Row by row.
    entries: Vec<u32>,
    t: usize,
    /// The largest entry + 1, or 0.
    length: usize,
}

impl Positions {
    /// T positions from each offset on: one offset for all sequences, or one for each.
    pub(crate) fn starting_at(offsets: &[usize], t: usize) -> Result<Self> {
        let largest = offsets.iter().copied().max().unwrap_or(0);
        let Some(length) = largest.checked_add(t).filter(|&length| length <= END) else {
            bail!("[rope] positions from {largest} on, {t} of them, reach {END}, from where f32 cannot tell them apart")
        };
        let length = if t == 0 || offsets.is_empty() { 0 } else { length };
        let entries = offsets.iter().flat_map(|&offset| (offset..offset + t).map(|position| position as u32)).collect();
        Ok(Self { entries, t, length })
    }

    /// A position for each of T tokens of each sequence, row by row.
    pub(crate) fn of_each(entries: Vec<usize>, t: usize) -> Result<Self> {
        let length = entries.iter().map(|&position| position.saturating_add(1)).max().unwrap_or(0);
        if length > END {
            bail!("[rope] position {} is past {}, from where f32 cannot tell them apart", length - 1, END - 1)
        }
        Ok(Self { entries: entries.into_iter().map(|position| position as u32).collect(), t, length })
    }

    /// From an integer tensor (T,) or (B, T); `name` says in errors what it is.
    pub(crate) fn from_tensor(name: &str, positions: &Tensor, b: usize, t: usize) -> Result<Self> {
        if positions.dtype().is_float() {
            bail!("[rope] {name} have dtype {:?}, expected integers", positions.dtype())
        }
        if positions.dims() != [t] && positions.dims() != [b, t] {
            bail!("[rope] {name} have shape {:?}, expected (T,) = [{t}] or (B, T) = [{b}, {t}]", positions.dims())
        }
        // A view of nothing may begin past the end of its buffer, where Candle's copies panic.
        if positions.elem_count() == 0 {
            return Ok(Self { entries: Vec::new(), t, length: 0 });
        }
        let wide = positions.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let mut length = 0;
        let read = |position: i64| match usize::try_from(position) {
            Ok(position) if position < END => {
                length = length.max(position + 1);
                Ok(position as u32)
            }
            _ => bail!("[rope] {name} hold {position}, expected 0 to {}", END - 1),
        };
        let entries = wide.into_iter().map(read).collect::<Result<_>>()?;
        Ok(Self { entries, t, length })
    }

    /// The largest position + 1, or 0.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// T.
    pub(super) fn per_sequence(&self) -> usize {
        self.t
    }

    /// Row by row, T for all sequences or B · T.
    pub(super) fn entries(&self) -> &[u32] {
        &self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_the_first_positions() -> Result<()> {
        let each = Positions::starting_at(&[3, 0], 2)?;
        assert_eq!((each.entries(), each.per_sequence(), each.length()), ([3, 4, 0, 1].as_slice(), 2, 5));
        let tensor = Tensor::new(&[[3i64, 4], [0, 1]], &Device::Cpu)?;
        assert_eq!(each, Positions::from_tensor("positions", &tensor, 2, 2)?);
        assert_eq!(Positions::starting_at(&[7], 0)?.length(), 0);
        assert_eq!(Positions::starting_at(&[END - 2], 2)?.length(), END);
        Ok(())
    }

    #[test]
    fn positions_past_what_f32_tells_apart_are_an_error() {
        for offset in [END - 1, usize::MAX] {
            let error = Positions::starting_at(&[0, offset], 2).expect_err("too far").to_string();
            assert!(
                error.starts_with(&format!("[rope] positions from {offset} on, 2 of them, reach 16777216")),
                "{error}"
            );
        }
    }
}

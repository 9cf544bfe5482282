//! Positions: rotary embeddings of queries and keys (`rope`), and what is added to scores (`terms`).

mod query_scaling;
mod rope;
mod terms;

pub use query_scaling::QueryScaling;
pub use rope::{RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle, RotaryEmbedding};
pub use terms::{
    AlibiConfig, ContentPositions, DisentangledConfig, RelativeBias, RelativeBiasConfig, RelativeEmbeddings,
    alibi_slopes,
};

pub(crate) use rope::{AxisPositions, Rotation, score_factor};
pub(crate) use terms::{ContentLayer, KeysByHeads, Scores, Term, TermCall, alibi, content};

use candle_core::{DType, Device, Result, Tensor, bail};

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
    pub(crate) fn per_sequence(&self) -> usize {
        self.t
    }

    /// B, or 1 where all sequences have the same.
    pub(super) fn rows(&self) -> usize {
        self.entries.len().checked_div(self.t).unwrap_or(1)
    }

    /// Those of sequence `b`.
    pub(crate) fn of_sequence(&self, b: usize) -> &[u32] {
        let start = if self.entries.len() == self.t { 0 } else { b * self.t };
        &self.entries[start..start + self.t]
    }

    /// The first position of each sequence, or of all, if the others count up from it by one.
    pub(super) fn starts(&self) -> Option<Vec<u32>> {
        let mut rows = self.entries.chunks(self.t.max(1));
        let is_run = |row: &[u32]| row.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        rows.clone().all(is_run).then(|| rows.by_ref().map(|row| row[0]).collect())
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

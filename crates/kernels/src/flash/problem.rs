//! A call as the caller describes it, and the checks of its sizes.

use std::ops::Range;

use super::dims::{AttentionDims, RowStrides};
use super::options::ScoreOptions;
use crate::error::{Error, check_len};
use crate::number::Strided;

/// The order of an attention output, or of gradients, in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputLayout {
    /// Contiguous as (B, H, T, D).
    #[default]
    Bhtd,
    /// Contiguous as (B, T, H, D), as a layer merges its heads: transposed and reshaped to (B, T, H·D) without a copy.
    Bthd,
}

impl OutputLayout {
    /// Returns the strides of contiguous rows of `width` elements.
    pub(super) fn strides(self, heads: usize, positions: usize, width: usize) -> RowStrides {
        // The strides of an empty tensor may overflow, and are not used.
        let sequence = heads.wrapping_mul(positions).wrapping_mul(width);
        match self {
            Self::Bhtd => RowStrides { sequence, head: positions.wrapping_mul(width), position: width },
            Self::Bthd => RowStrides { sequence, head: width, position: heads.wrapping_mul(width) },
        }
    }
}

/// Keys or values: (B, H_kv, T_kv) rows of contiguous numbers.
#[derive(Debug, Clone, Copy)]
pub enum KvRows<'a, E> {
    /// Elements of the queries' type.
    Float(Strided<'a, E, 3>),
    /// 8 bits a number, each of which is `(code - 128) · scale`.
    Q8 {
        /// The numbers.
        codes: Strided<'a, u8, 3>,
        /// The scale of each row.
        scales: Strided<'a, f32, 3>,
    },
}

impl<'a, E> From<Strided<'a, E, 3>> for KvRows<'a, E> {
    fn from(rows: Strided<'a, E, 3>) -> Self {
        Self::Float(rows)
    }
}

impl<E> KvRows<'_, E> {
    /// Checks that the slices contain every row of the shape.
    fn check(&self, name: &str, shape: [usize; 3], width: usize) -> Result<(), Error> {
        match self {
            Self::Float(rows) => rows.check(name, shape, width),
            Self::Q8 { codes, scales } => {
                codes.check(name, shape, width)?;
                scales.check(&format!("the scales of {name}"), shape, 1)
            }
        }
    }
}

/// One call of [`attend`](super::attend).
#[derive(Debug, Clone, Copy)]
pub struct AttentionProblem<'a, E> {
    /// The sizes of all other fields.
    pub dims: AttentionDims,
    /// Queries: (B, H, T_q), rows of D contiguous elements.
    pub q: Strided<'a, E, 3>,
    /// Keys: (B, H_kv, T_kv), rows of D.
    pub k: KvRows<'a, E>,
    /// Values: (B, H_kv, T_kv), rows of D_v, of the keys' type.
    pub v: KvRows<'a, E>,
    /// The keys that each query of each sequence attends to: (B, T_q). The output of a fully masked query is zeros.
    pub ranges: &'a [Range<usize>],
    /// The score modifiers.
    pub scores: ScoreOptions<'a>,
    /// The order of the attention output.
    pub output_layout: OutputLayout,
}

impl<E> AttentionProblem<'_, E> {
    /// Returns the number of elements of the attention output, B·H·T_q·D_v.
    ///
    /// # Errors
    /// If no memory is large enough for them.
    pub fn output_len(&self) -> Result<usize, Error> {
        let AttentionDims { b, h, t_q, d_v, .. } = self.dims;
        // No partial product overflows either, and log-sum-exps, which are not empty where D_v = 0, are counted.
        let counts = [b, h, t_q, d_v, size_of::<f32>()];
        let bytes = counts.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim.max(1)));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Error::Memory(format!("an attention output of {:?}", [b, h, t_q, d_v])));
        }
        Ok(b * h * t_q * d_v)
    }

    /// Checks that every index of the call is within its slice.
    pub(super) fn check(&self) -> Result<(), Error> {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        if h_kv == 0 || !h.is_multiple_of(h_kv) {
            return Err(Error::Shape(format!("expected key heads that divide the {h} query heads, found {h_kv}")));
        }
        self.q.check("q", [b, h, t_q], d)?;
        self.k.check("k", [b, h_kv, t_kv], d)?;
        self.v.check("v", [b, h_kv, t_kv], d_v)?;
        check_len("ranges", self.ranges.len(), b * t_q)?;
        // An empty range may begin anywhere.
        if let Some(range) = self.ranges.iter().find(|range| !range.is_empty() && range.end > t_kv) {
            return Err(Error::Shape(format!("expected ranges within {t_kv} keys, found {range:?}")));
        }
        self.scores.check(&self.dims, self.ranges)
    }
}

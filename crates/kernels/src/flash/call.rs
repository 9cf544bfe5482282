//! A checked call, and where its results are written.

use super::inputs::ScoreInputs;
use super::options::{SoftmaxStats, TileModifiers};
use super::problem::{CpuCall, KeysOfQueries};
use super::results::ResultPointers;
use crate::error::{Error, check_len};
use crate::number::{Number, Strided};
use candle_attention_call::{AttentionCall, AttentionDims, LayoutStrides, QueryRow};

/// Returns the number of elements of an attention output, B·H·T_q·D_v.
///
/// # Errors
/// If no memory is large enough for them.
pub(super) fn output_len(dims: &AttentionDims) -> Result<usize, Error> {
    let AttentionDims { b, h, t_q, d_v, .. } = *dims;
    // No partial product overflows either, and log-sum-exps, which are not empty where D_v = 0, are counted.
    let counts = [b, h, t_q, d_v, size_of::<f32>()];
    let bytes = counts.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim.max(1)));
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Error::Memory(format!("an attention output of {:?}", [b, h, t_q, d_v])));
    }
    Ok(b * h * t_q * d_v)
}

/// A checked call without its keys and values.
pub(super) struct CheckedCall<'a, E> {
    pub q: Strided<'a, E, 3>,
    pub inputs: ScoreInputs<'a>,
    output_strides: LayoutStrides,
}

impl<'a, E: Number> CheckedCall<'a, E> {
    /// Checks everything but the keys and values.
    pub fn new(call: &CpuCall<'a>) -> Result<Self, Error> {
        let AttentionCall { dims, q, keys: KeysOfQueries { ranges, .. }, output_layout, .. } = *call;
        output_len(&dims)?;
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, .. } = dims;
        if h_kv == 0 || !h.is_multiple_of(h_kv) {
            return Err(Error::Shape(format!("expected key heads that divide the {h} query heads, found {h_kv}")));
        }
        let q = q.rows("q", d)?;
        q.check("q", [b, h, t_q], d)?;
        check_len("ranges", ranges.len(), b * t_q)?;
        // An empty range may begin anywhere.
        if let Some(range) = ranges.iter().find(|range| !range.is_empty() && range.end > t_kv) {
            return Err(Error::Shape(format!("expected ranges within {t_kv} keys, found {range:?}")));
        }
        let options = TileModifiers::new(call)?;
        Ok(Self {
            q,
            inputs: ScoreInputs { dims, ranges, options, relative_bias: None },
            output_strides: output_layout.strides(dims.h, dims.t_q, dims.d_v),
        })
    }

    /// Returns the index of the first element of the output of a query.
    #[inline(always)]
    pub fn output_start(&self, row: QueryRow) -> usize {
        self.output_strides.start(row.b, row.head, row.query)
    }
}

/// A checked forward pass without its keys and values, and where its results are written.
pub struct ForwardCall<'a, E> {
    pub(super) checked: CheckedCall<'a, E>,
    pub(super) to: ResultPointers<'a, E>,
}

impl<E: Number> ForwardCall<'_, E> {
    /// Returns the output row of a query, D_v elements that are not initialised before they are written.
    #[inline(always)]
    pub(super) fn output_row(&self, row: QueryRow) -> *mut E {
        self.to.output.0.wrapping_add(self.checked.output_start(row))
    }

    /// Writes the log-sum-exp and the softmax statistics of a query, if they are requested.
    ///
    /// # Safety
    /// The row belongs to the call, and no other thread writes its log-sum-exp.
    #[inline(always)]
    pub(super) unsafe fn write_stats(&self, row: QueryRow, stats: SoftmaxStats, log_sum_exp: impl FnOnce() -> f32) {
        let index = self.checked.inputs.dims.row_index(row);
        // SAFETY: there is an element for each query of each head.
        unsafe {
            if let Some(to) = self.to.log_sum_exp {
                to.add(index).write(log_sum_exp());
            }
            if let Some(to) = self.to.softmax_stats {
                to.add(index).write(stats);
            }
        }
    }
}

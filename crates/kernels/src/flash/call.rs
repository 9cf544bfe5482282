//! A checked forward pass, and where its results are written.

use super::inputs::CheckedCall;
use super::options::SoftmaxStats;
use super::results::ResultPointers;
use crate::number::{Number, Strided};
use candle_attention_call::QueryRow;

/// A checked forward pass without its keys and values, and where its results are written.
pub struct ForwardCall<'a, E> {
    pub(super) inputs: CheckedCall<'a>,
    pub(super) q: Strided<'a, E, 3>,
    pub(super) to: ResultPointers<'a, E>,
}

impl<E: Number> ForwardCall<'_, E> {
    /// Returns the output row of a query, D_v elements that are not initialised before they are written.
    #[inline(always)]
    pub(super) fn output_row(&self, row: QueryRow) -> *mut E {
        self.to.output.0.wrapping_add(self.inputs.output_start(row))
    }

    /// Writes the log-sum-exp and the softmax statistics of a query, if they are requested.
    ///
    /// # Safety
    /// The row belongs to the call, and no other thread writes its log-sum-exp.
    #[inline(always)]
    pub(super) unsafe fn write_stats(&self, row: QueryRow, stats: SoftmaxStats, log_sum_exp: impl FnOnce() -> f32) {
        let index = self.inputs.dims.row_index(row);
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

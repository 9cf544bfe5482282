//! A checked call, and where its results are written.

use std::mem::MaybeUninit;

use super::dims::{QueryRow, RowStrides};
use super::inputs::ScoreInputs;
use super::options::SoftmaxStats;
use super::problem::AttentionProblem;
use super::statistics::output::StatisticsOutput;
use crate::cpu::SharedPtr;
use crate::error::{Error, check_len};
use crate::number::{Number, Strided};

/// The memory for the results of a call.
pub(super) struct AttentionOutputs<'a, E> {
    /// The attention output. Not written in a backward pass.
    pub output: *mut [E],
    pub lse: Option<&'a mut [MaybeUninit<f32>]>,
    pub stats: Option<&'a mut [MaybeUninit<SoftmaxStats>]>,
    pub statistics: Option<StatisticsOutput<'a>>,
}

/// A checked problem without its keys and values, and where its results are written.
pub struct AttentionCall<'a, E> {
    pub(super) q: Strided<'a, E, 3>,
    pub(super) inputs: ScoreInputs<'a>,
    output_strides: RowStrides,
    /// B·H·T_q rows of D_v elements.
    output: SharedPtr<E>,
    /// (B, H, T_q).
    lse: Option<SharedPtr<f32>>,
    /// (B, H, T_q).
    stats: Option<SharedPtr<SoftmaxStats>>,
    /// The statistics of the weights, if they are requested.
    pub(super) statistics: Option<StatisticsOutput<'a>>,
}

impl<'a, E: Number> AttentionCall<'a, E> {
    /// Checks a problem and the sizes of its results.
    pub(super) fn new(problem: &AttentionProblem<'a, E>, outputs: AttentionOutputs<'a, E>) -> Result<Self, Error> {
        let AttentionProblem { dims, q, ranges, scores: options, output_layout, .. } = *problem;
        let AttentionOutputs { output, lse, stats, statistics } = outputs;
        let count = problem.output_len()?;
        problem.check()?;
        check_len("output", output.len(), count)?;
        if let Some(lse) = &lse {
            check_len("lse", lse.len(), dims.queries())?;
        }
        if let Some(stats) = &stats {
            check_len("stats", stats.len(), dims.queries())?;
        }
        Ok(Self {
            q,
            inputs: ScoreInputs { dims, ranges, options, relative_bias: None },
            output_strides: output_layout.strides(dims.h, dims.t_q, dims.d_v),
            output: SharedPtr(output.cast()),
            lse: lse.map(|lse| SharedPtr(lse.as_mut_ptr().cast())),
            stats: stats.map(|stats| SharedPtr(stats.as_mut_ptr().cast())),
            statistics,
        })
    }

    /// Returns the output row of a query, D_v elements that are not initialised before they are written.
    #[inline(always)]
    pub(super) fn output_row(&self, row: QueryRow) -> *mut E {
        self.output.0.wrapping_add(self.output_strides.start(row.b, row.head, row.query))
    }

    /// Writes the log-sum-exp and the softmax statistics of a query, if they are requested.
    ///
    /// # Safety
    /// The row belongs to the call, and no other thread writes its log-sum-exp.
    #[inline(always)]
    pub(super) unsafe fn write_stats(&self, row: QueryRow, stats: SoftmaxStats, lse: impl FnOnce() -> f32) {
        let index = self.inputs.dims.row_index(row);
        // SAFETY: there is an element for each query of each head.
        unsafe {
            if let Some(to) = self.lse {
                to.add(index).write(lse());
            }
            if let Some(to) = self.stats {
                to.add(index).write(stats);
            }
        }
    }
}

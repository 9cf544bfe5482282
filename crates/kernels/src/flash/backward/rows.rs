//! The work for each query before the first tile and after the last.

use std::f32::consts::LOG2_E;

use super::call::BackwardCall;
use crate::cpu::{SharedPtr, Vector};
use crate::flash::inputs::query_row;
use crate::number::{Number, load_first, store_first};
use candle_attention_call::QueryRow;

impl<E: Number> BackwardCall<'_, E> {
    /// Prepares the tiles' work for each query of one head of (B, H): writes the row term of the softmax's backward
    /// pass, δ_i = Σ_d O_id · dO_id minus the gradient of the log-sum-exp (FlashAttention-2, Algorithm 2), clears the
    /// sums of the queries' gradients, and sums the gradient of the head's sink.
    ///
    /// # Safety
    /// The processor has the instruction set of V, and no other task writes the rows of the head.
    #[inline(always)]
    pub(super) unsafe fn prepare_rows<V: Vector>(&self, head: usize, sink: &mut f32) {
        let inputs = &self.inputs;
        let lanes = V::LANES;
        let dims = &inputs.dims;
        let options = &inputs.options;
        let strides = self.query_strides();
        let mut sink_sum = 0f64;
        for query in 0..dims.t_q {
            let row = QueryRow { b: head / dims.h, head: head % dims.h, query };
            let index = dims.row_index(row);
            // SAFETY: the processor has the instruction set of V; the row belongs to the call, and no other task writes
            // it.
            unsafe {
                if self.requested.of.q {
                    self.to.q_sums.add(strides.start(row.b, row.head, query)).write_bytes(0, dims.d);
                }
                let output = self.output.as_ptr().wrapping_add(inputs.output_start(row));
                let gradient = query_row(&self.output_grad, row);
                let mut sum = V::splat(0.0);
                for d in (0..dims.d_v).step_by(lanes) {
                    let width = lanes.min(dims.d_v - d);
                    let outputs: V = load_first(output.add(d), width);
                    sum = outputs.mul_add(load_first(gradient.add(d), width), sum);
                }
                let stats = self.softmax_stats[index];
                // The gradient of a fully masked query is zero for any gradient of its output.
                let is_masked = inputs.range(row).is_empty() && options.sinks.is_none() || stats.sum == 0.0;
                // Adding to every score adds the same to the log-sum-exp.
                let lse_grad = if let Some(lse_grads) = self.lse_grad { lse_grads[index] } else { 0.0 };
                let delta = if is_masked { 0.0 } else { sum.sum() - lse_grad };
                self.to.deltas.add(index).write(delta);
                if let Some(sinks) = options.sinks
                    && self.requested.of.sinks
                    && !is_masked
                {
                    let unit = options.exponent_unit();
                    let weight = ((sinks[row.head] * (LOG2_E / unit) - stats.max) * unit).exp2() / stats.sum;
                    // A sink without weight has no gradient either.
                    if weight != 0.0 {
                        sink_sum -= f64::from(weight) * f64::from(delta);
                    }
                }
            }
        }
        *sink = sink_sum as f32;
    }

    /// Rounds the gradients of the queries of one head of (B, H) to their type.
    ///
    /// # Safety
    /// As [`prepare_rows`](Self::prepare_rows).
    #[inline(always)]
    pub(super) unsafe fn round_queries<V: Vector>(&self, head: usize, to: SharedPtr<E>) {
        let dims = &self.inputs.dims;
        let lanes = V::LANES;
        let strides = self.query_strides();
        for query in 0..dims.t_q {
            let row = strides.start(head / dims.h, head % dims.h, query);
            for column in (0..dims.d).step_by(lanes) {
                let width = lanes.min(dims.d - column);
                let at = row + column;
                // SAFETY: the processor has the instruction set of V; both have the elements, which no other thread
                // writes.
                unsafe {
                    let sum: V = load_first::<f32, _>(self.to.q_sums.add(at), width);
                    store_first(sum, to.add(at), width);
                }
            }
        }
    }
}

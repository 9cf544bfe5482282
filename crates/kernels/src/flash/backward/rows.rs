//! What the backward pass needs of each query before it begins, and does with it when it is done.

use std::f32::consts::LOG2_E;

use super::BackwardCall;
use crate::cpu::{Kernel, SharedPtr, SimdTask, Vector};
use crate::flash::problem::Row;
use crate::number::{Number, load_first, store_first};

/// Of each query of one head: the sum of its context times the gradient of it, which is that of its weights times
/// theirs. Clears the sums of the queries' gradients on the way, and sums the gradient of the head's sink.
pub(super) struct Deltas<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub b: usize,
    pub head: usize,
    /// Takes the gradient of the sink.
    pub sink: &'a mut f32,
}

impl<E: Number> SimdTask for Deltas<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { backward, b, head, sink } = self;
        let (call, lanes) = (&backward.call, K::Vector::LANES);
        let (dims, options) = (&call.inputs.dims, &call.inputs.options);
        let mut sink_sum = 0f64;
        for query in 0..dims.t_q {
            let row = Row { b, head, query };
            let index = dims.row_index(row);
            // SAFETY: the processor has the tier of K; the row belongs to the call and this head's rows to this task.
            unsafe {
                if backward.wanted.q {
                    backward.q_sums.add(index * dims.d).write_bytes(0, dims.d);
                }
                let (context, gradient) = (call.context_row(row), backward.context_grad.at([b, head, query]));
                let mut sum = K::Vector::splat(0.0);
                for d in (0..dims.d_v).step_by(lanes) {
                    let width = lanes.min(dims.d_v - d);
                    let context: K::Vector = load_first(context.add(d).cast_const(), width);
                    sum = context.mul_add(load_first(gradient.add(d), width), sum);
                }
                let stats = backward.stats[index];
                // What sees nothing has no gradient, whatever the gradient of its context is.
                let is_empty = call.inputs.range(row).is_empty() && options.sinks.is_none() || stats.sum == 0.0;
                // Adding to every score adds as much to the log-sum-exp.
                let of_lse = if let Some(lse) = backward.lse_grad { lse[index] } else { 0.0 };
                let delta = if is_empty { 0.0 } else { sum.sum() - of_lse };
                backward.deltas.add(index).write(delta);
                if let (Some(sinks), true) = (options.sinks, backward.wanted.sinks && !is_empty) {
                    let unit = options.exponent_unit();
                    let weight = ((sinks[head] * (LOG2_E / unit) - stats.max) * unit).exp2() / stats.sum;
                    // A sink without weight has no gradient either.
                    if weight != 0.0 {
                        sink_sum -= f64::from(weight) * f64::from(delta);
                    }
                }
            }
        }
        *sink = sink_sum as f32;
    }
}

/// The gradients of one head's queries, rounded to their type.
pub(super) struct RoundQueries<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub to: SharedPtr<E>,
    /// The first element, and how many.
    pub first: usize,
    pub count: usize,
}

impl<E: Number> SimdTask for RoundQueries<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        for at in (0..self.count).step_by(lanes) {
            let width = lanes.min(self.count - at);
            // SAFETY: the processor has the tier of K; both have the elements, which no other thread writes.
            unsafe {
                let sum: K::Vector = load_first::<f32, _>(self.backward.q_sums.add(self.first + at), width);
                store_first(sum, self.to.add(self.first + at), width);
            }
        }
    }
}

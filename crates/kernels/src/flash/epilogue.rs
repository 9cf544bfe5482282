//! From the state of a tile to the output: sinks, division, log-sum-exp, and the transposition to rows.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::problem::{Call, KvHead, Row, ScoreInputs, SoftmaxStats};
use super::workspace::State;
use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector};
use crate::number::{Number, store_first};

/// Writes the rows whose state is given.
pub(super) struct Epilogue<'a, 'b, E, S> {
    pub call: &'a Call<'b, E, S>,
    pub state: &'a mut State,
    pub kv: KvHead,
    pub rows: Range<usize>,
}

impl<E: Number, S> SimdTask for Epilogue<'_, '_, E, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { call, state, kv, rows } = self;
        let (lanes, dims, panel) = (K::Vector::LANES, &call.inputs.dims, state.panel);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for first in rows.clone().step_by(lanes) {
            let column = (first - rows.start) % panel;
            let own = state.of_panel((first - rows.start) / panel);
            let filled = lanes.min(rows.end - first);
            let mut factors = [0f32; MAX_LANES];
            // SAFETY: the processor has the tier of K; the state has `context` rows of a panel, a multiple of `lanes`;
            // the rows of the context are this task's.
            unsafe {
                for (lane, factor) in factors[..filled].iter_mut().enumerate() {
                    let (max, sum) = (*own.max.add(column + lane), *own.sum.add(column + lane));
                    *factor = normalise(call, dims.row(kv, first + lane), max, sum);
                }
                for d in (0..dims.d_v).step_by(lanes) {
                    let from = own.context.add(d * panel + column);
                    K::Vector::transpose(from, panel, square.as_mut_ptr(), lanes);
                    for (lane, &factor) in factors[..filled].iter().enumerate() {
                        let to = call.context_row(dims.row(kv, first + lane)).add(d);
                        let values = K::Vector::load(square.as_ptr().add(lane * lanes));
                        store_first::<E, _>(values.mul(K::Vector::splat(factor)), to, lanes.min(dims.d_v - d));
                    }
                }
            }
        }
    }
}

/// The largest exponent and the sum of the weights of a row, its sink's included.
pub(super) fn with_sink(inputs: &ScoreInputs, row: Row, max: f32, sum: f32) -> SoftmaxStats {
    let Some(sinks) = inputs.options.sinks else { return SoftmaxStats { max, sum } };
    let unit = inputs.options.exponent_unit();
    let sink = sinks[row.head] * (LOG2_E / unit);
    let shift = max.max(sink);
    let finite = if shift == f32::NEG_INFINITY { 0.0 } else { shift };
    SoftmaxStats { max: shift, sum: sum * ((max - finite) * unit).exp2() + ((sink - finite) * unit).exp2() }
}

/// The factor from a sum of weighted values to the context of a row, whose log-sum-exp is written too. `max` is the
/// largest exponent, `sum` that of the weights.
///
/// # Safety
/// The row belongs to the call, and no other thread writes its log-sum-exp.
#[inline(always)]
pub(super) unsafe fn normalise<E, S>(call: &Call<E, S>, row: Row, max: f32, sum: f32) -> f32 {
    let unit = call.inputs.options.exponent_unit();
    let SoftmaxStats { max: shift, sum: whole } = with_sink(&call.inputs, row, max, sum);
    let lse = || match (whole == 0.0, shift * (LN_2 * unit)) {
        (true, _) => f32::NEG_INFINITY,
        // Rounding may not take the least score to -inf.
        (false, most) if shift.is_finite() => most.clamp(f32::MIN, f32::MAX) + whole.ln(),
        (false, most) => most + whole.ln(),
    };
    // SAFETY: as this function's contract.
    unsafe { call.write_lse(row, SoftmaxStats { max: shift, sum: whole }, lse) };
    match (whole == 0.0, shift == max) {
        (true, _) => 0.0,
        (false, true) => 1.0 / whole,
        (false, false) => ((max - shift) * unit).exp2() / whole,
    }
}

//! From the state of a tile to the output: sinks, division, log-sum-exp, and rows where the caller wants them.

use super::params::{Problem, Row};
use super::workspace::Workspace;
use crate::cpu::{Element, Job, Kernel, Vector, store_first};
use std::ops::Range;

/// Writes the rows whose state the workspace holds.
pub(super) struct Finish<'a, 'b, E> {
    pub problem: &'a Problem<'b, E>,
    pub workspace: &'a mut Workspace,
    pub b: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
}

impl<E: Element> Job for Finish<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { problem, workspace, b, kv_head, rows } = self;
        let (lanes, d_v) = (K::Vector::LANES, problem.dims.d_v);
        let mut square = [0f32; 16 * 16];
        for first in rows.clone().step_by(lanes) {
            let (panel, column) = ((first - rows.start) / K::PANEL, (first - rows.start) % K::PANEL);
            let panel = workspace.state.panel(panel);
            let held = lanes.min(rows.end - first);
            let mut factors = [0f32; 16];
            // SAFETY: the caller's promise; the state has `context` rows of a panel, a multiple of `lanes`.
            unsafe {
                for (lane, factor) in factors[..held].iter_mut().enumerate() {
                    let row = problem.row(kv_head, first + lane);
                    let (max, sum) = (*panel.max.add(column + lane), *panel.sum.add(column + lane));
                    *factor = normalise(problem, (b, row), max, sum);
                }
                for d in (0..d_v).step_by(lanes) {
                    let from = panel.context.add(d * K::PANEL + column);
                    K::Vector::transpose(from, K::PANEL, square.as_mut_ptr(), lanes);
                    for (lane, &factor) in factors[..held].iter().enumerate() {
                        let to = problem.context_row(b, problem.row(kv_head, first + lane)).add(d);
                        let values = K::Vector::load(square.as_ptr().add(lane * lanes));
                        store_first::<E, _>(values.mul(K::Vector::splat(factor)), to, lanes.min(d_v - d));
                    }
                }
            }
        }
    }
}

/// The factor from a sum of weighted values to the context of a row, whose log-sum-exp is written on the way. `max` counts
/// powers of two.
///
/// # Safety
/// The row belongs to the problem.
#[inline(always)]
pub(super) unsafe fn normalise<E: Element>(problem: &Problem<E>, (b, row): (usize, Row), max: f32, sum: f32) -> f32 {
    use std::f32::consts::{LN_2, LOG2_E};
    let (shift, whole) = match problem.scores.sinks {
        None => (max, sum),
        Some(sinks) => {
            let sink = sinks[row.head] * LOG2_E;
            let shift = max.max(sink);
            let finite = if shift == f32::NEG_INFINITY { 0.0 } else { shift };
            (shift, sum * (max - finite).exp2() + (sink - finite).exp2())
        }
    };
    if let Some(lse) = problem.output.lse {
        let value = if whole == 0.0 { f32::NEG_INFINITY } else { shift * LN_2 + whole.ln() };
        let dims = &problem.dims;
        // SAFETY: the caller's promise.
        unsafe { *lse.add((b * dims.h + row.head) * dims.t_q + row.query) = value };
    }
    match (whole == 0.0, shift == max) {
        (true, _) => 0.0,
        (false, true) => 1.0 / whole,
        (false, false) => (max - shift).exp2() / whole,
    }
}

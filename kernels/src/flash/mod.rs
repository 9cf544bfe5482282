//! The fused attention kernel of the CPU: scores are made, weighed and used a tile at a time, and never stand in memory
//! as a whole. The design is in `README.md` beside this file.

mod ahead;
mod decode;
mod finish;
mod heuristics;
mod online_softmax;
mod pack;
mod params;
mod prefill;
mod scores;
#[cfg(test)]
mod tests;
mod tile;
mod workspace;

pub use params::{Alibi, Dims, Output, OutputOrder, Problem, Scores, Strided};

use std::ops::Range;

use crate::Scalar;
use crate::cpu::{Element, ForKernel, Kernel, Scratch, Tier, Vector, for_each_task, on_kernel, reserve};
use decode::{Decode, DecodeScratch};
use finish::Finish;
use heuristics::{Cut, SPAN};
use prefill::Prefill;
use workspace::Workspace;

/// Runs a call on the threads of the current pool. Gives the context in the order asked for; `None` where there is no memory
/// for it.
///
/// # Panics
/// If the processor lacks the tier.
pub fn run<E: Scalar>(problem: Problem<E>, tier: Tier) -> Option<Vec<E>> {
    E::attend(problem, tier)
}

pub(crate) fn run_generic<E: Element>(mut problem: Problem<E>, tier: Tier) -> Option<Vec<E>> {
    struct Attend<'a, 'b, E>(&'a Problem<'b, E>);
    impl<E: Element> ForKernel for Attend<'_, '_, E> {
        unsafe fn run<K: Kernel>(self) {
            // SAFETY: the caller's promise.
            unsafe { attend::<K, E>(self.0) }
        }
    }
    let Dims { b, h, t_q, d_v, .. } = problem.dims;
    let count = b * h * t_q * d_v;
    let mut context = reserve(count)?;
    problem.output.context = context.as_mut_ptr();
    on_kernel(tier, E::IS_BF16, Attend(&problem));
    // SAFETY: every query of every head belongs to a task, which wrote its row.
    unsafe { context.set_len(count) };
    Some(context)
}

/// Cuts the call into tasks, the ones that see most keys first, and runs them.
///
/// # Safety
/// The processor has the tier of K.
unsafe fn attend<K: Kernel, E: Element>(problem: &Problem<E>) {
    let dims = &problem.dims;
    if dims.b * dims.rows() == 0 {
        return;
    }
    if dims.rows() <= decode::MOST_ROWS.min(K::Vector::LANES) {
        // SAFETY: the caller's promise.
        return unsafe { attend_few::<K, E>(problem) };
    }
    let workers = heuristics::workers(dims);
    let cut = Cut::new::<K>(dims, workers.count);
    let panels = cut.rows_per_chunk.min(dims.rows()).div_ceil(K::PANEL);
    let heads = dims.b * dims.h_kv;
    let chunk = |index: usize| -> ((usize, usize), Range<usize>) {
        let (chunk, head) = (cut.chunks - 1 - index / heads, index % heads);
        let first = chunk * cut.rows_per_chunk;
        ((head / dims.h_kv, head % dims.h_kv), first..dims.rows().min(first + cut.rows_per_chunk))
    };
    let workspace = || Workspace::new::<K>(dims, panels);
    let prefill = |workspace: &mut Workspace, index: usize, keys: Range<usize>| {
        let ((b, kv_head), rows) = chunk(index);
        // SAFETY: the caller's promise.
        unsafe { K::vectorize(Prefill { problem, workspace, b, kv_head, rows, keys }) };
    };
    let finish = |workspace: &mut Workspace, index: usize| {
        let ((b, kv_head), rows) = chunk(index);
        // SAFETY: the caller's promise.
        unsafe { K::vectorize(Finish { problem, workspace, b, kv_head, rows }) };
    };
    let chunks = heads * cut.chunks;
    if cut.spans == 1 {
        return for_each_task(chunks, workers, workspace, |workspace, index| {
            prefill(workspace, index, 0..dims.t_kv);
            finish(workspace, index);
        });
    }
    let state_words = workspace().state.words(panels).len();
    let mut parts = Scratch::zeros(chunks * cut.spans * state_words);
    let slots = Slots { words: parts.as_mut_ptr(), each: state_words };
    for_each_task(chunks * cut.spans, workers, workspace, |workspace, task| {
        let (index, first) = (task / cut.spans, task % cut.spans * cut.span);
        prefill(workspace, index, first..dims.t_kv.min(first + cut.span));
        // SAFETY: each task has a slot of its own.
        unsafe { slots.get(task) }.copy_from_slice(workspace.state.words(panels));
    });
    for_each_task(chunks, workers, workspace, |workspace, index| {
        workspace.state.clear(panels);
        for span in 0..cut.spans {
            // SAFETY: the slots are read only, now that they are filled.
            workspace.state.merge(unsafe { slots.get(index * cut.spans + span) });
        }
        finish(workspace, index);
    });
}

/// [`attend`] for few rows: a task for each part of the keys of each key head.
///
/// # Safety
/// The processor has the tier of K.
unsafe fn attend_few<K: Kernel, E: Element>(problem: &Problem<E>) {
    let dims = &problem.dims;
    let spans = dims.t_kv.div_ceil(SPAN).max(1);
    let (heads, words) = (dims.b * dims.h_kv, decode::part_words(dims.d_v));
    let mut parts = Scratch::zeros(heads * spans * words);
    let slots = Slots { words: parts.as_mut_ptr(), each: words };
    let scratch = || DecodeScratch::new(dims.d, SPAN.min(dims.t_kv));
    let workers = heuristics::workers(dims);
    for_each_task(heads * spans, workers, scratch, |scratch, task| {
        let (head, first) = (task / spans, task % spans * SPAN);
        let (b, kv_head) = (head / dims.h_kv, head % dims.h_kv);
        let keys = first..dims.t_kv.min(first + SPAN);
        // SAFETY: the caller's promise; each task has a slot of its own.
        unsafe { K::vectorize(Decode { problem, scratch, b, kv_head, keys, part: slots.get(task) }) };
    });
    let of_head = Slots { words: parts.as_mut_ptr(), each: spans * words };
    for_each_task(
        heads,
        workers,
        || (),
        |(), head| {
            // SAFETY: each task has a slot of its own.
            decode::finish(problem, (head / dims.h_kv, head % dims.h_kv), unsafe { of_head.get(head) });
        },
    );
}

/// Equal parts of one allocation, a part for each task.
struct Slots {
    words: *mut f32,
    each: usize,
}

// SAFETY: a slot is used by one task at a time.
unsafe impl Sync for Slots {}

impl Slots {
    /// # Safety
    /// The slot exists and nobody else uses it.
    #[expect(clippy::mut_from_ref, reason = "slots are disjoint")]
    unsafe fn get(&self, slot: usize) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.words.add(slot * self.each), self.each) }
    }
}

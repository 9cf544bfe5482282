//! The forward pass. The columns of a state are independent of each other, so that a panel of them stays in the first
//! cache while all tokens of a block pass over it, a few at a time.
//!
//! Each pass over a panel adds the updates of some tokens to it, and reads it for the tokens after them, so that a
//! number of the state is stored once for all tokens whose updates fit in registers.

use std::ops::Range;

use super::DeltaCall;
use super::chunk::Chunk;
use super::pass::{PanelAddress, PanelUpdate, ReadingRows, TOKENS, VECTORS, VECTORS_OF_ONE, pass, sweep};
use super::problem::DeltaDims;
use super::rows::{BLOCK, DeltaTokenRows, NextBlock, ReadTokens, TokenAddresses};
use crate::cpu::{Kernel, Scratch, SimdTask, Vector};
use crate::number::{Number, store_first};

/// The largest number of heads of a task. Their states of 64 KB at D 128 fill a quarter of a second cache of 1 MB, and
/// the rest is for rows.
pub(super) const MAX_HEADS: usize = 4;

/// The division of a call into passes of tokens, panels of columns and heads of a task.
#[derive(Clone, Copy)]
pub(super) struct Tiling {
    /// The number of tokens of a pass.
    pub tokens: usize,
    /// The largest number of passes of a block.
    passes: usize,
    /// The number of columns of a panel.
    pub panel: usize,
    pub panels: usize,
    /// The number of heads of a task.
    pub heads: usize,
}

impl Tiling {
    pub fn new<V: Vector>(longest: usize, d_v: usize, heads: usize) -> Self {
        let is_wide = longest == 1 && d_v.is_multiple_of(VECTORS_OF_ONE * V::LANES);
        let panel = V::LANES * if is_wide { VECTORS_OF_ONE } else { VECTORS };
        let tokens = if longest > 1 && V::LANES >= 8 { TOKENS } else { 1 };
        Self { tokens, passes: longest.min(BLOCK).div_ceil(tokens), panel, panels: d_v.div_ceil(panel), heads }
    }
}

/// The scratch buffers of a thread.
pub(super) struct ForwardScratch {
    tiling: Tiling,
    rows: DeltaTokenRows,
    /// The chunk of each pass.
    chunks: Vec<Chunk>,
    /// The states of the heads, (heads, panels, D_k, panel).
    state: Scratch,
    /// The outputs, (tokens, D_v), each row up to whole panels.
    output: Scratch,
    /// The errors `e` of the tokens, as the outputs.
    errors: Scratch,
    /// The rows of the next block, of any element type.
    next_rows: Scratch,
}

impl ForwardScratch {
    pub fn new<V: Vector>(dims: &DeltaDims, tiling: Tiling) -> Self {
        let width = dims.d_k.next_multiple_of(V::LANES);
        let value_width = tiling.panels * tiling.panel;
        let tokens = tiling.passes * tiling.tokens;
        Self {
            tiling,
            rows: DeltaTokenRows::new(tokens, width, value_width),
            chunks: (0..tiling.passes).map(|_| Chunk::new(tiling.tokens, width)).collect(),
            state: Scratch::zeros(tiling.heads * dims.d_k * value_width),
            output: Scratch::zeros(tokens * value_width),
            errors: Scratch::zeros(tokens * value_width),
            // There is no next block where a block has fewer tokens.
            next_rows: Scratch::zeros(if tokens < BLOCK { 0 } else { BLOCK * (2 * dims.d_k + dims.d_v) }),
        }
    }

    /// Returns the address of a panel of the state of a head.
    fn panel_of_state(&mut self, head: usize, panel: usize, d_k: usize) -> PanelAddress {
        let Tiling { panel: stride, panels, .. } = self.tiling;
        PanelAddress { first: self.state.as_mut_ptr().wrapping_add((head * panels + panel) * d_k * stride), stride }
    }

    /// Returns the columns of a panel.
    fn columns(&self, panel: usize, d_v: usize) -> Range<usize> {
        panel * self.tiling.panel..d_v.min((panel + 1) * self.tiling.panel)
    }
}

/// A block of tokens of one head.
struct HeadBlock {
    head: usize,
    tokens: Range<usize>,
}

/// Runs all tokens of some heads of a sequence, for some panels of their states, block after block. The rows of
/// neighbouring heads are neighbours in memory: a page is looked up once for all of them.
///
/// # Safety
/// The processor has the instruction set of K; the scratch buffers were allocated for the call and this number of
/// heads.
pub(super) unsafe fn run_heads<K: Kernel, E: Number>(
    call: &DeltaCall<E>,
    scratch: &mut ForwardScratch,
    sequence: usize,
    heads: Range<usize>,
    panels: Range<usize>,
) {
    let problem = call.problem;
    let DeltaDims { h, d_k, d_v, h_v, .. } = problem.dims;
    let len = problem.state_len();
    let tokens = problem.sequences[sequence].clone();
    let panel_width = scratch.tiling.panel;
    // Whole panels are read and written in the caller's memory: a single token takes two thirds of the time.
    let is_direct = |columns: &Range<usize>| columns.len() == panel_width && !tokens.is_empty();
    let state_of =
        |states: *mut f32, head| PanelAddress { first: states.wrapping_add((sequence * h + head) * len), stride: d_v };
    let initial = |head| problem.states.map(|states| state_of(states.as_ptr().cast_mut(), head));
    let result = |head| state_of(call.states.0, head);
    // Each block is computed for all heads before the next block.
    let block_of = |index: usize| {
        let first = tokens.end.min(tokens.start + index / heads.len() * BLOCK);
        HeadBlock { head: heads.start + index % heads.len(), tokens: first..tokens.end.min(first + BLOCK) }
    };
    let rows_of = |head, token| TokenAddresses::new(problem, &problem.v, h_v, head, token);
    // SAFETY: as this function's contract; states have D_k rows of D_v, and this task alone writes these columns.
    unsafe {
        for head in heads.clone() {
            for panel in panels.clone() {
                let columns = scratch.columns(panel, d_v);
                let own = scratch.panel_of_state(head - heads.start, panel, d_k);
                match initial(head) {
                    Some(_) if is_direct(&columns) => (),
                    Some(state) => state.at_column(columns.start).copy_to(own, d_k, columns.len()),
                    None => own.first.write_bytes(0, d_k * own.stride),
                }
            }
        }
        for index in 0..tokens.len().div_ceil(BLOCK) * heads.len() {
            let HeadBlock { head, tokens: own_tokens } = block_of(index);
            let next_block = block_of(index + 1);
            let next_rows = rows_of(next_block.head, next_block.tokens.start);
            let next = NextBlock {
                from: next_rows,
                to: next_rows.in_scratch(scratch.next_rows.as_mut_ptr().cast()),
                tokens: next_block.tokens.len(),
            };
            // The rows of blocks after the first were copied with the block before.
            let from = if index == 0 { rows_of(head, own_tokens.start) } else { next.to };
            K::run_simd(ReadTokens { problem, head, tokens: own_tokens.clone(), from, rows: &mut scratch.rows });
            let saved = call.saved.as_ref().map(|saved| {
                let block = saved.blocks[sequence] + index / heads.len();
                saved.states.0.add((block * h + head) * len)
            });
            K::run_simd(ForwardBlock {
                head: head - heads.start,
                dims: problem.dims,
                has_beta: problem.beta.is_some(),
                tokens: own_tokens.len(),
                next,
                initial: initial(head).filter(|_| own_tokens.start == tokens.start),
                result: (own_tokens.end == tokens.end).then_some(result(head)),
                saved,
                panels: panels.clone(),
                scratch,
            });
            K::run_simd(WriteBlock { call, head, tokens: own_tokens, panels: panels.clone(), scratch });
        }
        call.excess_decay.record(scratch.rows.excess_decay());
        for head in heads.clone() {
            for panel in panels.clone() {
                let columns = scratch.columns(panel, d_v);
                let own = scratch.panel_of_state(head - heads.start, panel, d_k);
                if !is_direct(&columns) {
                    own.copy_to(result(head).at_column(columns.start), d_k, columns.len());
                }
            }
        }
    }
}

/// The tokens of a block of one head, for some panels of its state.
struct ForwardBlock<'a> {
    /// The index of the head among the heads of the task.
    head: usize,
    dims: DeltaDims,
    has_beta: bool,
    tokens: usize,
    next: NextBlock,
    /// The state before the first block, for that block.
    initial: Option<PanelAddress>,
    /// The address of the state after the last block, for that block.
    result: Option<PanelAddress>,
    /// The address to save the state before the block at, (D_k, D_v), if it is saved.
    saved: Option<*mut f32>,
    panels: Range<usize>,
    scratch: &'a mut ForwardScratch,
}

impl SimdTask for ForwardBlock<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let Tiling { tokens, panel, .. } = self.scratch.tiling;
        // SAFETY: the processor has the instruction set of K, and the scratch buffers were allocated for this tiling.
        unsafe {
            if tokens > 1 && const { K::Vector::LANES >= 8 } {
                self.passes::<K::Vector, VECTORS>(TOKENS);
            } else if panel == VECTORS * K::Vector::LANES {
                self.passes::<K::Vector, VECTORS>(1);
            } else {
                self.passes::<K::Vector, VECTORS_OF_ONE>(1);
            }
        }
    }
}

impl ForwardBlock<'_> {
    /// Runs the passes of a block over panels of N vectors. `c` is the number of tokens of a pass, a constant where
    /// this function is inlined.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn passes<V: Vector, const N: usize>(&mut self, c: usize) {
        let passes = self.tokens.div_ceil(c);
        // Some rows of the next block with each pass, so that memory is used evenly.
        let copied = self.next.tokens.div_ceil(passes * self.panels.len().max(1));
        // SAFETY: as this method's contract.
        unsafe {
            let ForwardScratch { rows, chunks, .. } = &mut *self.scratch;
            for (pass_index, chunk) in chunks[..passes].iter_mut().enumerate() {
                chunk.fill::<V>(rows, pass_index * c);
            }
            for panel in self.panels.clone() {
                let own = self.scratch.panel_of_state(self.head, panel, self.dims.d_k);
                let columns = self.scratch.columns(panel, self.dims.d_v);
                let direct_or_own = |state: Option<PanelAddress>| {
                    state.filter(|_| columns.len() == own.stride).map_or(own, |state| state.at_column(columns.start))
                };
                let mut from = direct_or_own(self.initial);
                let last = direct_or_own(self.result);
                if let Some(saved) = self.saved {
                    let saved = PanelAddress { first: saved, stride: self.dims.d_v };
                    from.copy_to(saved.at_column(columns.start), self.dims.d_k, columns.len());
                }
                let mut all_updates = [[V::splat(0.0); N]; TOKENS];
                let mut all_sums = [[V::splat(0.0); N]; 2 * TOKENS];
                let updates = &mut all_updates[..c];
                let sums = &mut all_sums[..2 * c];
                let d_k = self.dims.d_k;
                let first = &self.scratch.chunks[0];
                pass(PanelUpdate { from, to: own, channels: d_k, writing: first }, &[], first, sums);
                for pass_index in 0..passes {
                    let step = (panel - self.panels.start) * passes + pass_index;
                    self.next.copy::<V>(step * copied..(step + 1) * copied);
                    self.compute_updates(pass_index, columns.start, sums, updates);
                    let remaining = &self.scratch.chunks[pass_index..passes];
                    let writing = &remaining[0];
                    match remaining.get(1) {
                        Some(reading) => {
                            pass(PanelUpdate { from, to: own, channels: d_k, writing }, updates, reading, sums)
                        }
                        None => {
                            let update = PanelUpdate { from, to: last, channels: d_k, writing };
                            sweep(update, updates, ReadingRows { first: std::ptr::null(), tokens: 0 }, &mut []);
                        }
                    }
                    from = own;
                }
            }
        }
    }

    /// Computes the updates of the tokens of a pass, their errors times their betas, and their outputs from the sums
    /// that their keys and queries read.
    ///
    /// # Safety
    /// As [`passes`](Self::passes).
    #[inline(always)]
    unsafe fn compute_updates<V: Vector, const N: usize>(
        &mut self,
        pass: usize,
        column: usize,
        sums: &[[V; N]],
        updates: &mut [[V; N]],
    ) {
        let ForwardScratch { rows, chunks, output, errors, .. } = &mut *self.scratch;
        let key_products = chunks[pass].key_products();
        let query_products = chunks[pass].query_products();
        let c = updates.len();
        let (key_sums, query_sums) = sums.split_at(c);
        // SAFETY: as this method's contract.
        updates.fill(unsafe { [V::splat(0.0); N] });
        for i in 0..c.min(self.tokens - pass * c) {
            let token = pass * c + i;
            for n in 0..N {
                let at = token * rows.value_width + column + n * V::LANES;
                // SAFETY: as this method's contract; a row of a block has whole panels.
                unsafe {
                    let mut error = V::load(rows.values.as_ptr().add(at));
                    if self.has_beta {
                        error = error.sub(key_sums[i][n]);
                        for j in 0..i {
                            error = updates[j][n].mul_add(V::splat(-key_products[i * c + j]), error);
                        }
                    }
                    updates[i][n] = error.mul(V::splat(rows.beta[token]));
                    let mut sum = query_sums[i][n];
                    for j in 0..=i {
                        sum = updates[j][n].mul_add(V::splat(query_products[i * c + j]), sum);
                    }
                    sum.store(output.as_mut_ptr().add(at));
                    if self.saved.is_some() {
                        error.store(errors.as_mut_ptr().add(at));
                    }
                }
            }
        }
    }
}

/// Writes the outputs of a block, rounded to their type, and the errors if they are saved.
struct WriteBlock<'a, 'b, E> {
    call: &'a DeltaCall<'b, E>,
    head: usize,
    tokens: Range<usize>,
    panels: Range<usize>,
    scratch: &'a ForwardScratch,
}

impl<E: Number> SimdTask for WriteBlock<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let DeltaDims { t, h, d_v, .. } = self.call.problem.dims;
        let lanes = K::Vector::LANES;
        let first = self.panels.start * self.scratch.tiling.panel;
        let end = d_v.min(self.panels.end * self.scratch.tiling.panel);
        let width = self.scratch.rows.value_width;
        for (i, token) in self.tokens.enumerate() {
            let from = self.scratch.output.as_ptr().wrapping_add(i * width);
            // SAFETY: the processor has the instruction set of K; the results have a row for each token and head, of
            // which this task writes these columns.
            unsafe {
                let to = self.call.output.add((token * h + self.head) * d_v);
                for at in (first..end).step_by(lanes) {
                    let output = K::Vector::load(from.add(at));
                    store_first(output, to.add(at), lanes.min(end - at));
                }
                if let Some(saved) = &self.call.saved {
                    let row = (token / t * h + self.head) * t + token % t;
                    let errors = self.scratch.errors.as_ptr().add(i * width + first);
                    saved.errors.add(row * d_v + first).copy_from_nonoverlapping(errors, end - first);
                }
            }
        }
    }
}

//! The forward pass: a state is a matrix whose columns do not know of each other, so a panel of them stays in the first
//! cache while all tokens of a block pass over it, a few at a time.
//!
//! Each pass over a panel adds what some tokens write to it, and reads for the tokens after them, so that a number of
//! the state is stored once for as many tokens as registers hold updates of.

use std::ops::Range;

use super::Call;
use super::chunk::{Chunk, KEPT, KEYS, QUERIES, WRITING_KEYS};
use super::problem::Dims;
use super::rows::{Ahead, BLOCK, ReadRows, Rows, StoredRows};
use crate::cpu::{Kernel, Scratch, SimdTask, Vector};
use crate::number::{Number, store_first};

/// The most heads of a task: their states of 64 KB at D 128 leave most of a second cache of 1 MB for rows.
pub(super) const MAX_HEADS: usize = 4;

/// How the tokens, the columns and the heads of a call are taken.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Tokens of a pass.
    pub tokens: usize,
    /// The most passes of a block.
    passes: usize,
    /// Columns of a panel.
    pub panel: usize,
    pub panels: usize,
    /// Heads of a task.
    pub heads: usize,
}

/// The tokens of a pass, and the vectors of its panels: 16 sums, 8 updates and 2 vectors of the state, which the 32
/// registers of AVX-512 hold at once. The 16 of AVX2 hold the updates, or the sums of keys, or those of queries: a pass
/// of these three loops takes a Zen 3 0.86 of the time of two passes of two tokens in one loop, whose row waits for a
/// longer chain of multiply-adds.
const TOKENS: usize = 4;
const VECTORS: usize = 2;

/// The vectors of a panel of one token: rows of 512 bytes with AVX-512, which memory is read in at its full speed.
const VECTORS_OF_ONE: usize = 8;

impl Shape {
    pub fn new<V: Vector>(longest: usize, d_v: usize, heads: usize) -> Self {
        let is_wide = longest == 1 && d_v.is_multiple_of(VECTORS_OF_ONE * V::LANES);
        let panel = V::LANES * if is_wide { VECTORS_OF_ONE } else { VECTORS };
        let tokens = if longest > 1 && V::LANES >= 8 { TOKENS } else { 1 };
        Self { tokens, passes: longest.min(BLOCK).div_ceil(tokens), panel, panels: d_v.div_ceil(panel), heads }
    }
}

/// What a thread keeps.
pub(super) struct Workspace {
    shape: Shape,
    rows: Rows,
    /// Of each pass.
    chunks: Vec<Chunk>,
    /// (heads, panels, D_k, panel).
    state: Scratch,
    /// (tokens, D_v), each row up to whole panels.
    context: Scratch,
    errors: Scratch,
    /// The rows of the next block, of any element.
    ahead: Scratch,
}

impl Workspace {
    pub fn new<V: Vector>(dims: &Dims, shape: Shape) -> Self {
        let (width, value_width) = (dims.d_k.next_multiple_of(V::LANES), shape.panels * shape.panel);
        let tokens = shape.passes * shape.tokens;
        Self {
            shape,
            rows: Rows::new(tokens, width, value_width),
            chunks: (0..shape.passes).map(|_| Chunk::new(shape.tokens, width)).collect(),
            state: Scratch::zeros(shape.heads * dims.d_k * value_width),
            context: Scratch::zeros(tokens * value_width),
            errors: Scratch::zeros(tokens * value_width),
            // Only where there is a next block.
            ahead: Scratch::zeros(if tokens < BLOCK { 0 } else { BLOCK * (2 * dims.d_k + dims.d_v) }),
        }
    }

    /// Where a panel of the state of one of the heads is.
    fn place(&mut self, head: usize, panel: usize, d_k: usize) -> Place {
        let Shape { panel: stride, panels, .. } = self.shape;
        Place { at: self.state.as_mut_ptr().wrapping_add((head * panels + panel) * d_k * stride), stride }
    }

    fn columns(&self, panel: usize, d_v: usize) -> Range<usize> {
        panel * self.shape.panel..d_v.min((panel + 1) * self.shape.panel)
    }
}

/// Rows of a panel in memory.
#[derive(Clone, Copy)]
struct Place {
    at: *mut f32,
    stride: usize,
}

impl Place {
    fn at_column(self, column: usize) -> Self {
        Self { at: self.at.wrapping_add(column), ..self }
    }

    /// # Safety
    /// Both are valid for so many rows of so many columns.
    unsafe fn copy_to(self, to: Place, rows: usize, columns: usize) {
        for row in 0..rows {
            // SAFETY: as this method's contract.
            unsafe { to.at.add(row * to.stride).copy_from(self.at.add(row * self.stride), columns) }
        }
    }
}

/// Runs all tokens of some heads of a sequence, for some panels of their states, block after block. The rows of
/// neighbouring heads are neighbours in memory: a page is looked up once for all of them.
///
/// # Safety
/// The processor has the instruction set of K; the workspace was made for the call and as many heads.
pub(super) unsafe fn run_heads<K: Kernel, E: Number>(
    call: &Call<E>,
    workspace: &mut Workspace,
    sequence: usize,
    heads: Range<usize>,
    panels: Range<usize>,
) {
    let problem = call.problem;
    let (Dims { h, d_k, d_v, h_v, .. }, len) = (problem.dims, problem.state_len());
    let (tokens, panel) = (problem.sequences[sequence].clone(), workspace.shape.panel);
    // Whole panels are read and written where they are: a single token takes two thirds of the time.
    let is_direct = |columns: &Range<usize>| columns.len() == panel && !tokens.is_empty();
    let place = |states: *mut f32, head| Place { at: states.wrapping_add((sequence * h + head) * len), stride: d_v };
    let initial = |head| problem.states.map(|states| place(states.as_ptr().cast_mut(), head));
    let result = |head| place(call.states.0, head);
    // Of each block all heads.
    let block_of = |index: usize| {
        let first = tokens.end.min(tokens.start + index / heads.len() * BLOCK);
        (heads.start + index % heads.len(), first..tokens.end.min(first + BLOCK))
    };
    let stored = |head, token| StoredRows::new(problem, (&problem.v, h_v), head, token);
    // SAFETY: as this function's contract; states have D_k rows of D_v, and this task alone writes these columns.
    unsafe {
        for head in heads.clone() {
            for panel in panels.clone() {
                let (own, columns) = (workspace.place(head - heads.start, panel, d_k), workspace.columns(panel, d_v));
                match initial(head) {
                    Some(_) if is_direct(&columns) => (),
                    Some(state) => state.at_column(columns.start).copy_to(own, d_k, columns.len()),
                    None => own.at.write_bytes(0, d_k * own.stride),
                }
            }
        }
        for index in 0..tokens.len().div_ceil(BLOCK) * heads.len() {
            let ((head, own), (next_head, next)) = (block_of(index), block_of(index + 1));
            let rows = stored(next_head, next.start);
            let ahead = Ahead { from: rows, to: rows.beside(workspace.ahead.as_mut_ptr().cast()), tokens: next.len() };
            // Those after the first block were copied with the block before.
            let from = if index == 0 { stored(head, own.start) } else { ahead.to };
            K::run_simd(ReadRows { problem, head, tokens: own.clone(), from, rows: &mut workspace.rows });
            let saved = call.saved.as_ref().map(|saved| {
                let block = saved.blocks[sequence] + index / heads.len();
                saved.states.0.add((block * h + head) * len)
            });
            K::run_simd(Block {
                head: head - heads.start,
                dims: problem.dims,
                has_beta: problem.beta.is_some(),
                tokens: own.len(),
                ahead,
                initial: initial(head).filter(|_| own.start == tokens.start),
                result: (own.end == tokens.end).then_some(result(head)),
                saved,
                panels: panels.clone(),
                workspace,
            });
            K::run_simd(WriteContext { call, head, tokens: own, panels: panels.clone(), workspace });
        }
        call.excess_decay.record(workspace.rows.excess_decay());
        for head in heads.clone() {
            for panel in panels.clone() {
                let (own, columns) = (workspace.place(head - heads.start, panel, d_k), workspace.columns(panel, d_v));
                if !is_direct(&columns) {
                    own.copy_to(result(head).at_column(columns.start), d_k, columns.len());
                }
            }
        }
    }
}

/// The tokens of a block over panels of a state.
struct Block<'a> {
    /// One of the workspace's.
    head: usize,
    dims: Dims,
    has_beta: bool,
    tokens: usize,
    /// What the next block reads.
    ahead: Ahead,
    /// The states before the first block and after the last.
    initial: Option<Place>,
    result: Option<Place>,
    /// Where the state before the block goes, (D_k, D_v), if it is wanted.
    saved: Option<*mut f32>,
    panels: Range<usize>,
    workspace: &'a mut Workspace,
}

impl SimdTask for Block<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let Shape { tokens, panel, .. } = self.workspace.shape;
        // SAFETY: the processor has the instruction set of K, and the workspace was made for this shape.
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

impl Block<'_> {
    /// # Safety
    /// As [`SimdTask::run`], for panels of N vectors and the shape's C tokens, which the compiler knows where this
    /// becomes a part of it.
    #[inline(always)]
    unsafe fn passes<V: Vector, const N: usize>(&mut self, c: usize) {
        let passes = self.tokens.div_ceil(c);
        // Of the next block with each pass, so that memory is as busy all the time.
        let copied = self.ahead.tokens.div_ceil(passes * self.panels.len().max(1));
        // SAFETY: as this method's contract.
        unsafe {
            let Workspace { rows, chunks, .. } = &mut *self.workspace;
            for (pass, chunk) in chunks[..passes].iter_mut().enumerate() {
                chunk.fill::<V>(rows, pass * c);
            }
            for panel in self.panels.clone() {
                let own = self.workspace.place(self.head, panel, self.dims.d_k);
                let columns = self.workspace.columns(panel, self.dims.d_v);
                let direct = |place: Option<Place>| {
                    place.filter(|_| columns.len() == own.stride).map_or(own, |place| place.at_column(columns.start))
                };
                let (mut from, last) = (direct(self.initial), direct(self.result));
                if let Some(saved) = self.saved {
                    let saved = Place { at: saved, stride: self.dims.d_v };
                    from.copy_to(saved.at_column(columns.start), self.dims.d_k, columns.len());
                }
                let (mut updates, mut sums) = ([[V::splat(0.0); N]; TOKENS], [[V::splat(0.0); N]; 2 * TOKENS]);
                let (updates, sums) = (&mut updates[..c], &mut sums[..2 * c]);
                let (d_k, first) = (self.dims.d_k, &self.workspace.chunks[0]);
                pass([from, own], d_k, [first; 2], &[], sums);
                for pass_index in 0..passes {
                    let step = (panel - self.panels.start) * passes + pass_index;
                    self.ahead.copy::<V>(step * copied..(step + 1) * copied);
                    self.finish(pass_index, columns.start, sums, updates);
                    let chunks = &self.workspace.chunks[pass_index..passes];
                    match chunks.get(1) {
                        Some(next) => pass([from, own], d_k, [&chunks[0], next], updates, sums),
                        None => sweep([from, last], d_k, &chunks[0], updates, (std::ptr::null(), 0), &mut []),
                    }
                    from = own;
                }
            }
        }
    }

    /// The errors of the tokens of a pass times their betas, from what they read; their contexts.
    ///
    /// # Safety
    /// As [`passes`](Self::passes).
    #[inline(always)]
    unsafe fn finish<V: Vector, const N: usize>(
        &mut self,
        pass: usize,
        column: usize,
        sums: &[[V; N]],
        updates: &mut [[V; N]],
    ) {
        let Workspace { rows, chunks, context, errors, .. } = &mut *self.workspace;
        let (key_products, query_products) = chunks[pass].products();
        let (c, (keys, queries)) = (updates.len(), sums.split_at(updates.len()));
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
                        error = error.sub(keys[i][n]);
                        for j in 0..i {
                            error = updates[j][n].mul_add(V::splat(-key_products[i * c + j]), error);
                        }
                    }
                    updates[i][n] = error.mul(V::splat(rows.beta[token]));
                    let mut sum = queries[i][n];
                    for j in 0..=i {
                        sum = updates[j][n].mul_add(V::splat(query_products[i * c + j]), sum);
                    }
                    sum.store(context.as_mut_ptr().add(at));
                    if self.saved.is_some() {
                        error.store(errors.as_mut_ptr().add(at));
                    }
                }
            }
        }
    }
}

/// Adds updates of tokens, if there are any, to N vectors of columns of a state, from one place to another, and then
/// reads them by the keys and by the queries of the tokens after those, whose sums follow each other. The chunks are
/// those of the tokens that write and of those that read.
///
/// # Safety
/// The processor has the instruction set of V; both places have `channels` rows of N vectors, and the chunks as many
/// tokens.
#[inline(always)]
unsafe fn pass<V: Vector, const N: usize>(
    [from, to]: [Place; 2],
    channels: usize,
    [writing, reading]: [&Chunk; 2],
    updates: &[[V; N]],
    sums: &mut [[V; N]],
) {
    let tokens = sums.len() / 2;
    let (keys, queries) = ((reading.at(KEYS), tokens), (reading.at(QUERIES), tokens));
    // SAFETY: as this function's contract; the rows of queries follow those of keys.
    unsafe {
        if V::LANES > 8 || tokens == 1 {
            return sweep([from, to], channels, writing, updates, keys, sums);
        }
        let read = if updates.is_empty() { from } else { to };
        if !updates.is_empty() {
            sweep([from, to], channels, writing, updates, (keys.0, 0), &mut []);
        }
        let (of_keys, of_queries) = sums.split_at_mut(tokens);
        sweep([read; 2], channels, reading, &[], keys, of_keys);
        sweep([read; 2], channels, reading, &[], queries, of_queries);
    }
}

/// [`pass`] in one loop, or a part of it: N updates for each token of a chunk, N sums for each of some rows of words,
/// which are one or two for each of so many tokens.
///
/// # Safety
/// As there; each row of words is as wide as one of the chunk.
#[inline(always)]
unsafe fn sweep<V: Vector, const N: usize>(
    [mut from, mut to]: [Place; 2],
    channels: usize,
    chunk: &Chunk,
    updates: &[[V; N]],
    (words, tokens): (*const f32, usize),
    sums: &mut [[V; N]],
) {
    let (kept, writing_keys, width) = (chunk.at(KEPT), chunk.at(WRITING_KEYS), chunk.width);
    // SAFETY: as this function's contract.
    let mut own_sums = unsafe { [[V::splat(0.0); N]; 2 * TOKENS] };
    // Not `sums` itself, which would be written in each turn.
    let own_sums = &mut own_sums[..sums.len()];
    for d in 0..channels {
        // SAFETY: as this function's contract.
        unsafe {
            let mut row = [V::splat(0.0); N];
            for (n, vector) in row.iter_mut().enumerate() {
                *vector = V::load(from.at.add(n * V::LANES));
                if !updates.is_empty() {
                    *vector = vector.mul(V::splat(*kept.add(d)));
                }
            }
            for (i, updates) in updates.iter().enumerate() {
                let key = V::splat(*writing_keys.add(i * width + d));
                for (vector, &update) in row.iter_mut().zip(updates) {
                    *vector = key.mul_add(update, *vector);
                }
            }
            if !updates.is_empty() {
                for (n, &vector) in row.iter().enumerate() {
                    vector.store(to.at.add(n * V::LANES));
                }
                to = to.at_column(to.stride);
            }
            for token in 0..tokens {
                for (n, &vector) in row.iter().enumerate() {
                    for r in (token..own_sums.len()).step_by(tokens) {
                        let word = V::splat(*words.add(r * width + d));
                        own_sums[r][n] = word.mul_add(vector, own_sums[r][n]);
                    }
                }
            }
            from = from.at_column(from.stride);
        }
    }
    sums.copy_from_slice(own_sums);
}

/// The contexts of a block, rounded to their type, and the errors if they are wanted.
struct WriteContext<'a, 'b, E> {
    call: &'a Call<'b, E>,
    head: usize,
    tokens: Range<usize>,
    panels: Range<usize>,
    workspace: &'a Workspace,
}

impl<E: Number> SimdTask for WriteContext<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let (Dims { t, h, d_v, .. }, lanes) = (self.call.problem.dims, K::Vector::LANES);
        let first = self.panels.start * self.workspace.shape.panel;
        let end = d_v.min(self.panels.end * self.workspace.shape.panel);
        let width = self.workspace.rows.value_width;
        for (i, token) in self.tokens.enumerate() {
            let from = self.workspace.context.as_ptr().wrapping_add(i * width);
            // SAFETY: the processor has the instruction set of K; the results have a row for each token and head, of
            // whose columns this task has these.
            unsafe {
                let to = self.call.context.add((token * h + self.head) * d_v);
                for at in (first..end).step_by(lanes) {
                    let context = K::Vector::load(from.add(at));
                    store_first(context, to.add(at), lanes.min(end - at));
                }
                if let Some(saved) = &self.call.saved {
                    let row = (token / t * h + self.head) * t + token % t;
                    let errors = self.workspace.errors.as_ptr().add(i * width + first);
                    saved.errors.add(row * d_v + first).copy_from_nonoverlapping(errors, end - first);
                }
            }
        }
    }
}

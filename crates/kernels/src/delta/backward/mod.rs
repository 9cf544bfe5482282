//! The backward pass: the gradients of everything that the forward pass reads, from the errors and the states that it
//! kept. Blocks are taken from the last to the first, and each is split into chunks whose updates are products of
//! matrices.
//!
//! With the names of [`Chunk`], `u = beta e`, and `dS` the gradient of the state after a chunk, which is replaced by
//! that of the state before it:
//!
//! ```text
//! du = query_productsᵀ do + writing_keys dS
//! x  = the solution of x_j + Σ_{i>j} key_products(i, j) beta_i x_i = du_j;  y = beta x
//! d value = y,  d beta = x · e
//! d query_products = do uᵀ,  d key_products = -y uᵀ
//! d reading_queries = do Sᵀ,  d reading_keys = -y Sᵀ,  d writing_keys = u dSᵀ
//! dS = kept ∘ dS + reading_queriesᵀ do - reading_keysᵀ y
//! ```
//!
//! Factors act on queries and keys alone, so that the gradient of a logarithm is made of those of the rows: `q ∘ dq`
//! and `k ∘ dk` of what reads, less `k ∘ dk` of what writes, summed over the token and all after it.

mod panels;
mod rows;

use super::chunk::{Chunk, KEPT, KEYS, WRITING_KEYS};
use super::problem::{Decay, Dims, Head};
use super::rows::{BLOCK, ReadRows, Rows, StoredRows};
use super::{BackwardCall, BackwardProblem, Gradients, Saved};
use crate::cpu::{Kernel, Scratch, SharedPtr, SimdTask, Vector};
use crate::number::Number;
use panels::{Panels, for_each_vector, keep, left, multiply, product, transpose};

/// The tokens of a chunk: the columns of two vectors of AVX2, one of AVX-512.
const CHUNK: usize = 16;

/// The most chunks of a block.
const CHUNKS: usize = BLOCK / CHUNK;

/// What a thread keeps.
pub(super) struct Workspace {
    /// Its values are the gradients of contexts.
    rows: Rows,
    /// As the values.
    errors: Scratch,
    chunks: [Chunk; CHUNKS],
    /// Before each chunk, (D_k, D_v).
    states: [Panels; CHUNKS],
    gradient: Panels,
    /// `-y`, then the gradients of contexts: (2 · CHUNK, D_v).
    outer: Panels,
    outer_columns: Panels,
    updates: Panels,
    update_columns: Panels,
    /// `du`, then `x`.
    solution: Panels,
    /// The gradients of key products, then of query products: (2 · CHUNK, CHUNK).
    products: Panels,
    /// The gradients of rows that read, keys first, and of those that write: as columns, and as rows.
    reading_columns: Panels,
    reading: Panels,
    writing_columns: Panels,
    writing: Panels,
    /// (CHUNK, width) each.
    q: Scratch,
    k: Scratch,
    decay: Scratch,
}

impl Workspace {
    pub fn new<K: Kernel>(dims: &Dims) -> Self {
        let (d_k, d_v) = (dims.d_k, dims.d_v);
        let [width, depth] = [d_k, d_v].map(|width| width.next_multiple_of(K::Vector::LANES));
        let value_width = d_v.div_ceil(K::PANEL) * K::PANEL;
        let rows = || Scratch::zeros(CHUNK * width);
        Self {
            rows: Rows::new(BLOCK, width, value_width),
            errors: Scratch::zeros(BLOCK * value_width),
            chunks: std::array::from_fn(|_| Chunk::new(CHUNK, width)),
            states: std::array::from_fn(|_| Panels::new::<K>(d_k, d_v)),
            gradient: Panels::new::<K>(d_k, d_v),
            outer: Panels::new::<K>(2 * CHUNK, d_v),
            outer_columns: Panels::new::<K>(depth, 2 * CHUNK),
            updates: Panels::new::<K>(CHUNK, d_v),
            update_columns: Panels::new::<K>(depth, CHUNK),
            solution: Panels::new::<K>(CHUNK, d_v),
            products: Panels::new::<K>(2 * CHUNK, CHUNK),
            reading_columns: Panels::new::<K>(width, 2 * CHUNK),
            reading: Panels::plain(2 * CHUNK, width),
            writing_columns: Panels::new::<K>(width, CHUNK),
            writing: Panels::plain(CHUNK, width),
            q: rows(),
            k: rows(),
            decay: rows(),
        }
    }

    /// The errors of some tokens, from a row of (B, H, T) on; zeros for what is missing.
    fn read_errors(&mut self, saved: &Saved, row: usize, tokens: usize, d_v: usize) {
        let errors = self.errors.words_mut();
        errors.fill(0.0);
        if d_v > 0 {
            let saved = saved.errors[row * d_v..][..tokens * d_v].chunks_exact(d_v);
            for (to, from) in errors.chunks_exact_mut(self.rows.value_width).zip(saved) {
                to[..d_v].copy_from_slice(from);
            }
        }
    }
}

/// Runs all tokens of a head, the last ones first.
///
/// # Safety
/// The processor has the instruction set of K; the workspace was made for the call.
pub(super) unsafe fn run_head<K: Kernel, E: Number>(call: &BackwardCall<E>, workspace: &mut Workspace, at: Head) {
    let BackwardProblem { forward: problem, saved, context_grad, states_grad } = call.problem;
    let (dims, len) = (problem.dims, problem.state_len());
    let tokens = problem.sequences[at.sequence].clone();
    let index = problem.head_index(at);
    let output = &call.gradients;
    // SAFETY: as this function's contract; this task alone writes the gradients of the head's rows and state.
    unsafe {
        match states_grad {
            Some(gradient) => workspace.gradient.copy_rows_from(gradient[index * len..].as_ptr()),
            None => workspace.gradient.words.words_mut().fill(0.0),
        }
        for block in (0..tokens.len().div_ceil(BLOCK)).rev() {
            let first = tokens.start + block * BLOCK;
            let tokens = first..tokens.end.min(first + BLOCK);
            let from = StoredRows::new(problem, (context_grad, dims.h), at.head, first);
            let rows = &mut workspace.rows;
            K::run_simd(ReadRows { problem, head: at.head, tokens: tokens.clone(), from, rows });
            let state = ((call.blocks[at.sequence] + block) * dims.h + at.head) * len;
            workspace.states[0].copy_rows_from(saved.states[state..].as_ptr());
            let row = (tokens.start / dims.t * dims.h + at.head) * dims.t + tokens.start % dims.t;
            workspace.read_errors(saved, row, tokens.len(), dims.d_v);
            K::run_simd(Block {
                dims,
                decay: problem.decay,
                scale: problem.scale,
                is_normed: problem.qk_norm.is_some(),
                has_beta: problem.beta.is_some(),
                row,
                tokens: tokens.len(),
                output,
                workspace,
            });
        }
        workspace.gradient.copy_rows_to(output.states.0.add(index * len));
        call.excess_decay.record(workspace.rows.excess_decay());
    }
}

/// The tokens of a block, chunk after chunk from the last.
struct Block<'a> {
    dims: Dims,
    decay: Option<Decay<'a>>,
    scale: f32,
    is_normed: bool,
    has_beta: bool,
    /// The first token's row in (B, H, T).
    row: usize,
    tokens: usize,
    output: &'a Gradients<SharedPtr<f32>>,
    workspace: &'a mut Workspace,
}

impl SimdTask for Block<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let chunks = self.tokens.div_ceil(CHUNK);
        // SAFETY: the processor has the instruction set of K, and the workspace was made for it.
        unsafe {
            for chunk in 0..chunks {
                let Workspace { chunks, rows, .. } = &mut *self.workspace;
                chunks[chunk].fill::<K::Vector>(rows, chunk * CHUNK);
                if chunk + 1 < self.tokens.div_ceil(CHUNK) {
                    self.update::<K>(chunk);
                    self.advance::<K>(chunk);
                }
            }
            for chunk in (0..chunks).rev() {
                self.update::<K>(chunk);
                self.solve::<K>(chunk);
                self.contract::<K>(chunk);
                self.differentiate::<K::Vector>(chunk);
                self.write::<K::Vector>(chunk);
                self.retreat::<K>(chunk);
            }
        }
    }
}

impl Block<'_> {
    /// The updates of a chunk.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn update<K: Kernel>(&mut self, chunk: usize) {
        let Workspace { rows, errors, updates, .. } = &mut *self.workspace;
        for i in 0..CHUNK {
            let token = chunk * CHUNK + i;
            // SAFETY: as this method's contract; a row of errors has whole panels.
            unsafe {
                let beta = K::Vector::splat(rows.beta[token]);
                for_each_vector!(updates, K::Vector, |panel, at| {
                    let error = errors.as_ptr().add(token * rows.value_width + panel * K::PANEL + at);
                    K::Vector::load(error).mul(beta).store(updates.at_mut(panel, i).add(at));
                });
            }
        }
    }

    /// The state after a chunk, from that before it.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn advance<K: Kernel>(&mut self, chunk: usize) {
        let Workspace { rows, chunks, states, updates, .. } = &mut *self.workspace;
        let (before, after) = states.split_at_mut(chunk + 1);
        let (before, after, chunk) = (&before[chunk], &mut after[0], &chunks[chunk]);
        // SAFETY: as this method's contract.
        unsafe {
            keep::<K::Vector>(before.at(0, 0), chunk.at(KEPT), after);
            let keys = left::<K>(chunk.at(WRITING_KEYS), 1, rows.width);
            for panel in 0..after.count() {
                let sizes = [self.dims.d_k, CHUNK, after.len(panel)];
                multiply::<K>(keys, updates.at(panel, 0), after.at_mut(panel, 0), sizes, true);
            }
        }
    }

    /// `x` and `y`, and the gradients of values and betas.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn solve<K: Kernel>(&mut self, chunk: usize) {
        let Workspace { rows, chunks, gradient, outer, solution, errors, .. } = &mut *self.workspace;
        let (first, chunk) = (chunk * CHUNK, &chunks[chunk]);
        let d_v = self.dims.d_v;
        // SAFETY: as this method's contract; the results have rows for each token.
        unsafe {
            for i in 0..CHUNK {
                for_each_vector!(outer, K::Vector, |panel, at| {
                    let from = rows.values.as_ptr().add((first + i) * rows.value_width + panel * K::PANEL + at);
                    K::Vector::load(from).store(outer.at_mut(panel, CHUNK + i).add(at));
                });
            }
            let queries = left::<K>(chunk.products().1.as_ptr(), 1, CHUNK);
            let keys = left::<K>(chunk.at(WRITING_KEYS), rows.width, 1);
            for panel in 0..solution.count() {
                let (to, columns) = (solution.at_mut(panel, 0), solution.len(panel));
                multiply::<K>(queries, outer.at(panel, CHUNK), to, [CHUNK, CHUNK, columns], false);
                multiply::<K>(keys, gradient.at(panel, 0), to, [CHUNK, self.dims.d_k, columns], true);
            }
            for i in (0..CHUNK).rev() {
                let beta = rows.beta[first + i];
                for j in 0..if self.has_beta { i } else { 0 } {
                    let factor = K::Vector::splat(-beta * chunk.products().0[i * CHUNK + j]);
                    for_each_vector!(solution, K::Vector, |panel, at| {
                        let to = solution.at_mut(panel, j).add(at);
                        K::Vector::load(solution.at(panel, i).add(at)).mul_add(factor, K::Vector::load(to)).store(to);
                    });
                }
                let mut sums = K::Vector::splat(0.0);
                for_each_vector!(solution, K::Vector, |panel, at| {
                    let x = K::Vector::load(solution.at(panel, i).add(at));
                    let error = errors.as_ptr().add((first + i) * rows.value_width + panel * K::PANEL + at);
                    sums = K::Vector::load(error).mul_add(x, sums);
                    let minus_y = x.mul(K::Vector::splat(-beta));
                    minus_y.store(outer.at_mut(panel, i).add(at));
                });
                if first + i < self.tokens {
                    let row = self.row + first + i;
                    *self.output.beta.add(row) = sums.sum();
                    for column in 0..d_v {
                        let minus_y = outer.at(column / K::PANEL, i).add(column % K::PANEL);
                        *self.output.v.add(row * d_v + column) = -*minus_y;
                    }
                }
                if !self.has_beta {
                    // Nothing is read by keys.
                    for panel in 0..outer.count() {
                        outer.at_mut(panel, i).write_bytes(0, K::PANEL);
                    }
                }
            }
        }
    }

    /// The gradients of products and of the rows that read and write.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn contract<K: Kernel>(&mut self, chunk: usize) {
        let workspace = &mut *self.workspace;
        let Workspace { outer, outer_columns, updates, update_columns, gradient, .. } = workspace;
        let d_k = self.dims.d_k;
        // SAFETY: as this method's contract.
        unsafe {
            transpose::<K::Vector>(outer, outer_columns);
            transpose::<K::Vector>(updates, update_columns);
            product::<K>(outer, 2 * CHUNK, update_columns, &mut workspace.products);
            product::<K>(&workspace.states[chunk], d_k, outer_columns, &mut workspace.reading_columns);
            product::<K>(gradient, d_k, update_columns, &mut workspace.writing_columns);
            transpose::<K::Vector>(&workspace.reading_columns, &mut workspace.reading);
            transpose::<K::Vector>(&workspace.writing_columns, &mut workspace.writing);
        }
    }

    /// The gradient of the state before a chunk, from that of the state after it.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn retreat<K: Kernel>(&mut self, chunk: usize) {
        let Workspace { rows, chunks, gradient, outer, .. } = &mut *self.workspace;
        let chunk = &chunks[chunk];
        // SAFETY: as this method's contract; the queries that read follow the keys.
        unsafe {
            keep::<K::Vector>(gradient.at(0, 0), chunk.at(KEPT), gradient);
            let reading = left::<K>(chunk.at(KEYS), 1, rows.width);
            for panel in 0..gradient.count() {
                let sizes = [self.dims.d_k, 2 * CHUNK, gradient.len(panel)];
                multiply::<K>(reading, outer.at(panel, 0), gradient.at_mut(panel, 0), sizes, true);
            }
        }
    }
}

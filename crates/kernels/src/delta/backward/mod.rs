//! The backward pass: the gradients of all inputs of the forward pass, from the errors and the states that the forward
//! pass saved. Blocks are computed from the last to the first, and each is divided into chunks whose updates are
//! products of matrices.
//!
//! With the names of [`Chunk`], `u = beta e`, and `dS` the gradient of the state after a chunk, which is replaced by
//! the gradient of the state before the chunk:
//!
//! ```text
//! du = query_productsᵀ do + writing_keys dS
//! x  = the solution of x_j + Σ_{i>j} key_products(i, j) beta_i x_i = du_j;  y = beta x
//! d value = y,  d beta = x · e
//! d query_products = do uᵀ,  d key_products = -y uᵀ
//! d reading_queries = do Sᵀ,  d reading_keys = -y Sᵀ,  d writing_keys = u dSᵀ
//! dS = decay ∘ dS + reading_queriesᵀ do - reading_keysᵀ y
//! ```
//!
//! Gradients of the rows and of the logarithms of factors are in `rows.rs`.

mod panels;
mod rows;

use super::chunk::Chunk;
use super::problem::{DeltaDecay, DeltaDims, SequenceHead};
use super::rows::{BLOCK, DeltaTokenRows, ReadTokens, TokenAddresses};
use super::{DeltaBackwardCall, DeltaBackwardProblem, DeltaSaved, GradientAddresses};
use crate::cpu::{Kernel, Scratch, SimdTask, Vector};
use crate::number::Number;
use panels::{Panels, ProductSizes, for_each_vector, left_operand, multiply, multiply_panels, scale_rows, transpose};

/// The tokens of a chunk: the columns of two vectors of AVX2, one of AVX-512.
const CHUNK: usize = 16;

/// The largest number of chunks of a block.
const CHUNKS: usize = BLOCK / CHUNK;

/// The scratch buffers of a thread.
pub(super) struct DeltaBackwardScratch {
    /// The rows of a block. Its values are the gradients of outputs.
    rows: DeltaTokenRows,
    /// The saved errors of the block, as the values.
    errors: Scratch,
    chunks: [Chunk; CHUNKS],
    /// The state before each chunk, (D_k, D_v).
    states: [Panels; CHUNKS],
    /// `dS`, (D_k, D_v).
    state_grad: Panels,
    /// `-y`, then the gradients of outputs: (2 · CHUNK, D_v).
    value_grads: Panels,
    /// The columns of `value_grads`.
    value_grad_columns: Panels,
    /// `u`, (CHUNK, D_v).
    updates: Panels,
    /// The columns of `updates`.
    update_columns: Panels,
    /// The gradient `du` of the updates, which the solution `x` of the triangular system replaces.
    solution: Panels,
    /// The gradients of key products, then of query products: (2 · CHUNK, CHUNK).
    product_grads: Panels,
    /// The gradients of reading rows, keys first, as columns and as rows.
    reading_columns: Panels,
    reading: Panels,
    /// The gradients of writing rows, as columns and as rows.
    writing_columns: Panels,
    writing: Panels,
    /// The gradients of queries, keys and logarithms of factors: (CHUNK, width) each.
    q_grad: Scratch,
    k_grad: Scratch,
    decay_grad: Scratch,
}

impl DeltaBackwardScratch {
    pub fn new<K: Kernel>(dims: &DeltaDims) -> Self {
        let d_k = dims.d_k;
        let d_v = dims.d_v;
        let width = d_k.next_multiple_of(K::Vector::LANES);
        let depth = d_v.next_multiple_of(K::Vector::LANES);
        let value_width = d_v.div_ceil(K::PANEL) * K::PANEL;
        let rows = || Scratch::zeros(CHUNK * width);
        Self {
            rows: DeltaTokenRows::new(BLOCK, width, value_width),
            errors: Scratch::zeros(BLOCK * value_width),
            chunks: std::array::from_fn(|_| Chunk::new(CHUNK, width)),
            states: std::array::from_fn(|_| Panels::new::<K>(d_k, d_v)),
            state_grad: Panels::new::<K>(d_k, d_v),
            value_grads: Panels::new::<K>(2 * CHUNK, d_v),
            value_grad_columns: Panels::new::<K>(depth, 2 * CHUNK),
            updates: Panels::new::<K>(CHUNK, d_v),
            update_columns: Panels::new::<K>(depth, CHUNK),
            solution: Panels::new::<K>(CHUNK, d_v),
            product_grads: Panels::new::<K>(2 * CHUNK, CHUNK),
            reading_columns: Panels::new::<K>(width, 2 * CHUNK),
            reading: Panels::single(2 * CHUNK, width),
            writing_columns: Panels::new::<K>(width, CHUNK),
            writing: Panels::single(CHUNK, width),
            q_grad: rows(),
            k_grad: rows(),
            decay_grad: rows(),
        }
    }

    /// Reads the saved errors of some tokens, from a row of (B, H, T) on; zeros for missing tokens.
    fn read_errors(&mut self, saved: &DeltaSaved, row: usize, tokens: usize, d_v: usize) {
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

/// Runs all tokens of a head, from the last block to the first.
///
/// # Safety
/// The processor has the instruction set of K; the scratch buffers were allocated for the call.
pub(super) unsafe fn run_head<K: Kernel, E: Number>(
    call: &DeltaBackwardCall<E>,
    scratch: &mut DeltaBackwardScratch,
    at: SequenceHead,
) {
    let DeltaBackwardProblem { forward: problem, saved, output_grad, states_grad } = call.problem;
    let dims = problem.dims;
    let len = problem.state_len();
    let tokens = problem.sequences[at.sequence].clone();
    let index = problem.head_index(at);
    let gradients = &call.gradients;
    // SAFETY: as this function's contract; this task alone writes the gradients of the head's rows and state.
    unsafe {
        match states_grad {
            Some(states_grad) => scratch.state_grad.copy_rows_from(states_grad[index * len..].as_ptr()),
            None => scratch.state_grad.words.words_mut().fill(0.0),
        }
        for block in (0..tokens.len().div_ceil(BLOCK)).rev() {
            let first = tokens.start + block * BLOCK;
            let own_tokens = first..tokens.end.min(first + BLOCK);
            let from = TokenAddresses::new(problem, output_grad, dims.h, at.head, first);
            let rows = &mut scratch.rows;
            K::run_simd(ReadTokens { problem, head: at.head, tokens: own_tokens.clone(), from, rows });
            let state = ((call.blocks[at.sequence] + block) * dims.h + at.head) * len;
            scratch.states[0].copy_rows_from(saved.states[state..].as_ptr());
            let row = (own_tokens.start / dims.t * dims.h + at.head) * dims.t + own_tokens.start % dims.t;
            scratch.read_errors(saved, row, own_tokens.len(), dims.d_v);
            K::run_simd(BackwardBlock {
                dims,
                decay: problem.decay,
                scale: problem.scale,
                is_normed: problem.qk_norm.is_some(),
                has_beta: problem.beta.is_some(),
                row,
                tokens: own_tokens.len(),
                gradients,
                scratch,
            });
        }
        scratch.state_grad.copy_rows_to(gradients.states.add(index * len));
        call.excess_decay.record(scratch.rows.excess_decay());
    }
}

/// The tokens of a block, chunk after chunk from the last.
struct BackwardBlock<'a> {
    dims: DeltaDims,
    decay: Option<DeltaDecay<'a>>,
    scale: f32,
    is_normed: bool,
    has_beta: bool,
    /// The first token's row in (B, H, T).
    row: usize,
    tokens: usize,
    gradients: &'a GradientAddresses,
    scratch: &'a mut DeltaBackwardScratch,
}

impl SimdTask for BackwardBlock<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let chunks = self.tokens.div_ceil(CHUNK);
        // SAFETY: the processor has the instruction set of K, and the scratch buffers were allocated for it.
        unsafe {
            for chunk in 0..chunks {
                let DeltaBackwardScratch { chunks: all, rows, .. } = &mut *self.scratch;
                all[chunk].fill::<K::Vector>(rows, chunk * CHUNK);
                if chunk + 1 < chunks {
                    self.compute_updates::<K>(chunk);
                    self.advance_state::<K>(chunk);
                }
            }
            for chunk in (0..chunks).rev() {
                self.compute_updates::<K>(chunk);
                self.solve::<K>(chunk);
                self.differentiate_products::<K>(chunk);
                self.differentiate_rows::<K::Vector>(chunk);
                self.write_gradients::<K::Vector>(chunk);
                self.advance_state_gradient::<K>(chunk);
            }
        }
    }
}

impl BackwardBlock<'_> {
    /// Computes the updates `u` of a chunk.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn compute_updates<K: Kernel>(&mut self, chunk: usize) {
        let DeltaBackwardScratch { rows, errors, updates, .. } = &mut *self.scratch;
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

    /// Computes the state after a chunk from the state before it.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn advance_state<K: Kernel>(&mut self, index: usize) {
        let DeltaBackwardScratch { rows, chunks, states, updates, .. } = &mut *self.scratch;
        let (earlier, later) = states.split_at_mut(index + 1);
        let before = &earlier[index];
        let after = &mut later[0];
        let chunk = &chunks[index];
        // SAFETY: as this method's contract.
        unsafe {
            scale_rows::<K::Vector>(before.at(0, 0), chunk.decay(), after);
            let keys = left_operand::<K>(chunk.writing_keys(), 1, rows.width);
            for panel in 0..after.count() {
                let sizes = ProductSizes { rows: self.dims.d_k, depth: CHUNK, columns: after.len(panel) };
                multiply::<K>(keys, updates.at(panel, 0), after.at_mut(panel, 0), sizes, true);
            }
        }
    }

    /// Computes `x` and `y`, and writes the gradients of values and betas.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn solve<K: Kernel>(&mut self, index: usize) {
        let DeltaBackwardScratch { rows, chunks, state_grad, value_grads, solution, errors, .. } = &mut *self.scratch;
        let first = index * CHUNK;
        let chunk = &chunks[index];
        let d_v = self.dims.d_v;
        // SAFETY: as this method's contract; the results have rows for each token.
        unsafe {
            for i in 0..CHUNK {
                for_each_vector!(value_grads, K::Vector, |panel, at| {
                    let from = rows.values.as_ptr().add((first + i) * rows.value_width + panel * K::PANEL + at);
                    K::Vector::load(from).store(value_grads.at_mut(panel, CHUNK + i).add(at));
                });
            }
            let queries = left_operand::<K>(chunk.query_products().as_ptr(), 1, CHUNK);
            let keys = left_operand::<K>(chunk.writing_keys(), rows.width, 1);
            for panel in 0..solution.count() {
                let to = solution.at_mut(panel, 0);
                let columns = solution.len(panel);
                let query_sizes = ProductSizes { rows: CHUNK, depth: CHUNK, columns };
                let key_sizes = ProductSizes { rows: CHUNK, depth: self.dims.d_k, columns };
                multiply::<K>(queries, value_grads.at(panel, CHUNK), to, query_sizes, false);
                multiply::<K>(keys, state_grad.at(panel, 0), to, key_sizes, true);
            }
            for i in (0..CHUNK).rev() {
                let beta = rows.beta[first + i];
                let earlier_tokens = if self.has_beta { i } else { 0 };
                for j in 0..earlier_tokens {
                    let factor = K::Vector::splat(-beta * chunk.key_products()[i * CHUNK + j]);
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
                    minus_y.store(value_grads.at_mut(panel, i).add(at));
                });
                if first + i < self.tokens {
                    let row = self.row + first + i;
                    *self.gradients.beta.add(row) = sums.sum();
                    for column in 0..d_v {
                        let minus_y = value_grads.at(column / K::PANEL, i).add(column % K::PANEL);
                        *self.gradients.v.add(row * d_v + column) = -*minus_y;
                    }
                }
                if !self.has_beta {
                    // Keys read nothing without a beta.
                    for panel in 0..value_grads.count() {
                        value_grads.at_mut(panel, i).write_bytes(0, K::PANEL);
                    }
                }
            }
        }
    }

    /// Computes the gradients of products and of the rows that read and write.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn differentiate_products<K: Kernel>(&mut self, chunk: usize) {
        let scratch = &mut *self.scratch;
        let DeltaBackwardScratch { value_grads, value_grad_columns, updates, update_columns, state_grad, .. } = scratch;
        let d_k = self.dims.d_k;
        // SAFETY: as this method's contract.
        unsafe {
            transpose::<K::Vector>(value_grads, value_grad_columns);
            transpose::<K::Vector>(updates, update_columns);
            multiply_panels::<K>(value_grads, 2 * CHUNK, update_columns, &mut scratch.product_grads);
            multiply_panels::<K>(&scratch.states[chunk], d_k, value_grad_columns, &mut scratch.reading_columns);
            multiply_panels::<K>(state_grad, d_k, update_columns, &mut scratch.writing_columns);
            transpose::<K::Vector>(&scratch.reading_columns, &mut scratch.reading);
            transpose::<K::Vector>(&scratch.writing_columns, &mut scratch.writing);
        }
    }

    /// Computes the gradient of the state before a chunk from the gradient of the state after it.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn advance_state_gradient<K: Kernel>(&mut self, index: usize) {
        let DeltaBackwardScratch { rows, chunks, state_grad, value_grads, .. } = &mut *self.scratch;
        let chunk = &chunks[index];
        // SAFETY: as this method's contract; the reading queries follow the reading keys.
        unsafe {
            scale_rows::<K::Vector>(state_grad.at(0, 0), chunk.decay(), state_grad);
            let reading = left_operand::<K>(chunk.reading_keys(), 1, rows.width);
            for panel in 0..state_grad.count() {
                let sizes = ProductSizes { rows: self.dims.d_k, depth: 2 * CHUNK, columns: state_grad.len(panel) };
                multiply::<K>(reading, value_grads.at(panel, 0), state_grad.at_mut(panel, 0), sizes, true);
            }
        }
    }
}

//! The gradients of queries, keys and decays, from the gradients of the rows that read and write a state.
//!
//! The factor of token i is in each product of what was stored before the token and what the token or a later one
//! reads. The gradient of its logarithm is the sum of these products times their gradients:
//!
//! ```text
//! d log(factor_i) = Σ_{j<i} (k_j ∘ between(i, j)) ∘ dk(i, j)                what earlier tokens of the chunk wrote
//!                 + Σ_{m>=i} (q_m ∘ decayed(m, start)) ∘ (do_m Sᵀ)          what queries read of the state before it
//!                 - Σ_{m>=i} (k_m ∘ decayed(m, start)) ∘ (y_m Sᵀ)           what keys read of it
//!                 + decayed(end, start) ∘ (S · dS)                          what is left of it after the chunk
//! ```
//!
//! `between(i, j)` is the product of the factors after j and before i. `dk(i, j)` is the gradient of the key that token
//! j wrote, by what token i, later tokens and the state after the chunk take of it, times the factors from i on. Tokens
//! are taken from the last to the first, so that `dk` and the sums over m gain one term for each.
//!
//! Each term has the factor itself, and is as small as the gradient where the decay is strong. The difference between
//! the products that begin and the products that end at a token, summed over the later tokens, is the same number, but
//! its rounding error is that of the largest product, and exceeds the gradient where factors are below 1e-7.

use super::panels::Panels;
use super::{BackwardBlock, CHUNK, DeltaBackwardScratch};
use crate::cpu::{MAX_LANES, Scratch, Vector};
use crate::delta::problem::DeltaDecay;
use crate::delta::rows::dot;

/// The gradients of the products of a chunk, each (i, j) for tokens j <= i.
struct ProductGradients {
    keys: [[f32; CHUNK]; CHUNK],
    queries: [[f32; CHUNK]; CHUNK],
}

impl ProductGradients {
    /// Copies the gradients of key products and of query products, which are the rows after them.
    ///
    /// # Safety
    /// The matrix has 2 · CHUNK rows and CHUNK columns.
    #[inline(always)]
    unsafe fn read(from: &Panels) -> Self {
        let mut gradients = Self { keys: [[0.0; CHUNK]; CHUNK], queries: [[0.0; CHUNK]; CHUNK] };
        for i in 0..CHUNK {
            for j in 0..=i {
                let at = |row| from.at(j / from.panel, row).wrapping_add(j % from.panel);
                // SAFETY: as this function's contract.
                unsafe {
                    gradients.keys[i][j] = *at(i);
                    gradients.queries[i][j] = *at(CHUNK + i);
                }
            }
        }
        gradients
    }
}

impl BackwardBlock<'_> {
    /// Computes the gradients of queries, keys and the logarithms of factors, a row of each for each token.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    pub(super) unsafe fn differentiate_rows<V: Vector>(&mut self, index: usize) {
        let scratch = &mut *self.scratch;
        let width = scratch.rows.width;
        let chunk = &scratch.chunks[index];
        let state = &scratch.states[index];
        let state_grad = &scratch.state_grad;
        let rows_of_chunk = |rows: &Scratch| rows.as_ptr().wrapping_add(index * CHUNK * width);
        let q = rows_of_chunk(&scratch.rows.q);
        let k = rows_of_chunk(&scratch.rows.k);
        let factors = rows_of_chunk(&scratch.rows.factors);
        // SAFETY: as this method's contract; every row has whole vectors.
        unsafe {
            let products = ProductGradients::read(&scratch.product_grads);
            // For each channel, the product of the state before the chunk with the gradient of the state after it.
            let mut ends = [0f32; MAX_LANES];
            for at in (0..width).step_by(V::LANES) {
                for (lane, end) in ends.iter_mut().enumerate().take(V::LANES) {
                    *end = 0.0;
                    let panels = if at + lane < state.rows { state.count() } else { 0 };
                    for panel in 0..panels {
                        let words = state_grad.len(panel).next_multiple_of(V::LANES);
                        *end += dot::<V>(state.at(panel, at + lane), state_grad.at(panel, at + lane), words);
                    }
                }
                let zero = V::splat(0.0);
                // The gradients of the keys that write, by what token i and all tokens after it read.
                let mut writing = [zero; CHUNK];
                for (j, gradient) in writing.iter_mut().enumerate() {
                    *gradient = V::load(scratch.writing.at(0, j).add(at));
                }
                // The terms of the state before the chunk in the gradient of the logarithm of token i.
                let mut of_state = V::load(ends.as_ptr()).mul(V::load(chunk.decay().add(at)));
                for i in (0..CHUNK).rev() {
                    let row = i * width + at;
                    let query = V::load(q.add(row));
                    let key = V::load(k.add(row));
                    let factor = V::load(factors.add(row));
                    let mut query_grad = zero;
                    let mut reading_grad = zero;
                    let mut decay_grad = zero;
                    // The product of the factors of the tokens after j and before i.
                    let mut between = V::splat(1.0);
                    for j in (0..i).rev() {
                        let word = j * width + at;
                        let earlier_key = V::load(k.add(word)).mul(between);
                        let by_query = V::splat(products.queries[i][j]);
                        let by_key = V::splat(products.keys[i][j]);
                        query_grad = earlier_key.mul_add(by_query, query_grad);
                        reading_grad = earlier_key.mul_add(by_key, reading_grad);
                        let later_reads = query.mul_add(by_query, key.mul_add(by_key, writing[j]));
                        writing[j] = later_reads.mul(factor);
                        decay_grad = earlier_key.mul_add(writing[j], decay_grad);
                        between = between.mul(V::load(factors.add(word)));
                    }
                    let of_reading_query = V::load(scratch.reading.at(0, CHUNK + i).add(at)).mul(between);
                    let of_reading_key = V::load(scratch.reading.at(0, i).add(at)).mul(between);
                    let read = query.mul_add(of_reading_query, key.mul(of_reading_key));
                    of_state = read.mul_add(factor, of_state);
                    decay_grad = decay_grad.add(of_state);
                    query_grad = query_grad.add(of_reading_query).mul(factor);
                    reading_grad = reading_grad.add(of_reading_key).mul(factor);
                    let own = V::splat(products.queries[i][i]);
                    key.mul_add(own, query_grad).store(scratch.q_grad.as_mut_ptr().add(row));
                    let key_grad = query.mul_add(own, writing[i]).add(reading_grad);
                    key_grad.store(scratch.k_grad.as_mut_ptr().add(row));
                    let kept = V::select(zero.less_than(factor), decay_grad, zero);
                    kept.store(scratch.decay_grad.as_mut_ptr().add(row));
                }
            }
        }
    }

    /// Writes the gradients of queries, keys and decays, from before the norm and the scale.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    pub(super) unsafe fn write_gradients<V: Vector>(&mut self, chunk: usize) {
        let DeltaBackwardScratch { rows, q_grad, k_grad, decay_grad, .. } = &mut *self.scratch;
        let width = rows.width;
        let d_k = self.dims.d_k;
        for i in 0..CHUNK.min(self.tokens - chunk * CHUNK) {
            let token = chunk * CHUNK + i;
            let row = self.row + chunk * CHUNK + i;
            let scales = rows.scales[token];
            let q_row = rows.q.as_ptr().wrapping_add(token * width);
            let k_row = rows.k.as_ptr().wrapping_add(token * width);
            // SAFETY: as this method's contract; the results have a row for each token.
            unsafe {
                let dq = q_grad.as_mut_ptr().add(i * width);
                let dk = k_grad.as_mut_ptr().add(i * width);
                if self.is_normed {
                    differentiate_norm::<V>(dq, q_row, width, self.scale);
                    differentiate_norm::<V>(dk, k_row, width, 1.0);
                }
                for d in 0..d_k {
                    *self.gradients.q.add(row * d_k + d) = scales.q * *dq.add(d);
                    *self.gradients.k.add(row * d_k + d) = scales.k * *dk.add(d);
                }
                let decay_row = decay_grad.as_ptr().add(i * width);
                match self.decay {
                    Some(DeltaDecay::Heads(_)) => {
                        let mut sum = 0.0;
                        for d in 0..d_k {
                            sum += *decay_row.add(d);
                        }
                        *self.gradients.decay.add(row) = sum;
                    }
                    Some(DeltaDecay::Channels(_)) => {
                        self.gradients.decay.add(row * d_k).copy_from_nonoverlapping(decay_row, d_k);
                    }
                    None => (),
                }
            }
        }
    }
}

/// Computes the gradient of a row before it was divided by its length and multiplied with `scale`, up to the factor of
/// both. The part of the gradient along the row is removed, since it changes only the length.
///
/// # Safety
/// The processor has the instruction set of V; both are valid for `width` words, whole vectors.
#[inline(always)]
unsafe fn differentiate_norm<V: Vector>(gradient: *mut f32, row: *const f32, width: usize, scale: f32) {
    if scale == 0.0 {
        return;
    }
    // SAFETY: as this function's contract.
    unsafe {
        let along = V::splat(-dot::<V>(gradient, row, width) / (scale * scale));
        for at in (0..width).step_by(V::LANES) {
            let to = gradient.add(at);
            V::load(row.add(at)).mul_add(along, V::load(to)).store(to);
        }
    }
}

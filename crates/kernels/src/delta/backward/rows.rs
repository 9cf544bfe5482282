//! The gradients of queries, keys and decays, from the gradients of the rows that read and write a state.

use super::{BackwardBlock, BackwardScratch, CHUNK};
use crate::cpu::{MAX_LANES, Scratch, Vector};
use crate::delta::problem::DeltaDecay;
use crate::delta::rows::dot;

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
                let mut dq = [zero; CHUNK];
                let mut reading = [zero; CHUNK];
                let mut writing = [zero; CHUNK];
                let mut later = V::load(ends.as_ptr()).mul(V::load(chunk.decay().add(at)));
                let mut decayed = V::splat(1.0);
                for i in 0..CHUNK {
                    decayed = decayed.mul(V::load(factors.add(i * width + at)));
                    reading[i] = V::load(scratch.reading.at(0, i).add(at)).mul(decayed);
                    dq[i] = V::load(scratch.reading.at(0, CHUNK + i).add(at)).mul(decayed);
                    let written = V::load(scratch.writing.at(0, i).add(at));
                    later = V::load(chunk.writing_keys().add(i * width + at)).mul_add(written, later);
                }
                for j in 0..CHUNK {
                    let mut key = V::load(k.add(j * width + at));
                    let mut written = V::load(scratch.writing.at(0, j).add(at));
                    let panel = j / scratch.product_grads.panel;
                    let column = j % scratch.product_grads.panel;
                    let product = |row: usize| scratch.product_grads.at(panel, row).wrapping_add(column);
                    let own = V::splat(*product(CHUNK + j));
                    dq[j] = key.mul_add(own, dq[j]);
                    for i in j + 1..CHUNK {
                        key = key.mul(V::load(factors.add(i * width + at)));
                        dq[i] = key.mul_add(V::splat(*product(CHUNK + i)), dq[i]);
                        reading[i] = key.mul_add(V::splat(*product(i)), reading[i]);
                    }
                    for i in (j + 1..CHUNK).rev() {
                        let row = i * width + at;
                        written = V::load(q.add(row)).mul_add(V::splat(*product(CHUNK + i)), written);
                        written = V::load(k.add(row)).mul_add(V::splat(*product(i)), written);
                        written = written.mul(V::load(factors.add(row)));
                    }
                    writing[j] = V::load(q.add(j * width + at)).mul_add(own, written);
                }
                for i in (0..CHUNK).rev() {
                    let row = i * width + at;
                    let factor = V::load(factors.add(row));
                    later = V::load(q.add(row)).mul_add(dq[i], later);
                    later = V::load(k.add(row)).mul_add(reading[i].sub(writing[i]), later);
                    V::select(zero.less_than(factor), later, zero).store(scratch.decay_grad.as_mut_ptr().add(row));
                    dq[i].store(scratch.q_grad.as_mut_ptr().add(row));
                    reading[i].add(writing[i]).store(scratch.k_grad.as_mut_ptr().add(row));
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
        let BackwardScratch { rows, q_grad, k_grad, decay_grad, .. } = &mut *self.scratch;
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

//! From the gradients of what reads and writes a state to those of queries, keys and decays.

use super::{Block, CHUNK, KEPT, WRITING_KEYS, Workspace};
use crate::cpu::{MAX_LANES, Scratch, Vector};
use crate::delta::problem::Decay;
use crate::delta::rows::dot;

impl Block<'_> {
    /// The gradients of queries, keys and the logarithms of factors, a row of each for each token.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    pub(super) unsafe fn differentiate<V: Vector>(&mut self, index: usize) {
        let workspace = &mut *self.workspace;
        let (width, chunk) = (workspace.rows.width, &workspace.chunks[index]);
        let (state, gradient) = (&workspace.states[index], &workspace.gradient);
        let rows = |of: &Scratch| of.as_ptr().wrapping_add(index * CHUNK * width);
        let [q, k, factors] = [rows(&workspace.rows.q), rows(&workspace.rows.k), rows(&workspace.rows.factors)];
        // SAFETY: as this method's contract; every row has whole vectors.
        unsafe {
            // What the state after the chunk has to do with its gradient, for each channel.
            let mut ends = [0f32; MAX_LANES];
            for at in (0..width).step_by(V::LANES) {
                for (lane, end) in ends.iter_mut().enumerate().take(V::LANES) {
                    *end = 0.0;
                    for panel in 0..if at + lane < state.rows { state.count() } else { 0 } {
                        let (state, gradient) = (state.at(panel, at + lane), gradient.at(panel, at + lane));
                        *end += dot::<V>(state, gradient, workspace.gradient.len(panel).next_multiple_of(V::LANES));
                    }
                }
                let zero = V::splat(0.0);
                let (mut dq, mut reading, mut writing) = ([zero; CHUNK], [zero; CHUNK], [zero; CHUNK]);
                let mut later = V::load(ends.as_ptr()).mul(V::load(chunk.at(KEPT).add(at)));
                let mut decayed = V::splat(1.0);
                for i in 0..CHUNK {
                    decayed = decayed.mul(V::load(factors.add(i * width + at)));
                    reading[i] = V::load(workspace.reading.at(0, i).add(at)).mul(decayed);
                    dq[i] = V::load(workspace.reading.at(0, CHUNK + i).add(at)).mul(decayed);
                    let written = V::load(workspace.writing.at(0, i).add(at));
                    later = V::load(chunk.at(WRITING_KEYS).add(i * width + at)).mul_add(written, later);
                }
                for j in 0..CHUNK {
                    let mut key = V::load(k.add(j * width + at));
                    let mut written = V::load(workspace.writing.at(0, j).add(at));
                    let (panel, column) = (j / workspace.products.panel, j % workspace.products.panel);
                    let product = |row: usize| workspace.products.at(panel, row).wrapping_add(column);
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
                    V::select(zero.less_than(factor), later, zero).store(workspace.decay.as_mut_ptr().add(row));
                    dq[i].store(workspace.q.as_mut_ptr().add(row));
                    reading[i].add(writing[i]).store(workspace.k.as_mut_ptr().add(row));
                }
            }
        }
    }

    /// The rows of gradients, behind the norm and the scale.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    pub(super) unsafe fn write<V: Vector>(&mut self, chunk: usize) {
        let Workspace { rows, q, k, decay, .. } = &mut *self.workspace;
        let (width, d_k) = (rows.width, self.dims.d_k);
        for i in 0..CHUNK.min(self.tokens - chunk * CHUNK) {
            let (token, row) = (chunk * CHUNK + i, self.row + chunk * CHUNK + i);
            let scales = rows.scales[token];
            let [q_row, k_row] = [&rows.q, &rows.k].map(|rows| rows.as_ptr().wrapping_add(token * width));
            // SAFETY: as this method's contract; the results have a row for each token.
            unsafe {
                let (dq, dk) = (q.as_mut_ptr().add(i * width), k.as_mut_ptr().add(i * width));
                if self.is_normed {
                    behind_norm::<V>(dq, q_row, width, self.scale);
                    behind_norm::<V>(dk, k_row, width, 1.0);
                }
                for d in 0..d_k {
                    *self.output.q.add(row * d_k + d) = scales[0] * *dq.add(d);
                    *self.output.k.add(row * d_k + d) = scales[1] * *dk.add(d);
                }
                let decay = decay.as_ptr().add(i * width);
                match self.decay {
                    Some(Decay::Heads(_)) => {
                        let mut sum = 0.0;
                        for d in 0..d_k {
                            sum += *decay.add(d);
                        }
                        *self.output.decay.add(row) = sum;
                    }
                    Some(Decay::Channels(_)) => {
                        self.output.decay.add(row * d_k).copy_from_nonoverlapping(decay, d_k);
                    }
                    None => (),
                }
            }
        }
    }
}

/// The gradient of a row before it was divided by its length and multiplied with `scale`, without the factor that both
/// are: what points along the row changes nothing.
///
/// # Safety
/// The processor has the instruction set of V; both are valid for `width` words, whole vectors.
#[inline(always)]
unsafe fn behind_norm<V: Vector>(gradient: *mut f32, row: *const f32, width: usize, scale: f32) {
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

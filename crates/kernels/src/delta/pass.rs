//! One pass over a panel of a state: adds the updates of some tokens, and reads the state for the tokens after them.

use super::chunk::Chunk;
use crate::cpu::Vector;

/// The tokens of a pass, and the vectors of its panels: 16 sums, 8 updates and 2 vectors of the state, which fit in the
/// 32 registers of AVX-512 together. In the 16 registers of AVX2 fit the updates, or the sums of keys, or the sums of
/// queries: on a Zen 3, a pass of these three loops takes 0.86 of the time of two passes of two tokens in one loop,
/// whose row waits for a longer chain of multiply-adds.
pub(super) const TOKENS: usize = 4;
pub(super) const VECTORS: usize = 2;

/// The vectors of a panel of one token: rows of 512 bytes with AVX-512, which are read from memory at its full speed.
pub(super) const VECTORS_OF_ONE: usize = 8;

/// The address of rows of a panel in memory, and the words from one row to the next.
#[derive(Clone, Copy)]
pub(super) struct PanelAddress {
    pub first: *mut f32,
    pub stride: usize,
}

impl PanelAddress {
    /// Returns the address of the rows from a column on.
    #[inline(always)]
    pub fn at_column(self, column: usize) -> Self {
        Self { first: self.first.wrapping_add(column), ..self }
    }

    /// Copies some rows of some columns.
    ///
    /// # Safety
    /// Both addresses are valid for the rows and columns.
    pub unsafe fn copy_to(self, to: PanelAddress, rows: usize, columns: usize) {
        for row in 0..rows {
            // SAFETY: as this method's contract.
            unsafe { to.first.add(row * to.stride).copy_from(self.first.add(row * self.stride), columns) }
        }
    }
}

/// An update of a panel of a state by the tokens of a chunk.
#[derive(Clone, Copy)]
pub(super) struct PanelUpdate<'a> {
    pub from: PanelAddress,
    pub to: PanelAddress,
    /// The number of rows of the panel.
    pub channels: usize,
    /// The chunk whose tokens write to the state.
    pub writing: &'a Chunk,
}

/// The rows of keys, queries or both that read a state.
#[derive(Clone, Copy)]
pub(super) struct ReadingRows {
    pub first: *const f32,
    pub tokens: usize,
}

/// Adds updates of the tokens of a chunk, if there are any, to N vectors of columns of a state. Then reads the state by
/// the keys and by the queries of the tokens of the chunk `reading`. The sums of the queries follow the sums of the
/// keys.
///
/// # Safety
/// The processor has the instruction set of V; both addresses have the channels as rows of N vectors, and the chunks
/// have the tokens.
#[inline(always)]
pub(super) unsafe fn pass<V: Vector, const N: usize>(
    update: PanelUpdate,
    updates: &[[V; N]],
    reading: &Chunk,
    sums: &mut [[V; N]],
) {
    let tokens = sums.len() / 2;
    let keys = ReadingRows { first: reading.reading_keys(), tokens };
    let queries = ReadingRows { first: reading.reading_queries(), tokens };
    // SAFETY: as this function's contract; the rows of queries follow the rows of keys.
    unsafe {
        if V::LANES > 8 || tokens == 1 {
            return sweep(update, updates, keys, sums);
        }
        let read = if updates.is_empty() { update.from } else { update.to };
        if !updates.is_empty() {
            sweep(update, updates, ReadingRows { tokens: 0, ..keys }, &mut []);
        }
        let (key_sums, query_sums) = sums.split_at_mut(tokens);
        let only_read = PanelUpdate { from: read, to: read, writing: reading, ..update };
        sweep(only_read, &[], keys, key_sums);
        sweep(only_read, &[], queries, query_sums);
    }
}

/// Computes [`pass`] in one loop, or a part of it: N updates for each token of a chunk, and N sums for each of the rows
/// that read, which are one or two for each token.
///
/// # Safety
/// As [`pass`]; each row that reads has the width of a row of the chunk.
#[inline(always)]
pub(super) unsafe fn sweep<V: Vector, const N: usize>(
    update: PanelUpdate,
    updates: &[[V; N]],
    reading: ReadingRows,
    sums: &mut [[V; N]],
) {
    let PanelUpdate { mut from, mut to, channels, writing } = update;
    let ReadingRows { first: words, tokens } = reading;
    let decay = writing.decay();
    let writing_keys = writing.writing_keys();
    let width = writing.width;
    // SAFETY: as this function's contract.
    let mut registers = unsafe { [[V::splat(0.0); N]; 2 * TOKENS] };
    // Not `sums` itself, which would be written in each turn of the loop.
    let own_sums = &mut registers[..sums.len()];
    for d in 0..channels {
        // SAFETY: as this function's contract.
        unsafe {
            let mut row = [V::splat(0.0); N];
            for (n, vector) in row.iter_mut().enumerate() {
                *vector = V::load(from.first.add(n * V::LANES));
                if !updates.is_empty() {
                    *vector = vector.mul(V::splat(*decay.add(d)));
                }
            }
            for (i, token_updates) in updates.iter().enumerate() {
                let key = V::splat(*writing_keys.add(i * width + d));
                for (vector, &token_update) in row.iter_mut().zip(token_updates) {
                    *vector = key.mul_add(token_update, *vector);
                }
            }
            if !updates.is_empty() {
                for (n, &vector) in row.iter().enumerate() {
                    vector.store(to.first.add(n * V::LANES));
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

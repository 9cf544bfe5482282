//! How a call is split into tasks. Every constant of the split stands here, with its reason.

use super::pack::column_group;
use super::problem::{Call, Dims};
use crate::cpu::{Kernel, Vector, Workers, second_cache};

/// The state of a task's queries (packed queries and context sums) in bytes: half of the second cache, whose other half
/// holds a block of keys and values and its scores.
fn state_bytes() -> usize {
    second_cache() / 2
}

/// Tasks for each thread, so that unequal ones (causal masks) even out.
const TASKS_PER_THREAD: usize = 4;

/// Up to this many rows, keys are split over tasks: there are too few rows to keep the threads busy.
const KV_SPLIT_MAX_ROWS: usize = 256;

/// What a task of the backward pass keeps of its keys: most of an L2 cache of 1 MB, whatever the processor has, since
/// where keys are split shows in the last bits of the queries' gradients.
const BACKWARD_STATE_BYTES: usize = 768 << 10;

/// Tasks of the backward pass for each sequence, if it has the keys for them. It depends on nothing but the shape of
/// one sequence, since where keys are split shows in the last bits of the queries' gradients.
const BACKWARD_TASKS: usize = 16;

/// The blocks of keys of a task of the backward pass, each of which keeps so many words.
pub(super) fn backward_blocks<K: Kernel>(dims: &Dims, block_words: usize) -> usize {
    let blocks = dims.t_kv.div_ceil(K::BLOCK);
    let fit = BACKWARD_STATE_BYTES / (4 * block_words).max(1);
    let most = fit.min(blocks.saturating_mul(dims.h_kv) / BACKWARD_TASKS).max(1);
    // Chunks of one length.
    blocks.div_ceil(blocks.div_ceil(most).max(1)).max(1)
}

/// The keys of one part then. A multiple of every block. It depends on nothing but the shape of one sequence, since
/// where keys are split shows in the last bits of the result.
pub(super) const KV_SPLIT: usize = 1024;

/// How many threads a call is worth, which reads keys and values once and multiplies them `passes` times.
pub(super) fn workers<E, S>(call: &Call<E, S>, passes: usize) -> Workers {
    let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = call.inputs.dims;
    let product = |counts: [usize; 5]| counts.into_iter().fold(1usize, usize::saturating_mul);
    let width = d.saturating_add(d_v);
    let multiply_adds = product([b, h, t_q, t_kv, width]).saturating_mul(passes);
    Workers::of(multiply_adds, product([b, h_kv, t_kv, width, size_of::<S>()]), call.executor)
}

/// The threads that a call with statistics has tasks for.
const STATISTICS_THREADS: usize = 16;

/// The scores that a task keeps, in bytes, unless those of one panel are more: what a thread has of a third cache.
const KEPT_BYTES: usize = 8 << 20;

/// How the rows and keys of each key head are split.
#[derive(Debug, Clone, Copy)]
pub(super) struct TaskSplit {
    pub rows_per_chunk: usize,
    pub row_chunks: usize,
    pub keys_per_chunk: usize,
    pub key_chunks: usize,
}

impl TaskSplit {
    /// A call that `has_statistics` is split alike for any number of threads, since where rows are parted shows in the
    /// last bits of the sums over them.
    pub fn new<K: Kernel>(dims: &Dims, threads: usize, has_statistics: bool) -> Self {
        let rows = dims.rows();
        let split_keys = rows <= KV_SPLIT_MAX_ROWS && !has_statistics;
        let keys_per_chunk = if split_keys { KV_SPLIT } else { dims.t_kv };
        let key_chunks = if split_keys { dims.t_kv.div_ceil(KV_SPLIT).max(1) } else { 1 };
        let mut fit = state_bytes() / (4 * PackedSizes::new::<K>(dims).row_words());
        let threads = if has_statistics { STATISTICS_THREADS } else { threads };
        if has_statistics {
            fit = fit.min(KEPT_BYTES / (4 * dims.t_kv).max(1));
        }
        let even = (dims.b * dims.h_kv * rows).saturating_mul(key_chunks).div_ceil(TASKS_PER_THREAD * threads);
        // Chunks of one length, or the last would pack all keys for few rows.
        let panels = rows.div_ceil(K::PANEL);
        let row_chunks = panels.div_ceil((fit.min(even) / K::PANEL).max(1));
        let rows_per_chunk = panels.div_ceil(row_chunks) * K::PANEL;
        Self { rows_per_chunk, row_chunks: rows.div_ceil(rows_per_chunk), keys_per_chunk, key_chunks }
    }
}

/// A width, D or D_v, as packed matrices have it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedWidth {
    /// In 32-bit words as the depth of a product, padded to what it takes.
    pub words: usize,
    /// The same, padded to whole transposed squares.
    pub word_squares: usize,
    /// As the rows of a product, padded to whole groups.
    pub rows: usize,
    /// The same, padded to whole transposed squares.
    pub row_squares: usize,
}

impl PackedWidth {
    pub fn new<K: Kernel>(width: usize) -> Self {
        let lanes = K::Vector::LANES;
        let words = width.div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH);
        let rows = width.next_multiple_of(K::ROWS);
        Self { words, word_squares: words.next_multiple_of(lanes), rows, row_squares: rows.next_multiple_of(lanes) }
    }

    /// The words in which [`pack_columns`](super::pack::pack_columns) writes a block of rows of this width.
    pub fn column_words<K: Kernel>(&self) -> usize {
        match K::ELEMENTS {
            1 => self.rows / K::ROWS * column_group::<K>(),
            elements => K::BLOCK / elements * self.row_squares,
        }
    }

    /// The words on the way there.
    pub fn staging_words<K: Kernel>(&self) -> usize {
        let pairs = if K::IS_BF16 { K::BLOCK / 2 * self.row_squares } else { 0 };
        pairs.max(K::Vector::LANES * self.word_squares.max(self.rows))
    }
}

/// The sizes of packed matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedSizes {
    pub d: PackedWidth,
    pub d_v: PackedWidth,
}

impl PackedSizes {
    pub fn new<K: Kernel>(dims: &Dims) -> Self {
        Self { d: PackedWidth::new::<K>(dims.d), d_v: PackedWidth::new::<K>(dims.d_v) }
    }

    /// For one query of the forward pass: packed, its context, its maximum and sum.
    pub fn row_words(&self) -> usize {
        self.d.word_squares + self.d_v.row_squares + 2
    }
}

//! How a call is split into tasks. Every constant of the split stands here, with its reason.

use super::problem::{Call, Dims};
use crate::cpu::{Kernel, Vector, Workers};

/// The state of a task's queries (packed queries and context sums) in bytes: half of an L2 cache of 1 MB, whose other half
/// holds a block of keys and values and its scores.
const STATE_BYTES: usize = 512 << 10;

/// Tasks for each thread, so that unequal ones (causal masks) even out.
const TASKS_PER_THREAD: usize = 4;

/// Up to this many rows, keys are split over tasks: there are too few rows to keep the threads busy.
const KV_SPLIT_MAX_ROWS: usize = 256;

/// The keys of one part then. A multiple of every block. It depends on nothing but the shape of one sequence, since
/// where keys are split shows in the last bits of the result.
pub(super) const KV_SPLIT: usize = 1024;

/// How many threads a call is worth, which reads keys and values once.
pub(super) fn workers<E, S>(call: &Call<E, S>) -> Workers {
    let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = call.inputs.dims;
    let product = |counts: [usize; 5]| counts.into_iter().fold(1usize, usize::saturating_mul);
    let width = d.saturating_add(d_v);
    Workers::of(product([b, h, t_q, t_kv, width]), product([b, h_kv, t_kv, width, size_of::<S>()]), call.executor)
}

/// How the rows and keys of each key head are split.
#[derive(Debug, Clone, Copy)]
pub(super) struct TaskSplit {
    pub rows_per_chunk: usize,
    pub row_chunks: usize,
    pub keys_per_chunk: usize,
    pub key_chunks: usize,
}

impl TaskSplit {
    pub fn new<K: Kernel>(dims: &Dims, threads: usize) -> Self {
        let rows = dims.rows();
        let split_keys = rows <= KV_SPLIT_MAX_ROWS;
        let keys_per_chunk = if split_keys { KV_SPLIT } else { dims.t_kv };
        let key_chunks = if split_keys { dims.t_kv.div_ceil(KV_SPLIT).max(1) } else { 1 };
        let fit = STATE_BYTES / (4 * PackedSizes::new::<K>(dims).row_words());
        let even = (dims.b * dims.h_kv * rows).saturating_mul(key_chunks).div_ceil(TASKS_PER_THREAD * threads);
        // Chunks of one length, or the last would pack all keys for few rows.
        let panels = rows.div_ceil(K::PANEL);
        let row_chunks = panels.div_ceil((fit.min(even) / K::PANEL).max(1));
        let rows_per_chunk = panels.div_ceil(row_chunks) * K::PANEL;
        Self { rows_per_chunk, row_chunks: rows.div_ceil(rows_per_chunk), keys_per_chunk, key_chunks }
    }
}

/// The sizes of packed matrices, in 32-bit words.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedSizes {
    /// Of a query or key in depth: D in words, padded to what a product takes.
    pub depth: usize,
    /// The same, padded to whole transposed squares.
    pub query: usize,
    /// D_v, padded to rows of a product.
    pub value: usize,
    /// D_v, padded to whole transposed squares.
    pub context: usize,
}

impl PackedSizes {
    pub fn new<K: Kernel>(dims: &Dims) -> Self {
        let lanes = K::Vector::LANES;
        let depth = dims.d.div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH);
        let value = dims.d_v.next_multiple_of(K::ROWS);
        Self { depth, query: depth.next_multiple_of(lanes), value, context: value.next_multiple_of(lanes) }
    }

    /// For one query: packed, its context, its maximum and sum.
    pub fn row_words(&self) -> usize {
        self.query + self.context + 2
    }
}

//! How a forward call is split into tasks, and the memory of a task. Every constant of the split is here, with its
//! reason.

use std::ops::Range;

use super::chain::Chain;
use super::epilogue::KeyPart;
use super::inputs::CheckedCall;
use super::options::ScoreUnits;
use super::packed_width::PackedWidth;
use super::state::SoftmaxState;
use super::statistics::memory::StatisticsMemory;
use super::tile::Tile;
use crate::cpu::{Layout, Scratch, WorkSize, Workers, second_cache};
use candle_attention_call::{AttentionDims, KvHead};

/// Tasks for each thread, so that tasks of different lengths (causal masks) even out.
pub(super) const TASKS_PER_THREAD: usize = 4;

/// Up to this many rows, keys are split over tasks: there are too few rows to keep the threads busy.
const KV_SPLIT_MAX_ROWS: usize = 256;

/// The keys of one part where keys are split. A multiple of every block. It depends only on the shape of one sequence,
/// since the split of the keys changes the last bits of the result.
pub(super) const KV_SPLIT: usize = 1024;

/// The number of threads that a call with statistics is split for.
const STATISTICS_THREADS: usize = 16;

/// The most bytes of scores that a task with statistics stores, unless one panel takes more: a core's share of an L3
/// cache.
const STORED_SCORE_BYTES: usize = 8 << 20;

/// Chooses the threads for a call that reads keys and values once, in numbers of `bytes` bytes, and multiplies them
/// `passes` times.
pub(super) fn workers(dims: &AttentionDims, bytes: usize, passes: usize) -> Workers {
    let product = |counts: [usize; 5]| counts.into_iter().fold(1usize, usize::saturating_mul);
    let width = dims.d.saturating_add(dims.d_v);
    let multiply_adds = product([dims.b, dims.h, dims.t_q, dims.t_kv, width]).saturating_mul(passes);
    let read = product([dims.b, dims.h_kv, dims.t_kv, width, bytes]);
    Workers::for_call(WorkSize { multiply_adds, bytes: read })
}

/// The split of the rows and keys of each key head.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionTaskSplit {
    pub rows_per_chunk: usize,
    pub row_chunks: usize,
    pub keys_per_part: usize,
    pub key_parts: usize,
}

/// The rows and keys of one task.
pub(super) struct TaskRange {
    pub kv: KvHead,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
}

impl AttentionTaskSplit {
    /// Splits a call. A call that `has_statistics` is split alike for any number of threads, since the split of the
    /// rows changes the last bits of the sums over them.
    pub fn new(layout: Layout, dims: &AttentionDims, threads: usize, has_statistics: bool) -> Self {
        let rows = dims.rows();
        let mut keys_per_part = dims.t_kv;
        let mut key_parts = 1;
        if rows <= KV_SPLIT_MAX_ROWS && !has_statistics {
            keys_per_part = KV_SPLIT;
            key_parts = dims.t_kv.div_ceil(KV_SPLIT).max(1);
        }
        let d = PackedWidth::new(layout, dims.d);
        let d_v = PackedWidth::new(layout, dims.d_v);
        // The packed query, its output, maximum and sum. They take half of the second cache, whose other half stores a
        // block of keys and values and its scores.
        let mut rows_that_fit = second_cache() / 2 / (4 * (d.word_squares + d_v.row_squares + 2));
        let threads = if has_statistics { STATISTICS_THREADS } else { threads };
        if has_statistics {
            rows_that_fit = rows_that_fit.min(STORED_SCORE_BYTES / (4 * dims.t_kv).max(1));
        }
        let rows_for_threads = (dims.kv_heads() * rows).saturating_mul(key_parts).div_ceil(TASKS_PER_THREAD * threads);
        // Chunks of one length, or the last would pack all keys for few rows.
        let panels = rows.div_ceil(layout.panel);
        let row_chunks = panels.div_ceil((rows_that_fit.min(rows_for_threads) / layout.panel).max(1));
        let rows_per_chunk = panels.div_ceil(row_chunks) * layout.panel;
        Self { rows_per_chunk, row_chunks: rows.div_ceil(rows_per_chunk), keys_per_part, key_parts }
    }

    /// Returns the key head and rows of a chunk, and the keys of a part. The last rows come first: under a causal mask
    /// they attend to the most keys.
    pub fn task(&self, dims: &AttentionDims, chunk: usize, part: usize) -> TaskRange {
        let heads = dims.kv_heads();
        let row = (self.row_chunks - 1 - chunk / heads) * self.rows_per_chunk;
        let key = part * self.keys_per_part;
        TaskRange {
            kv: dims.kv_head(chunk % heads),
            rows: row..dims.rows().min(row + self.rows_per_chunk),
            keys: key..dims.t_kv.min(key + self.keys_per_part),
        }
    }
}

/// Some query rows of a key head against some of its keys.
pub(super) struct AttentionTask<'a> {
    pub inputs: &'a CheckedCall<'a>,
    pub units: ScoreUnits,
    pub kv: KvHead,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
    /// The tiles of the rows.
    pub tiles: Vec<Tile>,
    /// The part of the keys whose results the task writes, where keys are split.
    pub key_part: Option<KeyPart<'a>>,
    pub chain: &'a Chain,
    /// The number of the task in the chain.
    pub index: usize,
}

/// The memory that a thread needs for its tasks. Its size depends on D, D_v, the instruction set and whether weights
/// are dropped, up to about a megabyte and a half at D = 128, and grows with them.
pub(super) struct AttentionWorkspace {
    pub d: PackedWidth,
    pub d_v: PackedWidth,
    /// (panels, D, panel).
    pub queries: Scratch,
    pub state: SoftmaxState,
    /// (block, D).
    pub keys: Scratch,
    /// (D_v / rows, block, rows) for words of one element, (D_v, block / 2) for pairs.
    pub values: Scratch,
    /// (block, panel).
    pub scores: Scratch,
    /// (block / 2, panel), for pairs.
    pub weights: Scratch,
    /// (block, panel), where weights are dropped.
    pub dropout: Scratch,
    /// Rows before they are transposed.
    pub staging: Scratch,
    /// The memory for statistics. `None` where none are requested, and where there is not enough.
    pub statistics: Option<StatisticsMemory>,
}

impl AttentionWorkspace {
    /// Allocates memory for tasks of some panels.
    pub fn new(layout: Layout, inputs: &CheckedCall, panels: usize, has_statistics: bool) -> Self {
        let Layout { block, lanes, panel, .. } = layout;
        let dims = &inputs.dims;
        let d = PackedWidth::new(layout, dims.d);
        let d_v = PackedWidth::new(layout, dims.d_v);
        // For scores, a row of a block for each lane.
        let staging = (lanes * block).max(d.staging_words(layout)).max(d_v.staging_words(layout));
        Self {
            d,
            d_v,
            queries: Scratch::zeros(panels * d.word_squares * panel),
            state: SoftmaxState::new(panel, d_v, panels),
            keys: Scratch::zeros(block * d.words),
            values: Scratch::zeros(d_v.column_words(layout)),
            scores: Scratch::zeros(block * panel),
            weights: Scratch::zeros(if layout.elements == 2 { block / 2 * panel } else { 0 }),
            dropout: Scratch::zeros(if inputs.options.dropout.is_some() { block * panel } else { 0 }),
            staging: Scratch::zeros(staging),
            statistics: if has_statistics { StatisticsMemory::new(dims, panels, panel) } else { None },
        }
    }
}

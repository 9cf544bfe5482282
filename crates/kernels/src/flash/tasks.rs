//! How a call is split into tasks, the memory that one works in, and the order in which they add to what they share.
//! Every constant of the split stands here, with its reason.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::pack::column_group;
use super::problem::{Call, Dims, KvHead, ScoreInputs, ScoreUnits};
use super::softmax::Partials;
use super::statistics::kept_scores;
use super::tile::Tile;
use crate::cpu::{Layout, Scratch, Workers, second_cache};

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
pub(super) fn backward_blocks(block: usize, dims: &Dims, block_words: usize) -> usize {
    let blocks = dims.t_kv.div_ceil(block);
    let fit = BACKWARD_STATE_BYTES / (4 * block_words).max(1);
    let most = fit.min(blocks.saturating_mul(dims.h_kv) / BACKWARD_TASKS).max(1);
    // Chunks of one length.
    blocks.div_ceil(blocks.div_ceil(most).max(1)).max(1)
}

/// The keys of one part then. A multiple of every block. It depends on nothing but the shape of one sequence, since
/// where keys are split shows in the last bits of the result.
pub(super) const KV_SPLIT: usize = 1024;

/// How many threads a call is worth, which reads keys and values, of so many bytes a number, once and multiplies them
/// `passes` times.
pub(super) fn workers<E>(call: &Call<E>, bytes: usize, passes: usize) -> Workers {
    let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = call.inputs.dims;
    let product = |counts: [usize; 5]| counts.into_iter().fold(1usize, usize::saturating_mul);
    let width = d.saturating_add(d_v);
    let multiply_adds = product([b, h, t_q, t_kv, width]).saturating_mul(passes);
    Workers::of(multiply_adds, product([b, h_kv, t_kv, width, bytes]), call.executor)
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
    pub fn new(layout: Layout, dims: &Dims, threads: usize, has_statistics: bool) -> Self {
        let rows = dims.rows();
        let split_keys = rows <= KV_SPLIT_MAX_ROWS && !has_statistics;
        let keys_per_chunk = if split_keys { KV_SPLIT } else { dims.t_kv };
        let key_chunks = if split_keys { dims.t_kv.div_ceil(KV_SPLIT).max(1) } else { 1 };
        let [d, d_v] = [dims.d, dims.d_v].map(|width| PackedWidth::new(layout, width));
        // Of a query: packed, its context, its maximum and sum. They take half of the second cache, whose other half
        // holds a block of keys and values and its scores.
        let mut fit = second_cache() / 2 / (4 * (d.word_squares + d_v.row_squares + 2));
        let threads = if has_statistics { STATISTICS_THREADS } else { threads };
        if has_statistics {
            fit = fit.min(KEPT_BYTES / (4 * dims.t_kv).max(1));
        }
        let even = (dims.b * dims.h_kv * rows).saturating_mul(key_chunks).div_ceil(TASKS_PER_THREAD * threads);
        // Chunks of one length, or the last would pack all keys for few rows.
        let panels = rows.div_ceil(layout.panel);
        let row_chunks = panels.div_ceil((fit.min(even) / layout.panel).max(1));
        let rows_per_chunk = panels.div_ceil(row_chunks) * layout.panel;
        Self { rows_per_chunk, row_chunks: rows.div_ceil(rows_per_chunk), keys_per_chunk, key_chunks }
    }

    /// The key head and rows of a chunk, the last rows first, and the keys of a part.
    pub fn task(&self, dims: &Dims, chunk: usize, part: usize) -> (KvHead, [Range<usize>; 2]) {
        let heads = dims.b * dims.h_kv;
        let (row, key) = ((self.row_chunks - 1 - chunk / heads) * self.rows_per_chunk, part * self.keys_per_chunk);
        let rows = row..dims.rows().min(row + self.rows_per_chunk);
        (dims.kv_head(chunk % heads), [rows, key..dims.t_kv.min(key + self.keys_per_chunk)])
    }
}

/// Some query rows of a key head against some of its keys.
pub(super) struct AttendTask<'a> {
    pub inputs: &'a ScoreInputs<'a>,
    pub units: ScoreUnits,
    pub kv: KvHead,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
    /// Of the rows.
    pub tiles: Vec<Tile>,
    /// Takes the rows where keys are split, with the number of the part.
    pub partials: Option<(&'a Partials, usize)>,
    pub chain: &'a Chain,
    /// Its number there.
    pub index: usize,
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
    pub fn new(layout: Layout, width: usize) -> Self {
        let lanes = layout.lanes;
        let words = width.div_ceil(layout.elements).next_multiple_of(layout.depth);
        let rows = width.next_multiple_of(layout.rows);
        Self { words, word_squares: words.next_multiple_of(lanes), rows, row_squares: rows.next_multiple_of(lanes) }
    }

    /// The words in which [`pack_columns`](super::pack::pack_columns) writes a block of rows of this width.
    pub fn column_words(&self, layout: Layout) -> usize {
        match layout.elements {
            1 => self.rows / layout.rows * column_group(layout),
            elements => layout.block / elements * self.row_squares,
        }
    }

    /// The words on the way there.
    pub fn staging_words(&self, layout: Layout) -> usize {
        let pairs = if layout.elements == 2 { layout.block / 2 * self.row_squares } else { 0 };
        pairs.max(layout.lanes * self.word_squares.max(self.rows))
    }
}

/// What the online softmax knows of a chunk of queries after some of the keys: for each panel the sums of weighted
/// values (context, panel), the largest exponent and the sum of the weights (panel).
pub(super) struct State {
    words: Scratch,
    context: usize,
    /// The columns of a panel.
    pub panel: usize,
}

impl State {
    pub fn new(panel: usize, d_v: PackedWidth, panels: usize) -> Self {
        let context = d_v.row_squares;
        Self { words: Scratch::zeros(panels * panel * (context + 2)), context, panel }
    }

    fn stride(&self) -> usize {
        self.panel * (self.context + 2)
    }

    /// The state before any key.
    pub fn clear(&mut self) {
        let (stride, context) = (self.stride(), self.context * self.panel);
        for panel in self.words.words_mut().chunks_exact_mut(stride) {
            panel[..context].fill(0.0);
            panel[context..context + self.panel].fill(f32::NEG_INFINITY);
            panel[context + self.panel..].fill(0.0);
        }
    }

    /// The state of one panel.
    pub fn of_panel(&mut self, panel: usize) -> PanelState {
        let (stride, context) = (self.stride(), self.context * self.panel);
        assert!((panel + 1) * stride <= self.words.words().len(), "the state has a part for each panel");
        // Derived from one pointer, so that each may be used after the others.
        let first = self.words.as_mut_ptr().wrapping_add(panel * stride);
        PanelState { context: first, max: first.wrapping_add(context), sum: first.wrapping_add(context + self.panel) }
    }
}

/// Pointers to the state of one panel.
#[derive(Clone, Copy)]
pub(super) struct PanelState {
    pub context: *mut f32,
    pub max: *mut f32,
    pub sum: *mut f32,
}

/// Everything a thread needs for its tasks. Its size depends on D, D_v, the instruction set and whether weights are
/// dropped, up to about a megabyte and a half at D = 128, and grows with them.
pub(super) struct Workspace {
    /// Of D and D_v.
    pub sizes: [PackedWidth; 2],
    /// (panels, D, panel).
    pub queries: Scratch,
    pub state: State,
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
    /// Rows on their way to being transposed.
    pub staging: Scratch,
    /// Where statistics are wanted, the scores of all keys (panels, T_kv, panel), until the sum of their weights is
    /// known, and what is found of them: see [`kept_scores`]. `None` too where there is no memory for them.
    pub kept: Option<Scratch>,
}

impl Workspace {
    pub fn new(layout: Layout, inputs: &ScoreInputs, panels: usize, keeps_scores: bool) -> Self {
        let (Layout { block, lanes, panel, .. }, dims) = (layout, &inputs.dims);
        let sizes @ [d, d_v] = [dims.d, dims.d_v].map(|width| PackedWidth::new(layout, width));
        // For scores, a row of a block for each lane.
        let staging = (lanes * block).max(d.staging_words(layout)).max(d_v.staging_words(layout));
        Self {
            sizes,
            queries: Scratch::zeros(panels * d.word_squares * panel),
            state: State::new(panel, d_v, panels),
            keys: Scratch::zeros(block * d.words),
            values: Scratch::zeros(d_v.column_words(layout)),
            scores: Scratch::zeros(block * panel),
            weights: Scratch::zeros(if layout.elements == 2 { block / 2 * panel } else { 0 }),
            dropout: Scratch::zeros(if inputs.options.dropout.is_some() { block * panel } else { 0 }),
            staging: Scratch::zeros(staging),
            kept: if keeps_scores { kept_scores(dims, panels, panel) } else { None },
        }
    }
}

/// How far each task has come through the tiles of its rows. A task adds to what tiles share with other tasks after all
/// tasks before it in its chain have passed the last of these tiles, so that a sum has the same order for any number of
/// threads.
///
/// Tasks are started in their order and a task waits for earlier ones only, so the first of those that run never waits.
pub(super) struct Chain {
    passed: Vec<AtomicUsize>,
    /// How many tasks before a task the one before it in its chain is.
    step: usize,
}

/// The task is done.
const DONE: usize = usize::MAX - 1;
/// The task and all before it in its chain are done.
const ALL_DONE: usize = usize::MAX;
/// A thread that waits for longer lets others run.
const SPINS: usize = 1 << 10;

impl Chain {
    /// `None` where there is no memory for so many tasks.
    pub fn new(tasks: usize, step: usize) -> Option<Self> {
        let mut passed = Vec::new();
        passed.try_reserve_exact(tasks).ok()?;
        passed.resize_with(tasks, AtomicUsize::default);
        Some(Self { passed, step })
    }

    /// That the task has passed the tiles before this one.
    pub fn pass(&self, task: usize, tile: usize) {
        self.passed[task].store(tile, Ordering::Release);
    }

    pub fn finish(&self, task: usize) {
        let before = task.checked_sub(self.step).map_or(ALL_DONE, |before| self.passed[before].load(Ordering::Acquire));
        self.passed[task].store(if before == ALL_DONE { ALL_DONE } else { DONE }, Ordering::Release);
    }

    /// Waits until every earlier task of the chain has passed a tile.
    pub fn wait(&self, task: usize, tile: usize) {
        let mut next = task.checked_sub(self.step);
        let mut spins = 0;
        while let Some(before) = next {
            match self.passed[before].load(Ordering::Acquire) {
                ALL_DONE => return,
                passed if passed > tile => next = before.checked_sub(self.step),
                _ if spins < SPINS => {
                    spins += 1;
                    std::hint::spin_loop();
                }
                _ => std::thread::yield_now(),
            }
        }
    }

    /// Waits until every earlier task of the chain is done.
    pub fn wait_for_all(&self, task: usize) {
        self.wait(task, DONE - 1);
    }
}

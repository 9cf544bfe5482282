//! The backward pass on the kernel of an instruction set: the row terms of all queries, the tasks, and the sums over
//! tasks.

use std::ops::Range;

use super::call::BackwardCall;
use super::memory::{BackwardScratch, BackwardSizes};
use super::output::GradientOutput;
use super::task::{BackwardTask, BackwardWork};
use super::tile_gradient::TileModifierGradients;
use crate::cpu::{Kernel, Layout, MAX_LANES, Scratch, SharedPtr, for_each_index, for_each_task};
use crate::flash::chain::Chain;
use crate::flash::inputs::CheckedCall;
use crate::flash::tasks::workers;
use crate::flash::tile::Tile;
use crate::number::Number;
use candle_attention_call::{KvHead, QueryRow};

/// Computes the gradients of a call. `None` if there is no memory for intermediate results.
///
/// # Safety
/// The processor has the instruction set of K.
pub(in crate::flash) unsafe fn run_on<K: Kernel, E: Number>(backward: &BackwardCall<E>) -> Option<()> {
    // SAFETY: the processor has the instruction set of K; no two tasks write the same number at the same time.
    run_tasks(backward, K::LAYOUT, &|work| unsafe { K::run_simd(work) })
}

fn run_tasks<E: Number>(
    backward: &BackwardCall<E>,
    layout: Layout,
    run: &(dyn Fn(BackwardWork<E>) + Sync),
) -> Option<()> {
    let inputs = &backward.inputs;
    let dims = &inputs.dims;
    let workers = workers(dims, size_of::<E>(), 3);
    let heads = dims.b * dims.h;
    let mut sinks = vec![0f32; heads];
    let sink_sums = SharedPtr(sinks.as_mut_ptr());
    for_each_index(heads, workers, &|head| {
        // SAFETY: each task has a separate sum.
        let sink = unsafe { &mut *sink_sums.add(head) };
        run(BackwardWork::PrepareRows { backward, head, sink });
    });

    let split = BackwardSplit::new(backward, layout)?;
    let mut slopes = Scratch::try_zeros(&[split.chunks, if backward.requested.of.alibi_slopes { heads } else { 0 }])?;
    let slope_sums = SharedPtr(slopes.as_mut_ptr());
    let allocate = || BackwardScratch::new(layout, split.sizes, &inputs.options);
    for_each_task(split.tasks, workers, &allocate, &|memory, task| {
        split.run_task(backward, slope_sums, memory, task, run);
    });

    if let Some(to) = backward.to.q {
        for_each_index(heads, workers, &|head| run(BackwardWork::RoundQueries { backward, head, to }));
    }
    if let Some(to) = backward.to.alibi_slopes {
        write_head_sums(dims.h, slopes.words(), to);
    }
    if let Some(to) = backward.to.sinks {
        write_head_sums(dims.h, &sinks, to);
    }
    Some(())
}

/// Writes the sum of each head over the tasks and sequences, in their order.
fn write_head_sums(heads: usize, sums: &[f32], to: SharedPtr<f32>) {
    for head in 0..heads {
        let sum: f64 = sums.iter().skip(head).step_by(heads).map(|&sum| f64::from(sum)).sum();
        // SAFETY: there is an element for each head.
        unsafe { to.add(head).write(sum as f32) };
    }
}

/// The split of a call into tasks: a chunk of the keys of each key head.
struct BackwardSplit {
    sizes: BackwardSizes,
    /// The number of keys in a chunk.
    keys_per_chunk: usize,
    chunks: usize,
    tasks: usize,
    chain: Chain,
    /// The number of tiles of a key head.
    tiles: usize,
    /// For each tile, (B, tiles), the smallest range that contains the keys that it attends to.
    tile_keys: Vec<Range<usize>>,
}

impl BackwardSplit {
    /// Splits a call; `None` if there is no memory for so large a number of tasks.
    fn new<E: Number>(backward: &BackwardCall<E>, layout: Layout) -> Option<Self> {
        let inputs = &backward.inputs;
        let dims = &inputs.dims;
        let sizes = BackwardSizes::new(layout, dims);
        let keys_per_chunk = sizes.blocks * layout.block;
        let chunks = dims.t_kv.div_ceil(keys_per_chunk);
        let tiles = dims.rows().div_ceil(layout.panel);
        let keys_of_tile = |index: usize| {
            let kv = KvHead { b: index / tiles, head: 0 };
            let first = index % tiles * layout.panel;
            Tile::new(layout, inputs, kv, first..dims.rows().min(first + layout.panel)).some_attend
        };
        // Tasks that add to the same numbers wait for each other: tasks of the same head, or all.
        let outputs = [backward.to.bias, backward.to.relative_bias];
        let is_shared = outputs.into_iter().flatten().any(|output| output.is_shared(dims));
        let heads = dims.kv_heads();
        let tasks = chunks.checked_mul(heads)?;
        Some(Self {
            sizes,
            keys_per_chunk,
            chunks,
            tasks,
            chain: Chain::new(tasks, if is_shared { 1 } else { heads })?,
            tiles,
            tile_keys: (0..dims.b * tiles).map(keys_of_tile).collect(),
        })
    }

    /// Runs one task, and adds its sums to the gradients of score modifiers.
    fn run_task<E: Number>(
        &self,
        backward: &BackwardCall<E>,
        slope_sums: SharedPtr<f32>,
        memory: &mut BackwardScratch,
        task: usize,
        run: &(dyn Fn(BackwardWork<E>) + Sync),
    ) {
        let inputs = &backward.inputs;
        let dims = &inputs.dims;
        let heads = dims.kv_heads();
        // The first keys first: under a causal mask, most queries attend to them.
        let kv = dims.kv_head(task % heads);
        let first = task / heads * self.keys_per_chunk;
        let keys = first..dims.t_kv.min(first + self.keys_per_chunk);
        let mut sums = TaskSums::new(backward, kv, keys.clone());
        // SAFETY: each task has separate sums, one for each head of the group.
        let slopes =
            backward.requested.of.alibi_slopes.then(|| SharedPtr(unsafe { slope_sums.add(task * dims.group()) }));
        let modifiers = sums.modifier_gradients(backward, slopes);
        let tile_keys = &self.tile_keys[kv.b * self.tiles..(kv.b + 1) * self.tiles];
        let chain = &self.chain;
        let work = BackwardTask { backward, memory, kv, keys, tile_keys, chain, index: task, modifiers };
        run(BackwardWork::Keys(work));
        if !sums.are_empty() {
            self.chain.wait_for_all(task);
            // SAFETY: no other task adds to the gradients now.
            unsafe { sums.add_to(backward) };
        }
        self.chain.finish(task);
    }
}

/// The sums of a task for the gradients of score modifiers of which several queries share an entry.
struct TaskSums {
    kv: KvHead,
    keys: Range<usize>,
    /// The gradient of the bias, (group, keys).
    bias: Vec<f32>,
    /// The gradient of the relative bias, in the order of its table.
    relative_bias: Vec<f32>,
}

impl TaskSums {
    fn new<E: Number>(backward: &BackwardCall<E>, kv: KvHead, keys: Range<usize>) -> Self {
        let inputs = &backward.inputs;
        let has_shared_bias = backward.to.bias.is_some_and(|bias| bias.is_summed_over_queries);
        let bias_len = if has_shared_bias { inputs.dims.group() * keys.len() } else { 0 };
        let table_len = match inputs.relative_bias {
            Some(table) if backward.to.relative_bias.is_some() => table.size(),
            _ => 0,
        };
        Self { kv, keys, bias: vec![0.0; bias_len], relative_bias: vec![0.0; table_len] }
    }

    /// Returns where the task adds the gradients of score modifiers; `None` if none are requested.
    fn modifier_gradients<E: Number>(
        &mut self,
        backward: &BackwardCall<E>,
        slopes: Option<SharedPtr<f32>>,
    ) -> Option<TileModifierGradients> {
        let bias = match backward.to.bias {
            Some(bias) if bias.is_summed_over_queries => Some(self.bias_output(backward)),
            bias => bias,
        };
        let relative_bias = backward.to.relative_bias.map(|_| SharedPtr(self.relative_bias.as_mut_ptr()));
        if bias.is_none() && relative_bias.is_none() && slopes.is_none() {
            return None;
        }
        Some(TileModifierGradients { bias, relative_bias, slopes })
    }

    /// Returns the sums of the bias as a tensor with the indices of the whole call.
    fn bias_output<E: Number>(&mut self, backward: &BackwardCall<E>) -> GradientOutput {
        let count = self.keys.len();
        let first = backward.inputs.dims.query_head(self.kv, 0) * count + self.keys.start;
        let at = SharedPtr(self.bias.as_mut_ptr().wrapping_sub(first));
        GradientOutput { at, strides: [0, count, 0, 1], is_summed_over_queries: true }
    }

    fn are_empty(&self) -> bool {
        self.bias.is_empty() && self.relative_bias.is_empty()
    }

    /// Adds the sums to the gradients of the call.
    ///
    /// # Safety
    /// No other thread uses the entries of the key head.
    unsafe fn add_to<E: Number>(&self, backward: &BackwardCall<E>) {
        let CheckedCall { dims, options, .. } = &backward.inputs;
        let row = |n: usize| QueryRow { b: self.kv.b, head: dims.query_head(self.kv, n), query: 0 };
        // SAFETY: the entries exist, and as this method's contract.
        unsafe {
            if let Some(to) = backward.to.bias {
                let count = self.keys.len();
                for (index, sum) in self.bias.iter().enumerate() {
                    *to.entry(row(index / count), self.keys.start + index % count) += sum;
                }
            }
            if let Some(to) = backward.to.relative_bias
                && let Some(bias) = options.relative_bias
            {
                let entries = bias.table_entries(dims.group());
                for (sum, entry) in self.relative_bias[MAX_LANES..].iter().zip(entries) {
                    *to.entry(row(entry.head), entry.entry) += sum;
                }
            }
        }
    }
}

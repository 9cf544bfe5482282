//! Fused attention: scores are computed, normalised and used a tile at a time, and are never in memory as a whole. The
//! design is in this package's README.

mod backward;
mod decode;
mod distances;
mod dropout;
mod epilogue;
mod heuristics;
mod kernels;
mod pack;
mod prefill;
mod problem;
mod scores;
mod softmax;
mod statistics;
#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    clippy::reversed_empty_ranges,
    reason = "calls with one row, and with empty ones"
)]
mod tests;
mod tile;
mod workspace;

pub(crate) use backward::{BackwardCall, run as run_backward};
pub use backward::{BackwardProblem, Gradients, Wanted, attend_backward};
pub use distances::DistanceBias;
pub use dropout::{Dropout, DropoutMask, philox_keeps};
pub use kernels::AttentionKernels;
pub(crate) use problem::Call;
pub use problem::{Alibi, Dims, KvRows, OutputOrder, Problem, ScoreOptions, SoftmaxStats, Strided};
pub use statistics::{MAX_TOP, Statistics, StatisticsOptions, attend_with_statistics};

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::cpu::{Kernel, Scratch, SharedPtr, SimdTask, Tier, Vector, Workers, for_each_task, large_page_vec};
use crate::error::{Error, check_tier};
use crate::number::{Number, Stored};
use distances::DistanceTable;
use epilogue::Epilogue;
use heuristics::{StatisticsSplit, TaskSplit};
use pack::PackQueries;
use prefill::Prefill;
use problem::{KeysValues, KvHead, ScoreInputs, StoredRows};
use statistics::{Observe, StatisticsOutput};
use tile::Tile;
use workspace::Workspace;

/// Attention of every query of a call, on the executor or on the threads of the current rayon pool: the context,
/// B·H·T_q·D_v elements in the order that the problem names, the log-sum-exp of each query's scores, (B, H, T_q), if
/// `lse` is given, and what [`attend_backward`] needs of each query, (B, H, T_q), if `stats` is given. On success every
/// element of all is initialised.
///
/// # Errors
/// [`Error::Shape`] if a slice is shorter than the dimensions need, a range ends past the keys, the query heads are no
/// multiple of the key heads, or only one of keys and values has 8 bits; [`Error::Tier`] if the processor lacks the
/// tier; [`Error::Memory`] if there is none for intermediate results.
///
/// ```
/// use candle_attention_kernels::Tier;
/// use candle_attention_kernels::flash::{self, Dims, OutputOrder, Problem, ScoreOptions, SoftmaxStats, Strided};
///
/// // One sequence and head: two queries over two keys of width 2, causal.
/// let (q, k, v) = ([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0], [1.0, 2.0]);
/// let rows = |data, width| Strided { data, strides: [2 * width, 2 * width, width] };
/// let problem = Problem {
///     dims: Dims { b: 1, h: 1, h_kv: 1, t_q: 2, t_kv: 2, d: 2, d_v: 1 },
///     q: rows(&q, 2),
///     k: rows(&k, 2).into(),
///     v: rows(&v, 1).into(),
///     ranges: &[0..1, 0..2],
///     scores: ScoreOptions { scale: 0.5f64.sqrt(), ..Default::default() },
///     output_order: OutputOrder::Bhtd,
///     executor: None,
/// };
/// let mut context = Box::new_uninit_slice(2);
/// flash::attend(&problem, Tier::choose(None, false)?, &mut context, None, None)?;
///
/// // The same into vectors of their own, with the log-sum-exp.
/// let mut lse = Vec::new();
/// let context: Vec<f32> = flash::attend_vec(&problem, Tier::Scalar, Some(&mut lse), None)?;
/// let weight = (0.5f32.sqrt()).exp() / (1.0 + (0.5f32.sqrt()).exp());
/// assert_eq!(context[0], 1.0);
/// assert!((context[1] - (1.0 - weight + 2.0 * weight)).abs() < 1e-6);
/// assert!((lse[1] - (1.0 + (0.5f32.sqrt()).exp()).ln()).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend<E: AttentionKernels>(
    problem: &Problem<E>,
    tier: Tier,
    context: &mut [MaybeUninit<E>],
    lse: Option<&mut [MaybeUninit<f32>]>,
    stats: Option<&mut [MaybeUninit<SoftmaxStats>]>,
) -> Result<(), Error> {
    attend_to(problem, tier, context, lse, stats, None)
}

/// [`attend`], and the statistics of the weights if they are wanted.
fn attend_to<E: AttentionKernels>(
    problem: &Problem<E>,
    tier: Tier,
    context: &mut [MaybeUninit<E>],
    lse: Option<&mut [MaybeUninit<f32>]>,
    stats: Option<&mut [MaybeUninit<SoftmaxStats>]>,
    statistics: Option<StatisticsOutput>,
) -> Result<(), Error> {
    check_tier(tier)?;
    let done = match (problem.k, problem.v) {
        (KvRows::Float(k), KvRows::Float(v)) => {
            let [k, v] = [k, v].map(|rows| StoredRows { rows, scales: None });
            let call = Call::new(problem, KeysValues { k, v }, context, lse, stats)?;
            E::attend(&call.with_statistics(statistics), tier)
        }
        (KvRows::Q8 { codes: k, scales: k_scales }, KvRows::Q8 { codes: v, scales: v_scales }) => {
            let k = StoredRows { rows: k, scales: Some(k_scales) };
            let v = StoredRows { rows: v, scales: Some(v_scales) };
            let call = Call::new(problem, KeysValues { k, v }, context, lse, stats)?;
            E::attend_q8(&call.with_statistics(statistics), tier)
        }
        _ => return Err(Error::Shape("expected keys and values that are both floats or both of 8 bits".into())),
    };
    done.ok_or_else(|| Error::Memory("what attention keeps between its steps".into()))
}

/// [`attend`] into a vector that it allocates, in large pages if it is large, and into `lse` and `stats`, whose
/// elements are replaced.
///
/// # Errors
/// As [`attend`], and [`Error::Memory`] if there is none for the results.
pub fn attend_vec<E: AttentionKernels>(
    problem: &Problem<E>,
    tier: Tier,
    lse: Option<&mut Vec<f32>>,
    stats: Option<&mut Vec<SoftmaxStats>>,
) -> Result<Vec<E>, Error> {
    let Dims { b, h, t_q, d_v, .. } = problem.dims;
    let (count, queries) = (problem.context_len()?, b * h * t_q);
    let no_memory = || Error::Memory(format!("a context of {:?}", [b, h, t_q, d_v]));
    let mut context = large_page_vec(count).ok_or_else(no_memory)?;
    let (mut new_lse, mut new_stats) = (Vec::new(), Vec::new());
    if lse.is_some() {
        new_lse.try_reserve_exact(queries).map_err(|_| no_memory())?;
    }
    if stats.is_some() {
        new_stats.try_reserve_exact(queries).map_err(|_| no_memory())?;
    }
    let lse_out = lse.is_some().then(|| &mut new_lse.spare_capacity_mut()[..queries]);
    let stats_out = stats.is_some().then(|| &mut new_stats.spare_capacity_mut()[..queries]);
    attend(problem, tier, &mut context.spare_capacity_mut()[..count], lse_out, stats_out)?;
    // SAFETY: `attend` initialised every element of all.
    unsafe { context.set_len(count) };
    if let Some(lse) = lse {
        // SAFETY: as above.
        unsafe { new_lse.set_len(queries) };
        *lse = new_lse;
    }
    if let Some(stats) = stats {
        // SAFETY: as above.
        unsafe { new_stats.set_len(queries) };
        *stats = new_stats;
    }
    Ok(context)
}

/// A call on a tier that the processor has. `None` where there is no memory for intermediate results.
pub(crate) fn run<E: Number, S: Stored>(call: &Call<E, S>, tier: Tier) -> Option<()> {
    struct Attend<'a, 'b, E, S> {
        call: &'a Call<'b, E, S>,
        done: &'a mut Option<()>,
    }
    impl<E: Number, S: Stored> SimdTask for Attend<'_, '_, E, S> {
        unsafe fn run<K: Kernel>(self) {
            // SAFETY: the processor has the tier of K, by the contract of `SimdTask`.
            *self.done = unsafe { attend_on::<K, E, S>(self.call) };
        }
    }
    let mut done = None;
    E::dispatch(tier, Attend { call, done: &mut done });
    done
}

/// Splits the call into tasks, the ones that see most keys first, and runs them.
///
/// # Safety
/// The processor has the tier of K.
unsafe fn attend_on<K: Kernel, E: Number, S: Stored>(call: &Call<E, S>) -> Option<()> {
    let dims = &call.inputs.dims;
    if dims.b * dims.rows() == 0 {
        return Some(());
    }
    let is_decoded = call.inputs.options.dropout.is_none() && call.statistics.is_none();
    if is_decoded && dims.rows() <= decode::max_rows::<K>() {
        // SAFETY: the processor has the tier of K, which includes that of its kernel for f32.
        return unsafe { decode::run::<K::F32, E, S>(call) };
    }
    let distances = match call.inputs.options.distance_bias {
        Some(bias) => Some(DistanceTable::new(bias, dims)?),
        None => None,
    };
    let inputs = ScoreInputs { distances: distances.as_ref(), ..call.inputs };
    let workers = heuristics::workers(call, 1);
    if let Some(statistics) = &call.statistics {
        let split = StatisticsSplit::new::<K>(dims);
        let steps = KernelSteps::<K, E, S> { call, inputs, panels: split.panels, kernel: PhantomData };
        return statistics::run(&steps, dims, statistics, split, workers);
    }
    let split = TaskSplit::new::<K>(dims, workers.count);
    let panels = split.rows_per_chunk.min(dims.rows()).div_ceil(K::PANEL);
    run_steps(&KernelSteps::<K, E, S> { call, inputs, panels, kernel: PhantomData }, &inputs, &split, workers)
}

/// What the tasks of a call do. The order in which they do it is compiled once for all kernels and elements.
trait Steps: Sync {
    /// The panels of a chunk of rows.
    fn panels(&self) -> usize;
    fn workspace(&self) -> Workspace;
    /// Some rows of a key head against some of its keys.
    fn prefill(&self, workspace: &mut Workspace, kv: KvHead, rows: Range<usize>, keys: Range<usize>);
    fn epilogue(&self, workspace: &mut Workspace, kv: KvHead, rows: Range<usize>);
    /// The statistics of some rows after all keys, whose scores were kept: see [`Observe`].
    fn observe(&self, workspace: &mut Workspace, kv: KvHead, rows: Range<usize>, received: &mut [f32]);
}

/// The steps of a call on a kernel whose tier the processor has.
struct KernelSteps<'a, 'b, K, E, S> {
    call: &'a Call<'b, E, S>,
    inputs: ScoreInputs<'a>,
    panels: usize,
    kernel: PhantomData<fn() -> K>,
}

impl<K: Kernel, E: Number, S: Stored> Steps for KernelSteps<'_, '_, K, E, S> {
    fn panels(&self) -> usize {
        self.panels
    }

    fn workspace(&self) -> Workspace {
        Workspace::new::<K>(&self.inputs, self.panels)
    }

    fn prefill(&self, workspace: &mut Workspace, kv: KvHead, rows: Range<usize>, keys: Range<usize>) {
        let (Call { q, keys_values, .. }, inputs) = (self.call, &self.inputs);
        let tiles = &Tile::of_rows(inputs, kv, rows, K::PANEL, K::Vector::LANES);
        // SAFETY: the processor has the tier of K; the workspace was made for the call and has a panel for each tile.
        unsafe {
            K::run_simd(PackQueries { q, inputs, workspace, tiles });
            K::run_simd(Prefill { inputs, keys_values, workspace, kv, tiles, keys });
        }
    }

    fn epilogue(&self, workspace: &mut Workspace, kv: KvHead, rows: Range<usize>) {
        let task = Epilogue { call: self.call, state: &mut workspace.state, kv, rows };
        // SAFETY: the processor has the tier of K, which includes that of its kernel for f32.
        unsafe { K::F32::run_simd(task) };
    }

    fn observe(&self, workspace: &mut Workspace, kv: KvHead, rows: Range<usize>, received: &mut [f32]) {
        let (inputs, Some(output)) = (&self.inputs, &self.call.statistics) else { return };
        let tiles = &Tile::of_rows(inputs, kv, rows, K::PANEL, K::Vector::LANES);
        let units = inputs.options.units(K::IS_BF16);
        // SAFETY: as above; the workspace has the state and the scores of the tiles.
        unsafe { K::F32::run_simd(Observe { inputs, output, workspace, tiles, units, received }) };
    }
}

/// Runs the steps of every task. `None` where there is no memory for partial results.
fn run_steps(steps: &dyn Steps, inputs: &ScoreInputs, split: &TaskSplit, workers: Workers) -> Option<()> {
    let (dims, panels) = (&inputs.dims, steps.panels());
    let heads = dims.b * dims.h_kv;
    let chunk = |index: usize| -> (KvHead, Range<usize>) {
        let first = (split.row_chunks - 1 - index / heads) * split.rows_per_chunk;
        (dims.kv_head(index % heads), first..dims.rows().min(first + split.rows_per_chunk))
    };
    let workspace = || steps.workspace();
    let prefill = |workspace: &mut Workspace, index: usize, keys: Range<usize>| {
        let (kv, rows) = chunk(index);
        steps.prefill(workspace, kv, rows, keys);
    };
    let epilogue = |workspace: &mut Workspace, index: usize| {
        let (kv, rows) = chunk(index);
        steps.epilogue(workspace, kv, rows);
    };
    let chunks = heads.checked_mul(split.row_chunks)?;
    if split.key_chunks == 1 {
        for_each_task(chunks, workers, workspace, |workspace, index| {
            prefill(workspace, index, 0..dims.t_kv);
            epilogue(workspace, index);
        });
        return Some(());
    }
    let state_words = workspace().state.words(panels).len();
    let mut partials = Scratch::try_zeros(&[chunks, split.key_chunks, state_words])?;
    let slots = SharedPtr(partials.as_mut_ptr());
    for_each_task(chunks * split.key_chunks, workers, workspace, |workspace, task| {
        let (index, first) = (task / split.key_chunks, task % split.key_chunks * split.keys_per_chunk);
        prefill(workspace, index, first..dims.t_kv.min(first + split.keys_per_chunk));
        // SAFETY: the partial states are initialised, and each task writes one of its own.
        unsafe { slots.slice(task * state_words, state_words) }.copy_from_slice(workspace.state.words(panels));
    });
    let partials = partials.words();
    for_each_task(chunks, workers, workspace, |workspace, index| {
        workspace.state.clear(panels);
        let own = &partials[index * split.key_chunks * state_words..][..split.key_chunks * state_words];
        for partial in own.chunks_exact(state_words) {
            workspace.state.merge(partial, inputs.options.exponent_unit());
        }
        epilogue(workspace, index);
    });
    Some(())
}

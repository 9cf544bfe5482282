//! Fused attention: scores are computed, normalised and used a tile at a time, and are never in memory as a whole. The
//! design is in this package's README.

mod backward;
mod decode;
mod dropout;
mod pack;
mod prefill;
mod problem;
mod scores;
mod softmax;
mod statistics;
mod tasks;
#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    clippy::reversed_empty_ranges,
    reason = "calls with one row, and with empty ones"
)]
mod tests;
mod tile;

pub(crate) use backward::{BackwardCall, run as run_backward};
pub use backward::{BackwardProblem, Gradients, Wanted, attend_backward};
pub use dropout::{Dropout, DropoutMask, philox_keeps};
pub(crate) use problem::Call;
pub use problem::{Alibi, Dims, KvRows, OutputOrder, Problem, ScoreOptions, SoftmaxStats, Strided};
pub use scores::DistanceBias;
pub use statistics::{MAX_TOP, Statistics, StatisticsOptions, attend_with_statistics};

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::Ordering;

use half::{bf16, f16};

use crate::cpu::{Kernel, Scratch, SharedPtr, SimdTask, Tier, Unwritten, Vector, Workers, for_each_task};
use crate::error::{Error, check_tier};
use crate::number::{Number, Stored};
use pack::PackQueries;
use prefill::Prefill;
use problem::{KeysValues, KvHead, Outputs, ScoreInputs, StoredRows};
use scores::DistanceTable;
use softmax::Epilogue;
use statistics::Observe;
use tasks::{Chain, TaskSplit, Workspace};
use tile::Tile;

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
    attend_to(problem, tier, Outputs { context, lse, stats, statistics: None })
}

/// [`attend`], and the statistics of the weights if they are wanted.
fn attend_to<E: AttentionKernels>(problem: &Problem<E>, tier: Tier, outputs: Outputs<E>) -> Result<(), Error> {
    check_tier(tier)?;
    let done = match (problem.k, problem.v) {
        (KvRows::Float(k), KvRows::Float(v)) => {
            let [k, v] = [k, v].map(|rows| StoredRows { rows, scales: None });
            E::attend(&Call::new(problem, KeysValues { k, v }, outputs)?, tier)
        }
        (KvRows::Q8 { codes: k, scales: k_scales }, KvRows::Q8 { codes: v, scales: v_scales }) => {
            let k = StoredRows { rows: k, scales: Some(k_scales) };
            let v = StoredRows { rows: v, scales: Some(v_scales) };
            E::attend_q8(&Call::new(problem, KeysValues { k, v }, outputs)?, tier)
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
    problem.context_len()?;
    let no_memory = || Error::Memory(format!("a context of {:?}", [b, h, t_q, d_v]));
    let mut context = Unwritten::new(&[b, h, t_q, d_v]).ok_or_else(no_memory)?;
    let (mut new_lse, mut new_stats) = (None, None);
    if lse.is_some() {
        new_lse = Some(Unwritten::new(&[b, h, t_q]).ok_or_else(no_memory)?);
    }
    if stats.is_some() {
        new_stats = Some(Unwritten::new(&[b, h, t_q]).ok_or_else(no_memory)?);
    }
    let (lse_out, stats_out) = (new_lse.as_mut().map(Unwritten::elements), new_stats.as_mut().map(Unwritten::elements));
    attend(problem, tier, context.elements(), lse_out, stats_out)?;
    // SAFETY: `attend` initialised every element of all.
    unsafe {
        lse.zip(new_lse).into_iter().for_each(|(lse, new)| *lse = new.written());
        stats.zip(new_stats).into_iter().for_each(|(stats, new)| *stats = new.written());
        Ok(context.written())
    }
}

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used. Calls are checked before they are made, and nobody else can make one.
pub trait AttentionKernels: Number {
    /// Attention; `None` if memory is short.
    fn attend(call: &Call<Self>, tier: Tier) -> Option<()>;
    /// Attention to keys and values of 8 bits.
    fn attend_q8(call: &Call<Self, u8>, tier: Tier) -> Option<()>;
    /// The backward pass.
    fn attend_backward(call: &BackwardCall<Self>, tier: Tier) -> Option<()>;
}

macro_rules! attend {
    ($($type:ty),*) => {
        $(impl AttentionKernels for $type {
            fn attend(call: &Call<Self>, tier: Tier) -> Option<()> {
                run(call, tier)
            }

            fn attend_q8(call: &Call<Self, u8>, tier: Tier) -> Option<()> {
                run(call, tier)
            }

            fn attend_backward(call: &BackwardCall<Self>, tier: Tier) -> Option<()> {
                run_backward(call, tier)
            }
        })*
    };
}

attend!(f32, bf16, f16);

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
    let workers = tasks::workers(call, 1);
    let split = TaskSplit::new::<K>(dims, workers.count, call.statistics.is_some());
    let heads = dims.b * dims.h_kv;
    let chain = Chain::new(heads.checked_mul(split.row_chunks)?, heads)?;
    run_steps(&KernelSteps::<K, E, S> { call, inputs, split, chain, kernel: PhantomData }, &inputs, &split, workers)?;
    let is_short = call.statistics.as_ref().is_some_and(|statistics| statistics.is_short.load(Ordering::Relaxed));
    (!is_short).then_some(())
}

/// What the tasks of a call do with a chunk of the rows of a key head. The order in which they do it is compiled once
/// for all kernels and elements.
trait Steps: Sync {
    fn workspace(&self) -> Workspace;
    /// The rows against some of the keys.
    fn prefill(&self, workspace: &mut Workspace, chunk: usize, keys: Range<usize>);
    /// The results of the rows after all keys.
    fn epilogue(&self, workspace: &mut Workspace, chunk: usize);
}

/// The steps of a call on a kernel whose tier the processor has.
struct KernelSteps<'a, 'b, K, E, S> {
    call: &'a Call<'b, E, S>,
    inputs: ScoreInputs<'a>,
    split: TaskSplit,
    /// The chunks of each head.
    chain: Chain,
    kernel: PhantomData<fn() -> K>,
}

impl<K: Kernel, E, S> KernelSteps<'_, '_, K, E, S> {
    /// The rows of a chunk, the last ones first.
    fn chunk(&self, index: usize) -> (KvHead, Range<usize>) {
        let (dims, split) = (&self.inputs.dims, &self.split);
        let heads = dims.b * dims.h_kv;
        let first = (split.row_chunks - 1 - index / heads) * split.rows_per_chunk;
        (dims.kv_head(index % heads), first..dims.rows().min(first + split.rows_per_chunk))
    }
}

impl<K: Kernel, E: Number, S: Stored> Steps for KernelSteps<'_, '_, K, E, S> {
    fn workspace(&self) -> Workspace {
        let panels = self.split.rows_per_chunk.min(self.inputs.dims.rows()).div_ceil(K::PANEL);
        Workspace::new::<K>(&self.inputs, panels, self.call.statistics.is_some())
    }

    fn prefill(&self, workspace: &mut Workspace, chunk: usize, keys: Range<usize>) {
        let (Call { q, keys_values, .. }, inputs) = (self.call, &self.inputs);
        let (kv, rows) = self.chunk(chunk);
        let tiles = &Tile::of_rows(inputs, kv, rows, K::PANEL, K::Vector::LANES);
        // SAFETY: the processor has the tier of K; the workspace was made for the call and has a panel for each tile.
        unsafe {
            K::run_simd(PackQueries { q, inputs, workspace, tiles });
            K::run_simd(Prefill { inputs, keys_values, workspace, kv, tiles, keys });
        }
    }

    fn epilogue(&self, workspace: &mut Workspace, chunk: usize) {
        let (kv, rows) = self.chunk(chunk);
        if let Some(output) = &self.call.statistics {
            let (inputs, chain) = (&self.inputs, &self.chain);
            let tiles = &Tile::of_rows(inputs, kv, rows.clone(), K::PANEL, K::Vector::LANES);
            let units = inputs.options.units(K::IS_BF16);
            // SAFETY: as below; the workspace has the state and the scores of the tiles.
            unsafe { K::F32::run_simd(Observe { inputs, output, workspace, kv, tiles, units, chain, task: chunk }) };
        }
        let task = Epilogue { call: self.call, state: &mut workspace.state, kv, rows };
        // SAFETY: the processor has the tier of K, which includes that of its kernel for f32.
        unsafe { K::F32::run_simd(task) };
    }
}

/// Runs the steps of every task. `None` where there is no memory for partial results.
fn run_steps(steps: &dyn Steps, inputs: &ScoreInputs, split: &TaskSplit, workers: Workers) -> Option<()> {
    let dims = &inputs.dims;
    let workspace = || steps.workspace();
    let chunks = (dims.b * dims.h_kv).checked_mul(split.row_chunks)?;
    if split.key_chunks == 1 {
        for_each_task(chunks, workers, workspace, |workspace, chunk| {
            steps.prefill(workspace, chunk, 0..dims.t_kv);
            steps.epilogue(workspace, chunk);
        });
        return Some(());
    }
    let state_words = workspace().state.words().len();
    let mut partials = Scratch::try_zeros(&[chunks, split.key_chunks, state_words])?;
    let slots = SharedPtr(partials.as_mut_ptr());
    for_each_task(chunks * split.key_chunks, workers, workspace, |workspace, task| {
        let (chunk, first) = (task / split.key_chunks, task % split.key_chunks * split.keys_per_chunk);
        steps.prefill(workspace, chunk, first..dims.t_kv.min(first + split.keys_per_chunk));
        // SAFETY: the partial states are initialised, and each task writes one of its own.
        unsafe { slots.slice(task * state_words, state_words) }.copy_from_slice(workspace.state.words());
    });
    let partials = partials.words();
    for_each_task(chunks, workers, workspace, |workspace, chunk| {
        workspace.state.clear();
        let own = &partials[chunk * split.key_chunks * state_words..][..split.key_chunks * state_words];
        for partial in own.chunks_exact(state_words) {
            workspace.state.merge(partial, inputs.options.exponent_unit());
        }
        steps.epilogue(workspace, chunk);
    });
    Some(())
}

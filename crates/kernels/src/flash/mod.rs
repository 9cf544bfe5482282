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

pub use backward::{BackwardProblem, Gradients, Wanted, attend_backward};
pub use dropout::{Dropout, DropoutMask, philox_keeps};
pub use problem::{Alibi, Dims, KvRows, OutputLayout, Problem, ScoreOptions, SoftmaxStats, Strided};
pub use scores::RelativeBias;
pub use statistics::{MAX_TOP, Statistics, StatisticsOptions, attend_with_statistics};

use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

use half::{bf16, f16};

use crate::cpu::{InstructionSet, Kernel, Layout, SimdTask, Unwritten, for_each_task};
use crate::error::{Error, check_instruction_set};
use crate::number::{Number, Stored};
use pack::{PackPanel, TileRows};
use prefill::Prefill;
use problem::{Call, KernelCall, Outputs, ScoreInputs, StoredRows};
use scores::DistanceTable;
use softmax::{Epilogue, Partials};
use statistics::Observe;
use tasks::{AttendTask, Chain, TaskSplit, Workspace};
use tile::Tile;

/// Attention of every query of a call, on the executor or on the threads of the current rayon pool: the context,
/// B·H·T_q·D_v elements in the order that the problem names, the log-sum-exp of each query's scores, (B, H, T_q), if
/// `lse` is given, and what [`attend_backward`] needs of each query, (B, H, T_q), if `stats` is given. On success every
/// element of all is initialised.
///
/// # Errors
/// [`Error::Shape`] if a slice is shorter than the dimensions need, a range ends past the keys, the query heads are no
/// multiple of the key heads, or only one of keys and values has 8 bits; [`Error::InstructionSet`] if the processor
/// lacks the instruction set; [`Error::Memory`] if there is none for intermediate results.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{self, Dims, OutputLayout, Problem, ScoreOptions, SoftmaxStats, Strided};
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
///     output_layout: OutputLayout::Bhtd,
///     executor: None,
/// };
/// let mut context = Box::new_uninit_slice(2);
/// flash::attend(&problem, InstructionSet::choose(None, false)?, &mut context, None, None)?;
///
/// // The same into vectors of their own, with the log-sum-exp.
/// let mut lse = Vec::new();
/// let context: Vec<f32> = flash::attend_vec(&problem, InstructionSet::Scalar, Some(&mut lse), None)?;
/// let weight = (0.5f32.sqrt()).exp() / (1.0 + (0.5f32.sqrt()).exp());
/// assert_eq!(context[0], 1.0);
/// assert!((context[1] - (1.0 - weight + 2.0 * weight)).abs() < 1e-6);
/// assert!((lse[1] - (1.0 + (0.5f32.sqrt()).exp()).ln()).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend<E: AttentionKernels>(
    problem: &Problem<E>,
    instruction_set: InstructionSet,
    context: &mut [MaybeUninit<E>],
    lse: Option<&mut [MaybeUninit<f32>]>,
    stats: Option<&mut [MaybeUninit<SoftmaxStats>]>,
) -> Result<(), Error> {
    let context = context as *mut [MaybeUninit<E>] as *mut [E];
    attend_to(problem, instruction_set, Outputs { context, lse, stats, statistics: None })
}

/// [`attend`], and the statistics of the weights if they are wanted.
fn attend_to<E: AttentionKernels>(
    problem: &Problem<E>,
    instruction_set: InstructionSet,
    outputs: Outputs<E>,
) -> Result<(), Error> {
    check_instruction_set(instruction_set)?;
    let Dims { d, d_v, .. } = problem.dims;
    let call = &Call::new(problem, outputs)?;
    let is_empty = call.inputs.dims.b * call.inputs.dims.rows() == 0;
    let run = |kernel| if is_empty { Some(()) } else { E::run(kernel, instruction_set) };
    let done = match (problem.k, problem.v) {
        (KvRows::Float(k), KvRows::Float(v)) => {
            let kv = [(k, d), (v, d_v)].map(|(rows, width)| StoredRows { rows, scales: None, width });
            run(KernelCall::Float(call, kv))
        }
        (KvRows::Q8 { codes: k, scales: of_k }, KvRows::Q8 { codes: v, scales: of_v }) => {
            let kv = [(k, of_k, d), (v, of_v, d_v)];
            let kv = kv.map(|(rows, scales, width)| StoredRows { rows, scales: Some(scales), width });
            run(KernelCall::Q8(call, kv))
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
    instruction_set: InstructionSet,
    lse: Option<&mut Vec<f32>>,
    stats: Option<&mut Vec<SoftmaxStats>>,
) -> Result<Vec<E>, Error> {
    let Dims { b, h, t_q, d_v, .. } = problem.dims;
    problem.context_len()?;
    let no_memory = |what: &str| Error::Memory(format!("{what} of {:?}", [b, h, t_q, d_v]));
    let no_memory_beside = || no_memory("what stands beside a context");
    let mut context = Unwritten::new(&[b, h, t_q, d_v]).ok_or_else(|| no_memory("a context"))?;
    let mut new_lse = lse.is_some().then(|| Unwritten::new(&[b, h, t_q]).ok_or_else(no_memory_beside)).transpose()?;
    let mut new_stats =
        stats.is_some().then(|| Unwritten::new(&[b, h, t_q]).ok_or_else(no_memory_beside)).transpose()?;
    let (lse_out, stats_out) = (new_lse.as_mut().map(Unwritten::elements), new_stats.as_mut().map(Unwritten::elements));
    attend(problem, instruction_set, context.elements(), lse_out, stats_out)?;
    // SAFETY: `attend` initialised every element of all.
    unsafe {
        lse.zip(new_lse).into_iter().for_each(|(lse, new)| *lse = new.written());
        stats.zip(new_stats).into_iter().for_each(|(stats, new)| *stats = new.written());
        Ok(context.written())
    }
}

/// Zeros for what is named.
fn zeros<T: Copy + Default>(what: &str, shape: &[usize]) -> Result<Vec<T>, Error> {
    let mut zeros = Unwritten::new(shape).ok_or_else(|| Error::Memory(format!("{what} of {shape:?}")))?;
    zeros.clear();
    // SAFETY: every element was cleared.
    Ok(unsafe { zeros.written() })
}

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used. Calls are checked before they are made, and nobody else can make one.
pub trait AttentionKernels: Number {
    /// `None` if memory is short. The processor has the instruction set.
    fn run(call: KernelCall<Self>, instruction_set: InstructionSet) -> Option<()>;
}

macro_rules! run {
    ($($type:ty),*) => {
        $(impl AttentionKernels for $type {
            fn run(call: KernelCall<Self>, instruction_set: InstructionSet) -> Option<()> {
                let mut done = None;
                Self::dispatch(instruction_set, Run { call, done: &mut done });
                done
            }
        })*
    };
}

run!(f32, bf16, f16);

struct Run<'a, 'b, E> {
    call: KernelCall<'a, 'b, E>,
    done: &'a mut Option<()>,
}

impl<E: Number> SimdTask for Run<'_, '_, E> {
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
        *self.done = unsafe {
            match self.call {
                KernelCall::Float(call, keys_values) => attend_on::<K, E, E>(call, &keys_values),
                KernelCall::Q8(call, keys_values) => attend_on::<K, E, u8>(call, &keys_values),
                KernelCall::Backward(call, keys_values) => backward::run_on::<K, E>(call, &keys_values),
            }
        };
    }
}

/// # Safety
/// The processor has the instruction set of K.
unsafe fn attend_on<K: Kernel, E: Number, S: Stored>(call: &Call<E>, keys_values: &[StoredRows<S>; 2]) -> Option<()> {
    let is_decoded = call.inputs.options.dropout.is_none() && call.statistics.is_none();
    if is_decoded && call.inputs.dims.rows() <= decode::max_rows::<K>() {
        // SAFETY: the processor has the instruction set of K, which includes that of its kernel for f32.
        return unsafe { decode::run::<K::Vector, E, S>(call, keys_values) };
    }
    run_tasks(call, K::LAYOUT, size_of::<S>(), &|workspace, task| {
        let &AttendTask { inputs, units, kv, ref rows, ref tiles, partials, .. } = task;
        // SAFETY: the processor has the instruction set of K, which includes that of its kernel for f32; the workspace
        // was made for the call and has a panel for each tile.
        unsafe {
            for (index, tile) in tiles.iter().enumerate() {
                let rows = &TileRows { matrix: &call.q, width: inputs.dims.d, dims: &inputs.dims, tile };
                let (width, staging) = (workspace.sizes[0], workspace.staging.as_mut_ptr());
                let panel = workspace.queries.as_mut_ptr().add(index * width.word_squares * K::PANEL);
                K::run_simd(PackPanel { rows, width, panel, staging, factor: units.query });
            }
            K::run_simd(Prefill { task, keys_values, workspace });
            if let Some(output) = &call.statistics {
                K::Vector::run_simd(Observe { task, output, workspace });
            }
            K::Vector::run_simd(Epilogue { call, state: &mut workspace.state, kv, rows: rows.clone(), partials });
        }
    })
}

/// Splits a call, whose keys and values have so many bytes a number, into tasks, the ones that see most keys first, and
/// runs them.
fn run_tasks<E: Number>(
    call: &Call<E>,
    layout: Layout,
    bytes: usize,
    run: &(dyn Fn(&mut Workspace, &AttendTask) + Sync),
) -> Option<()> {
    let dims = &call.inputs.dims;
    let distances = match call.inputs.options.relative_bias {
        Some(bias) => Some(DistanceTable::new(bias, dims)?),
        None => None,
    };
    let inputs = &ScoreInputs { distances: distances.as_ref(), ..call.inputs };
    let (units, workers) = (inputs.options.units(layout.elements == 2), tasks::workers(call, bytes, 1));
    let split = TaskSplit::new(layout, dims, workers.count, call.statistics.is_some());
    let heads = dims.b * dims.h_kv;
    let chunks = heads.checked_mul(split.row_chunks)?;
    let chain = &Chain::new(chunks, heads)?;
    let partials = match split.key_chunks {
        1 => None,
        parts => Some(Partials::new(dims, dims.rows(), parts)?),
    };
    let panels = split.rows_per_chunk.min(dims.rows()).div_ceil(layout.panel);
    let workspace = || Workspace::new(layout, inputs, panels, call.statistics.is_some());
    for_each_task(chunks.checked_mul(split.key_chunks)?, workers, &workspace, &|workspace, task| {
        let (index, part) = (task / split.key_chunks, task % split.key_chunks);
        let (kv, [rows, keys]) = split.task(dims, index, part);
        let tile = |first| Tile::new(layout, inputs, kv, first..rows.end.min(first + layout.panel));
        let tiles = rows.clone().step_by(layout.panel).map(tile).collect();
        let partials = partials.as_ref().map(|partials| (partials, part));
        run(workspace, &AttendTask { inputs, units, kv, rows, keys, tiles, partials, chain, index });
    });
    if let Some(partials) = partials {
        partials.merge(call);
    }
    let is_short = call.statistics.as_ref().is_some_and(|statistics| statistics.is_short.load(Ordering::Relaxed));
    (!is_short).then_some(())
}

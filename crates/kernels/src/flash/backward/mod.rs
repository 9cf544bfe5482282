//! The backward pass of attention (Dao, <https://arxiv.org/abs/2307.08691>): the gradients of everything that the
//! forward pass reads, from its results. Scores are computed again a tile at a time, and are never in memory as a
//! whole.

mod gradient;
mod step;
mod task;

use super::problem::{
    Call, Dims, KernelCall, KvHead, KvRows, Outputs, Problem, Row, SoftmaxStats, StoredRows, Strided,
};
use super::scores::DistanceTable;
use super::tasks::{self, Chain};
use super::tile::Tile;
use crate::cpu::{
    Format, InstructionSet, Kernel, Layout, MAX_LANES, Scratch, SharedPtr, Unwritten, for_each_index, for_each_task,
};
use crate::error::{Error, check_instruction_set, check_len};
use crate::flash::{AttentionKernels, zeros};
use crate::number::Number;
use gradient::{BiasGradients, BiasOutput};
use task::{BackwardMemory, BackwardSizes, BackwardTask, Work, WorkOn};

/// A call of [`attend`](super::attend), its results, and the gradients of a loss by them.
#[derive(Clone, Copy)]
pub struct BackwardProblem<'a, E> {
    /// The call, as it was.
    pub forward: Problem<'a, E>,
    /// Its context, in the order that the call names.
    pub context: &'a [E],
    /// What it wrote for each query: (B, H, T_q).
    pub stats: &'a [SoftmaxStats],
    /// The gradient of the context: (B, H, T_q), rows of D_v contiguous elements.
    pub context_grad: Strided<'a, E, 3>,
    /// The gradient of the log-sum-exp, if it was used: (B, H, T_q).
    pub lse_grad: Option<&'a [f32]>,
}

/// Whose gradients [`attend_backward`] computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Of the queries.
    pub q: bool,
    /// Of the keys.
    pub k: bool,
    /// Of the values.
    pub v: bool,
    /// The shape of the bias, each dimension that of (B, H, T_q, T_kv), or 1. What shares an entry is summed.
    pub bias: Option<[usize; 4]>,
    /// Of the distance biases.
    pub distances: bool,
    /// Of ALiBi's slopes.
    pub slopes: bool,
    /// Of the sinks.
    pub sinks: bool,
}

/// The gradients that were wanted, contiguous.
#[derive(Debug, Clone, Default)]
pub struct Gradients<E> {
    /// (B, H, T_q, D).
    pub q: Option<Vec<E>>,
    /// (B, H_kv, T_kv, D), summed over the queries of the heads that share a key head.
    pub k: Option<Vec<E>>,
    /// (B, H_kv, T_kv, D_v).
    pub v: Option<Vec<E>>,
    /// In the shape that was named.
    pub bias: Option<Vec<f32>>,
    /// (B, H) rows of a bias for each distance, or (1, H) where sequences share them.
    pub distances: Option<Vec<f32>>,
    /// (H,).
    pub slopes: Option<Vec<f32>>,
    /// (H,).
    pub sinks: Option<Vec<f32>>,
}

/// A problem that was checked, and where its gradients go.
pub struct BackwardCall<'a, E> {
    call: Call<'a, E>,
    stats: &'a [SoftmaxStats],
    context_grad: Strided<'a, E, 3>,
    lse_grad: Option<&'a [f32]>,
    wanted: Wanted,
    /// (B, H, T_q): see [`write_deltas`](Self::write_deltas).
    deltas: SharedPtr<f32>,
    /// The sums of the queries' gradients, (B, H, T_q, D): the gradients themselves in f32.
    q_sums: SharedPtr<f32>,
    q: Option<SharedPtr<E>>,
    keys_values: [Option<SharedPtr<E>>; 2],
    bias: Option<BiasOutput>,
    distances: Option<BiasOutput>,
    /// (H,).
    slopes: Option<SharedPtr<f32>>,
    sinks: Option<SharedPtr<f32>>,
}

/// The gradients of a call of [`attend`](super::attend), on the executor or on the threads of the current rayon pool.
/// The same to the bit for any number of threads, and whatever else is in the batch.
///
/// A query that sees no key has a gradient of zeros, and NaN and infinities in keys, values, queries and gradients
/// reach only the pairs that see each other.
///
/// # Errors
/// As [`attend`](super::attend); [`Error::Shape`] too for a bias of another shape and for gradients of biases, slopes
/// or sinks that the call does not have.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{
///     BackwardProblem, Dims, OutputLayout, Problem, ScoreOptions, Strided, Wanted, attend_backward, attend_vec,
/// };
///
/// // One query over two keys of width 1, whose values are 0 and 1: the context is the second weight.
/// let (q, k, v) = ([1.0], [0.0, 2.0], [0.0, 1.0]);
/// let rows = |data| Strided { data, strides: [2, 2, 1] };
/// let forward = Problem {
///     dims: Dims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 2, d: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k).into(),
///     v: rows(&v).into(),
///     ranges: &[0..2],
///     scores: ScoreOptions::default(),
///     output_layout: OutputLayout::Bhtd,
///     executor: None,
/// };
/// let (instruction_set, mut stats) = (InstructionSet::choose(None, false)?, Vec::new());
/// let context = attend_vec(&forward, instruction_set, None, Some(&mut stats))?;
/// let problem = BackwardProblem {
///     forward,
///     context: &context,
///     stats: &stats,
///     context_grad: rows(&[1.0]),
///     lse_grad: None,
/// };
/// let wanted = Wanted { q: true, v: true, ..Default::default() };
/// let gradients = attend_backward(&problem, instruction_set, wanted)?;
/// let weight = 1.0 / (1.0 + (-2f32).exp());
/// assert!((gradients.q.unwrap()[0] - 2.0 * weight * (1.0 - weight)).abs() < 1e-6);
/// assert!((gradients.v.unwrap()[1] - weight).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend_backward<E: AttentionKernels>(
    problem: &BackwardProblem<E>,
    instruction_set: InstructionSet,
    wanted: Wanted,
) -> Result<Gradients<E>, Error> {
    check_instruction_set(instruction_set)?;
    let BackwardProblem { forward, context, stats, context_grad, lse_grad } = *problem;
    let dims = forward.dims;
    let (KvRows::Float(k), KvRows::Float(v)) = (forward.k, forward.v) else {
        return Err(Error::Shape("expected keys and values that are floats, found some of 8 bits".into()));
    };
    let keys_values = [(k, dims.d), (v, dims.d_v)].map(|(rows, width)| StoredRows { rows, scales: None, width });
    let outputs = Outputs { context: std::ptr::from_ref(context).cast_mut(), lse: None, stats: None, statistics: None };
    let mut call = Call::new(&forward, outputs)?;
    let no_memory = || Error::Memory("what attention's backward pass keeps between its steps".into());
    let table = |bias| DistanceTable::new(bias, &dims).ok_or_else(no_memory);
    let table = forward.scores.relative_bias.map(table).transpose()?;
    call.inputs.distances = table.as_ref();
    let queries = dims.b * dims.h * dims.t_q;
    check_len("stats", stats.len(), queries)?;
    lse_grad.map_or(Ok(()), |lse| check_len("lse_grad", lse.len(), queries))?;
    context_grad.check("context_grad", [dims.b, dims.h, dims.t_q], dims.d_v)?;
    check_wanted(&forward, wanted)?;

    let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = dims;
    let operand = |wanted: bool, dims: [usize; 4]| wanted.then(|| gradient::<E>(dims)).transpose();
    let (mut q, mut k) = (operand(wanted.q, [b, h, t_q, d])?, operand(wanted.k, [b, h_kv, t_kv, d])?);
    let mut v = operand(wanted.v, [b, h_kv, t_kv, d_v])?;
    let is_f32 = E::FORMAT == Format::F32;
    let mut wide = gradient::<f32>(if wanted.q && !is_f32 { [b, h, t_q, d] } else { [0; 4] })?;
    let mut deltas = gradient::<f32>([b, h, t_q, 1])?;
    let added = |dims: Option<[usize; 4]>| dims.map(|dims| zeros::<f32>("a gradient", &dims)).transpose();
    let relative_bias = forward.scores.relative_bias.filter(|_| wanted.distances);
    let distance_dims = relative_bias.map(|bias| [bias.sequences(&dims), h, 1, bias.len]);
    let of_heads = |wanted: bool| added(wanted.then_some([h, 1, 1, 1]));
    let (mut bias, mut distances) = (added(wanted.bias)?, added(distance_dims)?);
    let (mut slopes, mut sinks) = (of_heads(wanted.slopes)?, of_heads(wanted.sinks)?);
    let pointer = |gradient: &mut Option<Unwritten<E>>| gradient.as_mut().map(|to| SharedPtr(to.as_mut_ptr()));
    let added = |gradient: &mut Option<Vec<f32>>| gradient.as_mut().map(|to| SharedPtr(to.as_mut_ptr()));
    let entries = |gradient: &mut Option<Vec<f32>>, dims: Option<[usize; 4]>| {
        added(gradient).zip(dims).map(|(at, dims)| BiasOutput::new(at, dims))
    };
    let q_out = pointer(&mut q);
    let backward = BackwardCall {
        call,
        stats,
        context_grad,
        lse_grad,
        wanted,
        deltas: SharedPtr(deltas.as_mut_ptr()),
        q_sums: q_out.filter(|_| is_f32).map_or(SharedPtr(wide.as_mut_ptr()), |q| SharedPtr(q.0.cast())),
        q: q_out.filter(|_| !is_f32),
        keys_values: [pointer(&mut k), pointer(&mut v)],
        bias: entries(&mut bias, wanted.bias),
        distances: entries(&mut distances, distance_dims),
        slopes: added(&mut slopes),
        sinks: added(&mut sinks),
    };
    if queries == 0 {
        // The other dimensions may be anything then.
        [&mut k, &mut v].into_iter().flatten().for_each(Unwritten::clear);
    } else {
        E::run(KernelCall::Backward(&backward, keys_values), instruction_set).ok_or_else(no_memory)?;
    }
    // SAFETY: every element was written.
    let [q, k, v] = [q, k, v].map(|gradient| gradient.map(|gradient| unsafe { gradient.written() }));
    Ok(Gradients { q, k, v, bias, distances, slopes, sinks })
}

/// # Safety
/// The processor has the instruction set of K.
pub(super) unsafe fn run_on<K: Kernel, E: Number>(
    backward: &BackwardCall<E>,
    keys_values: &[StoredRows<E>; 2],
) -> Option<()> {
    // SAFETY: the processor has the instruction set of K; the work belongs to the call, and each number is one task's.
    run_tasks(backward, K::LAYOUT, &|work| unsafe { K::run_simd(WorkOn { backward, keys_values, work }) })
}

fn run_tasks<E: Number>(backward: &BackwardCall<E>, layout: Layout, run: &(dyn Fn(Work<E>) + Sync)) -> Option<()> {
    let (inputs, wanted) = (&backward.call.inputs, &backward.wanted);
    let dims = &inputs.dims;
    let workers = tasks::workers(&backward.call, size_of::<E>(), 3);
    let rows = dims.b * dims.h;
    let mut sinks = vec![0f32; rows];
    let sink_sums = SharedPtr(sinks.as_mut_ptr());
    // SAFETY: each task has a sum of its own.
    for_each_index(rows, workers, &|row| run(Work::Deltas(row, unsafe { &mut *sink_sums.add(row) })));

    let sizes = BackwardSizes::new(layout, dims);
    let (heads, chunk, panel) = (dims.b * dims.h_kv, sizes.blocks * layout.block, layout.panel);
    let (chunks, group, tiles) = (dims.t_kv.div_ceil(chunk), dims.group(), dims.rows().div_ceil(panel));
    let seen = |index: usize| {
        let (kv, first) = (KvHead { b: index / tiles, head: 0 }, index % tiles * panel);
        Tile::new(layout, inputs, kv, first..dims.rows().min(first + panel)).some
    };
    let seen: Vec<_> = (0..dims.b * tiles).map(seen).collect();
    // What is added to the same numbers waits for each other: tasks of the same head, or all.
    let (bias, distances) = (backward.bias, backward.distances);
    let is_shared = [bias, distances].into_iter().flatten().any(|entries| entries.is_shared(dims));
    let step = if is_shared { 1 } else { heads };
    let tasks = chunks.checked_mul(heads)?;
    let chain = &Chain::new(tasks, step)?;
    let mut slopes = Scratch::try_zeros(&[chunks, if wanted.slopes { rows } else { 0 }])?;
    let slope_sums = SharedPtr(slopes.as_mut_ptr());
    let memory = || BackwardMemory::new(layout, sizes, &inputs.options);
    for_each_task(tasks, workers, &memory, &|memory, task| {
        // The first keys first: a causal mask shows them to most queries.
        let (kv, first) = (dims.kv_head(task % heads), task / heads * chunk);
        let keys = first..dims.t_kv.min(first + chunk);
        let (count, tiles) = (keys.len(), &seen[kv.b * tiles..(kv.b + 1) * tiles]);
        // What queries share is summed by the task first.
        let bias_sums = bias.filter(|bias| bias.is_summed_over_queries).map_or(0, |_| group * count);
        let distance_sums = inputs.distances.filter(|_| distances.is_some()).map_or(0, DistanceTable::size);
        let (mut bias_sums, mut distance_sums) = (vec![0f32; bias_sums], vec![0f32; distance_sums]);
        let of_heads = bias_sums.as_mut_ptr().wrapping_sub(kv.head * group * count + keys.start);
        let summed = BiasOutput { at: SharedPtr(of_heads), strides: [0, count, 0, 1], is_summed_over_queries: true };
        let biases = BiasGradients {
            bias: bias.map(|bias| if bias.is_summed_over_queries { summed } else { bias }),
            distances: distances.map(|_| SharedPtr(distance_sums.as_mut_ptr())),
            // SAFETY: each task has sums of its own, one for each head of the group.
            slopes: wanted.slopes.then(|| SharedPtr(unsafe { slope_sums.add(task * group) })),
        };
        let biases = (bias.is_some() || distances.is_some() || wanted.slopes).then_some(biases);
        run(Work::Task(BackwardTask { memory, kv, keys: keys.clone(), tiles, chain, task, biases }));
        if !bias_sums.is_empty() || !distance_sums.is_empty() {
            chain.wait_for_all(task);
        }
        let row = |g: usize| Row { b: kv.b, head: kv.head * group + g, query: 0 };
        // SAFETY: the entries exist, and no other task adds to them now.
        unsafe {
            if let Some(bias) = bias {
                for (index, sum) in bias_sums.iter().enumerate() {
                    *bias.entry(row(index / count), keys.start + index % count) += sum;
                }
            }
            if let (Some(to), Some(from)) = (distances, inputs.options.relative_bias) {
                for (sum, (g, entry)) in distance_sums[MAX_LANES..].iter().zip(from.table_entries(group)) {
                    *to.entry(row(g), entry) += sum;
                }
            }
        }
        chain.finish(task);
    });

    if let Some(to) = backward.q {
        for_each_index(rows, workers, &|row| run(Work::Round(row, to)));
    }
    for (to, sums) in [(backward.slopes, slopes.words()), (backward.sinks, &sinks[..])] {
        let Some(to) = to else { continue };
        for h in 0..dims.h {
            // In the order of tasks and sequences.
            let sum: f64 = sums.iter().skip(h).step_by(dims.h).map(|&sum| f64::from(sum)).sum();
            // SAFETY: there is an element for each head.
            unsafe { to.add(h).write(sum as f32) };
        }
    }
    Some(())
}

fn check_wanted<E>(forward: &Problem<E>, wanted: Wanted) -> Result<(), Error> {
    let (dims, scores) = (forward.dims, &forward.scores);
    for (what, is_wanted, is_there) in [
        ("bias", wanted.bias.is_some(), scores.bias.is_some()),
        ("distance biases", wanted.distances, scores.relative_bias.is_some()),
        ("slopes", wanted.slopes, scores.alibi.is_some()),
        ("sinks", wanted.sinks, scores.sinks.is_some()),
    ] {
        if is_wanted && !is_there {
            return Err(Error::Shape(format!("expected {what} whose gradient is wanted, found none")));
        }
    }
    let full = [dims.b, dims.h, dims.t_q, dims.t_kv];
    match wanted.bias.filter(|shape| shape.iter().zip(full).any(|(&dim, full)| dim != full && dim != 1)) {
        Some(shape) => Err(Error::Shape(format!("expected a bias that broadcasts to {full:?}, found {shape:?}"))),
        None => Ok(()),
    }
}

/// Memory for a gradient that is not touched yet.
fn gradient<T>(dims: [usize; 4]) -> Result<Unwritten<T>, Error> {
    Unwritten::new(&dims).ok_or_else(|| Error::Memory(format!("a gradient of {dims:?}")))
}

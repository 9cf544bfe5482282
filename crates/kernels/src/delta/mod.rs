//! Linear attention: each head has a state (D_k, D_v), which its tokens update one after the other. A token decays the
//! state, corrects the value stored for its key, and reads the state with its query. The design is in this package's
//! README.

mod backward;
mod chunk;
mod forward;
mod problem;
mod rows;
#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "calls of one sequence")]
mod tests;

pub use problem::{Decay, Dims, Problem};

use half::{bf16, f16};

use crate::cpu::{InstructionSet, Kernel, SharedPtr, SimdTask, Unwritten, Workers, dispatch_f32, for_each_task};
use crate::error::{Error, check_instruction_set, check_len};
use crate::number::{Number, Strided};
use forward::{MAX_HEADS, Shape, Workspace, run_heads};
use problem::ExcessDecay;
use rows::BLOCK;

/// What [`gated_delta_rule`] gives.
#[derive(Debug, Clone, Default)]
pub struct Output<E> {
    /// (B, T, H, D_v).
    pub context: Vec<E>,
    /// The states after the last token of each sequence, (N, H, D_k, D_v).
    pub states: Vec<f32>,
    /// What the backward pass needs, if it was asked for.
    pub saved: Option<Saved>,
}

/// What the backward pass needs of the forward pass: D_v numbers for each token and head, and a state for each block of
/// 64 tokens.
#[derive(Debug, Clone, Default)]
pub struct Saved {
    /// `e` of each token, the difference of its value to what the state gave for its key, (B, H, T, D_v).
    errors: Vec<f32>,
    /// The states before each block of tokens, (blocks of all sequences, H, D_k, D_v).
    states: Vec<f32>,
}

/// A call of [`gated_delta_rule`], what it saved, and the gradients of a loss with respect to its results.
#[derive(Debug, Clone, Copy)]
pub struct BackwardProblem<'a, E> {
    /// The call, as it was.
    pub forward: Problem<'a, E>,
    /// What it saved.
    pub saved: &'a Saved,
    /// The gradient of the context, (B, H, T) rows of D_v contiguous elements.
    pub context_grad: Strided<'a, E, 3>,
    /// The gradient of the states after the last tokens, if they were used: (N, H, D_k, D_v).
    pub states_grad: Option<&'a [f32]>,
}

/// Contiguous gradients. Those of queries, keys and values have all H heads: where several heads read one head of an
/// input, the caller sums over them.
#[derive(Debug, Clone, Default)]
pub struct Gradients<T = Vec<f32>> {
    /// (B, H, T, D_k).
    pub q: T,
    /// (B, H, T, D_k).
    pub k: T,
    /// (B, H, T, D_v).
    pub v: T,
    /// Of the logarithms, (B, H, T) or (B, H, T, D_k) as the decay; empty without one. 0 where the logarithm is -inf.
    pub decay: T,
    /// (B, H, T).
    pub beta: T,
    /// Of the states before the first tokens, (N, H, D_k, D_v).
    pub states: T,
}

impl<T> From<[T; 6]> for Gradients<T> {
    fn from([q, k, v, decay, beta, states]: [T; 6]) -> Self {
        Self { q, k, v, decay, beta, states }
    }
}

/// A backward pass that was checked, and where its results go.
pub struct BackwardCall<'a, E> {
    problem: &'a BackwardProblem<'a, E>,
    /// The blocks before those of each sequence.
    blocks: Vec<usize>,
    gradients: Gradients<SharedPtr<f32>>,
    excess_decay: ExcessDecay,
}

/// A call that was checked, and where its results go.
pub struct Call<'a, E> {
    problem: &'a Problem<'a, E>,
    context: SharedPtr<E>,
    states: SharedPtr<f32>,
    saved: Option<SavedOutput>,
    excess_decay: ExcessDecay,
}

struct SavedOutput {
    /// The blocks before those of each sequence.
    blocks: Vec<usize>,
    errors: SharedPtr<f32>,
    states: SharedPtr<f32>,
}

/// An element whose kernels are compiled here, in this package.
pub trait DeltaKernels: Number {
    /// [`gated_delta_rule`], whose call nobody else can make.
    fn gated_delta_rule(call: &Call<Self>, instruction_set: InstructionSet);
    /// [`gated_delta_rule_backward`], likewise.
    fn gated_delta_rule_backward(call: &BackwardCall<Self>, instruction_set: InstructionSet);
}

macro_rules! kernels {
    ($($type:ty),*) => {
        $(impl DeltaKernels for $type {
            fn gated_delta_rule(call: &Call<Self>, instruction_set: InstructionSet) {
                dispatch_f32(instruction_set, call);
            }

            fn gated_delta_rule_backward(call: &BackwardCall<Self>, instruction_set: InstructionSet) {
                dispatch_f32(instruction_set, call);
            }
        })*
    };
}

kernels!(f32, bf16, f16);

/// Linear attention. Which of decay and beta the call has decides the rule: with `S` the state of a head, for one token
/// after the other
///
/// ```text
/// S = exp(decay) ∘ S              where there is a decay, for the head or for each row of S
/// e = v - Sᵀ k                    with a beta, else v
/// S = S + k (beta e)ᵀ
/// context = Sᵀ (scale q)
/// ```
///
/// Neither is linear attention, decay alone gated linear attention (Yang et al. 2023,
/// <https://arxiv.org/abs/2312.06635>), beta alone the delta rule (Yang et al. 2024,
/// <https://arxiv.org/abs/2406.06484>), and both the gated delta rule (Yang et al. 2024,
/// <https://arxiv.org/abs/2412.06464>). It is computed in f32 whatever the elements are. The results of a sequence are
/// the same to the bit for any number of threads and whatever else is in the call. With `saves`, the output has what
/// [`gated_delta_rule_backward`] needs.
///
/// # Errors
/// [`Error::Shape`] if a slice is shorter than the dimensions need, heads do not divide H, or the sequences are not the
/// tokens one after the other; [`Error::InstructionSet`] if the processor lacks the instruction set; [`Error::Memory`]
/// if there is none for the results; [`Error::Range`] for a decay above 2.5, and with a norm for a scale other than 0
/// whose magnitude is below 1e-15 or above 1e15.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::delta::{Dims, Problem, gated_delta_rule};
/// use candle_attention_kernels::flash::Strided;
///
/// // One head of width 1: the second token corrects what the first one wrote for the same key.
/// let (q, k, v, beta) = ([1.0, 1.0], [1.0, 1.0], [4.0, 6.0], [1.0, 0.5]);
/// let rows = |data| Strided { data, strides: [2, 2, 1] };
/// let problem = Problem {
///     dims: Dims { b: 1, t: 2, h: 1, h_q: 1, h_k: 1, h_v: 1, d_k: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k),
///     v: rows(&v),
///     decay: None,
///     beta: Some(rows(&beta)),
///     states: None,
///     sequences: &[0..2],
///     scale: 1.0,
///     qk_norm: None,
///     executor: None,
/// };
/// let output = gated_delta_rule::<f32>(&problem, InstructionSet::choose(None, false)?, false)?;
/// assert_eq!((output.context, output.states), (vec![4.0, 5.0], vec![5.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gated_delta_rule<E: DeltaKernels>(
    problem: &Problem<E>,
    instruction_set: InstructionSet,
    saves: bool,
) -> Result<Output<E>, Error> {
    check_instruction_set(instruction_set)?;
    problem.check()?;
    let Dims { b, t, h, d_v, .. } = problem.dims;
    let blocks = if saves { problem.blocks(BLOCK) } else { vec![0] };
    let (contexts, block_heads) = (b * t * h * d_v, blocks[blocks.len() - 1].saturating_mul(h));
    let counts = [problem.heads(), block_heads].map(|heads| heads.saturating_mul(problem.state_len()));
    let counts = [counts[0], counts[1], if saves { contexts } else { 0 }];
    let (mut context, [states, block_states, errors]) = (unwritten::<E>(contexts)?, counts.map(unwritten::<f32>));
    let (mut states, mut block_states, mut errors) = (states?, block_states?, errors?);
    let pointer = |of: &mut Unwritten<f32>| SharedPtr(of.as_mut_ptr());
    let saved = SavedOutput { blocks, errors: pointer(&mut errors), states: pointer(&mut block_states) };
    let (context_to, saved) = (SharedPtr(context.as_mut_ptr()), saves.then_some(saved));
    let call = Call {
        problem,
        context: context_to,
        states: pointer(&mut states),
        saved,
        excess_decay: ExcessDecay::default(),
    };
    // Without results, of which there may be any number of heads, there is nothing to compute.
    if contexts > 0 || counts[0] > 0 {
        E::gated_delta_rule(&call, instruction_set);
        call.excess_decay.check()?;
    }
    // SAFETY: each head of each sequence wrote its columns of all of them.
    unsafe {
        let saved = Saved { errors: errors.written(), states: block_states.written() };
        Ok(Output { context: context.written(), states: states.written(), saved: saves.then_some(saved) })
    }
}

fn unwritten<T>(count: usize) -> Result<Unwritten<T>, Error> {
    Unwritten::new(&[count]).ok_or_else(|| Error::Memory(format!("a result of {count} numbers")))
}

impl<E: Number> SimdTask for &Call<'_, E> {
    unsafe fn run<K: Kernel>(self) {
        let problem = self.problem;
        let longest = problem.sequences.iter().map(|range| range.len()).max().unwrap_or(0);
        let (multiply_adds, bytes) = problem.work();
        let workers = Workers::of(multiply_adds, bytes, problem.executor);
        // How heads and columns are split over tasks changes no number.
        let (wanted, h) = (2 * workers.count, problem.dims.h);
        let most = if longest > BLOCK { MAX_HEADS.min(h.max(1)) } else { 1 };
        let heads = (problem.heads() / wanted).clamp(1, most);
        let shape = Shape::new::<K::Vector>(longest, problem.dims.d_v, heads);
        let parts = wanted.div_ceil(problem.heads().max(1)).clamp(1, shape.panels.max(1));
        let panels = |part: usize| part * shape.panels / parts..(part + 1) * shape.panels / parts;
        let groups = h.div_ceil(heads);
        let workspace = || Workspace::new::<K::Vector>(&problem.dims, shape);
        for_each_task(problem.sequences.len() * groups * parts, workers, &workspace, &|workspace, task| {
            let (group, panels) = (task / parts, panels(task % parts));
            let first = group % groups * heads;
            // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
            unsafe { run_heads::<K, E>(self, workspace, group / groups, first..h.min(first + heads), panels) };
        });
    }
}

/// The gradients of a call of [`gated_delta_rule`], as deterministic as its results. Memory is O(T · D) for a head.
///
/// # Errors
/// As [`gated_delta_rule`], and [`Error::Shape`] for what another call saved and gradients of other shapes.
pub fn gated_delta_rule_backward<E: DeltaKernels>(
    problem: &BackwardProblem<E>,
    instruction_set: InstructionSet,
) -> Result<Gradients, Error> {
    check_instruction_set(instruction_set)?;
    let BackwardProblem { forward, saved, context_grad, states_grad } = problem;
    forward.check()?;
    let Dims { b, t, h, d_k, d_v, .. } = forward.dims;
    let blocks = forward.blocks(BLOCK);
    let (rows, states) = (b * t * h, forward.heads() * forward.state_len());
    check_len("the saved errors", saved.errors.len(), rows * d_v)?;
    let block_heads = blocks[blocks.len() - 1].saturating_mul(h);
    check_len("the saved states", saved.states.len(), block_heads.saturating_mul(forward.state_len()))?;
    context_grad.check("context_grad", [b, h, t], d_v)?;
    states_grad.map_or(Ok(()), |gradient| check_len("states_grad", gradient.len(), states))?;
    let decays = match forward.decay {
        Some(Decay::Heads(_)) => rows,
        Some(Decay::Channels(_)) => rows * d_k,
        None => 0,
    };
    let counts = [rows * d_k, rows * d_k, rows * d_v, decays, rows, states];
    let [q, k, v, decay, beta, states] = counts.map(unwritten::<f32>);
    let mut all = [q?, k?, v?, decay?, beta?, states?];
    let gradients = all.each_mut().map(|of| SharedPtr(of.as_mut_ptr())).into();
    let call = BackwardCall { problem, blocks, gradients, excess_decay: ExcessDecay::default() };
    if counts.iter().any(|&count| count > 0) {
        E::gated_delta_rule_backward(&call, instruction_set);
        call.excess_decay.check()?;
    }
    // SAFETY: each head of each sequence wrote the rows of its tokens and its state.
    Ok(all.map(|of| unsafe { of.written() }).into())
}

impl<E: Number> SimdTask for &BackwardCall<'_, E> {
    unsafe fn run<K: Kernel>(self) {
        let problem = &self.problem.forward;
        let (multiply_adds, bytes) = problem.work();
        let workers = Workers::of(multiply_adds.saturating_mul(2), bytes, problem.executor);
        let workspace = || backward::Workspace::new::<K>(&problem.dims);
        for_each_task(problem.heads(), workers, &workspace, &|workspace, task| {
            // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
            unsafe { backward::run_head::<K, E>(self, workspace, problem.head(task)) };
        });
    }
}

//! Linear attention: each head has a state (D_k, D_v), which its tokens update one after the other. A token decays the
//! state, corrects the value stored for its key, and reads the state with its query. The design is in this package's
//! README.

mod backward;
mod chunk;
mod forward;
mod pass;
mod problem;
mod rows;
#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "calls of one sequence")]
mod tests;

pub use problem::{DeltaDecay, DeltaDims, DeltaProblem};

use half::{bf16, f16};

use crate::cpu::{
    InstructionSet, Kernel, SharedPtr, SimdTask, Unwritten, WorkSize, Workers, dispatch_f32, for_each_task,
};
use crate::error::{Error, check_instruction_set, check_len};
use crate::number::{Number, Strided};
use forward::{ForwardScratch, MAX_HEADS, Tiling, run_heads};
use problem::ExcessDecay;
use rows::BLOCK;

/// The results of [`gated_delta_rule`].
#[derive(Debug, Clone, Default)]
pub struct DeltaOutput<E> {
    /// The attention output, (B, T, H, D_v).
    pub output: Vec<E>,
    /// The states after the last token of each sequence, (N, H, D_k, D_v).
    pub states: Vec<f32>,
    /// The intermediate results for the backward pass, if the caller asked to save them.
    pub saved: Option<DeltaSaved>,
}

/// The intermediate results of a forward pass that the backward pass reads: D_v numbers for each token and head, and a
/// state for each block of 64 tokens.
#[derive(Debug, Clone, Default)]
pub struct DeltaSaved {
    /// `e` of each token, the difference between its value and the value that the state has for its key, (B, H, T,
    /// D_v).
    errors: Vec<f32>,
    /// The states before each block of tokens, (blocks of all sequences, H, D_k, D_v).
    states: Vec<f32>,
}

/// A call of [`gated_delta_rule`], its saved results, and the gradients of a loss with respect to its results.
#[derive(Debug, Clone, Copy)]
pub struct DeltaBackwardProblem<'a, E> {
    /// The call of the forward pass.
    pub forward: DeltaProblem<'a, E>,
    /// The saved results of the forward pass.
    pub saved: &'a DeltaSaved,
    /// The gradient of the attention output, (B, H, T) rows of D_v contiguous elements.
    pub output_grad: Strided<'a, E, 3>,
    /// The gradient of the states after the last tokens, if the loss depends on them: (N, H, D_k, D_v).
    pub states_grad: Option<&'a [f32]>,
}

/// Contiguous gradients. The gradients of queries, keys and values have all H heads: where several heads read one head
/// of an input, the caller sums over them.
#[derive(Debug, Clone, Default)]
pub struct DeltaGradients {
    /// (B, H, T, D_k).
    pub q: Vec<f32>,
    /// (B, H, T, D_k).
    pub k: Vec<f32>,
    /// (B, H, T, D_v).
    pub v: Vec<f32>,
    /// The gradient of the logarithms, (B, H, T) or (B, H, T, D_k) as the decay; empty without a decay. It is 0 where
    /// the logarithm is -inf.
    pub decay: Vec<f32>,
    /// (B, H, T).
    pub beta: Vec<f32>,
    /// The gradient of the states before the first tokens, (N, H, D_k, D_v).
    pub states: Vec<f32>,
}

/// A checked call, and the addresses of its results.
pub struct DeltaCall<'a, E> {
    problem: &'a DeltaProblem<'a, E>,
    output: SharedPtr<E>,
    states: SharedPtr<f32>,
    saved: Option<SavedAddresses>,
    excess_decay: ExcessDecay,
}

/// The addresses of the results for the backward pass.
struct SavedAddresses {
    /// The number of blocks before the blocks of each sequence.
    blocks: Vec<usize>,
    errors: SharedPtr<f32>,
    states: SharedPtr<f32>,
}

/// A checked backward pass, and the addresses of its results.
pub struct DeltaBackwardCall<'a, E> {
    problem: &'a DeltaBackwardProblem<'a, E>,
    /// The number of blocks before the blocks of each sequence.
    blocks: Vec<usize>,
    gradients: GradientAddresses,
    excess_decay: ExcessDecay,
}

/// The addresses of the gradients.
struct GradientAddresses {
    q: SharedPtr<f32>,
    k: SharedPtr<f32>,
    v: SharedPtr<f32>,
    decay: SharedPtr<f32>,
    beta: SharedPtr<f32>,
    states: SharedPtr<f32>,
}

/// An element type whose kernels are compiled here, in this package.
pub trait DeltaKernels: Number {
    /// Runs [`gated_delta_rule`]. Only this package can create the call.
    fn gated_delta_rule(call: &DeltaCall<Self>, instruction_set: InstructionSet);
    /// Runs [`gated_delta_rule_backward`]. Only this package can create the call.
    fn gated_delta_rule_backward(call: &DeltaBackwardCall<Self>, instruction_set: InstructionSet);
}

macro_rules! kernels {
    ($($type:ty),*) => {
        $(impl DeltaKernels for $type {
            fn gated_delta_rule(call: &DeltaCall<Self>, instruction_set: InstructionSet) {
                dispatch_f32(instruction_set, call);
            }

            fn gated_delta_rule_backward(call: &DeltaBackwardCall<Self>, instruction_set: InstructionSet) {
                dispatch_f32(instruction_set, call);
            }
        })*
    };
}

kernels!(f32, bf16, f16);

/// Computes linear attention by the gated delta rule. With `S` the state of a head, for one token after the other
///
/// ```text
/// S = exp(decay) ∘ S              with a decay, for the head or for each row of S
/// e = v - Sᵀ k                    with a beta, else v
/// S = S + k (beta e)ᵀ
/// output = Sᵀ (scale q)
/// ```
///
/// The rule depends on which of decay and beta the call has: neither is linear attention, decay alone gated linear
/// attention (Yang et al. 2023, <https://arxiv.org/abs/2312.06635>), beta alone the delta rule (Yang et al. 2024,
/// <https://arxiv.org/abs/2406.06484>), and both the gated delta rule (Yang et al. 2024,
/// <https://arxiv.org/abs/2412.06464>). All is computed in f32, for elements of any type. The results of a sequence
/// have the same bits for any number of threads and any other sequences in the call. With `saves`, the results include
/// the numbers that [`gated_delta_rule_backward`] reads.
///
/// # Errors
/// [`Error::Shape`] if a slice is shorter than the dimensions need, if a number of heads does not divide H, or if the
/// sequences are not the tokens one after the other; [`Error::InstructionSet`] if the processor lacks the instruction
/// set; [`Error::Memory`] if there is none for the results; [`Error::Range`] for a decay above 2.5, and with a norm for
/// a scale other than 0 whose magnitude is below 1e-15 or above 1e15.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::delta::{DeltaDims, DeltaProblem, gated_delta_rule};
/// use candle_attention_kernels::flash::Strided;
///
/// // One head of width 1: the second token corrects the value that the first token stored for the same key.
/// let q = [1.0, 1.0];
/// let k = [1.0, 1.0];
/// let v = [4.0, 6.0];
/// let beta = [1.0, 0.5];
/// let rows = |data| Strided { data, strides: [2, 2, 1] };
/// let problem = DeltaProblem {
///     dims: DeltaDims { b: 1, t: 2, h: 1, h_q: 1, h_k: 1, h_v: 1, d_k: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k),
///     v: rows(&v),
///     decay: None,
///     beta: Some(rows(&beta)),
///     states: None,
///     sequences: &[0..2],
///     scale: 1.0,
///     qk_norm: None,
/// };
/// let results = gated_delta_rule::<f32>(&problem, InstructionSet::choose(None, false)?, false)?;
/// assert_eq!((results.output, results.states), (vec![4.0, 5.0], vec![5.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gated_delta_rule<E: DeltaKernels>(
    problem: &DeltaProblem<E>,
    instruction_set: InstructionSet,
    saves: bool,
) -> Result<DeltaOutput<E>, Error> {
    check_instruction_set(instruction_set)?;
    problem.check()?;
    let DeltaDims { b, t, h, d_v, .. } = problem.dims;
    let output_len = b * t * h * d_v;
    let blocks = if saves { problem.blocks(BLOCK) } else { vec![0] };
    let states_len = problem.heads().saturating_mul(problem.state_len());
    let block_heads = blocks[blocks.len() - 1].saturating_mul(h);
    let mut output = unwritten::<E>(output_len)?;
    let mut states = unwritten::<f32>(states_len)?;
    let mut block_states = unwritten::<f32>(block_heads.saturating_mul(problem.state_len()))?;
    let mut errors = unwritten::<f32>(if saves { output_len } else { 0 })?;
    let addresses = SavedAddresses { blocks, errors: address(&mut errors), states: address(&mut block_states) };
    let call = DeltaCall {
        problem,
        output: SharedPtr(output.as_mut_ptr()),
        states: address(&mut states),
        saved: saves.then_some(addresses),
        excess_decay: ExcessDecay::default(),
    };
    // Without results there is nothing to compute, for any number of heads.
    if output_len > 0 || states_len > 0 {
        E::gated_delta_rule(&call, instruction_set);
        call.excess_decay.check()?;
    }
    // SAFETY: each head of each sequence wrote its columns of all results.
    unsafe {
        let saved = DeltaSaved { errors: errors.into_vec(), states: block_states.into_vec() };
        Ok(DeltaOutput { output: output.into_vec(), states: states.into_vec(), saved: saves.then_some(saved) })
    }
}

/// Allocates memory for the numbers of a result.
fn unwritten<T>(count: usize) -> Result<Unwritten<T>, Error> {
    Unwritten::new(&[count]).ok_or_else(|| Error::Memory(format!("a result of {count} numbers")))
}

fn address(result: &mut Unwritten<f32>) -> SharedPtr<f32> {
    SharedPtr(result.as_mut_ptr())
}

impl<E: Number> SimdTask for &DeltaCall<'_, E> {
    type Output = ();

    unsafe fn run<K: Kernel>(self) {
        let problem = self.problem;
        let longest = problem.sequences.iter().map(|range| range.len()).max().unwrap_or(0);
        let workers = Workers::for_call(problem.work());
        // The division of heads and columns into tasks changes no number.
        let target_tasks = 2 * workers.count;
        let h = problem.dims.h;
        let most_heads = if longest > BLOCK { MAX_HEADS.min(h.max(1)) } else { 1 };
        let heads = (problem.heads() / target_tasks).clamp(1, most_heads);
        let tiling = Tiling::new::<K::Vector>(longest, problem.dims.d_v, heads);
        let parts = target_tasks.div_ceil(problem.heads().max(1)).clamp(1, tiling.panels.max(1));
        let panels = |part: usize| part * tiling.panels / parts..(part + 1) * tiling.panels / parts;
        let groups = h.div_ceil(heads);
        let new_scratch = || ForwardScratch::new::<K::Vector>(&problem.dims, tiling);
        for_each_task(problem.sequences.len() * groups * parts, workers, &new_scratch, &|scratch, task| {
            let group = task / parts;
            let task_panels = panels(task % parts);
            let first = group % groups * heads;
            // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
            unsafe { run_heads::<K, E>(self, scratch, group / groups, first..h.min(first + heads), task_panels) };
        });
    }
}

/// Computes the gradients of a call of [`gated_delta_rule`], as deterministic as its results. Memory is O(T · D) for a
/// head.
///
/// # Errors
/// As [`gated_delta_rule`], and [`Error::Shape`] for the saved results of another call and for gradients of other
/// shapes.
pub fn gated_delta_rule_backward<E: DeltaKernels>(
    problem: &DeltaBackwardProblem<E>,
    instruction_set: InstructionSet,
) -> Result<DeltaGradients, Error> {
    check_instruction_set(instruction_set)?;
    let DeltaBackwardProblem { forward, saved, output_grad, states_grad } = problem;
    forward.check()?;
    let DeltaDims { b, t, h, d_k, d_v, .. } = forward.dims;
    let blocks = forward.blocks(BLOCK);
    let rows = b * t * h;
    let states_len = forward.heads() * forward.state_len();
    check_len("the saved errors", saved.errors.len(), rows * d_v)?;
    let block_heads = blocks[blocks.len() - 1].saturating_mul(h);
    check_len("the saved states", saved.states.len(), block_heads.saturating_mul(forward.state_len()))?;
    output_grad.check("output_grad", [b, h, t], d_v)?;
    if let Some(states_grad) = states_grad {
        check_len("states_grad", states_grad.len(), states_len)?;
    }
    let decays = match forward.decay {
        Some(DeltaDecay::Heads(_)) => rows,
        Some(DeltaDecay::Channels(_)) => rows * d_k,
        None => 0,
    };
    let mut q = unwritten(rows * d_k)?;
    let mut k = unwritten(rows * d_k)?;
    let mut v = unwritten(rows * d_v)?;
    let mut decay = unwritten(decays)?;
    let mut beta = unwritten(rows)?;
    let mut states = unwritten(states_len)?;
    let gradients = GradientAddresses {
        q: address(&mut q),
        k: address(&mut k),
        v: address(&mut v),
        decay: address(&mut decay),
        beta: address(&mut beta),
        states: address(&mut states),
    };
    let call = DeltaBackwardCall { problem, blocks, gradients, excess_decay: ExcessDecay::default() };
    if rows > 0 || states_len > 0 {
        E::gated_delta_rule_backward(&call, instruction_set);
        call.excess_decay.check()?;
    }
    // SAFETY: each head of each sequence wrote the rows of its tokens and its state.
    unsafe {
        Ok(DeltaGradients {
            q: q.into_vec(),
            k: k.into_vec(),
            v: v.into_vec(),
            decay: decay.into_vec(),
            beta: beta.into_vec(),
            states: states.into_vec(),
        })
    }
}

impl<E: Number> SimdTask for &DeltaBackwardCall<'_, E> {
    type Output = ();

    unsafe fn run<K: Kernel>(self) {
        let problem = &self.problem.forward;
        let WorkSize { multiply_adds, bytes } = problem.work();
        let workers = Workers::for_call(WorkSize { multiply_adds: multiply_adds.saturating_mul(2), bytes });
        let new_scratch = || backward::DeltaBackwardScratch::new::<K>(&problem.dims);
        for_each_task(problem.heads(), workers, &new_scratch, &|scratch, task| {
            // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
            unsafe { backward::run_head::<K, E>(self, scratch, problem.head(task)) };
        });
    }
}

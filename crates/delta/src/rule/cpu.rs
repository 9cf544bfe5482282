//! The fused CPU kernel, and its results in Candle's graph.

use candle_core::{Error, Result, Tensor};

use super::call::{AllHeadGradients, CheckedDelta};
use candle_attention_kernels::delta::{
    DeltaBackwardProblem, DeltaDecay, DeltaDims, DeltaGradients, DeltaOutput, DeltaProblem, DeltaSaved,
    gated_delta_rule, gated_delta_rule_backward,
};
use candle_attention_kernels::{Error as KernelError, InstructionSet};
use candle_attention_modules::base::record_two;
use candle_attention_modules::base::rowwise::{Read, TensorElement, read, to_vec, with_contiguous_rows, with_float};

/// The outcome of the kernel.
pub(super) enum CpuOutcome {
    /// The attention output (B, H, T, D_v), a view of (B, T, H, D_v), and the states (n, H, D_k, D_v).
    Computed(Tensor, Tensor),
    /// Why the kernel does not compute a call with these numbers.
    OutOfRange(String),
}

/// Runs the kernel and records its results.
pub(super) fn run(call: &CheckedDelta, instruction_set: InstructionSet) -> Result<CpuOutcome> {
    let call = call.with_contiguous_rows()?;
    let DeltaDims { b, t, h, d_v, .. } = call.dims;
    let is_tracked = call.tracks_gradients();
    let shapes = [[b, t, h, d_v], call.state_dims()];
    let [ys, states] = with_float!(call.op, call.dtype(), |E| {
        let forward = |problem: &DeltaProblem<E>| gated_delta_rule(problem, instruction_set, is_tracked);
        let DeltaOutput { output, states, saved } = match call.with_problem(forward)? {
            Ok(results) => results,
            Err(KernelError::Range(reason)) => return Ok(CpuOutcome::OutOfRange(reason)),
            Err(error) => return Err(call.kernel_error(&error)),
        };
        let saved_call = call.clone();
        let saved = saved.unwrap_or_default();
        let backward = move |_: &Tensor, output_grad: &Tensor, states_grad: Option<Tensor>| {
            saved_call.gradients::<E>(instruction_set, &saved, output_grad, states_grad)
        };
        record_two("gated-delta-rule", &call.operands(), shapes.each_ref(), output, states, backward)?
    });
    Ok(CpuOutcome::Computed(ys.transpose(1, 2)?, states))
}

impl CheckedDelta {
    fn kernel_error(&self, error: &KernelError) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Runs a function over the call as the kernels take it.
    fn with_problem<E: TensorElement, R>(&self, run: impl FnOnce(&DeltaProblem<E>) -> R) -> Result<R> {
        let dims = self.dims;
        // Ranges of the tokens of all entries of the batch, counted through it.
        let sequences: Vec<_> = match &self.sequences {
            None => (0..dims.b).map(|entry| entry * dims.t..(entry + 1) * dims.t).collect(),
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s)).collect(),
        };
        let (q, k, v) = (read(&self.q), read(&self.k), read(&self.v));
        let decay = self.decay.as_ref().map(read);
        let beta = self.beta.as_ref().map(read);
        let states = self.states.as_ref().map(read);
        let decay = match &decay {
            Some(decay) if decay.layout.dims()[3] > 1 => Some(DeltaDecay::Channels(decay.strided()?)),
            Some(decay) => Some(DeltaDecay::Heads(decay.strided()?)),
            None => None,
        };
        let problem = DeltaProblem {
            dims,
            q: q.strided()?,
            k: k.strided()?,
            v: v.strided()?,
            decay,
            beta: beta.as_ref().map(Read::strided).transpose()?,
            states: states.as_ref().map(Read::contiguous).transpose()?,
            sequences: &sequences,
            scale: self.scale as f32,
            qk_norm: self.options.qk_norm.map(|eps| eps as f32),
        };
        Ok(run(&problem))
    }

    /// Returns the gradients of the tracked operands from the gradient of the output (B, T, H, D_v), and of the states
    /// if a loss depends on them.
    fn gradients<E: TensorElement>(
        &self,
        instruction_set: InstructionSet,
        saved: &DeltaSaved,
        output_grad: &Tensor,
        states_grad: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let output_grad = with_contiguous_rows(&output_grad.transpose(1, 2)?)?;
        let output_grad = read(&output_grad);
        let states_grad = states_grad.as_ref().map(to_vec).transpose()?;
        let (output_grad, states_grad) = (output_grad.strided()?, states_grad.as_deref());
        let backward = |&forward: &DeltaProblem<E>| {
            let problem = DeltaBackwardProblem { forward, saved, output_grad, states_grad };
            gated_delta_rule_backward(&problem, instruction_set)
        };
        let gradients = self.with_problem(backward)?.map_err(|error| self.kernel_error(&error))?;
        let DeltaGradients { q, k, v, decay, beta, states } = gradients;
        let DeltaDims { b, t, h, d_k, d_v, .. } = self.dims;
        let [n, ..] = self.state_dims();
        let tensor = |numbers: Vec<f32>, shape| Tensor::from_vec(numbers, shape, self.q.device());
        let like = |numbers: Vec<f32>, operand: &Option<Tensor>| match operand {
            Some(operand) => Tensor::from_vec(numbers, operand.shape(), self.q.device()).map(Some),
            None => Ok(None),
        };
        self.gradients_of(AllHeadGradients {
            q: tensor(q, (b, h, t, d_k))?,
            k: tensor(k, (b, h, t, d_k))?,
            v: tensor(v, (b, h, t, d_v))?,
            decay: like(decay, &self.decay)?,
            beta: like(beta, &self.beta)?,
            states: tensor(states, (n, h, d_k, d_v))?,
        })
    }
}

//! The kernel of the CPU, and its results in Candle's graph.

use candle_core::{Error, Result, Tensor};

use super::{Call, Dims};
use candle_attention_kernels::delta::{
    self, BackwardProblem, Decay, Gradients, Problem, Saved, gated_delta_rule_backward,
};
use candle_attention_kernels::{Error as KernelError, InstructionSet};
use candle_attention_modules::base::rowwise::{Element, Read, read, to_vec, with_contiguous_rows, with_float};
use candle_attention_modules::base::{executor, record_two};

/// The outcome of the kernel.
pub(super) enum Outcome {
    /// The attention output (B, H, T, D_v), a view of (B, T, H, D_v), and the states (n, H, D_k, D_v).
    Computed(Tensor, Tensor),
    /// Why the kernel does not compute a call with these numbers.
    OutOfRange(String),
}

/// Runs the kernel.
pub(super) fn run(call: &Call, instruction_set: InstructionSet) -> Result<Outcome> {
    let (mut call, is_tracked) = (call.clone(), call.tracks_gradients());
    for tensor in call.rows.iter_mut().chain(call.factors.iter_mut().flatten()) {
        *tensor = with_contiguous_rows(tensor)?;
    }
    let Dims { b, t, h, d_v, .. } = call.dims;
    let shapes = [[b, t, h, d_v], call.state_dims()];
    let [ys, states] = with_float!(call.op, call.dtype(), |E| {
        let forward = |problem: &Problem<E>| delta::gated_delta_rule(problem, instruction_set, is_tracked);
        let delta::Output { context, states, saved } = match call.with_problem(forward)? {
            Ok(output) => output,
            Err(KernelError::Range(obstacle)) => return Ok(Outcome::OutOfRange(obstacle)),
            Err(error) => return Err(call.kernel_error(&error)),
        };
        let (own, saved) = (call.clone(), saved.unwrap_or_default());
        let backward = move |_: &Tensor, of_context: &Tensor, of_states: Option<Tensor>| {
            own.gradients::<E>(instruction_set, &saved, of_context, of_states)
        };
        record_two("gated-delta-rule", &call.inputs(), shapes.each_ref(), context, states, backward)?
    });
    Ok(Outcome::Computed(ys.transpose(1, 2)?, states))
}

impl Call {
    fn inputs(&self) -> [Option<&Tensor>; 6] {
        let ([q, k, v], [decay, beta, states]) = (&self.rows, &self.factors);
        [Some(q), Some(k), Some(v), decay.as_ref(), beta.as_ref(), states.as_ref()]
    }

    fn kernel_error(&self, error: &KernelError) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Runs a function over the call as the kernels take it.
    fn with_problem<E: Element, R>(&self, run: impl FnOnce(&Problem<E>) -> R) -> Result<R> {
        let Self { dims, rows, factors, scale, options, .. } = self;
        // Of the tokens of all entries of the batch.
        let sequences: Vec<_> = match &self.sequences {
            None => (0..dims.b).map(|entry| entry * dims.t..(entry + 1) * dims.t).collect(),
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s)).collect(),
        };
        let [q, k, v] = rows.each_ref().map(read);
        let [decay, beta, states] = factors.each_ref().map(|xs| xs.as_ref().map(read));
        let decay = match &decay {
            Some(decay) if decay.layout.dims()[3] > 1 => Some(Decay::Channels(decay.strided()?)),
            Some(decay) => Some(Decay::Heads(decay.strided()?)),
            None => None,
        };
        let problem = Problem {
            dims: *dims,
            q: q.strided()?,
            k: k.strided()?,
            v: v.strided()?,
            decay,
            beta: beta.as_ref().map(Read::strided).transpose()?,
            states: states.as_ref().map(Read::contiguous).transpose()?,
            sequences: &sequences,
            scale: *scale as f32,
            qk_norm: options.qk_norm.map(|eps| eps as f32),
            executor: executor(),
        };
        Ok(run(&problem))
    }

    /// From the gradients of the results, that of (B, T, H, D_v), to those of the inputs that are tracked.
    fn gradients<E: Element>(
        &self,
        instruction_set: InstructionSet,
        saved: &Saved,
        of_context: &Tensor,
        of_states: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let context = with_contiguous_rows(&of_context.transpose(1, 2)?)?;
        let states = of_states.as_ref().map(to_vec).transpose()?;
        let context = read(&context);
        let (context_grad, states_grad) = (context.strided()?, states.as_deref());
        let backward = |&forward: &Problem<E>| {
            gated_delta_rule_backward(&BackwardProblem { forward, saved, context_grad, states_grad }, instruction_set)
        };
        let gradients = self.with_problem(backward)?.map_err(|error| self.kernel_error(&error))?;
        let Gradients { q, k, v, decay, beta, states } = gradients;
        let of_input = |(input, numbers): (Option<&Tensor>, Vec<f32>)| {
            let Some(input) = input.filter(|input| input.track_op()) else { return Ok(None) };
            // The heads of states that read one head of an input add to its gradient.
            let ((b, heads, t, d), h) = (input.dims4()?, self.dims.h);
            let gradient = Tensor::from_vec(numbers, (b, heads, h / heads, t, d), input.device())?;
            let gradient = if heads == h { gradient.squeeze(2)? } else { gradient.sum(2)? };
            gradient.to_dtype(input.dtype()).map(Some)
        };
        self.inputs().into_iter().zip([q, k, v, decay, beta, states]).map(of_input).collect()
    }
}

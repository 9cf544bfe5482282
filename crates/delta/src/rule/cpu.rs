//! The kernel of the CPU, and its results in Candle's graph.

use candle_core::{Error, Result, Tensor};

use super::{Call, Dims};
use candle_attention_kernels::Tier;
use candle_attention_kernels::delta::{
    self, BackwardProblem, Decay, Gradients, Problem, Saved, gated_delta_rule_backward,
};
use candle_attention_kernels::flash::Strided;
use candle_attention_modules::base::rowwise::{Element, Read, read, to_vec, with_contiguous_rows, with_float};
use candle_attention_modules::base::{executor, record_two};

/// What the queries read, (B, H, T, D_v), a view of (B, T, H, D_v), and the states (n, H, D_k, D_v).
pub(super) fn run(mut call: Call, tier: Tier) -> Result<(Tensor, Tensor)> {
    for tensor in call.rows.iter_mut().chain(call.factors.iter_mut().flatten()) {
        *tensor = with_contiguous_rows(tensor)?;
    }
    let [ys, states] = with_float!(call.op, call.dtype(), |E| call.run_kernel::<E>(tier)?);
    Ok((ys.transpose(1, 2)?, states))
}

impl Call {
    /// (B, T, H, D_v), and the states (n, H, D_k, D_v).
    fn run_kernel<E: Element>(self, tier: Tier) -> Result<[Tensor; 2]> {
        let is_tracked = self.tracks_gradients();
        let delta::Output { context, states, saved } = self.with_problem::<E, _>(|problem| {
            delta::gated_delta_rule(problem, tier, is_tracked).map_err(|error| self.error(error))
        })?;
        let (shapes, device) = (self.shapes(), self.rows[0].device());
        let [of_context, of_states] = shapes.each_ref();
        let Some(saved) = saved else {
            return Ok([Tensor::from_vec(context, of_context, device)?, Tensor::from_vec(states, of_states, device)?]);
        };
        let call = self.clone();
        let backward = move |_: &Tensor, of_context: &Tensor, of_states: Option<Tensor>| {
            call.gradients::<E>(tier, &saved, of_context, of_states)
        };
        record_two("gated-delta-rule", &self.inputs(), [of_context, of_states], context, states, backward)
    }

    fn inputs(&self) -> [Option<&Tensor>; 6] {
        let ([q, k, v], [decay, beta, states]) = (&self.rows, &self.factors);
        [Some(q), Some(k), Some(v), decay.as_ref(), beta.as_ref(), states.as_ref()]
    }

    /// Of the context and the states.
    fn shapes(&self) -> [[usize; 4]; 2] {
        let Dims { b, n, t, h, d_k, d_v, .. } = self.dims;
        [[b, t, h, d_v], [n, h, d_k, d_v]]
    }

    fn error(&self, error: impl std::fmt::Display) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Gives the call to a function.
    fn with_problem<E: Element, R>(&self, run: impl FnOnce(&Problem<E>) -> Result<R>) -> Result<R> {
        let Dims { b, t, h, d_k, d_v, .. } = self.dims;
        let Self { rows, factors, scale, options, .. } = self;
        // Of the tokens of all entries of the batch.
        let sequences: Vec<_> = match &self.sequences {
            None => (0..b).map(|entry| entry * t..(entry + 1) * t).collect(),
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s)).collect(),
        };
        let [h_q, h_k, h_v] = rows.each_ref().map(|row| row.dims()[1]);
        let [q, k, v] = rows.each_ref().map(read);
        let [decay, beta, states] = factors.each_ref().map(|xs| xs.as_ref().map(read));
        let decay = match &decay {
            Some(decay) if decay.layout.dims()[3] > 1 => Some(Decay::Channels(decay.strided()?)),
            Some(decay) => Some(Decay::Heads(decay.strided()?)),
            None => None,
        };
        let states: Option<Strided<f32, 3>> = states.as_ref().map(Read::strided).transpose()?;
        let count = self.shapes()[1].iter().product();
        run(&Problem {
            dims: delta::Dims { b, t, h, h_q, h_k, h_v, d_k, d_v },
            q: q.strided()?,
            k: k.strided()?,
            v: v.strided()?,
            decay,
            beta: beta.as_ref().map(Read::strided).transpose()?,
            states: states.map(|states| &states.data[..count]),
            sequences: &sequences,
            scale: *scale as f32,
            qk_norm: options.qk_norm.map(|eps| eps as f32),
            executor: executor(),
        })
    }

    /// From the gradients of the results, that of (B, T, H, D_v), to those of the inputs that are tracked.
    fn gradients<E: Element>(
        &self,
        tier: Tier,
        saved: &Saved,
        of_context: &Tensor,
        of_states: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let context = with_contiguous_rows(&of_context.transpose(1, 2)?)?;
        let states = of_states.as_ref().map(to_vec).transpose()?;
        let context = read(&context);
        let Gradients { q, k, v, decay, beta, states } = self.with_problem::<E, _>(|&forward| {
            let (context_grad, states_grad) = (context.strided()?, states.as_deref());
            let problem = BackwardProblem { forward, saved, context_grad, states_grad };
            gated_delta_rule_backward(&problem, tier).map_err(|error| self.error(error))
        })?;
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

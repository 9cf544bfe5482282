//! The kernel of the CPU.

mod gradients;

use std::ops::Range;

use candle_core::{Error, Result, Tensor, WithDType};

use super::validate::{Call, Dims};
use candle_attention_kernels::delta::{self, Decay, Problem};
use candle_attention_kernels::flash::Strided;
use candle_attention_kernels::{Element, Tier};
use candle_attention_modules::base::executor;
use candle_attention_modules::base::rowwise::{Read, read, with_contiguous_rows, with_float};

/// What the queries read, (B, H, T, D_v), a view of (B, T, H, D_v), and the states (n, H, D_k, D_v).
pub(super) fn run(call: Call, tier: Tier) -> Result<(Tensor, Tensor)> {
    let kernel = Kernel::new(call, tier)?;
    let (ys, states) = with_float!(kernel.call.op, kernel.call.dtype(), |E| kernel.run::<E>()?);
    Ok((ys.transpose(1, 2)?, states))
}

/// A call as the kernel takes it.
struct Kernel {
    call: Call,
    tier: Tier,
    /// Of the tokens of all entries of the batch.
    sequences: Vec<Range<usize>>,
}

impl Kernel {
    fn new(mut call: Call, tier: Tier) -> Result<Self> {
        let Dims { b, t, .. } = call.dims;
        for tensor in call.rows.iter_mut().chain(call.factors.iter_mut().flatten()) {
            *tensor = with_contiguous_rows(tensor)?;
        }
        let sequences = match &call.sequences {
            None => (0..b).map(|entry| entry * t..(entry + 1) * t).collect(),
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s)).collect(),
        };
        Ok(Self { call, tier, sequences })
    }

    /// (B, T, H, D_v), and the states (n, H, D_k, D_v).
    fn run<E: Element + WithDType>(self) -> Result<(Tensor, Tensor)> {
        let is_tracked = self.call.tracks_gradients();
        let delta::Output { context, states, saved } = self.with_problem::<E, _>(|problem| {
            delta::gated_delta_rule(problem, self.tier, is_tracked).map_err(|error| self.error(error))
        })?;
        if let Some(saved) = saved {
            return gradients::track(self, saved, E::to_cpu_storage_owned(context), states);
        }
        let ([context_shape, states_shape], device) = (self.shapes(), self.call.rows[0].device());
        Ok((Tensor::from_vec(context, &context_shape, device)?, Tensor::from_vec(states, &states_shape, device)?))
    }

    /// Of the context and the states.
    fn shapes(&self) -> [[usize; 4]; 2] {
        let Dims { b, n, t, h, d_k, d_v, .. } = self.call.dims;
        [[b, t, h, d_v], [n, h, d_k, d_v]]
    }

    fn error(&self, error: impl std::fmt::Display) -> Error {
        Error::msg(format!("[{}] {error}", self.call.op))
    }

    /// Gives the call to a function.
    fn with_problem<E: Element + WithDType, R>(&self, run: impl FnOnce(&Problem<E>) -> Result<R>) -> Result<R> {
        let Dims { b, t, h, d_k, d_v, .. } = self.call.dims;
        let Call { rows, factors, scale, options, .. } = &self.call;
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
            sequences: &self.sequences,
            scale: *scale as f32,
            qk_norm: options.qk_norm.map(|eps| eps as f32),
            executor: executor(),
        })
    }
}

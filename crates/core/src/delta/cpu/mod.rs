//! The kernel of the CPU.

mod gradients;

use std::ops::Range;

use candle_core::{DType, Error, Layout, Result, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};

use super::validate::{Call, Dims, with_heads};
use crate::base::executor;
use crate::base::rowwise::with_contiguous_rows;
use candle_attention_kernels::delta::{self, Decay, Problem};
use candle_attention_kernels::flash::Strided;
use candle_attention_kernels::{Element, Tier};

/// What the queries read, (B, H, T, D_v), a view of (B, T, H, D_v), and the states (n, H_s, D_k, D_v).
pub(super) fn run(call: &Call, tier: Tier) -> Result<(Tensor, Tensor)> {
    let Dims { n, h, h_s, d_k, d_v, .. } = call.dims;
    let kernel = Kernel::new(call, tier)?;
    let (y, states) = match call.dtype() {
        DType::BF16 => kernel.run::<bf16>(call.tracks_gradients())?,
        DType::F16 => kernel.run::<f16>(call.tracks_gradients())?,
        _ => kernel.run::<f32>(call.tracks_gradients())?,
    };
    // Heads of queries that read one state have it once each.
    let states = match h == h_s {
        true => states,
        false => states.reshape((n, h_s, h / h_s, d_k, d_v))?.narrow(2, 0, 1)?.squeeze(2)?.contiguous()?,
    };
    Ok((y.transpose(1, 2)?, states))
}

/// A call as the kernel takes it: a decay, a beta and a state for each of H heads.
struct Kernel {
    op: &'static str,
    tier: Tier,
    dims: delta::Dims,
    /// Of the tokens of all entries of the batch.
    sequences: Vec<Range<usize>>,
    scale: f32,
    qk_norm: Option<f32>,
    /// q, k and v.
    rows: [Tensor; 3],
    /// Decays, betas and states, in f32.
    factors: [Option<Tensor>; 3],
}

impl Kernel {
    fn new(call: &Call, tier: Tier) -> Result<Self> {
        let Dims { b, h, t, d_k, d_v, .. } = call.dims;
        let [h_q, h_k, h_v] = call.rows.each_ref().map(|row| row.dims()[1]);
        let mut kernel = Self {
            op: call.op,
            tier,
            dims: delta::Dims { b, t, h, h_q, h_k, h_v, d_k, d_v },
            sequences: match call.sequences {
                None => (0..b).map(|entry| entry * t..(entry + 1) * t).collect(),
                Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s)).collect(),
            },
            scale: call.scale as f32,
            qk_norm: call.options.qk_norm.map(|eps| eps as f32),
            rows: call.rows.clone(),
            factors: call.factors.clone(),
        };
        for row in &mut kernel.rows {
            *row = with_contiguous_rows(row)?;
        }
        for factor in kernel.factors.iter_mut().flatten() {
            *factor = with_contiguous_rows(&with_heads(&factor.to_dtype(DType::F32)?, h)?)?;
        }
        if let Some(states) = &mut kernel.factors[2] {
            *states = states.contiguous()?;
        }
        Ok(kernel)
    }

    /// (B, T, H, D_v), and the states (n, H, D_k, D_v).
    fn run<E: Element + WithDType>(self, is_tracked: bool) -> Result<(Tensor, Tensor)> {
        let delta::Output { context, states, saved } = self.with_problem::<E, _>(|problem| {
            delta::gated_delta_rule(problem, self.tier, is_tracked).map_err(|error| self.error(error))
        })?;
        if let Some(saved) = saved {
            return gradients::track(self, saved, E::to_cpu_storage_owned(context), states);
        }
        let ([context_shape, states_shape], device) = (self.shapes(), self.rows[0].device());
        Ok((Tensor::from_vec(context, &context_shape, device)?, Tensor::from_vec(states, &states_shape, device)?))
    }

    /// Of the context and the states.
    fn shapes(&self) -> [[usize; 4]; 2] {
        let delta::Dims { b, t, h, d_k, d_v, .. } = self.dims;
        [[b, t, h, d_v], [self.sequences.len(), h, d_k, d_v]]
    }

    fn error(&self, error: impl std::fmt::Display) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Gives the call to a function.
    fn with_problem<E: Element + WithDType, R>(&self, run: impl FnOnce(&Problem<E>) -> Result<R>) -> Result<R> {
        let [q, k, v] = self.rows.each_ref().map(Tensor::storage_and_layout);
        let [decay, beta, states] = self.factors.each_ref().map(|xs| xs.as_ref().map(Tensor::storage_and_layout));
        let decay = match &decay {
            Some((decay, layout)) if layout.dims()[3] > 1 => Some(Decay::Channels(strided(decay, layout)?)),
            Some((decay, layout)) => Some(Decay::Heads(strided(decay, layout)?)),
            None => None,
        };
        let states = states.as_ref().map(|(states, layout)| strided(states, layout)).transpose()?;
        let count = self.shapes()[1].iter().product();
        run(&Problem {
            dims: self.dims,
            q: strided(&q.0, q.1)?,
            k: strided(&k.0, k.1)?,
            v: strided(&v.0, v.1)?,
            decay,
            beta: beta.as_ref().map(|(beta, layout)| strided(beta, layout)).transpose()?,
            states: states.map(|states| &states.data[..count]),
            sequences: &self.sequences,
            scale: self.scale,
            qk_norm: self.qk_norm,
            executor: executor(),
        })
    }
}

/// A view of the rows of a tensor (B, H, T, D).
fn strided<'a, E: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<Strided<'a, E, 3>> {
    let Storage::Cpu(storage) = storage else {
        bail!("expected a tensor on the CPU, found one on {:?}", storage.device().location())
    };
    let &[of_b, of_h, of_t, _] = layout.stride() else { bail!("expected (B, H, T, D), found {:?}", layout.dims()) };
    let data = &storage.as_slice()?[layout.start_offset()..];
    Ok(Strided { data, strides: [of_b, of_h, of_t] })
}

//! The specification: the recurrence, token by token, in Candle's own operations, differentiable, on any device.

use std::ops::Range;

use candle_core::{D, Result, Tensor, bail};

use super::{Call, Dims, with_heads};
use candle_attention_modules::base::accumulation_dtype;

/// The tokens of a call that may have gradients. Candle walks back through its operations by recursion, and frees them
/// by it, for which the stack of a thread has to do.
const MOST_TRACKED: usize = 4096;

/// What the queries read, (B, H, T, D_v) in q's dtype, and the states (n, H, D_k, D_v). There are tokens and values.
pub(super) fn run(call: &Call) -> Result<(Tensor, Tensor)> {
    let (Dims { h, t, .. }, dtype) = (call.dims, accumulation_dtype(call.dtype()));
    if call.tracks_gradients() && t > MOST_TRACKED {
        bail!("[{}] {t} tokens have gradients, expected at most {MOST_TRACKED} on the reference path", call.op)
    }
    let normed = |x: &Tensor| {
        let x = x.to_dtype(dtype)?;
        let Some(eps) = call.options.qk_norm else { return Ok(x) };
        x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + eps)?.sqrt()?)
    };
    let rows = |x: &Tensor| split(&with_heads(x, h, dtype)?);
    let ([q, k, v], [decay, beta, _]) = (&call.rows, &call.factors);
    let (q, k, v) = (rows(&(normed(q)? * call.scale)?)?, rows(&normed(k)?)?, rows(v)?);
    let decay = decay.as_ref().map(|decay| split(&decay.exp()?)).transpose()?;
    let beta = beta.as_ref().map(split).transpose()?;
    let mut ys = Vec::with_capacity(t);
    let mut recur = |tokens: Range<usize>, mut state: Tensor| {
        for t in tokens {
            if let Some(decay) = &decay {
                state = state.broadcast_mul(&decay[t].t()?)?;
            }
            let value = match &beta {
                Some(beta) => (&v[t] - k[t].matmul(&state)?)?.broadcast_mul(&beta[t])?,
                None => v[t].clone(),
            };
            state = (state + k[t].t()?.broadcast_mul(&value)?)?;
            ys.push(q[t].matmul(&state)?);
        }
        Ok(state)
    };
    let before = call.states_before()?;
    let after = match &call.sequences {
        None => recur(0..t, before)?,
        Some(sequences) => {
            let of_sequence = |s| recur(sequences.queries(s), before.narrow(0, s, 1)?);
            Tensor::cat(&(0..sequences.len()).map(of_sequence).collect::<Result<Vec<_>>>()?, 0)?
        }
    };
    Ok((Tensor::cat(&ys, 2)?.to_dtype(call.dtype())?, after))
}

/// Rows (B, H, T, D) one token after the other, (B, H, 1, D) each.
///
/// By halves: the gradient of a view is as large as what is viewed.
fn split(xs: &Tensor) -> Result<Vec<Tensor>> {
    let t = xs.dim(2)?;
    if t == 1 {
        return Ok(vec![xs.contiguous()?]);
    }
    let mut rows = split(&xs.narrow(2, 0, t / 2)?)?;
    rows.extend(split(&xs.narrow(2, t / 2, t - t / 2)?)?);
    Ok(rows)
}

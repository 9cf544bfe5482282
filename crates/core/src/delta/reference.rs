//! The specification: the recurrence, token by token, in Candle's own operations, differentiable, on any device.

use std::ops::Range;

use candle_core::{D, Result, Tensor, bail};

use super::validate::{Call, Dims, with_heads};
use crate::base::accumulation_dtype;

/// The tokens of a call that may have gradients. Candle walks back through its operations by recursion, and frees them
/// by it, for which the stack of a thread has to do.
const MOST_TRACKED: usize = 4096;

/// What the queries read, (B, H, T, D_v) in q's dtype, and the states (n, H_s, D_k, D_v). There are tokens and values.
pub(super) fn run(call: &Call) -> Result<(Tensor, Tensor)> {
    let Dims { b, n, h, t, d_v, .. } = call.dims;
    if call.tracks_gradients() && t > MOST_TRACKED {
        bail!("[{}] {t} tokens have gradients, expected at most {MOST_TRACKED} on the reference path", call.op)
    }
    let (tokens, before, mut ys) = (Tokens::new(call)?, call.states()?, Vec::with_capacity(t));
    let after = match call.sequences {
        None => tokens.recur(0..t, before, &mut ys)?,
        Some(sequences) => {
            let of_sequence = |s| tokens.recur(sequences.queries(s), before.narrow(0, s, 1)?, &mut ys);
            Tensor::cat(&(0..n).map(of_sequence).collect::<Result<Vec<_>>>()?, 0)?
        }
    };
    Ok((Tensor::stack(&ys, 3)?.reshape((b, h, t, d_v))?.to_dtype(call.dtype())?, after))
}

/// The rows of each token, for all entries of the batch and as many heads as there are states.
struct Tokens {
    /// The scaled queries that read one state, (B, H_s, H / H_s, D_k).
    q: Vec<Tensor>,
    /// (B, H_s, 1, D_k)
    k: Vec<Tensor>,
    /// (B, H_s, 1, D_v)
    v: Vec<Tensor>,
    /// The factors of the rows of a state, (B, H_s, D_k or 1, 1).
    decay: Option<Vec<Tensor>>,
    /// (B, H_s, 1, 1)
    beta: Option<Vec<Tensor>>,
}

impl Tokens {
    fn new(call: &Call) -> Result<Self> {
        let (Dims { b, h, h_s, d_k, .. }, dtype) = (call.dims, accumulation_dtype(call.dtype()));
        let normed = |x: &Tensor| {
            let x = x.to_dtype(dtype)?;
            let Some(eps) = call.options.qk_norm else { return Ok(x) };
            x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + eps)?.sqrt()?)
        };
        let of_states = |x: &Tensor| rows(&x.to_dtype(dtype)?, h_s);
        let ([q, k, v], [decay, beta, _]) = (&call.rows, &call.factors);
        let q = rows(&(normed(q)? * call.scale)?, h)?.into_iter().map(|q| q.reshape((b, h_s, h / h_s, d_k)));
        let factors = |decay: &Tensor| of_states(decay)?.into_iter().map(|decay| decay.exp()?.t()).collect();
        Ok(Self {
            q: q.collect::<Result<_>>()?,
            k: rows(&normed(k)?, h_s)?,
            v: of_states(v)?,
            decay: decay.as_ref().map(factors).transpose()?,
            beta: beta.as_ref().map(of_states).transpose()?,
        })
    }

    /// The state (B, H_s, D_k, D_v) after some tokens; what their queries read, (B, H_s, H / H_s, D_v), goes to `ys`.
    fn recur(&self, tokens: Range<usize>, mut state: Tensor, ys: &mut Vec<Tensor>) -> Result<Tensor> {
        for t in tokens {
            if let Some(decay) = &self.decay {
                state = state.broadcast_mul(&decay[t])?;
            }
            let value = match &self.beta {
                Some(beta) => (&self.v[t] - self.k[t].matmul(&state)?)?.broadcast_mul(&beta[t])?,
                None => self.v[t].clone(),
            };
            state = (state + self.k[t].t()?.broadcast_mul(&value)?)?;
            ys.push(self.q[t].matmul(&state)?);
        }
        Ok(state)
    }
}

/// Rows (B, heads, T, D) one token after the other, for `h` heads: (B, h, 1, D) each.
fn rows(xs: &Tensor, h: usize) -> Result<Vec<Tensor>> {
    let mut rows = Vec::with_capacity(xs.dim(2)?);
    split(&with_heads(xs, h)?, &mut rows)?;
    Ok(rows)
}

/// By halves: the gradient of a view is as large as what is viewed.
fn split(xs: &Tensor, rows: &mut Vec<Tensor>) -> Result<()> {
    match xs.dim(2)? {
        1 => rows.push(xs.contiguous()?),
        t => {
            split(&xs.narrow(2, 0, t / 2)?, rows)?;
            split(&xs.narrow(2, t / 2, t - t / 2)?, rows)?;
        }
    }
    Ok(())
}

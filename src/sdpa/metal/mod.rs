//! The adapter to `candle_nn::ops::sdpa`: Metal, f32, f16 and bf16.

mod decide;
#[cfg(test)]
mod emulated;
#[cfg(test)]
mod tests;

pub(super) use decide::{Plan, decide};

use candle_core::{Result, Tensor};
use decide::Masking;

use super::softmax::scalar;
use super::validate::{Call, Dims};
use super::{OutputOrder, SdpaOptions, reference};
use crate::AttentionMask;

/// What the operation reads.
pub(super) struct Inputs<'a> {
    /// (B, H, T_q, D)
    pub q: &'a Tensor,
    /// (B, H_kv, T_kv, D)
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    /// (B, H, T_q, T_kv), added to the scores.
    pub mask: Option<&'a Tensor>,
    pub causal: bool,
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// The operation, or what stands in for it in tests.
pub(super) trait Kernel {
    /// Context: a contiguous (B, H, T_q, D).
    fn sdpa(&self, inputs: &Inputs) -> Result<Tensor>;
}

/// Candle's own.
pub(super) struct CandleSdpa;

impl Kernel for CandleSdpa {
    fn sdpa(&self, inputs: &Inputs) -> Result<Tensor> {
        let &Inputs { q, k, v, mask, causal, scale, softcap } = inputs;
        candle_nn::ops::sdpa(q, k, v, mask, causal, scale, softcap.unwrap_or(1.0))
    }
}

/// Context (B, H, T_q, D) in the order asked for, of a call that `decide` takes.
pub(super) fn attend(call: &Call, plan: &Plan, kernel: &impl Kernel) -> Result<Tensor> {
    let first = |tensor: &Tensor, copy: bool| {
        let tensor = tensor.narrow(2, 0, tensor.dim(2)? - plan.rest)?;
        // Not `contiguous`, which leaves the stride of a single head as it is, and the op walks along it from batch to batch.
        if copy { tensor.force_contiguous() } else { Ok(tensor) }
    };
    let keys = |tensor: &Tensor| tensor.narrow(2, plan.keys.start, plan.keys.len());
    let (all_k, all_v) = (keys(call.k)?, keys(call.v)?);
    let [q, k, v] =
        [first(call.q, plan.copies.0[0])?, first(&all_k, plan.copies.0[1])?, first(&all_v, plan.copies.0[2])?];
    let keep = match plan.masking {
        Masking::Written { .. } => call.mask.keep_tensor(call.score_dims(), call.q.device())?,
        Masking::None | Masking::Causal => None,
    };
    let mask = keep.as_ref().map(|keep| additive(keep, call)).transpose()?;
    let mut context = kernel.sdpa(&Inputs {
        q: &q,
        k: &k,
        v: &v,
        mask: mask.as_ref(),
        causal: plan.masking == Masking::Causal,
        scale: call.scale() as f32,
        softcap: call.options.softcap.map(|softcap| softcap as f32),
    })?;
    if let (Masking::Written { empty_rows: true }, Some(keep)) = (plan.masking, keep) {
        context = without_empty_rows(&context, &keep)?;
    }
    if plan.rest > 0 {
        let q = call.q.narrow(2, call.dims.t_q - plan.rest, plan.rest)?;
        let causal = AttentionMask::causal();
        let options = SdpaOptions { output_order: OutputOrder::Bhtd, ..call.options.clone() };
        let rest = reference::attend(&Call::new(call.op, (&q, &all_k, &all_v), &causal, &options)?)?;
        context = Tensor::cat(&[&context, &rest.context], 2)?.contiguous()?;
    }
    match call.options.output_order {
        OutputOrder::Bhtd => Ok(context),
        OutputOrder::Bthd => context.transpose(1, 2)?.contiguous()?.transpose(1, 2),
    }
}

/// 0 where `keep` is, and -inf elsewhere. The op reads a mask from the beginning of its buffer, so this is one of its own.
fn additive(keep: &Tensor, call: &Call) -> Result<Tensor> {
    let Dims { b, h, t_q, t_kv, .. } = call.dims;
    let value = |x: f64| scalar(x, call.q)?.broadcast_as(keep.shape());
    let mask = keep.where_cond(&value(0.0)?, &value(f64::NEG_INFINITY)?)?;
    mask.broadcast_as((b, h, t_q, t_kv))?.contiguous()
}

/// The same context with zeros for queries that see no key.
fn without_empty_rows(context: &Tensor, keep: &Tensor) -> Result<Tensor> {
    let sees = keep.max_keepdim(3)?.broadcast_as(context.shape())?;
    sees.where_cond(context, &context.zeros_like()?)
}

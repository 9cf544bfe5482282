//! The adapter to candle-flash-attn: CUDA, f16 and bf16, behind the feature `flash-attn`.
//!
//! It reads (B, T, H, D), which a transposed view is, so that nothing is copied but what `decide` says.

mod candle;
mod decide;
#[cfg(test)]
mod emulated;
mod probe;
#[cfg(test)]
mod tests;

pub(super) use candle::CandleFlashAttn;
pub(super) use decide::{Lengths, Plan, decide};
pub(super) use probe::obstacle;

use candle_core::{DType, Device, Result, Tensor};

use super::OutputOrder;
use super::band::Window;
use super::validate::{Call, Dims};

/// What happens to scores.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
pub(super) struct Scores {
    pub scale: f32,
    pub softcap: Option<f32>,
    /// (H,) in f32.
    pub alibi_slopes: Option<Tensor>,
    pub window: Window,
}

/// The operations of candle-flash-attn, or what stands in for them in tests.
pub(super) trait Kernel {
    /// q (B, T_q, H, D), k and v (B, T_kv, H_kv, D) to a contiguous (B, T_q, H, D).
    fn dense(&self, qkv: [&Tensor; 3], scores: &Scores) -> Result<Tensor>;

    /// q (total_q, H, D), k and v (total_kv, H_kv, D) to a contiguous (total_q, H, D).
    fn varlen(&self, qkv: [&Tensor; 3], lengths: &Cumulative, scores: &Scores) -> Result<Tensor>;
}

/// [`Lengths`] on the device: (n + 1,) in u32.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
pub(super) struct Cumulative {
    pub cu_seqlens_q: Tensor,
    pub cu_seqlens_kv: Tensor,
    pub max_q: usize,
    pub max_kv: usize,
}

impl Cumulative {
    fn new(lengths: &Lengths, device: &Device) -> Result<Self> {
        Ok(Self {
            cu_seqlens_q: Tensor::new(lengths.cu_seqlens_q.as_slice(), device)?,
            cu_seqlens_kv: Tensor::new(lengths.cu_seqlens_kv.as_slice(), device)?,
            max_q: lengths.max_q,
            max_kv: lengths.max_kv,
        })
    }
}

/// Context (B, H, T_q, D) in the order asked for, of a call that `decide` takes.
pub(super) fn attend(call: &Call, plan: &Plan, kernel: &impl Kernel) -> Result<Tensor> {
    let options = call.options;
    let slopes = |slopes: &Tensor| slopes.to_dtype(DType::F32)?.contiguous();
    let scores = Scores {
        scale: call.scale() as f32,
        softcap: options.softcap.map(|softcap| softcap as f32),
        alibi_slopes: options.alibi_slopes.as_ref().map(slopes).transpose()?,
        window: plan.window,
    };
    let keys = |tensor: &Tensor| tensor.narrow(2, plan.keys.start, plan.keys.len());
    let [q, k, v] = [
        sequence_first(call.q, plan.copies.0[0])?,
        sequence_first(&keys(call.k)?, plan.copies.0[1])?,
        sequence_first(&keys(call.v)?, plan.copies.0[2])?,
    ];
    let context = match &plan.lengths {
        None => kernel.dense([&q, &k, &v], &scores)?,
        Some(lengths) => {
            let Dims { b, h, t_q, d, .. } = call.dims;
            let lengths = Cumulative::new(lengths, call.q.device())?;
            let [q, k, v] = [joined(&q)?, joined(&k)?, joined(&v)?];
            kernel.varlen([&q, &k, &v], &lengths, &scores)?.reshape((b, t_q, h, d))?
        }
    };
    let context = context.transpose(1, 2)?;
    match options.output_order {
        OutputOrder::Bhtd => context.contiguous(),
        OutputOrder::Bthd => Ok(context),
    }
}

/// (B, H, T, D) as (B, T, H, D).
fn sequence_first(tensor: &Tensor, copy: bool) -> Result<Tensor> {
    let tensor = tensor.transpose(1, 2)?;
    // Not `contiguous`, which leaves a view that begins at an odd element as it is.
    if copy { tensor.force_contiguous() } else { Ok(tensor) }
}

/// (B, T, H, D) as (B · T, H, D), in place where `decide` found that possible.
fn joined(tensor: &Tensor) -> Result<Tensor> {
    if tensor.dim(0)? == 1 { tensor.squeeze(0) } else { tensor.flatten(0, 1) }
}

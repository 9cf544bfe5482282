//! Scaled dot-product attention: one function for every device, dtype and mask.
//!
//! `softmax(scale · q kᵀ) v`, in this order: scale, softcap, bias (ALiBi, then the mask's), mask, softmax (in f32 for
//! half-precision inputs), dropout, times v. The reference path in [`reference`](self) is the specification; a fused
//! path has to give its numbers. What queries attend to is a [`Keys`]: keys and values of their own, those of packed
//! sequences, codes of 8 bits as a cache keeps them, or others that stand elsewhere.

mod bands;
mod cpu;
mod gpu;
mod plan;
mod reference;
mod statistics;
#[cfg(test)]
mod tests;
mod validate;
mod varlen;

pub use plan::{Backend, OutputLayout, Plan, SdpaOptions};
pub use reference::{masked_softmax, merge_attention};
pub use statistics::{
    AttentionStatistics, StatisticsOptions, scaled_dot_product_attention_varlen_with_statistics,
    scaled_dot_product_attention_with_statistics,
};
pub use varlen::{PackedSequences, scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse};

pub(crate) use plan::{Choice, Outputs};
pub(crate) use validate::Call;

use std::sync::Once;

use candle_core::{Result, Tensor, bail};

use crate::mask::AttentionMask;
use candle_attention_modules::base::Expect;

/// What attention gives when the weights are asked for too.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The attended values: (B, H, T_q, D_v).
    pub output: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv).
    pub weights: Tensor,
}

/// Attends from queries to keys and mixes their values.
///
/// Shapes: q (B, H, T_q, D), k (B, H_kv, T_kv, D), v (B, H_kv, T_kv, D_v) give (B, H, T_q, D_v) in q's dtype, on q's
/// device. H_kv divides H; query head h reads key head `h / (H / H_kv)`. Any strides are accepted. k and v may have a
/// batch of 1 next to a larger B, which is read in place for all of it. As in PyTorch, all three may come without B,
/// (H, T, D), or without B and H, (T, D), and so does the result; masks keep the shape (B, H, T_q, T_kv) that they
/// broadcast to.
///
/// A query that sees no key gets zeros; one whose scores are all -inf, by a bias, counts as such. NaN and infinities in
/// keys and values reach only the queries that see them, in the backward pass too where the CPU's kernel runs; a key
/// that only a bias of -inf suppresses is seen. The fused operations of GPUs, which are other libraries', keep that
/// promise for keys that no query of a sequence sees, and not for those that some of its queries do.
///
/// ```
/// use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (2, 8, 5, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (2, 2, 7, 64), &Device::Cpu)?;
/// let y = scaled_dot_product_attention(&q, &kv, &kv, &AttentionMask::causal(), &SdpaOptions::default())?;
/// assert_eq!(y.dims(), [2, 8, 5, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// For shapes, dtypes or devices that do not fit together, for a mask or an option that does not fit them, and for
/// [`Backend::Fused`] where no fused path can run the call.
pub fn scaled_dot_product_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    Ok(attend(Outputs::Context, [q, k, v], None, mask, options)?.context)
}

/// [`scaled_dot_product_attention`] that also returns the weights.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_weights(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<AttentionOutput> {
    let (context, weights) =
        attend(Outputs::Weights, [q, k, v], None, mask, options)?.with(|found| found.weights.take())?;
    Ok(AttentionOutput { output: context, weights })
}

/// [`scaled_dot_product_attention`] that also returns the log-sum-exp of each query's scores: (B, H, T_q) in f32 (f64
/// for f64 inputs), `-inf` for a query that sees no key. A sink counts as one more score.
///
/// The two together are what [`merge_attention`] needs to put attention over parts of the keys back together. Parts
/// take [`FullyMaskedRows::Zero`](crate::FullyMaskedRows::Zero): whether a row is empty shows only in the whole.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<(Tensor, Tensor)> {
    attend(Outputs::LogSumExp, [q, k, v], None, mask, options)?.with(|found| found.lse.take())
}

/// The context of a call, and what was wanted beside it.
pub(crate) struct Attended {
    /// (B, H, T_q, D_v) in the dtype of the queries, in the order of the options; nothing of use beside a plan.
    pub context: Tensor,
    /// (B, H, T_q) in the dtype of the accumulation.
    pub lse: Option<Tensor>,
    /// (B, H, T_q, T_kv).
    pub weights: Option<Tensor>,
    /// (B, H, ..).
    pub statistics: Option<AttentionStatistics>,
    pub plan: Option<Plan>,
}

impl Attended {
    pub fn context(context: Tensor) -> Self {
        Self { context, lse: None, weights: None, statistics: None, plan: None }
    }

    /// The same after a change of the context, and of each tensor beside it.
    pub fn map(
        mut self,
        of_context: impl FnOnce(Tensor) -> Result<Tensor>,
        change: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        self.context = of_context(self.context)?;
        let of_statistics = self.statistics.iter_mut().flat_map(AttentionStatistics::tensors);
        for tensor in self.lse.iter_mut().chain(&mut self.weights).chain(of_statistics) {
            *tensor = change(tensor.clone())?;
        }
        Ok(self)
    }

    /// The context, and what was wanted beside it.
    pub fn with<T>(mut self, wanted: impl FnOnce(&mut Self) -> Option<T>) -> Result<(Tensor, T)> {
        match wanted(&mut self) {
            Some(found) => Ok((self.context, found)),
            None => bail!("[scaled_dot_product_attention] attention gave nothing but the context"),
        }
    }
}

/// What is wanted of a batch, in the rank of q, or of packed sequences, without B.
fn attend(
    outputs: Outputs,
    qkv: [&Tensor; 3],
    sequences: Option<&PackedSequences>,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Attended> {
    let call = Call::new(outputs.op(sequences.is_some()), qkv, sequences, mask, options)?;
    let rank = if sequences.is_some() { 3 } else { qkv[0].rank() };
    let in_rank = |found| (rank..4).try_fold(found, |found: Tensor, _| found.squeeze(0));
    let of_context = |context: Tensor| in_rank(if sequences.is_some() { context.transpose(1, 2)? } else { context });
    run(call, outputs)?.map(of_context, in_rank)
}

/// What is wanted of a call, with all dimensions.
pub(crate) fn run(call: Call, outputs: Outputs) -> Result<Attended> {
    Choice::of(&call, outputs)?.run(call, outputs)
}

/// What a GPU's fused operation gave; where it failed and another path was allowed, what the reference path gives.
fn or_reference<T>(call: &Call, fused: Result<T>, reference: impl FnOnce() -> Result<T>) -> Result<T> {
    let Err(cause) = fused else { return fused };
    if call.options.backend == Backend::Fused {
        bail!("[{}] the fused operation failed: {}", call.op, first_line(&cause))
    }
    // Once, since a model would say the same for every layer and token.
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| {
        log::warn!("[{}] the fused operation failed, the reference path runs instead: {}", call.op, first_line(&cause));
    });
    reference().map_err(|error| error.context(format!("after the fused operation failed: {}", first_line(&cause))))
}

/// An error without the backtrace that Candle may append.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().trim().to_string()
}

/// The backend that [`scaled_dot_product_attention`] would run for these arguments, and why.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn plan(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
    Ok(attend(Outputs::Plan, [q, k, v], None, mask, options)?.with(|found| found.plan.take())?.1)
}

/// A function of the arguments and with the result of [`scaled_dot_product_attention`].
pub type AttentionFunction<'a> = dyn Fn(&Tensor, &Tensor, &Tensor, &AttentionMask, &SdpaOptions) -> Result<Tensor> + 'a;

/// The keys and values of one call, to which queries (B, H, T_q, D) attend.
pub(crate) trait Keys {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended>;
}

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v), or those (1, H_kv, total_kv, ..) of packed sequences.
pub(crate) struct OwnKeys<'a> {
    pub k: Tensor,
    pub v: Tensor,
    pub sequences: Option<&'a PackedSequences>,
    /// The caller's, which attends to them; of no packed sequences.
    pub function: Option<&'a AttentionFunction<'a>>,
}

impl Keys for OwnKeys<'_> {
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let Some(function) = self.function else {
            let (op, qkv) = (outputs.op(self.sequences.is_some()), [q, &self.k, &self.v]);
            return run(Call::of(op, qkv, None, self.sequences, mask, options)?, outputs);
        };
        let missing = match outputs {
            Outputs::Context | Outputs::LogSumExp => None,
            Outputs::Weights => Some("weights"),
            Outputs::Statistics(_) => Some("statistics"),
            Outputs::Plan => Some("plans"),
        };
        if let Some(missing) = missing {
            bail!("[attention_function] {missing} are asked for, which a function of the caller's does not give")
        }
        let context = function(q, &self.k, &self.v, mask, options)?;
        let (b, h, t_q, _) = q.dims4()?;
        let found = Expect::one("attention_function", "the context", &context).sizes(&[b, h, t_q, self.v.dim(3)?])?;
        found.dtype(q.dtype(), "the queries'")?;
        Ok(Attended::context(context))
    }
}

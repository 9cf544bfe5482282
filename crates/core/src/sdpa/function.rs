//! Scaled dot-product attention as a function, for batches and for packed sequences.

use candle_attention_call::RequestedResults;
use candle_core::{Result, Tensor};

use super::call::{Call, Qkv};
use super::options::SdpaOptions;
use super::packed::PackedSequences;
use super::plan::Plan;
use super::results::{Attended, AttentionOutput, operation};
use super::run;
use super::statistics::{AttentionStatistics, StatisticsOptions};
use crate::mask::AttentionMask;

/// Computes scaled dot-product attention: `softmax(scale · q kᵀ) v`.
///
/// Shapes: q (B, H, T_q, D), k (B, H_kv, T_kv, D) and v (B, H_kv, T_kv, D_v) to an output (B, H, T_q, D_v) in q's
/// dtype, on q's device. H_kv divides H; query head h reads key head `h / (H / H_kv)`. Any strides are accepted. k and
/// v may have a batch of 1 with a larger B of q: they are read in place for all sequences. As in PyTorch, all three may
/// lack B, (H, T, D), or B and H, (T, D), and so does the output then. Masks still broadcast to (B, H, T_q, T_kv).
///
/// The order is: scale, softcap, bias (ALiBi, relative bias, then the mask's), mask, softmax (in f32 for half-precision
/// inputs), dropout, times v.
///
/// The output of a fully masked query is zeros, also if all of its scores are -inf by a bias. NaN and infinities in
/// keys and values reach only the queries that attend to them, in the backward pass of the CPU kernel too; a query
/// attends to a key that only a bias of -inf suppresses. Candle's operation for Metal keeps this promise only for keys
/// that are masked for every query of the sequence.
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
/// [`Backend::Fused`](crate::Backend) if no fused path can run the call.
#[doc(alias("sdpa", "flash_attention", "flash_attn"))]
pub fn scaled_dot_product_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    Ok(attend_in_batch(Qkv { q, k, v }, mask, options, RequestedResults::default())?.output)
}

/// Computes [`scaled_dot_product_attention`], and returns the weights too.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
#[doc(alias("need_weights", "output_attentions"))]
pub fn scaled_dot_product_attention_with_weights(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<AttentionOutput> {
    let wanted = RequestedResults { weights: true, ..RequestedResults::default() };
    attend_in_batch(Qkv { q, k, v }, mask, options, wanted)?.output_and_weights()
}

/// Computes [`scaled_dot_product_attention`], and returns the log-sum-exp of each query's scores too: (B, H, T_q) in
/// f32 (f64 for f64 inputs), `-inf` for a fully masked query. A sink counts as one more score.
///
/// [`merge_attention`](crate::merge_attention) merges such results over parts of the keys. Use
/// [`FullyMaskedRows::Zero`](crate::FullyMaskedRows::Zero) for the parts: only all keys together show whether a query
/// is fully masked.
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
    let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
    attend_in_batch(Qkv { q, k, v }, mask, options, wanted)?.output_and_log_sum_exp()
}

/// Computes [`scaled_dot_product_attention`], and returns statistics of its weights too: for each query the keys with
/// the largest weights and the entropy, for each key the sum of its weights, and the weights of a tile of queries and
/// keys on request.
///
/// On a CPU the fused kernel computes the statistics. It needs memory for them and for T_kv scores of some dozens of
/// queries in each thread, and passes over the scores a second time, with an exponential for each: for eight keys,
/// 36 to 70 % more time than without statistics at 2,048 tokens and more, and less than twice the time at 512. On other
/// devices the reference path computes them.
///
/// ```
/// use candle_attention::{AttentionMask, SdpaOptions, StatisticsOptions, scaled_dot_product_attention_with_statistics};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let xs = Tensor::randn(0f32, 1., (1, 8, 1000, 64), &Device::Cpu)?;
/// let (causal, options) = (AttentionMask::causal(), SdpaOptions::default());
/// let wanted = StatisticsOptions::default().with_top_keys(4);
/// let (ys, found) = scaled_dot_product_attention_with_statistics(&xs, &xs, &xs, &causal, &options, &wanted)?;
/// assert_eq!(ys.dims(), [1, 8, 1000, 64]);
/// assert_eq!(found.top_keys.dims(), [1, 8, 1000, 4]);
/// assert_eq!(found.key_weight_sums.dims(), [1, 8, 1000]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`scaled_dot_product_attention`], for more than 32 keys, and for a tile that exceeds the queries or keys.
/// [`Backend::Fused`](crate::Backend) is an error if an input is tracked for gradients.
pub fn scaled_dot_product_attention_with_statistics(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
    wanted: &StatisticsOptions,
) -> Result<(Tensor, AttentionStatistics)> {
    let results = RequestedResults { statistics: Some(wanted.requested()), ..RequestedResults::default() };
    attend_in_batch(Qkv { q, k, v }, mask, options, results)?.output_and_statistics()
}

/// Returns the backend that [`scaled_dot_product_attention`] would run for these arguments, and the reason.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn plan(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
    run::plan(Call::new("plan", Qkv { q, k, v }, None, mask, options)?)
}

/// Computes [`scaled_dot_product_attention`] over packed sequences: sequences of different lengths, one after the other
/// in one tensor, without padding (flash-attention's `varlen`).
///
/// Shapes: q (total_q, H, D), k (total_kv, H_kv, D) and v (total_kv, H_kv, D_v) to a contiguous output (total_q, H,
/// D_v) in q's dtype, on q's device. Any strides are accepted. Each sequence has the numbers of a call by itself.
///
/// The mask applies to each sequence by itself, as to an entry of a batch: alignment, windows and chunks count within
/// the sequence; lengths, starts and prefixes are (n,), or a list of T_q entries for each of the n sequences. Boolean
/// mask and bias tensors are an error. PyTorch's generator draws the dropout of the sequences one by one. The options'
/// output layout has no effect.
///
/// ```
/// use candle_attention::{AttentionMask, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let sequences = PackedSequences::from_lens(&[5, 3], &[5, 3])?; // cumulative: 0, 5, 8
/// let q = Tensor::randn(0f32, 1., (8, 4, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (8, 2, 64), &Device::Cpu)?;
/// let causal = AttentionMask::causal();
/// let y = scaled_dot_product_attention_varlen(&q, &kv, &kv, &sequences, &causal, &SdpaOptions::default())?;
/// assert_eq!(y.dims(), [8, 4, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`scaled_dot_product_attention`], for cumulative lengths that do not end where the tensors do, and for a mask
/// with a boolean mask or bias tensor.
#[doc(alias = "flash_attn_varlen")]
pub fn scaled_dot_product_attention_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    Ok(attend_in_packed(Qkv { q, k, v }, sequences, mask, options, RequestedResults::default())?.output)
}

/// Computes [`scaled_dot_product_attention_varlen`], and returns the log-sum-exp of each query's scores too: (H,
/// total_q) in f32 (f64 for f64 inputs), `-inf` for a fully masked query. A sink counts as one more score.
///
/// # Errors
/// As [`scaled_dot_product_attention_varlen`].
pub fn scaled_dot_product_attention_varlen_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<(Tensor, Tensor)> {
    let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
    attend_in_packed(Qkv { q, k, v }, sequences, mask, options, wanted)?.output_and_log_sum_exp()
}

/// Computes [`scaled_dot_product_attention_varlen`], and returns statistics of its weights too, without the dimension
/// B: for (H, total_q) queries and (H, total_kv) keys. Keys and tiles count through all sequences, and a query's
/// weights for the keys of other sequences are 0.
///
/// # Errors
/// As [`scaled_dot_product_attention_varlen`] and [`scaled_dot_product_attention_with_statistics`].
pub fn scaled_dot_product_attention_varlen_with_statistics(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
    wanted: &StatisticsOptions,
) -> Result<(Tensor, AttentionStatistics)> {
    let results = RequestedResults { statistics: Some(wanted.requested()), ..RequestedResults::default() };
    attend_in_packed(Qkv { q, k, v }, sequences, mask, options, results)?.output_and_statistics()
}

/// Attends in a batch. The results have the rank of q.
fn attend_in_batch(
    qkv: Qkv,
    mask: &AttentionMask,
    options: &SdpaOptions,
    wanted: RequestedResults,
) -> Result<Attended> {
    let call = Call::new(operation(wanted, false), qkv, None, mask, options)?;
    let missing = 4 - qkv.q.rank();
    run::run(call, wanted)?.map(|result| without_leading_dims(result, missing))
}

/// Attends in packed sequences. The output is (total_q, H, D_v), and other results have no B.
fn attend_in_packed(
    qkv: Qkv,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
    wanted: RequestedResults,
) -> Result<Attended> {
    let call = Call::new(operation(wanted, true), qkv, Some(sequences), mask, options)?;
    run::run(call, wanted)?.without_batch()
}

/// Removes the first dimensions of a tensor, which are 1.
fn without_leading_dims(tensor: Tensor, count: usize) -> Result<Tensor> {
    let mut squeezed = tensor;
    for _ in 0..count {
        squeezed = squeezed.squeeze(0)?;
    }
    Ok(squeezed)
}

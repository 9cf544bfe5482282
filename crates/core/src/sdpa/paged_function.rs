//! Scaled dot-product attention over pages as a function.

use candle_attention_call::RequestedResults;
use candle_core::{Result, Tensor};

use super::call::{Call, Qkv};
use super::options::SdpaOptions;
use super::paged::PagedSequences;
use super::plan::Plan;
use super::run;
use crate::mask::AttentionMask;

/// Computes [`scaled_dot_product_attention`](crate::scaled_dot_product_attention) over sequences whose keys and values
/// are in pages of pools, in the layout of flash-attention's paged calls. Some sequences may bring a chunk of a prompt,
/// others one token.
///
/// Shapes: q (total_q, H, D), the packed queries of all sequences; pools of keys (pages, page size, H_kv, D) and of
/// values (pages, page size, H_kv, D_v), to a contiguous output (total_q, H, D_v) in q's dtype, on q's device. The last
/// query of a sequence is at its last position, unless the mask says otherwise. Each sequence has the numbers of a call
/// by itself.
///
/// The mask applies to each sequence by itself, as in
/// [`scaled_dot_product_attention_varlen`](crate::scaled_dot_product_attention_varlen), with T_kv the length of the
/// sequence. Boolean mask and bias tensors are an error. A relative bias counts the queries and keys of the longest
/// sequences. The options' output layout has no effect.
///
/// ```
/// use candle_attention::{AttentionMask, PagedSequences, SdpaOptions, scaled_dot_product_attention_paged};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// // Five pages of 16 positions; the two sequences share their first page.
/// let pool = Tensor::randn(0f32, 1., (5, 16, 2, 64), &Device::Cpu)?;
/// let sequences = PagedSequences::new(vec![0, 20, 21], vec![40, 17], vec![vec![3, 0, 4], vec![3, 1]])?;
/// let q = Tensor::randn(0f32, 1., (21, 4, 64), &Device::Cpu)?;
/// let (causal, options) = (AttentionMask::causal(), SdpaOptions::default());
/// let y = scaled_dot_product_attention_paged(&q, &pool, &pool, &sequences, &causal, &options)?;
/// assert_eq!(y.dims(), [21, 4, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`scaled_dot_product_attention_varlen`](crate::scaled_dot_product_attention_varlen), for a sequence with too few
/// pages or a page that the pools do not have, and for a mask that allows a query to attend to a released position.
#[doc(alias("paged_attention", "flash_attn_varlen_paged", "block_table"))]
pub fn scaled_dot_product_attention_paged(
    q: &Tensor,
    k_pool: &Tensor,
    v_pool: &Tensor,
    sequences: &PagedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    const OP: &str = "scaled_dot_product_attention_paged";
    let call = Call::over_pages(OP, Qkv { q, k: k_pool, v: v_pool }, None, sequences, mask, options)?;
    Ok(run::run(call, RequestedResults::default())?.without_batch()?.output)
}

/// Computes [`scaled_dot_product_attention_paged`], and returns the log-sum-exp of each query's scores too: (H,
/// total_q) in f32 (f64 for f64 inputs), `-inf` for a fully masked query. A sink counts as one more score.
///
/// # Errors
/// As [`scaled_dot_product_attention_paged`].
pub fn scaled_dot_product_attention_paged_with_lse(
    q: &Tensor,
    k_pool: &Tensor,
    v_pool: &Tensor,
    sequences: &PagedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "scaled_dot_product_attention_paged_with_lse";
    let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
    let call = Call::over_pages(OP, Qkv { q, k: k_pool, v: v_pool }, None, sequences, mask, options)?;
    run::run(call, wanted)?.without_batch()?.output_and_log_sum_exp()
}

/// Returns the backend that [`scaled_dot_product_attention_paged`] would run for these arguments, and the reason.
///
/// # Errors
/// As [`scaled_dot_product_attention_paged`].
pub fn plan_paged(
    q: &Tensor,
    k_pool: &Tensor,
    v_pool: &Tensor,
    sequences: &PagedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Plan> {
    run::plan(Call::over_pages("plan_paged", Qkv { q, k: k_pool, v: v_pool }, None, sequences, mask, options)?)
}

//! Attention over packed sequences: each attends to its own keys, and no padding is computed.

use candle_core::{Result, Tensor, bail};

use super::plan::{self, Choice, Wanted};
use super::validate::Call;
use super::{OutputOrder, PackedSequences, SdpaOptions, accumulation_dtype, cpu, cuda, or_reference, reference};
use crate::AttentionMask;
use crate::cpu::Tier;

/// [`scaled_dot_product_attention`](crate::scaled_dot_product_attention) over sequences of different lengths, packed one
/// after the other: flash-attention's `varlen`.
///
/// Shapes: q (total_q, H, D), k (total_kv, H_kv, D), v (total_kv, H_kv, D_v) give a contiguous (total_q, H, D_v) in q's
/// dtype, on q's device. Any strides are accepted. The sequences say which positions belong together; each has the numbers
/// of a call by itself.
///
/// The mask holds for each sequence by itself, as for an entry of a batch: alignment, windows and bands count within the
/// sequence; lengths, starts and prefixes are (n,), or a list of T_q entries for each of the n sequences. `keep` and `bias`
/// tensors have no shape here, and are refused. Dropout is drawn for one sequence after the other; the output order of the
/// options has no meaning here.
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
/// As [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), and for cumulative lengths that end elsewhere
/// than the tensors, and for a mask with `keep` or `bias` tensors.
pub fn scaled_dot_product_attention_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    let [q, k, v] = heads_first("scaled_dot_product_attention_varlen", [q, k, v])?;
    let packed = Call::packed("scaled_dot_product_attention_varlen", [&q, &k, &v], mask, options)?;
    check_fit(&packed, sequences)?;
    context(&packed, sequences)
}

/// [`scaled_dot_product_attention_varlen`] that also returns the log-sum-exp of each query's scores: (H, total_q) in f32
/// (f64 for f64 inputs), `-inf` for a query that sees no key. A sink counts as one more score.
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
    let [q, k, v] = heads_first("scaled_dot_product_attention_varlen_with_lse", [q, k, v])?;
    let packed = Call::packed("scaled_dot_product_attention_varlen_with_lse", [&q, &k, &v], mask, options)?;
    check_fit(&packed, sequences)?;
    context_and_lse(&packed, sequences)
}

/// (total, H, D) each to (1, H, total, D).
fn heads_first(op: &str, qkv: [&Tensor; 3]) -> Result<[Tensor; 3]> {
    let shapes = ["(total_q, H, D)", "(total_kv, H_kv, D)", "(total_kv, H_kv, D_v)"];
    for ((name, tensor), shape) in ["q", "k", "v"].into_iter().zip(qkv).zip(shapes) {
        if tensor.rank() != 3 {
            bail!("[{op}] {name} has shape {:?}, expected {shape}", tensor.dims())
        }
    }
    let [q, k, v] = qkv.map(|tensor| tensor.unsqueeze(0)?.transpose(1, 2));
    Ok([q?, k?, v?])
}

fn check_fit(packed: &Call, sequences: &PackedSequences) -> Result<()> {
    let op = packed.op;
    let totals = [
        ("q", packed.dims.t_q, "cu_seqlens_q", sequences.total_queries()),
        ("k", packed.dims.t_kv, "cu_seqlens_kv", sequences.total_keys()),
    ];
    for (name, found, lens, expected) in totals {
        if found != expected {
            bail!("[{op}] {name} has {found} positions, expected the {expected} that {lens} ends with")
        }
    }
    if let Some(tensor) = packed.mask.tensor_kind() {
        bail!("[{op}] the mask has a {tensor} tensor, expected none: packed sequences have no (B, H, T_q, T_kv)")
    }
    if sequences.is_empty() {
        // No sequence resolves the mask, which may be wrong all the same.
        packed.mask.resolve(0, 0, 0)?;
    }
    Ok(())
}

/// (total_q, H, D_v).
fn context(packed: &Call, sequences: &PackedSequences) -> Result<Tensor> {
    let reference = || Ok(one_by_one(packed, sequences)?.0);
    match plan::choose(packed, Some(sequences), Wanted::Context)? {
        // Metal's operation takes no packed sequences, and is not chosen for them.
        Choice::Reference { .. } | Choice::Metal(_) => reference(),
        Choice::Cpu(tier) => on_cpu(packed, sequences, tier, None),
        Choice::FlashAttn(plan) => {
            let options = in_sequence_order(packed.options);
            let fused = cuda::attend(&Call { options: &options, ..packed.clone() }, &plan, cuda::flash_attn);
            or_reference(packed, fused.and_then(without_batch), reference)
        }
    }
}

/// The context (total_q, H, D_v) and the log-sum-exp (H, total_q).
fn context_and_lse(packed: &Call, sequences: &PackedSequences) -> Result<(Tensor, Tensor)> {
    match plan::choose(packed, Some(sequences), Wanted::LogSumExp)? {
        // The operations of GPUs have no log-sum-exp, and are not chosen for one.
        Choice::Reference { .. } | Choice::FlashAttn(_) | Choice::Metal(_) => one_by_one(packed, sequences),
        Choice::Cpu(tier) => {
            let mut lse = Vec::new();
            let context = on_cpu(packed, sequences, tier, Some(&mut lse))?;
            Ok((context, Tensor::from_vec(lse, (packed.dims.h, packed.dims.t_q), packed.q.device())?))
        }
    }
}

fn on_cpu(packed: &Call, sequences: &PackedSequences, tier: Tier, lse: Option<&mut Vec<f32>>) -> Result<Tensor> {
    let options = in_sequence_order(packed.options);
    without_batch(cpu::attend_packed(&Call { options: &options, ..packed.clone() }, sequences, tier, lse)?)
}

fn in_sequence_order(options: &SdpaOptions) -> SdpaOptions {
    options.clone().with_output_order(OutputOrder::Bthd)
}

/// (1, H, total_q, D_v) to (total_q, H, D_v).
fn without_batch(context: Tensor) -> Result<Tensor> {
    context.transpose(1, 2)?.squeeze(0)
}

/// The reference path of each sequence by itself.
pub(super) fn one_by_one(packed: &Call, sequences: &PackedSequences) -> Result<(Tensor, Tensor)> {
    let (op, dims) = (packed.op, packed.dims);
    let options = in_sequence_order(packed.options);
    let (mut contexts, mut lses) = (Vec::new(), Vec::new());
    for s in 0..sequences.len() {
        let (queries, keys) = (sequences.queries(s), sequences.keys(s));
        let mask = packed.mask.of_sequence(s, sequences.len(), queries.len(), keys.len());
        let q = packed.q.narrow(2, queries.start, queries.len())?;
        let k = packed.k.narrow(2, keys.start, keys.len())?;
        let v = packed.v.narrow(2, keys.start, keys.len())?;
        let attended = reference::attend(&Call::new(op, [&q, &k, &v], &mask, &options)?)?;
        if !queries.is_empty() {
            contexts.push(attended.context.transpose(1, 2)?.squeeze(0)?);
            lses.push(attended.lse.squeeze(0)?);
        }
    }
    if contexts.is_empty() {
        let (device, dtype) = (packed.q.device(), packed.q.dtype());
        let context = Tensor::zeros((dims.t_q, dims.h, dims.d_v), dtype, device)?;
        return Ok((context, Tensor::zeros((dims.h, dims.t_q), accumulation_dtype(dtype), device)?));
    }
    Ok((Tensor::cat(&contexts, 0)?.contiguous()?, Tensor::cat(&lses, 1)?.contiguous()?))
}

//! Packed sequences that do not fit each other, their tensors or their mask.

use candle_attention::{
    AttentionMask, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse,
};
use candle_core::{DType, Result, Shape, Tensor};

use crate::{CPU, Case, of, zeros};

/// Two sequences, of 2 and 1 queries and 4 and 2 keys.
fn sequences() -> Result<PackedSequences> {
    PackedSequences::new(vec![0, 2, 3], vec![0, 4, 6])
}

/// Every query sees every key of its sequence.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, sequences: &PackedSequences) -> Result<()> {
    let (mask, options) = (AttentionMask::none(), SdpaOptions::default());
    scaled_dot_product_attention_varlen(q, k, v, sequences, &mask, &options).map(drop)
}

fn attend(q: impl Into<Shape>, k: impl Into<Shape>, v: impl Into<Shape>) -> Result<()> {
    plain(&zeros(q), &zeros(k), &zeros(v), &sequences()?)
}

/// q (3, 4, 8) and k, v (6, 2, 8).
fn with(mask: AttentionMask, options: SdpaOptions) -> Result<()> {
    let (sequences, q, kv) = (sequences()?, zeros((3, 4, 8)), zeros((6, 2, 8)));
    scaled_dot_product_attention_varlen(&q, &kv, &kv, &sequences, &mask, &options).map(drop)
}

fn masked(mask: AttentionMask) -> Result<()> {
    with(mask, SdpaOptions::default())
}

fn new(cu_seqlens_q: &[usize], cu_seqlens_kv: &[usize]) -> Result<()> {
    PackedSequences::new(cu_seqlens_q.to_vec(), cu_seqlens_kv.to_vec()).map(drop)
}

fn from_tensor(cu_seqlens: &Tensor) -> Result<()> {
    PackedSequences::from_tensors(cu_seqlens, cu_seqlens).map(drop)
}

pub const SEQUENCES: &[Case] = cases! {
    "no entry" => new(&[], &[0]),
    "lengths in place of their sums" => new(&[0, 2, 5], &[4, 2]),
    "lengths after a zero" => new(&[0, 5, 3], &[0, 5, 8]),
    "more sequences of keys" => new(&[0, 2], &[0, 4, 6]),
    "self-attention that decreases" => PackedSequences::self_attention(vec![0, 1, 0]),
    "more lengths of queries" => PackedSequences::from_lens(&[1, 2], &[3]),
    "lengths without a sum" => PackedSequences::from_lens(&[1, 2], &[1, usize::MAX]),
    "floats" => from_tensor(&zeros(3)),
    "a batch of lengths" => from_tensor(&of(DType::I64, (2, 3))),
    "a scalar" => from_tensor(&of(DType::U32, ())),
    "an empty tensor" => from_tensor(&of(DType::I64, 3).narrow(0, 3, 0)?),
    "a negative entry" => from_tensor(&Tensor::new(&[0i64, 3, -1], &CPU)?),
};

pub const TENSORS: &[Case] = cases! {
    "queries with a batch" => attend((1, 4, 3, 8), (6, 2, 8), (6, 2, 8)),
    "keys without heads" => attend((3, 4, 8), (6, 8), (6, 2, 8)),
    "values without heads" => attend((3, 4, 8), (6, 2, 8), (6, 8)),
    "more queries than sequences hold" => attend((4, 4, 8), (6, 2, 8), (6, 2, 8)),
    "more queries than any memory holds" => {
        let sequences = PackedSequences::from_lens(&[1 << 59], &[1])?;
        plain(&zeros(1).broadcast_as((1 << 59, 1, 1))?, &zeros((1, 1, 1)), &zeros((1, 1, 1)), &sequences)
    },
    "fewer keys than sequences hold" => attend((3, 4, 8), (5, 2, 8), (5, 2, 8)),
    "fewer values than keys" => attend((3, 4, 8), (6, 2, 8), (5, 2, 8)),
    "three key heads for four query heads" => attend((3, 4, 8), (6, 3, 8), (6, 3, 8)),
    "heads before positions" => attend((4, 3, 8), (2, 6, 8), (2, 6, 8)),
    "keys of another width" => attend((3, 4, 8), (6, 2, 4), (6, 2, 8)),
    "keys in half precision" => plain(&zeros((3, 4, 8)), &of(DType::F16, (6, 2, 8)), &zeros((6, 2, 8)), &sequences()?),
    "no sequences for some queries" =>
        plain(&zeros((1, 4, 8)), &zeros((0, 2, 8)), &zeros((0, 2, 8)), &PackedSequences::from_lens(&[], &[])?),
    "the same through the log-sum-exp" => {
        let (q, kv) = (zeros((4, 4, 8)), zeros((6, 2, 8)));
        let (mask, options) = (AttentionMask::none(), SdpaOptions::default());
        scaled_dot_product_attention_varlen_with_lse(&q, &kv, &kv, &sequences()?, &mask, &options)
    },
    "a softcap of zero" => with(AttentionMask::none(), SdpaOptions::default().with_softcap(0.0)),
    "slopes for the key heads" => with(AttentionMask::none(), SdpaOptions::default().with_alibi_slopes(&zeros(2))),
};

pub const MASKS: &[Case] = cases! {
    "a tensor of what to keep" => masked(AttentionMask::none().with_keep(&of(DType::U8, (3, 6)))),
    "a bias beside other constraints" =>
        masked(AttentionMask::causal().and(&AttentionMask::none().with_bias(&zeros((3, 6))))),
    "padding with holes" => masked(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 0, 1]], &CPU)?)?),
    "padding of a batch" =>
        masked(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 1, 0, 0], [1, 1, 0, 0]], &CPU)?)?),
    "lengths for another number of sequences" => masked(AttentionMask::none().with_valid_lens(vec![1])),
    "prefixes for another number of sequences" => masked(AttentionMask::causal().with_prefix(vec![1, 2, 3])),
    "rows for another number of sequences" => masked(AttentionMask::none().with_starts(vec![vec![0, 0]])),
    "a row for another number of queries" =>
        masked(AttentionMask::none().with_valid_lens(vec![vec![1, 1], vec![1, 1]])),
    "lengths for no sequences" => {
        let (sequences, mask) = (PackedSequences::from_lens(&[], &[])?, AttentionMask::none().with_valid_lens(vec![1]));
        let (q, kv) = (zeros((0, 4, 8)), zeros((0, 2, 8)));
        let options = SdpaOptions::default();
        scaled_dot_product_attention_varlen(&q, &kv, &kv, &sequences, &mask, &options)
    },
    "a window of zero" => masked(AttentionMask::causal().with_window(0)),
};

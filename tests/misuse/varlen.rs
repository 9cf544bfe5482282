//! Packed sequences that do not fit each other, their tensors or their mask.

use candle_attention::{
    AttentionMask, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse,
};
use candle_core::{DType, Result, Shape, Tensor};

use crate::{CPU, Misuse, check, of, zeros};

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

const SEQUENCES: &[Misuse] = &[
    (
        "no entry",
        || new(&[], &[0]),
        "[packed_sequences] cu_seqlens_q is empty, expected 0 and then the end of each sequence",
    ),
    (
        "lengths in place of their sums",
        || new(&[0, 2, 5], &[4, 2]),
        "[packed_sequences] cu_seqlens_kv begins with 4, expected 0",
    ),
    (
        "lengths after a zero",
        || new(&[0, 5, 3], &[0, 5, 8]),
        "[packed_sequences] entry 2 of cu_seqlens_q is 3, expected at least the 5 before it",
    ),
    (
        "more sequences of keys",
        || new(&[0, 2], &[0, 4, 6]),
        "[packed_sequences] cu_seqlens_q has 2 entries and cu_seqlens_kv has 3, expected the same",
    ),
    (
        "self-attention that decreases",
        || PackedSequences::self_attention(vec![0, 1, 0]).map(drop),
        "[packed_sequences] entry 2 of cu_seqlens_q is 0, expected at least the 1 before it",
    ),
    (
        "more lengths of queries",
        || PackedSequences::from_lens(&[1, 2], &[3]).map(drop),
        "[packed_sequences] lens_q has 2 entries and lens_kv has 1, expected the same",
    ),
    (
        "lengths without a sum",
        || PackedSequences::from_lens(&[1, 2], &[1, usize::MAX]).map(drop),
        "[packed_sequences] lens_kv add up to more than 18446744073709551615",
    ),
    ("floats", || from_tensor(&zeros(3)), "[packed_sequences] cu_seqlens_q has dtype F32, expected integers"),
    (
        "a batch of lengths",
        || from_tensor(&of(DType::I64, (2, 3))),
        "[packed_sequences] cu_seqlens_q has shape [2, 3], expected (n + 1,)",
    ),
    (
        "a scalar",
        || from_tensor(&of(DType::U32, ())),
        "[packed_sequences] cu_seqlens_q has shape [], expected (n + 1,)",
    ),
    (
        "an empty tensor",
        || from_tensor(&of(DType::I64, 3).narrow(0, 3, 0)?),
        "[packed_sequences] cu_seqlens_q is empty, expected 0 and then the end of each sequence",
    ),
    (
        "a negative entry",
        || from_tensor(&Tensor::new(&[0i64, 3, -1], &CPU)?),
        "[packed_sequences] entry 2 of cu_seqlens_q is -1, expected zero or more",
    ),
];

const TENSORS: &[Misuse] = &[
    (
        "queries with a batch",
        || attend((1, 4, 3, 8), (6, 2, 8), (6, 2, 8)),
        "[scaled_dot_product_attention_varlen] q has shape [1, 4, 3, 8], expected (total_q, H, D)",
    ),
    (
        "keys without heads",
        || attend((3, 4, 8), (6, 8), (6, 2, 8)),
        "[scaled_dot_product_attention_varlen] k has shape [6, 8], expected (total_kv, H_kv, D)",
    ),
    (
        "values without heads",
        || attend((3, 4, 8), (6, 2, 8), (6, 8)),
        "[scaled_dot_product_attention_varlen] v has shape [6, 8], expected (total_kv, H_kv, D_v)",
    ),
    (
        "more queries than sequences hold",
        || attend((4, 4, 8), (6, 2, 8), (6, 2, 8)),
        "[scaled_dot_product_attention_varlen] q has 4 positions, expected the 3 that cu_seqlens_q ends with",
    ),
    (
        "fewer keys than sequences hold",
        || attend((3, 4, 8), (5, 2, 8), (5, 2, 8)),
        "[scaled_dot_product_attention_varlen] k has 5 positions, expected the 6 that cu_seqlens_kv ends with",
    ),
    (
        "fewer values than keys",
        || attend((3, 4, 8), (6, 2, 8), (5, 2, 8)),
        "[scaled_dot_product_attention_varlen] v has 5 positions, expected k's 6",
    ),
    (
        "three key heads for four query heads",
        || attend((3, 4, 8), (6, 3, 8), (6, 3, 8)),
        "[scaled_dot_product_attention_varlen] k has 3 heads, which does not divide q's 4",
    ),
    (
        "heads before positions",
        || attend((4, 3, 8), (2, 6, 8), (2, 6, 8)),
        "[scaled_dot_product_attention_varlen] k has 6 heads, which does not divide q's 3",
    ),
    (
        "keys of another width",
        || attend((3, 4, 8), (6, 2, 4), (6, 2, 8)),
        "[scaled_dot_product_attention_varlen] k has head dimension 4, expected q's 8",
    ),
    (
        "keys in half precision",
        || {
            let (q, v) = (zeros((3, 4, 8)), zeros((6, 2, 8)));
            plain(&q, &of(DType::F16, (6, 2, 8)), &v, &sequences()?)
        },
        "[scaled_dot_product_attention_varlen] k has dtype F16, expected q's F32",
    ),
    (
        "no sequences for some queries",
        || {
            let sequences = PackedSequences::from_lens(&[], &[])?;
            let (q, kv) = (zeros((1, 4, 8)), zeros((0, 2, 8)));
            plain(&q, &kv, &kv, &sequences)
        },
        "[scaled_dot_product_attention_varlen] q has 1 positions, expected the 0 that cu_seqlens_q ends with",
    ),
    (
        "the same through the log-sum-exp",
        || {
            let (q, kv) = (zeros((4, 4, 8)), zeros((6, 2, 8)));
            let (mask, options) = (AttentionMask::none(), SdpaOptions::default());
            scaled_dot_product_attention_varlen_with_lse(&q, &kv, &kv, &sequences()?, &mask, &options).map(drop)
        },
        "[scaled_dot_product_attention_varlen_with_lse] q has 4 positions, expected the 3 that cu_seqlens_q ends with",
    ),
    (
        "a softcap of zero",
        || with(AttentionMask::none(), SdpaOptions::default().with_softcap(0.0)),
        "[scaled_dot_product_attention_varlen] softcap is 0.0, expected a finite number above zero in F32",
    ),
    (
        "slopes for the key heads",
        || with(AttentionMask::none(), SdpaOptions::default().with_alibi_slopes(&zeros(2))),
        "[scaled_dot_product_attention_varlen] alibi_slopes has shape [2], expected one entry for each of 4 heads",
    ),
];

const MASKS: &[Misuse] = &[
    (
        "a tensor of what to keep",
        || masked(AttentionMask::none().with_keep(&of(DType::U8, (3, 6)))),
        "[scaled_dot_product_attention_varlen] the mask has a keep tensor, expected none: packed sequences have no (B, H, T_q, T_kv)",
    ),
    (
        "a bias beside other constraints",
        || masked(AttentionMask::causal().and(&AttentionMask::none().with_bias(&zeros((3, 6))))),
        "[scaled_dot_product_attention_varlen] the mask has a bias tensor, expected none: packed sequences have no (B, H, T_q, T_kv)",
    ),
    (
        "padding with holes",
        || masked(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 0, 1]], &CPU)?)?),
        "[scaled_dot_product_attention_varlen] the mask has a keep tensor, expected none: packed sequences have no (B, H, T_q, T_kv)",
    ),
    (
        "padding of a batch",
        || masked(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 1, 0, 0], [1, 1, 0, 0]], &CPU)?)?),
        "[attention_mask] the attention mask has 4 columns, expected one for each of 2 keys",
    ),
    (
        "lengths for another number of sequences",
        || masked(AttentionMask::none().with_valid_lens(vec![1])),
        "[attention_mask] valid_lens has 1 entries, expected one for each of 2 sequences",
    ),
    (
        "prefixes for another number of sequences",
        || masked(AttentionMask::causal().with_prefix(vec![1, 2, 3])),
        "[attention_mask] prefix has 3 entries, expected one for each of 2 sequences",
    ),
    (
        "rows for another number of sequences",
        || masked(AttentionMask::none().with_starts(vec![vec![0, 0]])),
        "[attention_mask] starts has 1 rows, expected one for each of 2 sequences",
    ),
    (
        "a row for another number of queries",
        || masked(AttentionMask::none().with_valid_lens(vec![vec![1, 1], vec![1, 1]])),
        "[attention_mask] row 1 of valid_lens has 2 entries, expected one for each of 1 queries",
    ),
    (
        "lengths for no sequences",
        || {
            let (sequences, mask) =
                (PackedSequences::from_lens(&[], &[])?, AttentionMask::none().with_valid_lens(vec![1]));
            let (q, kv) = (zeros((0, 4, 8)), zeros((0, 2, 8)));
            let options = SdpaOptions::default();
            scaled_dot_product_attention_varlen(&q, &kv, &kv, &sequences, &mask, &options).map(drop)
        },
        "[attention_mask] valid_lens has 1 entries, expected one for each of 0 sequences",
    ),
    (
        "a window of zero",
        || masked(AttentionMask::causal().with_window(0)),
        "[attention_mask] window is 0, expected at least 1 (the query's own key)",
    ),
];

#[test]
fn sequences_that_are_none_are_named() {
    check(SEQUENCES);
}

#[test]
fn tensors_that_do_not_fit_the_sequences_are_named() {
    check(TENSORS);
}

#[test]
fn masks_that_do_not_fit_the_sequences_are_named() {
    check(MASKS);
}

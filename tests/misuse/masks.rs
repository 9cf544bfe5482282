//! Masks, and the lengths that come with the data.

use candle_attention::{AttentionMask, SdpaOptions, ValidLens, scaled_dot_product_attention};
use candle_core::{DType, Result, Tensor};

use crate::{CPU, Misuse, check, of, zeros};

/// B 2, H 4, T_q 3, T_kv 5.
fn with(mask: AttentionMask) -> Result<()> {
    let (q, kv) = (zeros((2, 4, 3, 8)), zeros((2, 2, 5, 8)));
    scaled_dot_product_attention(&q, &kv, &kv, &mask, &SdpaOptions::default()).map(drop)
}

fn keep(shape: impl Into<candle_core::Shape>) -> Result<()> {
    with(AttentionMask::none().with_keep(&of(DType::U8, shape)))
}

fn padding(rows: &[[f32; 3]; 2]) -> Result<()> {
    AttentionMask::from_attention_mask(&Tensor::new(rows, &CPU)?).map(drop)
}

fn additive(dims: (usize, usize, usize, usize), dtype: DType) -> Result<()> {
    AttentionMask::causal().to_additive(dims, dtype, &CPU).map(drop)
}

const LENGTHS: &[Misuse] = &[
    (
        "lengths for another batch",
        || with(AttentionMask::none().with_valid_lens(vec![5, 4, 3])),
        "[attention_mask] valid_lens has 3 entries, expected one for each of 2 sequences",
    ),
    (
        "no lengths",
        || with(AttentionMask::none().with_valid_lens(Vec::<usize>::new())),
        "[attention_mask] valid_lens has 0 entries, expected one for each of 2 sequences",
    ),
    (
        "lengths for each key in place of each query",
        || with(AttentionMask::none().with_valid_lens(vec![vec![1; 5]; 2])),
        "[attention_mask] row 0 of valid_lens has 5 entries, expected one for each of 3 queries",
    ),
    (
        "ragged lengths",
        || with(AttentionMask::none().with_valid_lens(vec![vec![1, 2, 3], vec![1, 2]])),
        "[attention_mask] row 1 of valid_lens has 2 entries, expected one for each of 3 queries",
    ),
    (
        "rows of lengths for another batch",
        || with(AttentionMask::none().with_valid_lens(vec![vec![1, 2, 3]])),
        "[attention_mask] valid_lens has 1 rows, expected one for each of 2 sequences",
    ),
    (
        "starts for another batch",
        || with(AttentionMask::none().with_starts(vec![0])),
        "[attention_mask] starts has 1 entries, expected one for each of 2 sequences",
    ),
    (
        "prefixes for another batch",
        || with(AttentionMask::causal().with_prefix(vec![1, 1, 1, 1])),
        "[attention_mask] prefix has 4 entries, expected one for each of 2 sequences",
    ),
    (
        "lengths of each head",
        || ValidLens::from_tensor(&of(DType::I64, (2, 4, 3))).map(drop),
        "[valid_lens] expected shape (B,) or (B, T_q), found [2, 4, 3]",
    ),
    (
        "one length",
        || ValidLens::try_from(&of(DType::U32, ())).map(drop),
        "[valid_lens] expected shape (B,) or (B, T_q), found []",
    ),
    (
        "float lengths",
        || ValidLens::from_tensor(&zeros(2)).map(drop),
        "[valid_lens] expected an integer tensor, found F32",
    ),
    (
        "a negative length",
        || ValidLens::from_tensor(&Tensor::new(&[3i64, -1], &CPU)?).map(drop),
        "[valid_lens] expected lengths of zero or more, found -1",
    ),
    (
        "a negative length of a query",
        || ValidLens::from_tensor(&Tensor::new(&[[3i32, -7]], &CPU)?).map(drop),
        "[valid_lens] expected lengths of zero or more, found -7",
    ),
    (
        "a window of no keys",
        || with(AttentionMask::causal().with_window(0)),
        "[attention_mask] window is 0, expected at least 1 (the query's own key)",
    ),
    (
        "a window of no keys in the other mask",
        || with(AttentionMask::causal().and(&AttentionMask::none().with_window(0))),
        "[attention_mask] window is 0, expected at least 1 (the query's own key)",
    ),
];

const TENSORS: &[Misuse] = &[
    (
        "a float keep",
        || with(AttentionMask::none().with_keep(&zeros((3, 5)))),
        "[attention_mask] keep has dtype F32, expected U8 with 1 = attend",
    ),
    (
        "an integer keep of another width",
        || with(AttentionMask::none().with_keep(&of(DType::I64, (3, 5)))),
        "[attention_mask] keep has dtype I64, expected U8 with 1 = attend",
    ),
    (
        "a keep for the keys turned round",
        || keep((5, 3)),
        "[attention_mask] keep has shape [5, 3], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "a keep of each sequence without the head dimension",
        || keep((2, 3, 5)),
        "[attention_mask] keep has shape [2, 3, 5], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "a keep for each key head",
        || keep((2, 2, 3, 5)),
        "[attention_mask] keep has shape [2, 2, 3, 5], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "a keep with five dimensions",
        || keep((1, 2, 4, 3, 5)),
        "[attention_mask] keep has shape [1, 2, 4, 3, 5], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "an empty keep",
        || keep((3, 0)),
        "[attention_mask] keep has shape [3, 0], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "a mask of ones and zeros as a bias",
        || with(AttentionMask::none().with_bias(&of(DType::U8, (3, 5)))),
        "[attention_mask] bias has dtype U8, expected a float; a mask of ones and zeros is a keep",
    ),
    (
        "a bias for another length",
        || with(AttentionMask::none().with_bias(&zeros((3, 6)))),
        "[attention_mask] bias has shape [3, 6], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "an attention mask of one sequence",
        || AttentionMask::from_attention_mask(&zeros(5)).map(drop),
        "[from_attention_mask] expected shape (B, T_kv), found [5]",
    ),
    (
        "an attention mask for each query",
        || AttentionMask::from_attention_mask(&zeros((2, 3, 5))).map(drop),
        "[from_attention_mask] expected shape (B, T_kv), found [2, 3, 5]",
    ),
    (
        "an additive mask as an attention mask",
        || padding(&[[0.0, 0.0, f32::NEG_INFINITY], [0.0; 3]]),
        "[from_attention_mask] expected ones and zeros, found -inf",
    ),
    (
        "segment ids as an attention mask",
        || padding(&[[1.0, 1.0, 2.0], [1.0; 3]]),
        "[from_attention_mask] expected ones and zeros, found 2",
    ),
    (
        "an attention mask that is no number",
        || padding(&[[1.0, f32::NAN, 1.0], [1.0; 3]]),
        "[from_attention_mask] expected ones and zeros, found NaN",
    ),
    (
        "an attention mask for another length",
        || with(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 0, 1], [1, 1, 1]], &CPU)?)?),
        "[attention_mask] keep has shape [2, 1, 1, 3], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 3, 5]",
    ),
    (
        "an additive mask of integers",
        || additive((1, 1, 2, 2), DType::I64),
        "[attention_mask] an additive mask in I64 has no -inf, expected F32, F16, BF16 or F64",
    ),
    (
        "an additive mask of bytes",
        || additive((1, 1, 2, 2), DType::U8),
        "[attention_mask] an additive mask in U8 has no -inf, expected F32, F16, BF16 or F64",
    ),
    (
        "an additive mask of eight bits",
        || additive((1, 1, 2, 2), DType::F8E4M3),
        "[attention_mask] an additive mask in F8E4M3 has no -inf, expected F32, F16, BF16 or F64",
    ),
    (
        "an additive mask beyond counting",
        || additive((1, 1, 1 << 40, 1 << 40), DType::F32),
        "[attention_mask] (B, H, T_q, T_kv) = [1, 1, 1099511627776, 1099511627776] is more than any memory holds",
    ),
    (
        "an additive mask beyond memory",
        || additive((1, 1, 1 << 30, 1 << 29), DType::F32),
        "[attention_mask] a mask of 1073741824 × 536870912 entries does not fit in memory",
    ),
    (
        "sizes beyond counting beside a zero",
        || additive((usize::MAX, 2, 0, 5), DType::F32),
        "[attention_mask] (B, H, T_q, T_kv) = [18446744073709551615, 2, 0, 5] is more than any memory holds",
    ),
];

#[test]
fn lengths_that_do_not_fit_are_named() {
    check(LENGTHS);
}

#[test]
fn mask_tensors_that_do_not_fit_are_named() {
    check(TENSORS);
}

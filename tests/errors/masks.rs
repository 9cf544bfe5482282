//! Masks, and the lengths that come with the data.

use candle_attention::{AttentionMask, SdpaOptions, ValidLens, scaled_dot_product_attention};
use candle_core::{DType, Result, Tensor};

use crate::{CPU, Case, of, zeros};

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

pub const LENGTHS: &[Case] = cases! {
    "lengths for another batch" => with(AttentionMask::none().with_valid_lens(vec![5, 4, 3])),
    "no lengths" => with(AttentionMask::none().with_valid_lens(Vec::<usize>::new())),
    "lengths for each key in place of each query" => with(AttentionMask::none().with_valid_lens(vec![vec![1; 5]; 2])),
    "ragged lengths" => with(AttentionMask::none().with_valid_lens(vec![vec![1, 2, 3], vec![1, 2]])),
    "rows of lengths for another batch" => with(AttentionMask::none().with_valid_lens(vec![vec![1, 2, 3]])),
    "starts for another batch" => with(AttentionMask::none().with_starts(vec![0])),
    "prefixes for another batch" => with(AttentionMask::causal().with_prefix(vec![1, 1, 1, 1])),
    "causal offsets for another batch" => with(AttentionMask::causal_with_offsets([1])),
    "causal offsets for another batch, of a window alone" =>
        with(AttentionMask::causal_with_offsets([1, 2, 3]).with_window(2).and(&AttentionMask::causal())),
    "no causal offsets" => with(AttentionMask::causal_with_offsets([])),
    "a window of two causal offsets" => {
        let offsets = AttentionMask::causal_with_offsets;
        with(offsets([1, 2]).and(&offsets([1, 3])).with_window(2))
    },
    "lengths of each head" => ValidLens::from_tensor(&of(DType::I64, (2, 4, 3))),
    "one length" => ValidLens::try_from(&of(DType::U32, ())),
    "float lengths" => ValidLens::from_tensor(&zeros(2)),
    "a negative length" => ValidLens::from_tensor(&Tensor::new(&[3i64, -1], &CPU)?),
    "a negative length of a query" => ValidLens::from_tensor(&Tensor::new(&[[3i32, -7]], &CPU)?),
    "a window of no keys" => with(AttentionMask::causal().with_window(0)),
    "a chunk of no keys" => with(AttentionMask::causal().with_chunk(0)),
    "a window of no keys in the other mask" => with(AttentionMask::causal().and(&AttentionMask::none().with_window(0))),
};

pub const TENSORS: &[Case] = cases! {
    "a float keep" => with(AttentionMask::none().with_keep(&zeros((3, 5)))),
    "an integer keep of another width" => with(AttentionMask::none().with_keep(&of(DType::I64, (3, 5)))),
    "a keep for the keys turned round" => keep((5, 3)),
    "a keep of each sequence without the head dimension" => keep((2, 3, 5)),
    "a padding mask" => keep((2, 5)),
    "a padding mask of floats" => with(AttentionMask::none().with_bias(&zeros((2, 5)))),
    "a bias of each sequence without the head dimension" => with(AttentionMask::none().with_bias(&zeros((2, 3, 5)))),
    "a keep of bytes that are all ones" =>
        with(AttentionMask::none().with_keep(&Tensor::new(&[0u8, 1, 255, 1, 0], &CPU)?.broadcast_as((2, 1, 3, 5))?)),
    "segment ids as a keep" => AttentionMask::none().with_keep(&Tensor::new(&[1u8, 1, 2], &CPU)?).resolve(1, 3, 3),
    "a keep for each key head" => keep((2, 2, 3, 5)),
    "a keep with five dimensions" => keep((1, 2, 4, 3, 5)),
    "an empty keep" => keep((3, 0)),
    "a mask of ones and zeros as a bias" => with(AttentionMask::none().with_bias(&of(DType::U8, (3, 5)))),
    "a bias for another length" => with(AttentionMask::none().with_bias(&zeros((3, 6)))),
    "an attention mask of one sequence" => AttentionMask::from_attention_mask(&zeros(5)),
    "an attention mask for each query" => AttentionMask::from_attention_mask(&zeros((2, 3, 5))),
    "an additive mask as an attention mask" => padding(&[[0.0, 0.0, f32::NEG_INFINITY], [0.0; 3]]),
    "segment ids as an attention mask" => padding(&[[1.0, 1.0, 2.0], [1.0; 3]]),
    "an attention mask that is no number" => padding(&[[1.0, f32::NAN, 1.0], [1.0; 3]]),
    "an attention mask for another length" =>
        with(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 0, 1], [1, 1, 1]], &CPU)?)?),
    "an additive mask of integers" => additive((1, 1, 2, 2), DType::I64),
    "an additive mask of bytes" => additive((1, 1, 2, 2), DType::U8),
    "an additive mask of eight bits" => additive((1, 1, 2, 2), DType::F8E4M3),
    "an additive mask beyond counting" => additive((1, 1, 1 << 40, 1 << 40), DType::F32),
    "an additive mask beyond memory" => additive((1, 1, 1 << 30, 1 << 29), DType::F32),
    "sizes beyond counting beside a zero" => additive((usize::MAX, 2, 0, 5), DType::F32),
};

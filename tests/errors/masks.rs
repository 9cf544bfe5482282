//! Masks, and the lengths that come with the data.

use crate::*;

/// A call with B 2, H 4, T_q 3, T_kv 5.
fn with(mask: AttentionMask) -> Result<Tensor> {
    let (q, kv) = (zeros((2, 4, 3, 8)), zeros((2, 2, 5, 8)));
    scaled_dot_product_attention(&q, &kv, &kv, &mask, &SdpaOptions::default())
}

fn none() -> AttentionMask {
    AttentionMask::none()
}

#[test]
fn lengths() {
    let offsets = AttentionMask::causal_with_offsets;
    let causal = AttentionMask::causal;
    let cases = cases! {
        "lengths for another batch" => with(none().with_valid_lens(vec![5, 4, 3])),
        "no lengths" => with(none().with_valid_lens(Vec::<usize>::new())),
        "lengths for each key in place of each query" => with(none().with_valid_lens(vec![vec![1; 5]; 2])),
        "ragged lengths" => with(none().with_valid_lens(vec![vec![1, 2, 3], vec![1, 2]])),
        "rows of lengths for another batch" => with(none().with_valid_lens(vec![vec![1, 2, 3]])),
        "starts for another batch" => with(none().with_starts(vec![0])),
        "prefixes for another batch" => with(causal().with_prefix(vec![1, 1, 1, 1])),
        "causal offsets for another batch" => with(AttentionMask::causal_with_offsets([1])),
        "causal offsets for another batch, of a window alone" =>
            with(AttentionMask::causal_with_offsets([1, 2, 3]).with_window(2).and(&causal())),
        "no causal offsets" => with(AttentionMask::causal_with_offsets([])),
        "a window of two causal offsets" => with(offsets([1, 2]).and(&offsets([1, 3])).with_window(2)),
        "lengths of each head" => ValidLens::from_tensor(&of(DType::I64, (2, 4, 3))),
        "one length" => ValidLens::try_from(&of(DType::U32, ())),
        "float lengths" => ValidLens::from_tensor(&zeros(2)),
        "a negative length" => ValidLens::from_tensor(&Tensor::new(&[3i64, -1], &CPU)?),
        "a negative length of a query" => ValidLens::from_tensor(&Tensor::new(&[[3i32, -7]], &CPU)?),
        "a window of no keys" => with(causal().with_window(0)),
        "a chunk of no keys" => with(causal().with_chunk(0)),
        "a window of no keys in the other mask" => with(causal().and(&none().with_window(0))),
    };
    assert_reviewed("mask_lengths", &[cases]);
}

#[test]
fn tensors() {
    let from = AttentionMask::from_attention_mask;
    let others = cases! {
        "a keep for each key head" => with(none().with_keep(&of(DType::U8, (2, 2, 3, 5)))),
        "a keep for the keys turned round" => with(none().with_keep(&of(DType::U8, (5, 3)))),
        "a keep of each sequence without the head dimension" => with(none().with_keep(&of(DType::U8, (2, 3, 5)))),
        "a bias of each sequence without the head dimension" => with(none().with_bias(&zeros((2, 3, 5)))),
        "a padding mask as a keep" => with(none().with_keep(&of(DType::U8, (2, 5)))),
        "a padding mask as a bias" => with(none().with_bias(&zeros((2, 5)))),
        "a keep of bytes that are all ones" =>
            with(none().with_keep(&Tensor::new(&[0u8, 1, 255, 1, 0], &CPU)?.broadcast_as((2, 1, 3, 5))?)),
        "segment ids as a keep" => none().with_keep(&Tensor::new(&[1u8, 1, 2], &CPU)?).resolve(1, 3, 3),
        "a mask of ones and zeros as a bias" => with(none().with_bias(&of(DType::U8, (3, 5)))),
        "an attention mask with a hole for another length" =>
            with(from(&Tensor::new(&[[1u8, 0, 1], [1, 1, 1]], &CPU)?)?),
    };
    // An additive mask, segment ids.
    let rows = [[0.0, 0.0, f32::NEG_INFINITY], [1.0, 1.0, 2.0], [1.0, f32::NAN, 1.0]];
    let additive = [
        ((1, 1, 2, 2), DType::I64),
        ((1, 1, 2, 2), DType::U8),
        ((1, 1, 2, 2), DType::F8E4M3),
        ((1, 1, 1 << 40, 1 << 40), DType::F32),
        ((1, 1, 1 << 30, 1 << 29), DType::F32),
        ((usize::MAX, 2, 0, 5), DType::F32),
    ];
    assert_reviewed(
        "mask_tensors",
        &[
            wrong::tensors("H 4", &[("keep", DType::U8, "2 H 3 5")], |keep| with(none().with_keep(&keep[0]))),
            wrong::tensors("H 4", &[("bias", DType::F32, "2 H 3 5")], |bias| with(none().with_bias(&bias[0]))),
            wrong::tensors("B 2", &[("attention mask", DType::U8, "B 5")], |mask| with(from(&mask[0])?)),
            others,
            each("an attention mask", rows, |row| from(&Tensor::new(&[row, [0.0; 3]], &CPU)?)),
            each("an additive mask", additive, |(dims, dtype)| AttentionMask::causal().to_additive(dims, dtype, &CPU)),
        ],
    );
}

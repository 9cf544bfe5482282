//! The decode kernel.

use candle_attention_cuda::{
    BoundedKeys, CudaCall, FirstPosition, ForwardKernel, KvCodeFormat, KvScales, OutputLayout, PackedLengths,
    ScoreModifiers, launches_of_thread,
};
use candle_core::{DType, Result};

use super::case::{FEW_QUERIES, Sizes, check_forward, integers, numbers, plan};
use super::forward::with_scores;

/// Checks a call that the decode kernel runs with some parts of the keys.
fn check(call: &CudaCall, expected_splits: usize) -> Result<()> {
    assert_eq!(plan(call), Ok(ForwardKernel::Decode { splits: expected_splits }));
    check_forward(call)?;
    Ok(())
}

#[test]
fn decode_with_keys_in_parts_matches_reference() -> Result<()> {
    check(&FEW_QUERIES.call(DType::F32)?, 2)?;
    check(&Sizes { t_q: 1, t_kv: 700, ..FEW_QUERIES }.call(DType::F32)?, 5)?;
    check(&Sizes { t_q: 1, t_kv: 700, ..FEW_QUERIES }.call(DType::BF16)?, 5)
}

#[test]
fn decode_of_short_keys_has_one_part_and_matches_reference() -> Result<()> {
    check(&Sizes { t_kv: 40, ..FEW_QUERIES }.call(DType::F32)?, 1)
}

#[test]
fn decode_of_keys_in_a_longer_cache_matches_reference() -> Result<()> {
    let Sizes { b, h_kv, t_kv, d, d_v, .. } = FEW_QUERIES;
    let call = FEW_QUERIES.call(DType::BF16)?;
    let k = numbers(2, &[b, h_kv, t_kv + 30, d], DType::BF16)?.narrow(2, 0, t_kv)?;
    let v = numbers(3, &[b, h_kv, t_kv + 30, d_v], DType::BF16)?.narrow(2, 0, t_kv)?;
    check(&CudaCall { k, v, ..call }, 2)
}

#[test]
fn decode_launches_a_second_kernel_for_keys_in_parts() -> Result<()> {
    for (t_kv, splits, expected) in [(300, 2, 2), (40, 1, 1)] {
        let before = launches_of_thread();
        check(&Sizes { t_kv, ..FEW_QUERIES }.call(DType::F32)?, splits)?;
        assert_eq!(launches_of_thread() - before, expected, "{t_kv} keys");
    }
    Ok(())
}

#[test]
fn decode_with_causal_mask_lengths_and_sinks_matches_reference() -> Result<()> {
    let call = FEW_QUERIES.call(DType::F32)?;
    let keys = BoundedKeys {
        causal: true,
        first_position: FirstPosition::Each(integers(&[200, 3])?),
        lengths: Some(integers(&[203, 6])?),
        ..BoundedKeys::default()
    };
    let sinks = Some(numbers(6, &[4], DType::F32)?);
    let scores = ScoreModifiers { sinks, ..call.scores };
    check(&CudaCall { keys, scores, output_layout: OutputLayout::Bthd, ..call }, 2)
}

#[test]
fn decode_of_packed_sequences_matches_reference() -> Result<()> {
    let sizes = Sizes { b: 1, t_q: 4, t_kv: 500, ..FEW_QUERIES };
    let packed = PackedLengths {
        cu_seqlens_q: integers(&[0, 1, 2, 4])?,
        cu_seqlens_kv: integers(&[0, 290, 290, 500])?,
        longest_queries: 2,
        longest_keys: 290,
    };
    let keys = BoundedKeys { causal: true, ..BoundedKeys::default() };
    let keys = BoundedKeys { packed: Some(packed), ..keys };
    check(&CudaCall { keys, ..sizes.call(DType::F32)? }, 2)
}

#[test]
fn decode_with_all_score_modifiers_matches_reference() -> Result<()> {
    let Sizes { b, h, t_q, t_kv, .. } = FEW_QUERIES;
    let call = with_scores(FEW_QUERIES, |scores| {
        Ok(ScoreModifiers {
            softcap: Some(0.9),
            alibi_slopes: Some((numbers(6, &[h], DType::F32)? * 0.01)?),
            relative_bias: Some(numbers(7, &[1, h, t_q + t_kv - 1], DType::F32)?),
            bias: Some(numbers(8, &[b, 1, t_q, t_kv], DType::F32)?),
            boolean_mask: Some(numbers(9, &[1, h, 1, t_kv], DType::F32)?.gt(-0.7)?),
            ..scores
        })
    })?;
    check(&call, 2)
}

/// Returns a call whose keys and values are codes.
fn with_codes(sizes: Sizes, dtype: DType, format: KvCodeFormat) -> Result<CudaCall> {
    let Sizes { b, h_kv, t_kv, d, d_v, .. } = sizes;
    // Without the codes 127 and 255, which are NaN in E4M3.
    let codes = |seed, width| -> Result<_> {
        let rows = numbers(seed, &[b, h_kv, t_kv, format.bytes(width)], DType::F32)?;
        if format == KvCodeFormat::E4M3 {
            let positive = rows.abs()?.affine(126.0, 0.0)?.to_dtype(DType::U8)?;
            return positive + rows.lt(0f32)?.affine(128.0, 0.0)?;
        }
        rows.affine(127.0, 128.0)?.to_dtype(DType::U8)
    };
    // Numbers of up to 1.3.
    let largest = match format {
        KvCodeFormat::Q8 => 128.0,
        KvCodeFormat::E4M3 => 448.0,
        KvCodeFormat::Q4 => 7.5,
    };
    let scales = |seed, width| {
        numbers(seed, &[b, h_kv, t_kv, format.scales(width)], DType::F32)?.affine(0.4 / largest, 0.9 / largest)
    };
    let kv_scales = Some(KvScales { format, k: scales(6, d)?, v: scales(7, d_v)? });
    Ok(CudaCall { k: codes(2, d)?, v: codes(3, d_v)?, kv_scales, ..sizes.call(dtype)? })
}

#[test]
fn keys_and_values_of_8_bits_match_reference_in_both_kernels() -> Result<()> {
    check(&with_codes(Sizes { t_kv: 600, ..FEW_QUERIES }, DType::F16, KvCodeFormat::Q8)?, 2)?;
    let many = with_codes(super::case::MANY_QUERIES, DType::F16, KvCodeFormat::Q8)?;
    assert_eq!(plan(&many), Ok(ForwardKernel::Forward));
    check_forward(&many)?;
    Ok(())
}

#[test]
fn keys_and_values_of_e4m3_and_4_bits_match_reference() -> Result<()> {
    let many = with_codes(super::case::MANY_QUERIES, DType::F16, KvCodeFormat::E4M3)?;
    assert_eq!(plan(&many), Ok(ForwardKernel::Forward));
    check_forward(&many)?;
    check(&with_codes(Sizes { t_kv: 600, d: 128, ..FEW_QUERIES }, DType::F16, KvCodeFormat::Q4)?, 2)
}

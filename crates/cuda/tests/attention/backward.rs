//! The backward kernels.

use candle_attention_cuda::{
    BackwardInputs, BackwardKernel, BoundedKeys, CudaCall, Dropout, DropoutMask, OutputLayout, RequestedGradients,
    ScoreModifiers,
};
use candle_core::{DType, Result, Tensor};

use super::case::{ALL, MANY_QUERIES, Sizes, check_backward, check_forward, integers, kernels, numbers, plan_backward};
use super::forward::{packed_call, with_scores};

/// Head dimensions for which one kernel computes all gradients in f32.
const FUSED: Sizes = Sizes { b: 2, h: 4, h_kv: 2, t_q: 40, t_kv: 70, d: 64, d_v: 16 };

/// Sizes with an odd number of matrices of columns, which two kernels take.
const SEPARATE: Sizes = Sizes { t_q: 40, ..MANY_QUERIES };

#[test]
fn gradients_by_two_kernels_match_reference() -> Result<()> {
    let call = SEPARATE.call(DType::F32)?;
    assert_eq!(plan_backward(&call, ALL), Ok(BackwardKernel::Separate));
    check_backward(&call)?;
    Ok(())
}

#[test]
fn gradients_by_the_fused_kernel_match_reference() -> Result<()> {
    let call = FUSED.call(DType::F32)?;
    assert_eq!(plan_backward(&call, ALL), Ok(BackwardKernel::Fused));
    check_backward(&call)?;
    Ok(())
}

#[test]
fn gradients_in_16_bits_match_reference() -> Result<()> {
    check_backward(&SEPARATE.call(DType::BF16)?)?;
    check_backward(&Sizes { b: 1, h: 2, h_kv: 1, t_q: 40, t_kv: 50, d: 128, d_v: 96 }.call(DType::F16)?)?;
    Ok(())
}

#[test]
fn gradients_of_rows_that_are_not_aligned_match_reference() -> Result<()> {
    check_backward(&Sizes { d: 21, d_v: 13, ..SEPARATE }.call(DType::F32)?)?;
    Ok(())
}

#[test]
fn gradients_with_causal_mask_lengths_and_sinks_match_reference() -> Result<()> {
    let sinks = Some(numbers(6, &[4], DType::F32)?);
    let call = with_scores(FUSED, |scores| Ok(ScoreModifiers { sinks, ..scores }))?;
    let keys = BoundedKeys { causal: true, lengths: Some(integers(&[50, 33])?), ..BoundedKeys::default() };
    check_backward(&CudaCall { keys, output_layout: OutputLayout::Bthd, ..call })?;
    Ok(())
}

#[test]
fn gradients_of_packed_sequences_match_reference() -> Result<()> {
    let call = packed_call()?;
    let scores = ScoreModifiers {
        alibi_slopes: Some((numbers(6, &[4], DType::F32)? * 0.05)?),
        relative_bias: Some(numbers(7, &[1, 4, 70 + 50 - 1], DType::F32)?),
        ..call.scores
    };
    let keys = BoundedKeys { causal: true, ..call.keys };
    check_backward(&CudaCall { keys, scores, ..call })?;
    Ok(())
}

#[test]
fn gradients_of_every_score_modifier_match_reference() -> Result<()> {
    let Sizes { b, h, t_q, t_kv, .. } = SEPARATE;
    for (bias_dims, sequences) in [([1, h, t_q, t_kv], 1), ([b, h, t_q, t_kv], b), ([b, 1, 1, t_kv], 1)] {
        let call = with_scores(SEPARATE, |scores| {
            Ok(ScoreModifiers {
                softcap: Some(0.9),
                alibi_slopes: Some((numbers(6, &[h], DType::F32)? * 0.05)?),
                relative_bias: Some(numbers(7, &[sequences, h, t_q + t_kv - 1], DType::F32)?),
                bias: Some(numbers(8, &bias_dims, DType::F32)?),
                boolean_mask: Some(numbers(9, &[b, 1, t_q, t_kv], DType::F32)?.gt(-0.7)?),
                dropout: Some(Dropout { p: 0.2, mask: DropoutMask::Philox(77) }),
                ..scores
            })
        })?;
        check_backward(&call)?;
    }
    Ok(())
}

#[test]
fn gradients_of_the_fused_kernel_with_score_modifiers_match_reference() -> Result<()> {
    let Sizes { h, t_q, t_kv, .. } = FUSED;
    let call = with_scores(FUSED, |scores| {
        Ok(ScoreModifiers {
            alibi_slopes: Some((numbers(6, &[h], DType::F32)? * 0.05)?),
            relative_bias: Some(numbers(7, &[1, h, t_q + t_kv - 1], DType::F32)?),
            bias: Some(numbers(8, &[1, h, t_q, t_kv], DType::F32)?),
            ..scores
        })
    })?;
    check_backward(&call)?;
    Ok(())
}

#[test]
fn gradients_in_the_order_of_tokens_have_the_same_bits() -> Result<()> {
    for sizes in [FUSED, SEPARATE] {
        let call = sizes.call(DType::F32)?;
        let forward = check_forward(&call)?;
        let output_gradient = numbers(4, &[sizes.b, sizes.h, sizes.t_q, sizes.d_v], DType::F32)?;
        let inputs = BackwardInputs {
            output: &forward.output,
            softmax_stats: &forward.softmax_stats,
            output_gradient: &output_gradient,
            log_sum_exp_gradient: None,
        };
        let by_head = kernels(&call)?.backward(&inputs, ALL)?;
        let by_token = kernels(&call)?.backward(&inputs, RequestedGradients { layout: OutputLayout::Bthd, ..ALL })?;
        for (own, other) in [(by_token.q, by_head.q), (by_token.k, by_head.k), (by_token.v, by_head.v)] {
            let (own, other) = (own.expect("a gradient"), other.expect("a gradient"));
            assert!(own.transpose(1, 2)?.is_contiguous() && other.is_contiguous());
            assert_eq!(own.flatten_all()?.to_vec1::<f32>()?, other.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    Ok(())
}

#[test]
fn gradients_have_the_same_bits_every_time() -> Result<()> {
    let call = FUSED.call(DType::F32)?;
    let (first, second) = (check_backward(&call)?, check_backward(&call)?);
    let bits = |gradients: [Option<Tensor>; 3]| -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for gradient in gradients {
            all.extend(gradient.expect("a gradient").flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits));
        }
        Ok(all)
    };
    assert_eq!(bits([first.q, first.k, first.v])?, bits([second.q, second.k, second.v])?);
    Ok(())
}

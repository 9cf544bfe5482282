//! Tests of the kernel alone, without tensors. They are small enough for Miri, which finds reads and writes out of
//! bounds on the scalar instruction set. `tests/attention/flash` compares every instruction set with the oracle.

use half::{bf16, f16};

mod backward;
mod case;
mod codes;
mod errors;
mod joined_heads;
mod nan;
mod pages;
mod relative_bias;
mod shared_biases;
mod sizes;
mod statistics;

use super::{
    AttentionCall, AttentionDims, KeysOfQueries, KvCodeFormat, OutputLayout, RequestedResults, ScoreModifiers, Strided,
    attend,
};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use case::{Case, dims};

/// Returns the instruction sets of the processor, or the scalar one under Miri, where a call takes seconds.
fn on_miri_only_scalar() -> Vec<InstructionSet> {
    if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() }
}

#[test]
fn forward_with_causal_softcap_alibi_sinks_dropout_matches_plain_loops() {
    let shapes =
        [dims(2, 1, 3, 3, 2), dims(2, 9, 3, 2, 3), dims(1, 3, 2, 8, 1), dims(2, 11, 13, 9, 4), dims(4, 5, 131, 5, 3)];
    // Interpreted, a call takes seconds: one that decodes and one that fills a tile in part.
    let used_shapes = if cfg!(miri) { &shapes[..2] } else { &shapes[..] };
    for instruction_set in on_miri_only_scalar() {
        for &dims in used_shapes {
            let mut cases = Vec::new();
            for codes in [None, Some(KvCodeFormat::Q8)] {
                for (causal, has_modifiers) in [(false, false), (true, false), (true, true)] {
                    let case = Case { codes, ..Case::new(dims, causal, has_modifiers) };
                    cases.push(if codes.is_some() == causal { case.with_dropout(0x1234_5678_9abc) } else { case });
                }
            }
            for case in cases {
                let name = format!("{instruction_set}, {case}");
                let differences = [
                    case.difference::<f32>(instruction_set),
                    case.difference::<bf16>(instruction_set),
                    case.difference::<f16>(instruction_set),
                ];
                for (difference, most) in differences.into_iter().zip([2e-5, 2e-2, 2e-3]) {
                    assert!(difference < most, "{name}: off by {difference:e}, more than {most:e}");
                }
            }
        }
    }
}

/// Checks masks that are the least number of f32 or bf16, as PyTorch's users write them: such biases compare as numbers
/// do, and a row without any other key has the mean as its output.
fn check_extreme_biases<E: Element + Into<f32>>(instruction_set: InstructionSet, t_q: usize, repeats: usize) {
    let bf16_min = bf16::MIN.to_f32();
    // The biases of three keys, the weights that follow, and the largest.
    let cases = [
        ([f32::MIN; 3], [1.0 / 3.0; 3], f32::MIN),
        ([bf16_min; 3], [1.0 / 3.0; 3], bf16_min),
        ([-3.4e38, -3.0e38, -3.4e38], [0.0, 1.0, 0.0], -3.0e38),
        ([0.0, 3e38, 0.0], [0.0, 1.0, 0.0], 3e38),
        ([f32::MAX, f32::MAX, f32::MIN], [0.5, 0.5, 0.0], f32::MAX),
        ([f32::MIN, f32::NEG_INFINITY, f32::MIN], [0.5, 0.0, 0.5], f32::MIN),
        ([f32::MIN, 0.0, 0.0], [0.0, 0.5, 0.5], 0.0),
    ];
    let t_kv = 3 * repeats;
    let d = 4;
    let q: Vec<E> = vec![E::from_f32(0.25); t_q * d];
    let k: Vec<E> = vec![E::from_f32(0.5); t_kv * d];
    let v: Vec<E> = (0..t_kv).map(|key| E::from_f32([1.0, 2.0, 4.0][key % 3])).collect();
    for (biases, weights, most) in cases {
        let bias: Vec<f32> = biases.repeat(repeats);
        let call = AttentionCall {
            dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d, d_v: 1 },
            q: Strided { data: &q, strides: [0, d, d] }.into(),
            k: Strided { data: &k, strides: [0, 0, d] }.into(),
            v: Strided { data: &v, strides: [0, 0, 1] }.into(),
            kv_scales: None,
            pages: None,
            keys: KeysOfQueries { ranges: &vec![0..t_kv; t_q], ..Default::default() },
            scores: ScoreModifiers {
                bias: Some(Strided { data: &bias, strides: [0, 0, 0, 1] }.into()),
                ..Default::default()
            },
            output_layout: OutputLayout::Bhtd,
        };
        let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
        let found = attend::<E>(&call, instruction_set, wanted).expect("a few rows");
        let expected_output = weights[0] + 2.0 * weights[1] + 4.0 * weights[2];
        let what = format!("{instruction_set}, {t_q} queries, {t_kv} keys, biases {biases:?}");
        for got in found.output {
            let got: f32 = got.into();
            assert!((got - expected_output).abs() < 2e-2, "{what}: {got}, expected {expected_output}");
        }
        // The score of 0.5 and the logarithm of the number of keys change the sum only if biases are small.
        let keys = (repeats * weights.iter().filter(|&&weight| weight > 0.0).count()) as f32;
        let expected_lse = most + if most == 0.0 { 0.5 + keys.ln() } else { 0.0 };
        for got in found.log_sum_exp.expect("requested") {
            assert!(
                (got - expected_lse).abs() <= 3e-7 * expected_lse.abs(),
                "{what}: log-sum-exp {got:e}, expected {expected_lse:e}"
            );
        }
    }
}

#[test]
fn bias_at_the_limits_of_f32_matches_pytorch() {
    for instruction_set in on_miri_only_scalar() {
        // Decoding and tiles, within one part of the keys and over several.
        let shapes = [(1, 1), (9, 1), (3, 2), (40, 50), (1, 500), (17, 500)];
        for &(t_q, repeats) in if cfg!(miri) { &shapes[..2] } else { &shapes[..] } {
            check_extreme_biases::<f32>(instruction_set, t_q, repeats);
            check_extreme_biases::<bf16>(instruction_set, t_q, repeats);
            check_extreme_biases::<f16>(instruction_set, t_q, repeats);
        }
    }
}

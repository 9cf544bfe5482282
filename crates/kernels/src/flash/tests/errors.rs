//! Calls that are refused, and calls at the limits of what is computed.

use std::ops::Range;

use crate::cpu::InstructionSet;
use crate::error::Error;
use crate::flash::{
    Alibi, AttentionDims, AttentionProblem, Dropout, DropoutMask, KvRows, OutputLayout, ScoreOptions, Strided, attend,
    attend_vec,
};

/// Returns a valid call of one query, for tests to change.
fn small<'a>(data: &'a [f32], ranges: &'a [Range<usize>]) -> AttentionProblem<'a, f32> {
    let rows = Strided { data, strides: [8, 4, 2] };
    AttentionProblem {
        dims: AttentionDims { b: 1, h: 2, h_kv: 2, t_q: 1, t_kv: 2, d: 2, d_v: 2 },
        q: rows,
        k: rows.into(),
        v: rows.into(),
        ranges,
        scores: ScoreOptions::default(),
        output_layout: OutputLayout::Bhtd,
    }
}

/// Checks that each instruction set refuses each problem with the expected error.
fn check(cases: &[(AttentionProblem<'_, f32>, &str)]) {
    for (problem, expected) in cases {
        for instruction_set in InstructionSet::available() {
            let error = attend_vec(problem, instruction_set, None, None).expect_err(expected);
            if usize::BITS == 64 {
                assert_eq!(error.to_string(), *expected);
            }
        }
    }
}

#[test]
fn sizes_beyond_a_slice_are_refused() {
    let data = [1f32; 8];
    let ranges = [0..2];
    let good = small(&data, &ranges);
    assert_eq!(attend_vec(&good, InstructionSet::Scalar, None, None).expect("a good call"), [1.0; 4]);
    let dims = good.dims;
    let short = Strided { data: &data[..7], ..good.q };
    let codes = |count, scales| KvRows::Q8 {
        codes: Strided { data: &[0u8; 8][..count], strides: good.q.strides },
        scales: Strided { data: &data[..scales], strides: [4, 2, 1] },
    };
    let huge = usize::MAX / 2;
    let cases = [
        (
            AttentionProblem { dims: AttentionDims { h_kv: 0, ..dims }, ..good },
            "expected key heads that divide the 2 query heads, found 0",
        ),
        (
            AttentionProblem { dims: AttentionDims { h: 3, ..dims }, ..good },
            "expected key heads that divide the 3 query heads, found 2",
        ),
        (
            AttentionProblem { k: short.into(), ..good },
            "k of [1, 2, 2] entries of 2 elements with strides [8, 4, 2] ends past the 7 elements of its slice",
        ),
        (
            AttentionProblem { v: Strided { strides: [8, usize::MAX, 2], ..good.q }.into(), ..good },
            "v of [1, 2, 2] entries of 2 elements with strides [8, 18446744073709551615, 2] ends past the 8 elements \
             of its slice",
        ),
        (
            AttentionProblem { k: codes(8, 4), v: codes(7, 4), ..good },
            "v of [1, 2, 2] entries of 2 elements with strides [8, 4, 2] ends past the 7 elements of its slice",
        ),
        (
            AttentionProblem { k: codes(8, 3), v: codes(8, 4), ..good },
            "the scales of k of [1, 2, 2] entries of 1 elements with strides [4, 2, 1] ends past the 3 elements of \
             its slice",
        ),
        (
            AttentionProblem { v: codes(8, 4), ..good },
            "expected keys and values that are both floats or both of 8 bits",
        ),
        (
            AttentionProblem { dims: AttentionDims { t_q: 3, ..dims }, ..good },
            "q of [1, 2, 3] entries of 2 elements with strides [8, 4, 2] ends past the 8 elements of its slice",
        ),
        (AttentionProblem { ranges: &[], ..good }, "ranges has 0 elements, expected 1"),
        (AttentionProblem { ranges: &[0..3], ..good }, "expected ranges within 2 keys, found 0..3"),
        (
            AttentionProblem { dims: AttentionDims { d_v: huge, ..dims }, ..good },
            "an attention output of [1, 2, 1, 9223372036854775807] does not fit in memory",
        ),
        // Counts overflow without a byte of output.
        (
            AttentionProblem { dims: AttentionDims { b: huge, d_v: 0, ..dims }, ..good },
            "an attention output of [9223372036854775807, 2, 1, 0] does not fit in memory",
        ),
    ];
    check(&cases);
}

#[test]
fn score_options_beyond_their_slices_are_refused() {
    let data = [1f32; 8];
    let good = small(&data, &[0..2]);
    let entries = [0f32; 3];
    let allowed = [1u8; 3];
    let scores = good.scores;
    let alibi = |slopes, positions| ScoreOptions { alibi: Some(Alibi { slopes, positions }), ..scores };
    let cases = [
        (AttentionProblem { scores: alibi(&[1.0], &[0.0]), ..good }, "slopes has 1 elements, expected 2"),
        (AttentionProblem { scores: alibi(&[1.0, 1.0], &[]), ..good }, "positions has 0 elements, expected 1"),
        (
            AttentionProblem { scores: ScoreOptions { sinks: Some(&[0.0]), ..scores }, ..good },
            "sinks has 1 elements, expected 2",
        ),
        (
            AttentionProblem {
                scores: ScoreOptions { bias: Some(Strided { data: &entries, strides: [0, 2, 2, 1] }), ..scores },
                ..good
            },
            "bias of [1, 2, 1, 2] entries of 1 elements with strides [0, 2, 2, 1] ends past the 3 elements of its \
             slice",
        ),
        (
            AttentionProblem {
                scores: ScoreOptions { bool_mask: Some(Strided { data: &allowed, strides: [0, 2, 2, 1] }), ..scores },
                ..good
            },
            "bool_mask of [1, 2, 1, 2] entries of 1 elements with strides [0, 2, 2, 1] ends past the 3 elements of \
             its slice",
        ),
        (
            AttentionProblem {
                dims: AttentionDims { t_kv: usize::MAX, ..good.dims },
                k: Strided { strides: [0; 3], ..good.q }.into(),
                v: Strided { strides: [0; 3], ..good.q }.into(),
                scores: ScoreOptions {
                    dropout: Some(Dropout { mask: DropoutMask::KeptBits(&[255]), p: 0.5 }),
                    ..scores
                },
                ..good
            },
            "a dropout mask of [1, 2, 1, 18446744073709551615] does not fit in memory",
        ),
    ];
    check(&cases);
}

#[test]
fn results_of_a_wrong_length_and_missing_instruction_sets_are_refused() {
    let data = [1f32; 8];
    let good = small(&data, &[0..2]);
    let error = |output_len: usize, lse_len: usize| {
        let mut output = Box::new_uninit_slice(output_len);
        let mut lse = Box::new_uninit_slice(lse_len);
        attend(&good, InstructionSet::Scalar, &mut output, Some(&mut lse), None)
            .expect_err("a wrong length")
            .to_string()
    };
    assert_eq!(error(3, 2), "output has 3 elements, expected 4");
    assert_eq!(error(4, 1), "lse has 1 elements, expected 2");
    let missing = InstructionSet::ALL
        .into_iter()
        .find(|instruction_set| !instruction_set.is_available())
        .expect("of another processor");
    assert!(matches!(attend_vec(&good, missing, None, None), Err(Error::InstructionSet(_))));
}

/// Checks empty ranges outside of the keys, and repeated keys whose number is beyond memory.
#[test]
fn empty_ranges_anywhere_are_fully_masked_and_too_many_keys_are_refused() {
    let data = [1f32; 8];
    for range in [usize::MAX..0, 7..7, 2..1] {
        for t_q in [1, 9] {
            let mut problem = small(&data, &[]);
            let ranges = vec![range.clone(); t_q];
            problem.dims.t_q = t_q;
            problem.ranges = &ranges;
            problem.q.strides = [0; 3];
            for instruction_set in InstructionSet::available() {
                let output = attend_vec(&problem, instruction_set, None, None).expect("a fully masked query");
                assert!(output.iter().all(|&x| x == 0.0), "{instruction_set}: {range:?}");
            }
        }
    }
    let mut problem = small(&data, &[]);
    let repeated = Strided { strides: [0; 3], ..problem.q }.into();
    problem.dims.t_kv = usize::MAX / 4;
    problem.k = repeated;
    problem.v = repeated;
    let error = attend_vec(&AttentionProblem { ranges: &[0..3], ..problem }, InstructionSet::Scalar, None, None)
        .expect_err("no memory");
    assert_eq!(error.to_string(), "a scratch buffer of attention does not fit in memory");
}

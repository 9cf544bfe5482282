//! Calls that are refused, and calls at the limits of what is computed.

use std::ops::Range;

use crate::cpu::InstructionSet;
use crate::error::Error;
use crate::flash::{
    AttentionCall, AttentionDims, CpuCall, Dropout, DropoutMask, KeysOfQueries, KvCodeFormat, KvScales, OutputLayout,
    RequestedResults, ScoreModifiers, Strided, View, attend,
};

/// Returns a valid call of one query, for tests to change.
fn small<'a>(data: &'a [f32], ranges: &'a [Range<usize>]) -> CpuCall<'a> {
    let rows = Strided { data, strides: [8, 4, 2] }.into();
    AttentionCall {
        dims: AttentionDims { b: 1, h: 2, h_kv: 2, t_q: 1, t_kv: 2, d: 2, d_v: 2 },
        q: rows,
        k: rows,
        v: rows,
        kv_scales: None,
        pages: None,
        keys: KeysOfQueries { ranges, positions: &[0.0], ..Default::default() },
        scores: ScoreModifiers::default(),
        output_layout: OutputLayout::Bhtd,
    }
}

/// Checks that each instruction set refuses each problem with the expected error.
fn check(cases: &[(CpuCall, &str)]) {
    for (call, expected) in cases {
        for instruction_set in InstructionSet::available() {
            let error = attend::<f32>(call, instruction_set, RequestedResults::default()).expect_err(expected);
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
    assert_eq!(
        attend::<f32>(&good, InstructionSet::Scalar, RequestedResults::default()).expect("a good call").output,
        [1.0; 4]
    );
    let dims = good.dims;
    let rows = Strided { data: &data[..], strides: [8, 4, 2] };
    let short = Strided { data: &data[..7], ..rows };
    let codes = |count: usize| View::from(Strided { data: &[0u8; 8][..count], strides: rows.strides });
    let scales = |count: usize| View::from(Strided { data: &data[..count], strides: [4, 2, 1] });
    let all_scales = Some(KvScales { format: KvCodeFormat::Q8, k: scales(4), v: scales(4) });
    let with_ranges = |other| AttentionCall { keys: KeysOfQueries { ranges: other, ..good.keys }, ..good };
    let huge = usize::MAX / 2;
    let cases = [
        (
            AttentionCall { dims: AttentionDims { h_kv: 0, ..dims }, ..good },
            "expected key heads that divide the 2 query heads, found 0",
        ),
        (
            AttentionCall { dims: AttentionDims { h: 3, ..dims }, ..good },
            "expected key heads that divide the 3 query heads, found 2",
        ),
        (
            AttentionCall { k: short.into(), ..good },
            "k of [1, 2, 2] entries of 2 elements with strides [8, 4, 2] ends past the 7 elements of its slice",
        ),
        (
            AttentionCall { v: Strided { strides: [8, usize::MAX, 2], ..rows }.into(), ..good },
            "v of [1, 2, 2] entries of 2 elements with strides [8, 18446744073709551615, 2] ends past the 8 elements \
             of its slice",
        ),
        (
            AttentionCall { k: codes(8), v: codes(7), kv_scales: all_scales, ..good },
            "v of [1, 2, 2] entries of 2 elements with strides [8, 4, 2] ends past the 7 elements of its slice",
        ),
        (
            AttentionCall {
                k: codes(8),
                v: codes(8),
                kv_scales: Some(KvScales { format: KvCodeFormat::Q8, k: scales(3), v: scales(4) }),
                ..good
            },
            "the scales of k of [1, 2, 2] entries of 1 elements with strides [4, 2, 1] ends past the 3 elements of \
             its slice",
        ),
        (
            AttentionCall {
                k: codes(8),
                v: codes(8),
                kv_scales: Some(KvScales { format: KvCodeFormat::Q4, k: scales(4), v: scales(4) }),
                ..good
            },
            "expected rows of k of a multiple of 32 numbers, which codes of 4 bits have, found 2",
        ),
        (AttentionCall { v: codes(8), ..good }, "expected v in f32, found numbers in u8"),
        (AttentionCall { kv_scales: all_scales, ..good }, "expected k in u8, found numbers in f32"),
        (
            AttentionCall { q: Strided { data: &data[..], strides: [8, 4, 2, 2] }.into(), ..good },
            "expected contiguous rows of q, found numbers 2 apart",
        ),
        (
            AttentionCall { dims: AttentionDims { t_q: 3, ..dims }, ..good },
            "q of [1, 2, 3] entries of 2 elements with strides [8, 4, 2] ends past the 8 elements of its slice",
        ),
        (with_ranges(&[]), "ranges has 0 elements, expected 1"),
        (with_ranges(&[0..3]), "expected ranges within 2 keys, found 0..3"),
        (
            AttentionCall { dims: AttentionDims { d_v: huge, ..dims }, ..good },
            "an attention output of [1, 2, 1, 9223372036854775807] does not fit in memory",
        ),
        // Counts overflow without a byte of output.
        (
            AttentionCall { dims: AttentionDims { b: huge, d_v: 0, ..dims }, ..good },
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
    let repeated = Strided { data: &data[..], strides: [0; 3] }.into();
    let alibi = |slopes, positions| AttentionCall {
        keys: KeysOfQueries { positions, ..good.keys },
        scores: ScoreModifiers { alibi_slopes: Some(View::list::<f32>(slopes)), ..scores },
        ..good
    };
    let cases = [
        (
            AttentionCall { scores: ScoreModifiers { softcap: Some(0.0), ..scores }, ..good },
            "softcap is 0.0, expected a finite number above zero in F32",
        ),
        (alibi(&[1.0], &[0.0]), "slopes has 1 elements, expected 2"),
        (alibi(&[1.0, 1.0], &[]), "positions has 0 elements, expected 1"),
        (
            AttentionCall { scores: ScoreModifiers { sinks: Some(View::list(&[0f32])), ..scores }, ..good },
            "sinks has 1 elements, expected 2",
        ),
        (
            AttentionCall {
                scores: ScoreModifiers {
                    bias: Some(Strided { data: &entries[..], strides: [0, 2, 2, 1] }.into()),
                    ..scores
                },
                ..good
            },
            "bias of [1, 2, 1, 2] entries of 1 elements with strides [0, 2, 2, 1] ends past the 3 elements of its \
             slice",
        ),
        (
            AttentionCall {
                scores: ScoreModifiers {
                    boolean_mask: Some(Strided { data: &allowed[..], strides: [0, 2, 2, 1] }.into()),
                    ..scores
                },
                ..good
            },
            "boolean_mask of [1, 2, 1, 2] entries of 1 elements with strides [0, 2, 2, 1] ends past the 3 elements of \
             its slice",
        ),
        (
            AttentionCall {
                dims: AttentionDims { t_kv: usize::MAX, ..good.dims },
                k: repeated,
                v: repeated,
                scores: ScoreModifiers {
                    dropout: Some(Dropout { mask: DropoutMask::KeptBits(View::list(&[255u8])), p: 0.5 }),
                    ..scores
                },
                ..good
            },
            "a dropout mask of [1, 2, 1, 18446744073709551615] does not fit in memory",
        ),
        (
            AttentionCall {
                scores: ScoreModifiers {
                    dropout: Some(Dropout { mask: DropoutMask::PhiloxOnDevice(repeated), p: 0.5 }),
                    ..scores
                },
                ..good
            },
            "expected a seed of dropout as a number, found a tensor",
        ),
    ];
    check(&cases);
}

#[test]
fn weights_and_missing_instruction_sets_are_refused() {
    let data = [1f32; 8];
    let good = small(&data, &[0..2]);
    let wanted = RequestedResults { weights: true, ..RequestedResults::default() };
    let error = attend::<f32>(&good, InstructionSet::Scalar, wanted).expect_err("weights");
    assert_eq!(error.to_string(), "expected a call for results without the weights, which are never stored");
    let missing = InstructionSet::ALL
        .into_iter()
        .find(|instruction_set| !instruction_set.is_available())
        .expect("of another processor");
    assert!(matches!(attend::<f32>(&good, missing, RequestedResults::default()), Err(Error::InstructionSet(_))));
}

/// Checks empty ranges outside of the keys, and repeated keys whose number is beyond memory.
#[test]
fn empty_ranges_anywhere_are_fully_masked_and_too_many_keys_are_refused() {
    let data = [1f32; 8];
    for range in [usize::MAX..0, 7..7, 2..1] {
        for t_q in [1, 9] {
            let ranges = vec![range.clone(); t_q];
            let mut call = small(&data, &ranges);
            call.dims.t_q = t_q;
            call.q.strides = [0, 0, 0, 1];
            for instruction_set in InstructionSet::available() {
                let found =
                    attend::<f32>(&call, instruction_set, RequestedResults::default()).expect("a fully masked query");
                assert!(found.output.iter().all(|&x| x == 0.0), "{instruction_set}: {range:?}");
            }
        }
    }
    let mut call = small(&data, &[0..3]);
    let repeated = Strided { data: &data[..], strides: [0; 3] }.into();
    call.dims.t_kv = usize::MAX / 4;
    call.k = repeated;
    call.v = repeated;
    let error = attend::<f32>(&call, InstructionSet::Scalar, RequestedResults::default()).expect_err("no memory");
    assert_eq!(error.to_string(), "a scratch buffer of attention does not fit in memory");
}

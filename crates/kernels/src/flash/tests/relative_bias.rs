//! Relative biases against the same numbers as a bias (B, H, T_q, T_kv), and against the oracle.

mod random;

use std::ops::Range;

use half::bf16;

use super::case::{Case, FOR_BACKWARD};
use super::{numbers, on_miri_only_scalar};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::flash::relative_bias::TileRelativeBias;
use crate::flash::{
    AttentionBackwardProblem, AttentionCall, AttentionDims, AttentionGradients, CpuCall, Diagonals, KeysOfQueries,
    OutputLayout, PerInput, RequestedGradients, RequestedResults, ScoreModifiers, Strided, attend, attend_backward,
};

/// The positions of the queries of a sequence relative to its keys.
#[derive(Clone, Copy)]
enum Origins {
    /// Each diagonal of the scores has an entry.
    Diagonals,
    /// The second half of the queries is another sequence, whose keys begin one key later. Some pairs have no entry.
    Packed,
    /// In no order, and some far outside of the table.
    Scattered,
}

struct Biases {
    len: usize,
    of_sequence: usize,
    data: Vec<f32>,
    origins: Vec<i64>,
}

impl Biases {
    fn new(dims: &AttentionDims, origins: Origins, is_shared: bool) -> Self {
        let len = dims.t_q + dims.t_kv - 1;
        let origin = |row: usize| {
            let query = row % dims.t_q;
            let diagonal = (dims.t_q - 1 - query) as i64;
            match origins {
                Origins::Diagonals => diagonal + (row / dims.t_q) as i64,
                Origins::Packed => diagonal - i64::from(query >= dims.t_q / 2),
                Origins::Scattered => [diagonal, -3, i64::MAX, i64::MIN, 2][query * 7 % 5],
            }
        };
        let of_sequence = if is_shared { 0 } else { dims.h * len };
        let data = numbers((if is_shared { 1 } else { dims.b }) * dims.h * len, 9);
        Self { len, of_sequence, data, origins: (0..dims.b * dims.t_q).map(origin).collect() }
    }

    fn bias(&self) -> TileRelativeBias<'_> {
        let rows = Strided { data: &self.data[..], strides: [self.of_sequence, self.len] };
        TileRelativeBias { rows, len: self.len, origins: &self.origins }
    }

    /// Removes the keys without an entry from the ranges.
    fn narrow(&self, ranges: &mut [Range<usize>], t_kv: usize) {
        for (range, &origin) in ranges.iter_mut().zip(&self.origins) {
            let key_of = |entry: usize| (entry as i128 - i128::from(origin)).clamp(0, t_kv as i128) as usize;
            *range = range.start.max(key_of(0))..range.end.min(key_of(self.len));
        }
    }

    /// Returns the entry of each score, if it has one.
    fn entries(&self, dims: &AttentionDims) -> Vec<Option<usize>> {
        let AttentionDims { b, h, t_q, t_kv, .. } = *dims;
        let entry = |at: usize| {
            let sequence = at / (h * t_q * t_kv);
            let head = at / (t_q * t_kv) % h;
            let entry = i128::from(self.origins[sequence * t_q + at / t_kv % t_q]) + (at % t_kv) as i128;
            let first = sequence * self.of_sequence + head * self.len;
            (0..self.len as i128).contains(&entry).then(|| first + entry as usize)
        };
        (0..b * h * t_q * t_kv).map(entry).collect()
    }
}

/// Adds a relative bias to a call.
fn with_relative_bias<'a>(mut call: CpuCall<'a>, bias: TileRelativeBias<'a>) -> CpuCall<'a> {
    call.scores.relative_bias = Some(bias.rows.into());
    call.keys.diagonals = Diagonals { len: bias.len, origins: bias.origins };
    call
}

/// The output of a call and the requested gradients.
struct OutputAndGradients<E> {
    output: Vec<E>,
    gradients: AttentionGradients<E>,
}

/// Runs forward and backward, with arbitrary gradients of the output.
fn differentiate<E: Element>(
    forward: &CpuCall,
    instruction_set: InstructionSet,
    wanted: PerInput<bool>,
) -> OutputAndGradients<E> {
    let AttentionDims { b, h, t_q, d_v, .. } = forward.dims;
    let found = attend::<E>(forward, instruction_set, FOR_BACKWARD).expect("a few rows");
    let output = found.output;
    let softmax_stats = &found.softmax_stats.expect("requested");
    let factors: Vec<E> = numbers(b * h * t_q * d_v, 20);
    let output_grad = Strided { data: &factors[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
    let problem =
        AttentionBackwardProblem { forward: *forward, output: &output, softmax_stats, output_grad, lse_grad: None };
    let requested = RequestedGradients { layout: OutputLayout::Bhtd, of: wanted };
    let gradients = attend_backward(&problem, instruction_set, requested).expect("a few rows");
    OutputAndGradients { output, gradients }
}

/// Checks that the results are the same to the bit as with a bias (B, H, T_q, T_kv), and that the gradient of an entry
/// is the sum of the gradients of its scores.
fn check_against_dense_bias<E: Element + Into<f32> + PartialEq + std::fmt::Debug>(
    dims: AttentionDims,
    causal: bool,
    biases: &Biases,
) {
    let mut case = Case::new(dims, causal, false);
    biases.narrow(&mut case.ranges, dims.t_kv);
    let data = case.data::<E>();
    let entries = biases.entries(&dims);
    let dense: Vec<f32> = entries.iter().map(|entry| entry.map_or(0.0, |entry| biases.data[entry])).collect();
    let by_distance = with_relative_bias(case.call(&data), biases.bias());
    let mut by_pair = case.call(&data);
    let strides = [dims.h * dims.t_q * dims.t_kv, dims.t_q * dims.t_kv, dims.t_kv, 1];
    by_pair.scores.bias = Some(Strided { data: &dense[..], strides }.into());
    let operands = PerInput { q: true, k: true, v: true, ..Default::default() };
    for instruction_set in on_miri_only_scalar() {
        let found = differentiate::<E>(&by_distance, instruction_set, PerInput { relative_bias: true, ..operands });
        let expected = differentiate::<E>(&by_pair, instruction_set, PerInput { bias: true, ..operands });
        assert_eq!(found.output, expected.output, "{instruction_set}, {dims:?}");
        let found = found.gradients;
        let expected = expected.gradients;
        assert_eq!((found.q, found.k, found.v), (expected.q, expected.k, expected.v), "{instruction_set}, {dims:?}");
        let mut sums = vec![0f64; biases.data.len()];
        for (entry, gradient) in entries.iter().zip(expected.bias.expect("requested")) {
            if let Some(entry) = entry {
                sums[*entry] += f64::from(gradient);
            }
        }
        for (n, (x, sum)) in found.relative_bias.expect("requested").into_iter().zip(sums).enumerate() {
            assert!((f64::from(x) - sum).abs() < 1e-5, "{instruction_set}, {dims:?}, {n}: {x}, expected {sum}");
        }
    }
}

#[test]
fn relative_bias_matches_dense_bias() {
    let of = |h: usize, h_kv: usize, t_q: usize, t_kv: usize| AttentionDims { b: 2, h, h_kv, t_q, t_kv, d: 5, d_v: 7 };
    let few = [of(2, 1, 3, 9), of(3, 3, 1, 6)];
    let many = [of(2, 2, 40, 150), of(6, 2, 37, 20), of(2, 1, 70, 70)];
    for dims in few.into_iter().chain(many.into_iter().take(if cfg!(miri) { 0 } else { 3 })) {
        for origins in [Origins::Diagonals, Origins::Packed, Origins::Scattered] {
            for is_shared in [true, false] {
                let biases = Biases::new(&dims, origins, is_shared);
                check_against_dense_bias::<f32>(dims, true, &biases);
                check_against_dense_bias::<bf16>(dims, false, &biases);
            }
        }
    }
}

#[test]
fn relative_bias_outside_of_its_slice_is_refused() {
    let case = Case::new(AttentionDims { b: 1, h: 2, h_kv: 2, t_q: 3, t_kv: 4, d: 2, d_v: 2 }, false, false);
    let data = case.data::<f32>();
    let biases = Biases::new(&case.dims, Origins::Diagonals, true);
    let error = |bias: TileRelativeBias| {
        let call = with_relative_bias(case.call(&data), bias);
        attend::<f32>(&call, InstructionSet::Scalar, RequestedResults::default()).expect_err("too short").to_string()
    };
    let rows = biases.bias().rows;
    let short = Strided { data: &biases.data[1..], ..rows };
    assert!(error(TileRelativeBias { rows: short, ..biases.bias() }).contains("relative bias of [1, 2] entries"));
    assert!(error(TileRelativeBias { origins: &[0; 2], ..biases.bias() }).contains("origins"));
    assert_eq!(
        error(TileRelativeBias { origins: &[2, 1, 3], ..biases.bias() }),
        "query 2 of sequence 0 (origin 3, keys 0..4) reads entries 3..7 of the relative bias, \
         expected entries within 0..6"
    );
    assert_eq!(
        error(TileRelativeBias { origins: &[2, -1, 0], ..biases.bias() }),
        "query 1 of sequence 0 (origin -1, keys 0..4) reads entries -1..3 of the relative bias, \
         expected entries within 0..6"
    );
    assert!(
        error(TileRelativeBias { rows: Strided { data: &[], ..rows }, len: 0, ..biases.bias() })
            .contains("within 0..0")
    );
}

#[test]
fn relative_bias_without_entries_is_accepted_by_fully_masked_queries() {
    for (t_q, data) in [(1, &[][..]), (40, &[1.0; 3])] {
        let dims = AttentionDims { b: 2, h: 4, h_kv: 2, t_q, t_kv: 5, d: 2, d_v: 2 };
        let case = Case { ranges: vec![3..3; 2 * t_q], ..Case::new(dims, false, false) };
        let tensors = case.data::<f32>();
        let origins = vec![i64::MIN; 2 * t_q];
        let rows = Strided { data, strides: [usize::MAX, 7] };
        let call = with_relative_bias(case.call(&tensors), TileRelativeBias { rows, len: 0, origins: &origins });
        for instruction_set in InstructionSet::available() {
            let found = differentiate::<f32>(
                &call,
                instruction_set,
                PerInput { q: true, relative_bias: true, ..Default::default() },
            );
            assert!(found.output.iter().all(|&x| x == 0.0), "{instruction_set}");
            assert_eq!(found.gradients.relative_bias, Some(Vec::new()), "{instruction_set}");
        }
    }
}

#[test]
fn relative_bias_of_distant_keys_matches_near_keys() {
    // One key, repeated more often than memory has bytes, and enough queries that the keys are not split over tasks.
    let t_q = 150;
    let t_kv = usize::MAX / 4;
    let one = [0.5f32];
    let len = t_q + 2;
    let biases: Vec<f32> = numbers(2 * len, 3);
    let q: Vec<f32> = numbers(2 * t_q, 4);
    let lse_of = |first: usize| {
        let repeated = Strided { data: &one[..], strides: [0; 3] };
        let origins: Vec<_> = (0..t_q).rev().map(|diagonal| diagonal as i64 - first as i64).collect();
        let rows = Strided { data: &biases[..], strides: [0, len] };
        let call = AttentionCall {
            dims: AttentionDims { b: 1, h: 2, h_kv: 1, t_q, t_kv, d: 1, d_v: 1 },
            q: Strided { data: &q[..], strides: [0, t_q, 1] }.into(),
            k: repeated.into(),
            v: repeated.into(),
            kv_scales: None,
            pages: None,
            keys: KeysOfQueries {
                ranges: &vec![first..first + 3; t_q],
                diagonals: Diagonals { len, origins: &origins },
                ..Default::default()
            },
            scores: ScoreModifiers { relative_bias: Some(rows.into()), ..Default::default() },
            output_layout: OutputLayout::Bhtd,
        };
        let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
        attend::<f32>(&call, InstructionSet::Scalar, wanted).expect("a few rows").log_sum_exp.expect("requested")
    };
    let near = lse_of(0);
    for (n, (far, expected)) in lse_of(t_kv - 3).into_iter().zip(near).enumerate() {
        assert!((far - expected).abs() < 1e-5, "log-sum-exp {n}: {far}, expected {expected}");
    }
}

//! Distance biases against the same numbers as a bias (B, H, T_q, T_kv).

use super::*;
use crate::flash::{BackwardProblem, Gradients, RelativeBias, SoftmaxStats, Wanted, attend_backward};

/// How the queries of a sequence stand to its keys.
#[derive(Clone, Copy)]
enum Origins {
    /// Each diagonal of the scores has an entry.
    Diagonals,
    /// The first and the second half of the queries are sequences whose keys begin one further on than they do, so that
    /// some pairs have no entry.
    Packed,
    /// In no order, some far outside.
    Scattered,
}

struct Biases {
    len: usize,
    of_sequence: usize,
    data: Vec<f32>,
    origins: Vec<i64>,
}

impl Biases {
    fn new(dims: &Dims, origins: Origins, is_shared: bool) -> Self {
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

    fn bias(&self) -> RelativeBias<'_> {
        let rows = Strided { data: &self.data[..], strides: [self.of_sequence, self.len] };
        RelativeBias { rows, len: self.len, origins: &self.origins }
    }

    /// The entry of each score, if it has one.
    fn entries(&self, dims: &Dims) -> Vec<Option<usize>> {
        let Dims { b, h, t_q, t_kv, .. } = *dims;
        let entry = |at: usize| {
            let (b, h, query, key) = (at / (h * t_q * t_kv), at / (t_q * t_kv) % h, at / t_kv % t_q, at % t_kv);
            let entry = i128::from(self.origins[b * t_q + query]) + key as i128;
            (0..self.len as i128).contains(&entry).then(|| b * self.of_sequence + h * self.len + entry as usize)
        };
        (0..b * h * t_q * t_kv).map(entry).collect()
    }
}

fn gradients<E: Element>(
    forward: &Problem<E>,
    instruction_set: InstructionSet,
    wanted: Wanted,
) -> (Vec<E>, Gradients<E>) {
    let Dims { b, h, t_q, d_v, .. } = forward.dims;
    let mut stats = Vec::<SoftmaxStats>::new();
    let context = attend_vec(forward, instruction_set, None, Some(&mut stats)).expect("a few rows");
    let factors: Vec<E> = numbers(b * h * t_q * d_v, 20);
    let context_grad = Strided { data: &factors[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
    let problem = BackwardProblem { forward: *forward, context: &context, stats: &stats, context_grad, lse_grad: None };
    let gradients = attend_backward(&problem, instruction_set, wanted).expect("a few rows");
    (context, gradients)
}

/// The results are the same to the bit, and the gradient of an entry is the sum of those of its scores.
fn holds<E: Element + Into<f32> + PartialEq + std::fmt::Debug>(dims: Dims, causal: bool, biases: &Biases) {
    let case = Case::new(dims, causal, false);
    let data = case.data::<E>();
    let entries = biases.entries(&dims);
    let dense: Vec<f32> = entries.iter().map(|entry| entry.map_or(0.0, |entry| biases.data[entry])).collect();
    let mut by_distance = case.problem(&data);
    by_distance.scores.relative_bias = Some(biases.bias());
    let mut by_pair = case.problem(&data);
    let strides = [dims.h * dims.t_q * dims.t_kv, dims.t_q * dims.t_kv, dims.t_kv, 1];
    by_pair.scores.bias = Some(Strided { data: &dense, strides });
    let operands = Wanted { q: true, k: true, v: true, ..Default::default() };
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        let (context, found) = gradients(&by_distance, instruction_set, Wanted { distances: true, ..operands });
        let full = Some([dims.b, dims.h, dims.t_q, dims.t_kv]);
        let (expected_context, expected) = gradients(&by_pair, instruction_set, Wanted { bias: full, ..operands });
        assert_eq!(context, expected_context, "{instruction_set}, {dims:?}");
        assert_eq!((found.q, found.k, found.v), (expected.q, expected.k, expected.v), "{instruction_set}, {dims:?}");
        let mut sums = vec![0f64; biases.data.len()];
        for (entry, gradient) in entries.iter().zip(expected.bias.expect("wanted")) {
            if let Some(entry) = entry {
                sums[*entry] += f64::from(gradient);
            }
        }
        for (n, (found, expected)) in found.distances.expect("wanted").into_iter().zip(sums).enumerate() {
            assert!(
                (f64::from(found) - expected).abs() < 1e-5,
                "{instruction_set}, {dims:?}, {n}: {found}, expected {expected}"
            );
        }
    }
}

#[test]
fn distance_biases_are_a_bias_of_the_same_numbers() {
    let dims = |h: usize, h_kv: usize, t_q: usize, t_kv: usize| Dims { b: 2, h, h_kv, t_q, t_kv, d: 5, d_v: 7 };
    let few = [dims(2, 1, 3, 9), dims(3, 3, 1, 6)];
    let many = [dims(2, 2, 40, 150), dims(6, 2, 37, 20), dims(2, 1, 70, 70)];
    for dims in few.into_iter().chain(many.into_iter().take(if cfg!(miri) { 0 } else { 3 })) {
        for origins in [Origins::Diagonals, Origins::Packed, Origins::Scattered] {
            for is_shared in [true, false] {
                let biases = Biases::new(&dims, origins, is_shared);
                holds::<f32>(dims, true, &biases);
                holds::<bf16>(dims, false, &biases);
            }
        }
    }
}

#[test]
fn distance_biases_outside_their_slice_are_errors() {
    let case = Case::new(Dims { b: 1, h: 2, h_kv: 2, t_q: 3, t_kv: 4, d: 2, d_v: 2 }, false, false);
    let data = case.data::<f32>();
    let biases = Biases::new(&case.dims, Origins::Diagonals, true);
    let error = |bias: RelativeBias| {
        let mut problem = case.problem(&data);
        problem.scores.relative_bias = Some(bias);
        attend_vec(&problem, InstructionSet::Scalar, None, None).expect_err("too short").to_string()
    };
    let short = Strided { data: &biases.data[1..], ..biases.bias().rows };
    assert!(error(RelativeBias { rows: short, ..biases.bias() }).contains("distance biases of [1, 2] entries"));
    assert!(error(RelativeBias { origins: &[0; 2], ..biases.bias() }).contains("origins"));
}

//! Biases that heads share: the rows of one query lie in two tiles where a panel is no multiple of the group, and tasks
//! of other heads and sequences add to the same entries.

use half::bf16;

use super::case::FOR_BACKWARD;
use super::numbers;
use crate::Element;
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionBackwardProblem, AttentionCall, AttentionDims, KeysOfQueries, OutputLayout, PerInput, RequestedGradients,
    ScoreModifiers, Strided, View, attend, attend_backward,
};

/// Returns the bits of all gradients for each thread pool.
fn gradients<E: Element + Into<f32>>(
    dims: AttentionDims,
    shape: [usize; 4],
    instruction_set: InstructionSet,
    pools: &[&rayon::ThreadPool],
) -> Vec<Vec<u32>> {
    let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = dims;
    let [q, k, v] = [(h, t_q, d, 1), (h_kv, t_kv, d, 2), (h_kv, t_kv, d_v, 3)]
        .map(|(heads, t, width, salt)| numbers::<E>(b * heads * t * width, salt));
    let rows = |data, heads, t, width| Strided { data, strides: [heads * t * width, t * width, width] };
    let bias = numbers::<f32>(shape.iter().product(), 4);
    let stride = |n: usize| if shape[n] == 1 { 0 } else { shape[n + 1..].iter().product() };
    let bias = Strided::<f32, 4> { data: &bias[..], strides: std::array::from_fn(stride) };
    let slopes = numbers::<f32>(h, 5);
    let positions = vec![0.0; b * t_q];
    let sinks = numbers::<f32>(h, 6);
    // Each query attends to a few keys, so that tiles follow each other soon.
    let range = |query: usize| query.saturating_sub(3).min(t_kv)..(query + 4).min(t_kv);
    let forward = AttentionCall {
        dims,
        q: rows(&q, h, t_q, d).into(),
        k: rows(&k, h_kv, t_kv, d).into(),
        v: rows(&v, h_kv, t_kv, d_v).into(),
        kv_scales: None,
        pages: None,
        keys: KeysOfQueries {
            ranges: &(0..b * t_q).map(|row| range(row % t_q)).collect::<Vec<_>>(),
            positions: &positions,
            ..Default::default()
        },
        scores: ScoreModifiers {
            softcap: Some(3.0),
            alibi_slopes: Some(View::list(&slopes)),
            bias: Some(bias.into()),
            sinks: Some(View::list(&sinks)),
            ..Default::default()
        },
        output_layout: OutputLayout::Bhtd,
    };
    let found = attend::<E>(&forward, instruction_set, FOR_BACKWARD).expect("a few rows");
    let output = found.output;
    let softmax_stats = &found.softmax_stats.expect("wanted");
    let factors = numbers(output.len(), 7);
    let output_grad = rows(&factors, h, t_q, d_v);
    let problem = AttentionBackwardProblem { forward, output: &output, softmax_stats, output_grad, lse_grad: None };
    let requested = RequestedGradients {
        layout: OutputLayout::Bhtd,
        of: PerInput { q: true, k: true, v: true, bias: true, relative_bias: false, alibi_slopes: true, sinks: true },
    };
    let run = || {
        let gradients = attend_backward(&problem, instruction_set, requested).expect("a few rows");
        let wide = |gradient: Option<Vec<E>>| gradient.expect("requested").into_iter().map(Into::into);
        let of_f32 = |gradient: Option<Vec<f32>>| gradient.expect("requested");
        let elements = wide(gradients.q).chain(wide(gradients.k)).chain(wide(gradients.v));
        let others =
            [of_f32(gradients.bias), of_f32(gradients.alibi_slopes), of_f32(gradients.sinks)].into_iter().flatten();
        elements.chain(others).map(f32::to_bits).collect()
    };
    pools.iter().map(|pool| pool.install(run)).collect()
}

#[test]
fn shared_bias_gradients_are_equal_for_any_number_of_threads() {
    let best = InstructionSet::choose(None, false).expect("an instruction set");
    // Each group, and how often it runs on the best instruction set.
    let groups: &[(usize, usize)] = if cfg!(miri) { &[(3, 1)] } else { &[(3, 10), (5, 10), (6, 10), (7, 10), (71, 2)] };
    // A call is worth several threads by its length, one of Miri's by its width.
    let t = if cfg!(miri) { 32 } else { 520 };
    let width = if cfg!(miri) { 32 } else { 2 };
    let [one, two, four] = [1, 2, 4].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool"));
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        let gradients_of = match instruction_set {
            InstructionSet::NeonBf16 | InstructionSet::Avx512Bf16 | InstructionSet::Amx => gradients::<bf16>,
            _ => gradients::<f32>,
        };
        for (&(group, repeats), b) in groups.iter().flat_map(|group| [(group, 1), (group, 2)]) {
            let repeats = if instruction_set == best { repeats } else { repeats.div_ceil(10) };
            let pools = [&[&one][..], &[&two, &four].repeat(repeats)].concat();
            let dims = AttentionDims { b, h: 2 * group, h_kv: 2, t_q: t, t_kv: t, d: width, d_v: width };
            // The last one is another where there are two sequences.
            for shape in [[1, 1, t, t], [1, 1, t, 1], [1, 1, 1, t], [b, 1, t, t]].into_iter().take(2 + b) {
                let found = gradients_of(dims, shape, instruction_set, &pools);
                let differ = found.iter().filter(|&gradients| *gradients != found[0]).count();
                assert_eq!(
                    differ,
                    0,
                    "{instruction_set}: of {} runs, group {group}, bias {shape:?} of {b}",
                    found.len()
                );
            }
        }
    }
}

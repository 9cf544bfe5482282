//! Statistics of the weights against the weights of the oracle.

use half::{bf16, f16};

use super::case::{Case, dims};
use super::on_miri_only_scalar;
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionCall, AttentionDims, KeysOfQueries, KvCodeFormat, OutputLayout, RequestedResults, RequestedStatistics,
    ScoreModifiers, Statistics, Strided, WeightTile, attend,
};
use crate::{Element, Error};

/// Compares what an instruction set finds with the weights of the oracle, and the output with that of a call without
/// statistics.
fn check<E: Element + Into<f32> + PartialEq>(case: &Case, instruction_set: InstructionSet, top: usize, tolerance: f64) {
    let AttentionDims { b, h, t_q, t_kv, .. } = case.dims;
    let rows = t_q / 3..t_q;
    let columns = 0..t_kv.div_ceil(2);
    let tile = WeightTile { queries: rows.clone(), keys: columns.clone() };
    let options = RequestedStatistics { top_keys: top, tile: Some(tile) };
    let data = case.data::<E>();
    let call = case.call(&data);
    let results = attend::<E>(&call, instruction_set, with_statistics(&options)).expect("a few rows");
    let output = results.output;
    let found = results.statistics.expect("requested");
    let without = attend::<E>(&call, instruction_set, RequestedResults::default()).expect("a few rows").output;
    let near = |x: f32, exact: f64, what: &str| {
        assert!((f64::from(x) - exact).abs() <= tolerance * (1.0 + exact.abs()), "{what}: {x}, not {exact}");
    };
    for (x, expected) in output.iter().zip(without) {
        near((*x).into(), f64::from(expected.into()), "output");
    }

    let k = top.min(t_kv);
    let oracle = case.exact(&data.clone().widened(case.codes.is_some()));
    let mut key_weight_sums = vec![0.0; b * h * t_kv];
    for row in 0..b * h * t_q {
        let head_of_batch = row / t_q;
        let query = row % t_q;
        let weights = &oracle.weights[row * t_kv..(row + 1) * t_kv];
        for (key, weight) in weights.iter().enumerate() {
            key_weight_sums[head_of_batch * t_kv + key] += weight;
        }
        let terms = weights.iter().filter(|weight| **weight > 0.0).map(|weight| -weight * weight.ln());
        near(found.entropy[row], terms.sum(), "entropy");
        let mut sorted = weights.to_vec();
        sorted.sort_by(|one, other| other.total_cmp(one));
        let keys = &found.top_keys[row * k..][..k];
        let key_weights = &found.top_weights[row * k..][..k];
        for (n, (&key, &weight)) in keys.iter().zip(key_weights).enumerate() {
            near(weight, sorted[n], "the largest weights");
            near(weight, weights[key as usize], "the weight of a key");
            assert!(!keys[..n].contains(&key), "{keys:?}");
        }
        if rows.contains(&query) {
            let first = (head_of_batch * rows.len() + query - rows.start) * columns.len();
            for (x, exact) in found.weights[first..][..columns.len()].iter().zip(weights) {
                near(*x, *exact, "weights");
            }
        }
    }
    for (x, exact) in found.key_weight_sums.iter().zip(&key_weight_sums) {
        near(*x, *exact, "key_weight_sums");
    }
}

#[test]
fn statistics_with_causal_softcap_alibi_sinks_dropout_match_oracle() {
    let shapes = [dims(2, 1, 3, 3, 2), dims(2, 9, 40, 8, 3), dims(6, 50, 131, 5, 3), dims(1, 130, 300, 8, 4)];
    let used_shapes = if cfg!(miri) { &shapes[..1] } else { &shapes[..] };
    for instruction_set in on_miri_only_scalar() {
        for (&dims, top) in used_shapes.iter().zip([5, 32, 7, 0]) {
            for (causal, has_modifiers) in [(false, false), (true, false), (true, true)] {
                for codes in [None, Some(KvCodeFormat::Q8)] {
                    let case = Case { codes, ..Case::new(dims, causal, has_modifiers) };
                    let case = if causal && codes.is_some() { case.with_dropout(7) } else { case };
                    check::<f32>(&case, instruction_set, top, 2e-5);
                    check::<bf16>(&case, instruction_set, top, 2e-2);
                    check::<f16>(&case, instruction_set, top, 2e-3);
                }
            }
        }
    }
}

/// Returns a request for statistics.
fn with_statistics(requested: &RequestedStatistics) -> RequestedResults<'_> {
    RequestedResults { statistics: Some(requested), ..RequestedResults::default() }
}

/// Computes the statistics of one head, causal if there is a query for each key.
fn one_head(keys: &[f32], queries: &[f32], options: &RequestedStatistics) -> Result<Statistics, Error> {
    let t_q = queries.len();
    let t_kv = keys.len();
    let rows = |data| Strided { data, strides: [0, 0, 1] };
    let end = |query: usize| if t_q == t_kv { query + 1 } else { t_kv };
    let call = AttentionCall {
        dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d: 1, d_v: 1 },
        q: rows(queries).into(),
        k: rows(keys).into(),
        v: rows(keys).into(),
        kv_scales: None,
        pages: None,
        keys: KeysOfQueries { ranges: &(0..t_q).map(|query| 0..end(query)).collect::<Vec<_>>(), ..Default::default() },
        scores: ScoreModifiers::default(),
        output_layout: OutputLayout::Bhtd,
    };
    let found = attend::<f32>(&call, InstructionSet::available()[0], with_statistics(options))?;
    Ok(found.statistics.expect("requested"))
}

#[test]
fn statistics_list_lower_keys_first_and_masked_keys_last() -> Result<(), Error> {
    let top = |top_keys| RequestedStatistics { top_keys, tile: None };
    let keys: Vec<f32> = (0..500).map(|key| if key % 100 == 3 { 2.0 } else { 1.0 }).collect();
    let equal = one_head(&keys, &[1.0], &top(8))?;
    assert_eq!(equal.top_keys, [3, 103, 203, 303, 403, 0, 1, 2]);

    let causal = one_head(&[1.0, 2.0, 3.0, 4.0], &[1.0; 4], &top(3))?;
    assert_eq!(causal.top_keys, [0, 1, 2, 1, 0, 2, 2, 1, 0, 3, 2, 1]);
    assert_eq!(causal.top_weights[1..3], [0.0; 2]);

    // A weight that rounds to zero counts as a masked key.
    let rounded = one_head(&[-500.0, 500.0, -400.0], &[1.0], &top(3))?;
    assert_eq!(rounded.top_keys, [1, 0, 2]);
    assert_eq!(rounded.top_weights, [1.0, 0.0, 0.0]);
    assert_eq!(rounded.entropy, [0.0]);
    assert_eq!(rounded.key_weight_sums, [0.0, 1.0, 0.0]);
    Ok(())
}

#[test]
fn statistics_outside_of_the_call_are_refused() {
    let tile = WeightTile { queries: 0..2, keys: 0..3 };
    let options = RequestedStatistics { top_keys: 1, tile: Some(tile.clone()) };
    let with_tile = |other| RequestedStatistics { tile: Some(other), ..options.clone() };
    let error = |requested| one_head(&[1.0; 3], &[1.0; 2], &requested).expect_err("not there").to_string();
    assert!(one_head(&[1.0; 3], &[1.0; 2], &options).is_ok());
    let later_queries = with_tile(WeightTile { queries: 1..3, ..tile.clone() });
    assert_eq!(error(later_queries), "expected queries within 0..2, found 1..3");
    let later_keys = with_tile(WeightTile { keys: 0..4, ..tile });
    assert_eq!(error(later_keys), "expected keys within 0..3, found 0..4");
    let found = error(RequestedStatistics { top_keys: 33, ..options.clone() });
    assert_eq!(found, "expected at most 32 top keys, found 33");
}

#[test]
fn statistics_are_equal_for_any_number_of_threads() {
    let case = Case::new(dims(2, 700, 700, 8, 4), true, false);
    let data = case.data::<f32>();
    let options = RequestedStatistics { top_keys: 4, tile: None };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| {
            let found = attend::<f32>(&case.call(&data), InstructionSet::available()[0], with_statistics(&options));
            let found = found.expect("a few rows");
            (found.output, found.statistics)
        })
    };
    assert_eq!(run(1), run(3));
}

/// Checks that neither the other heads of a group nor columns without a query change.
#[test]
fn statistics_of_nan_reach_only_its_query() {
    let q = [1.0, f32::NAN];
    let k = [0.5, 1.0, 0.25];
    let v = [1.0, 2.0, 3.0];
    for instruction_set in InstructionSet::available() {
        let call = AttentionCall {
            dims: AttentionDims { b: 1, h: 2, h_kv: 1, t_q: 1, t_kv: 3, d: 1, d_v: 1 },
            q: Strided { data: &q, strides: [2, 1, 1] }.into(),
            k: Strided { data: &k, strides: [3, 3, 1] }.into(),
            v: Strided { data: &v, strides: [3, 3, 1] }.into(),
            kv_scales: None,
            pages: None,
            keys: KeysOfQueries { ranges: &[0..3], ..Default::default() },
            scores: ScoreModifiers::default(),
            output_layout: OutputLayout::Bhtd,
        };
        let options = RequestedStatistics { top_keys: 2, tile: None };
        let results = attend::<f32>(&call, instruction_set, with_statistics(&options)).expect("three keys");
        let found = results.statistics.expect("requested");
        assert!(
            found.key_weight_sums[..3].iter().all(|sum| sum.is_finite()),
            "{instruction_set}: {:?}",
            found.key_weight_sums
        );
        assert!(
            found.key_weight_sums[3..].iter().all(|sum| sum.is_nan()),
            "{instruction_set}: {:?}",
            found.key_weight_sums
        );
        assert_eq!(found.top_keys, [1, 0, 0, 1]);
        assert!(
            found.top_weights[2..].iter().all(|weight| weight.is_nan()),
            "{instruction_set}: {:?}",
            found.top_weights
        );
        // An infinite key, and lanes without a query.
        let infinite_keys = Strided { data: &[f32::NEG_INFINITY, 1.0, 0.25], strides: [3, 3, 1] };
        let dims = AttentionDims { h: 1, ..call.dims };
        let infinite_call = AttentionCall { dims, k: infinite_keys.into(), ..call };
        let infinite = attend::<f32>(&infinite_call, instruction_set, with_statistics(&options)).expect("three keys");
        let infinite_statistics = infinite.statistics.expect("requested");
        assert_eq!(infinite_statistics.key_weight_sums[0], 0.0, "{instruction_set}");
    }
}

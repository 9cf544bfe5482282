//! Statistics of weights: on every path against the oracle's weights, and in layers against the weights of the same
//! call.

use crate::layer_kind::LayerKind;
use crate::seeded;
use crate::*;

crate::on_each_device!(statistics_of_random_calls_match_oracle);

/// Returns the requested statistics of a call, by its seed.
fn wanted(recipe: &Recipe) -> StatisticsOptions {
    let Dims { t_q, t_kv, .. } = recipe.dims;
    let seed = recipe.seed as usize;
    let options = StatisticsOptions::default().with_top_keys(seed % 33);
    match seed % 3 {
        0 => options,
        n => options.with_weights_of(t_q / (n + 1)..t_q, 0..t_kv.div_ceil(n)),
    }
}

fn observe(
    Call { q, k, v, mask, options }: &Call,
    wanted: &StatisticsOptions,
) -> Result<(Tensor, AttentionStatistics)> {
    scaled_dot_product_attention_with_statistics(q, k, v, mask, options, wanted)
}

fn check(recipe: &Recipe, case: &Case, path: Path, device: &Device) -> Result<()> {
    let (context, found) = observe(&Call::new(case, recipe.dtype, device)?.by(path), &wanted(recipe))?;
    let expected = Expected::new(case, recipe.dtype).on(path);
    expected.context(&context)?;
    statistics(&expected, recipe, &found)
}

/// Compares each statistic with a tolerance that follows from the errors of its weights.
fn statistics(expected: &Expected, recipe: &Recipe, found: &AttentionStatistics) -> Result<()> {
    let Dims { b, h, t_q, t_kv, .. } = recipe.dims;
    let wanted = wanted(recipe);
    let float = wide(recipe.dtype);
    let rows = b * h * t_q;
    let weights = &expected.attended.weights;
    let bound = |at: usize| weights[at] * expected.share_bound(at / t_kv) + 1e-37;
    let of_row = |row: usize| row * t_kv..(row + 1) * t_kv;
    let logarithms = |row| of_row(row).filter(|at| weights[*at] > 0.0).map(|at| (at, weights[at].ln()));
    let entropy: Vec<f64> = (0..rows).map(|row| logarithms(row).map(|(at, ln)| -weights[at] * ln).sum()).collect();
    compare("entropies", &found.entropy, (&[b, h, t_q], float), &entropy, |row| {
        let most: f64 = logarithms(row).map(|(at, ln)| bound(at) * (2.0 + 2.0 * ln.abs())).sum();
        most + 1e-6 * expected.share_bound(row)
    })?;
    let of_key = |key: usize| (0..t_q).map(move |i| (key / t_kv * t_q + i) * t_kv + key % t_kv);
    let sums: Vec<f64> = (0..b * h * t_kv).map(|key| of_key(key).map(|at| weights[at]).sum()).collect();
    compare("sums", &found.key_weight_sums, (&[b, h, t_kv], float), &sums, |key| {
        of_key(key).map(|at| bound(at) + t_q as f64 * weights[at] * f64::from(f32::EPSILON)).sum()
    })?;
    // The weights at these places.
    let are = |what: &str, got: &Tensor, shape: &[usize], places: Vec<usize>| {
        let exact: Vec<_> = places.iter().map(|&at| weights[at]).collect();
        compare(what, got, (shape, float), &exact, |n| bound(places[n]))
    };
    let k = wanted.top_keys().min(t_kv);
    let shape = [b, h, t_q, k];
    let mut sorted = vec![];
    let mut of_keys = vec![];
    if (found.top_keys.dims(), found.top_keys.dtype()) != (&shape[..], DType::U32) {
        bail!("{:?}, expected {shape:?} in U32", found.top_keys);
    }
    for (row, keys) in values(&found.top_keys).chunks(k.max(1)).enumerate() {
        let mut order: Vec<usize> = of_row(row).collect();
        order.sort_by(|one, other| weights[*other].total_cmp(&weights[*one]));
        sorted.extend_from_slice(&order[..k]);
        of_keys.extend(keys.iter().map(|&key| row * t_kv + key as usize));
        if let Some(n) = (0..k).find(|&n| keys[..n].contains(&keys[n])) {
            bail!("a key comes twice in {keys:?}: {}", keys[n]);
        }
    }
    are("top weights", &found.top_weights, &shape, sorted)?;
    are("the weights of top keys", &found.top_weights, &shape, of_keys)?;
    let n = recipe.seed as usize % 3;
    let Some(window) = &found.weights else {
        return if n == 0 { Ok(()) } else { bail!("weights were requested") };
    };
    let first = t_q / (n + 1);
    let columns = t_kv.div_ceil(n);
    let places = (0..rows).filter(|row| row % t_q >= first).flat_map(|row| row * t_kv..row * t_kv + columns);
    are("weights", window, &[b, h, t_q - first, columns], places.collect())
}

fn statistics_of_random_calls_match_oracle(device: &Device) {
    let check_path = |recipe: &Recipe, small: bool| {
        let case = recipe.case();
        let paths = Path::of(&case, recipe.dtype, device);
        // The reference path for small calls, and another instruction set each time.
        let other = paths[recipe.seed as usize % paths.len()];
        let paths = if small { vec![Path::REFERENCE, other] } else { vec![*paths.last().unwrap_or(&other)] };
        paths.into_iter().try_for_each(|path| {
            check(recipe, &case, path, device).map_err(|difference| difference.context(format!("{path:?}")))
        })
    };
    for_all(1_500, recipes(dtypes(device)), |recipe| check_path(&recipe, true));
    for_all(150, kernel_recipes(), |recipe| check_path(&recipe, false));
}

/// Checks statistics against the weights (B, H, T_q, T_kv), by the definition of the reference path.
pub fn assert_of(found: &AttentionStatistics, weights: &Tensor, tolerance: f64, what: &str) -> Result<()> {
    // Metal has no f64.
    let weights = weights.to_device(&CPU)?.to_dtype(DType::F64)?;
    let k = found.top_keys.dim(candle_core::D::Minus1)?;
    let own = weights.contiguous()?.gather(&found.top_keys.to_device(&CPU)?, weights.rank() - 1)?;
    assert_close(&found.top_weights, &own, tolerance, what);
    let (sorted, _) = weights.contiguous()?.sort_last_dim(false)?;
    assert_close(&found.top_weights, &sorted.narrow(weights.rank() - 1, 0, k)?, tolerance, what);
    assert_close(&found.key_weight_sums, &weights.sum(weights.rank() - 2)?, 10.0 * tolerance, what);
    let terms = (weights.clone() * (weights + 1e-300)?.log()?)?;
    assert_close(&found.entropy, &terms.sum(terms.rank() - 1)?.neg()?, 20.0 * tolerance, what);
    Ok(())
}

#[test]
fn statistics_of_packed_sequences_match_separate_calls() -> Result<()> {
    let lens_q = [5, 0, 1, 70];
    let lens_kv = [9, 2, 1, 70];
    let sequences = PackedSequences::from_lens(&lens_q, &lens_kv)?;
    let total_q = sequences.total_queries();
    let total_kv = sequences.total_keys();
    let q = random(&[total_q, 4, 8])?;
    let k = random(&[total_kv, 2, 8])?;
    let v = random(&[total_kv, 2, 6])?;
    let mask = AttentionMask::causal();
    let wanted = StatisticsOptions::default().with_weights_of(0..total_q, 0..total_kv);
    for backend in [Backend::Fused, Backend::Reference] {
        let options = SdpaOptions::default().with_backend(backend);
        let varlen = scaled_dot_product_attention_varlen_with_statistics;
        let (context, found) = varlen(&q, &k, &v, &sequences, &mask, &options, &wanted)?;
        assert_eq!(found.top_keys.dims(), [4, total_q, 8]);
        let all = found.weights.clone().expect("requested");
        assert_of(&found, &all, 1e-6, "packed")?;
        for s in (0..sequences.len()).filter(|s| lens_q[*s] > 0) {
            let queries = sequences.queries(s);
            let keys = sequences.keys(s);
            let part = |xs: &Tensor, of: &std::ops::Range<usize>| xs.narrow(0, of.start, of.len())?.transpose(0, 1);
            let q = part(&q, &queries)?;
            let k = part(&k, &keys)?;
            let v = part(&v, &keys)?;
            let own = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &SdpaOptions::default())?;
            assert_close(&part(&context, &queries)?, &own.output, 1e-5, "context");
            assert_close(&all.i((.., queries, keys))?, &own.weights, 1e-6, "weights");
        }
        assert_close(&found.key_weight_sums.sum_all()?, &Tensor::new(4.0 * total_q as f64, &CPU)?, 1e-3, "all");
    }
    Ok(())
}

/// Checks layers with score modifiers that the tests of `layer` do not have, and layers with a cache.
#[test]
fn statistics_of_layers_match_their_weights() -> Result<()> {
    let cfg = Config::new(32, 4).with_causal(true).with_num_kv_heads(2).with_rope(RopeConfig::new(100.0));
    let content = ContentPositions::Clipped { left: 4, right: 2 };
    let plain = Config::new(32, 4);
    let of_content = Config::new(32, 4).with_content_positions(content);
    let config = AttentionCacheConfig::new;
    for (kind, cache) in [
        (LayerKind::MultiHead(plain.with_relative_bias(RelativeBiasConfig::new(true))), None),
        (LayerKind::MultiHead(of_content), None),
        (LayerKind::MultiHead(cfg.clone()), Some(config())),
        (LayerKind::MultiHead(cfg.clone()), Some(config().with_q8())),
        (LayerKind::MultiHead(cfg.with_window(4)), Some(config().with_window(4))),
        (LayerKind::Latent(LatentConfig::new(32, 4).with_causal(true)), Some(config())),
    ] {
        let layer = kind.of_parameters(&kind.parameters(3), DType::F32, &CPU)?;
        let mut caches =
            cache.iter().flat_map(|cache| [cache; 2]).map(AttentionCache::new).collect::<Result<Vec<_>>>()?;
        for t in [9, 1, 3, 1] {
            let xs = random(&[2, t, 32])?;
            let mut caches = caches.iter_mut();
            let mut input = || caches.next().into_iter().fold(AttentionInput::new(&xs), AttentionInput::with_cache);
            let (ys, found) = layer.run_with_statistics(input(), &StatisticsOptions::default().with_top_keys(3))?;
            let expected = layer.run_with_weights(input())?;
            assert_near(&ys, &expected.output, 1e-4, "beside statistics");
            assert_of(&found, &expected.weights, 1e-4, &format!("{kind:?}"))?;
        }
        assert!(caches.windows(2).all(|pair| pair[0].lens() == pair[1].lens()));
    }
    Ok(())
}

#[test]
fn statistics_of_packed_layer_match_separate_calls() -> Result<()> {
    let layer = seeded::layer(&Config::new(32, 4).with_causal(true), DType::F32, &CPU)?;
    let sequences = PackedSequences::from_lens(&[3, 8], &[3, 8])?;
    let xs = random(&[11, 32])?;
    let input = AttentionInput::new(&xs).with_packed(&sequences);
    let (_, found) = layer.forward_with_statistics(input, &StatisticsOptions::default())?;
    let (_, of_last) =
        layer.forward_with_statistics(&xs.narrow(0, 3, 8)?, &StatisticsOptions::default().with_top_keys(3))?;
    assert_close(&found.key_weight_sums.narrow(1, 3, 8)?, &of_last.key_weight_sums, 1e-5, "key_weight_sums");
    assert_close(&found.entropy.narrow(1, 3, 8)?, &of_last.entropy, 1e-5, "entropy");
    Ok(())
}

/// Checks that statistics are of the weights before dropout.
#[test]
fn dropout_changes_output_and_not_statistics() -> Result<()> {
    let q = random(&[1, 2, 20, 8])?;
    for backend in [Backend::Fused, Backend::Reference] {
        let call = Call::plain(&q, &q, &q, &AttentionMask::causal()).on(backend);
        let (plain, expected) = observe(&call, &StatisticsOptions::default())?;
        let dropping = call.with(|options| options.with_dropout(0.5, true));
        let (dropped, found) = observe(&dropping, &StatisticsOptions::default())?;
        assert_close(&found.key_weight_sums, &expected.key_weight_sums, 1e-6, "key_weight_sums");
        assert!(values(&(plain - dropped)?.abs()?.sum_all()?)[0] > 0.1);
    }
    Ok(())
}

#[test]
fn statistics_with_tracked_inputs_keep_gradients() -> Result<()> {
    let q = Var::from_tensor(&random(&[1, 2, 5, 8])?)?;
    let call = Call::plain(&q, &q, &q, &AttentionMask::causal());
    let (context, found) = observe(&call.on(Backend::Auto), &StatisticsOptions::default())?;
    assert!(context.sqr()?.sum_all()?.backward()?.get(&q).is_some());
    assert!(!found.key_weight_sums.track_op());
    let text = error_text(observe(&call, &StatisticsOptions::default()));
    assert!(text.contains("an input is tracked for gradients"), "{text}");
    Ok(())
}

#[test]
fn statistics_with_unsupported_options_are_rejected() -> Result<()> {
    let q = random(&[1, 2, 5, 8])?;
    let text = |wanted| error_text(observe(&Call::plain(&q, &q, &q, &AttentionMask::none()), &wanted));
    let op = "[scaled_dot_product_attention_with_statistics]";
    let default = StatisticsOptions::default;
    assert_eq!(text(default().with_top_keys(33)), format!("{op} top_keys is 33, expected at most 32"));
    let expected = "were requested, expected some of 5 queries and 5 keys";
    let expected = format!("{op} weights of queries 3..6 and keys 0..5 {expected}");
    assert_eq!(text(default().with_weights_of(3..6, 0..5)), expected);
    let layer: MultiHeadAttention = seeded::layer(&Config::new(32, 4), DType::F32, &CPU)?;
    let xs = random(&[1, 5, 32])?;
    let input = AttentionInput::new(&xs).with_function(&candle_attention::scaled_dot_product_attention);
    assert_eq!(
        error_text(layer.forward_with_statistics(input, &default())),
        "[attention_function] statistics were requested, which a caller's function does not return"
    );
    Ok(())
}

/// Checks that a NaN in a key makes the weights NaN of the queries that attend to it, and of no others.
#[test]
fn statistics_of_rows_of_nan_are_nan_on_every_path() -> Result<()> {
    let t = 5;
    let bad_key = 2;
    let q = random(&[1, 1, t, 8])?;
    let not_a_number = Tensor::full(f32::NAN, (1, 1, 1, 8), &CPU)?;
    let keys = [&q.narrow(2, 0, bad_key)?, &not_a_number, &q.narrow(2, bad_key + 1, t - bad_key - 1)?];
    let k = Tensor::cat(&keys, 2)?;
    let wanted = StatisticsOptions::default().with_top_keys(2).with_weights_of(0..t, 0..t);
    for mask in [AttentionMask::causal(), AttentionMask::causal().with_valid_lens(vec![4])] {
        for backend in [Backend::Fused, Backend::Reference] {
            let (context, found) = observe(&Call::plain(&q, &k, &q, &mask).on(backend), &wanted)?;
            let is_nan = |tensor: &Tensor| values(tensor).into_iter().map(f64::is_nan).collect::<Vec<_>>();
            let of_queries = [false, false, true, true, true];
            assert_eq!(is_nan(&context.narrow(3, 0, 1)?), of_queries, "{backend:?}: output");
            assert_eq!(is_nan(&found.entropy), of_queries, "{backend:?}: entropy");
            assert_eq!(is_nan(&found.top_weights.narrow(3, 0, 1)?), of_queries, "{backend:?}: top weights");
            assert_eq!(values(&found.top_keys.i((0, 0, bad_key..))?), [0., 1., 0., 1., 0., 1.], "{backend:?}");
            // The keys that every query of these attends to.
            assert_eq!(is_nan(&found.key_weight_sums)[..=bad_key], [true; 3], "{backend:?}: sums");
            let weights = found.weights.expect("requested").narrow(3, 0, bad_key + 1)?;
            assert_eq!(is_nan(&weights), of_queries.map(|flag| [flag; 3]).concat(), "{backend:?}: weights");
        }
    }
    Ok(())
}

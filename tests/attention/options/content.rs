//! Relative positions by content: what a layer makes of them, against the same numbers as a bias.

use std::sync::Arc;

use candle_attention::{
    AttentionInput, AttentionMask, Backend, ContentPositions, DisentangledConfig, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, ProjectionPlace, RelativeEmbeddings, SdpaOptions, Windows,
    scaled_dot_product_attention,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use super::{CPU, Tensors};
use crate::common::{assert_close, error_text, max_error, relative_error, values};

const HEADS: usize = 4;
const HEIGHT: usize = 3;
const WIDTH: usize = 5;

fn grid() -> Config {
    Config::new(24, HEADS).with_num_kv_heads(2).with_bias(true)
}

fn with_positions() -> Config {
    grid().with_content_positions(ContentPositions::Grid { height: HEIGHT, width: WIDTH })
}

/// Parameters that are not zero at first.
fn variables(cfg: &Config) -> Result<VarMap> {
    let variables = VarMap::new();
    MultiHeadAttention::new(cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    for var in variables.all_vars() {
        var.set(&Tensor::randn(0f32, 0.6, var.shape(), &CPU)?)?;
    }
    Ok(variables)
}

fn plain(variables: &VarMap, dtype: DType) -> Result<VarBuilder<'static>> {
    let data = variables.data().lock().expect("one thread");
    let cast = |(name, var): (&String, &Var)| Ok((name.clone(), var.as_detached_tensor().to_dtype(dtype)?));
    Ok(VarBuilder::from_tensors(data.iter().map(cast).collect::<Result<Tensors>>()?, dtype, &CPU))
}

/// Without what a layer refuses that has no use for it.
fn without_tables(variables: &VarMap) -> Result<VarBuilder<'static>> {
    let data = variables.data().lock().expect("one thread");
    let tables = ["rel", "pos_", "linear_pos", "distance_embedding", "logit_scale", "continuous"];
    let own = data.iter().filter(|(name, _)| !tables.iter().any(|table| name.starts_with(table)));
    Ok(VarBuilder::from_tensors(
        own.map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect(),
        DType::F32,
        &CPU,
    ))
}

/// `q · rel_pos_h[i - j] + q · rel_pos_w[i - j]` of all pairs of tokens, (B, H, T, T).
fn grid_bias(q: &Tensor, variables: &VarMap) -> Result<Tensor> {
    let data = variables.data().lock().expect("one thread");
    let t = HEIGHT * WIDTH;
    let of = |name: &str, place: fn(usize) -> usize, size: usize| -> Result<Tensor> {
        let distances = (0..t).flat_map(|i| (0..t).map(move |j| (place(i) + size - 1 - place(j)) as u32));
        let rows = data[name].index_select(&Tensor::from_iter(distances, &CPU)?, 0)?.reshape((t, t, ()))?;
        q.unsqueeze(3)?.broadcast_mul(&rows)?.sum(4)
    };
    of("rel_pos_h", |i| i / WIDTH, HEIGHT)? + of("rel_pos_w", |i| i % WIDTH, WIDTH)?
}

/// A layer without positions, whose scores get them as a bias.
fn by_bias(
    variables: &VarMap,
    xs: &Tensor,
    mask: &AttentionMask,
    bias: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    by_bias_of(&grid(), variables, xs, mask, bias)
}

fn by_bias_of(
    cfg: &Config,
    variables: &VarMap,
    xs: &Tensor,
    mask: &AttentionMask,
    bias: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let layer = MultiHeadAttention::new(cfg, without_tables(variables)?)?;
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
        scaled_dot_product_attention(q, k, v, &mask.clone().with_bias(&bias(q, k)?), options)
    };
    layer.forward_with(AttentionInput::new(xs).with_mask(mask).with_function(&attend))
}

#[test]
fn a_grid_gives_the_numbers_of_its_bias() -> Result<()> {
    let variables = variables(&with_positions())?;
    for b in [1, 3] {
        let xs = Tensor::randn(0f32, 1.0, (b, HEIGHT * WIDTH, 24), &CPU)?;
        let mask = AttentionMask::none().with_valid_lens(vec![11; b]);
        let expected = by_bias(&variables, &xs, &mask, |q, _| grid_bias(q, &variables))?;
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-5), (DType::BF16, 0.06), (DType::F16, 0.008)] {
            let layer = MultiHeadAttention::new(&with_positions(), plain(&variables, dtype)?)?;
            let backends =
                if dtype == DType::F64 { vec![Backend::Auto] } else { vec![Backend::Fused, Backend::Reference] };
            for backend in backends {
                let xs = xs.to_dtype(dtype)?;
                let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(backend);
                let ys = layer.forward_with(input)?.to_dtype(DType::F32)?;
                let error = relative_error(&ys, &expected);
                assert!(error < tolerance, "{dtype:?}, {backend:?}, {b} images: off by {error:e}");
            }
        }
    }
    Ok(())
}

/// To a part of the largest: that of a key's bias, which moves all scores of a query alike, is zero but for rounding.
#[track_caller]
fn assert_same_gradients(variables: &VarMap, found: &GradStore, expected: &GradStore) {
    let data = variables.data().lock().expect("one thread");
    let pairs = data.iter().map(|(name, var)| {
        let of = |gradients: &GradStore| gradients.get(var).cloned().expect("a gradient");
        (name, of(found), of(expected))
    });
    let pairs: Vec<_> = pairs.collect();
    let largest = pairs.iter().flat_map(|(.., expected)| values(expected)).fold(0f64, |most, x| most.max(x.abs()));
    for (name, found, expected) in pairs {
        let error = max_error(&found, &expected) / largest;
        assert!(error < 1e-5, "{name}: off by {error:e}");
    }
}

#[test]
fn tables_of_a_grid_get_the_gradients_of_its_bias() -> Result<()> {
    let variables = variables(&with_positions())?;
    let xs = Tensor::randn(0f32, 1.0, (2, HEIGHT * WIDTH, 24), &CPU)?;
    let weights = Tensor::randn(0f32, 1.0, xs.shape(), &CPU)?;
    let none = AttentionMask::none();
    let expected =
        by_bias(&variables, &xs, &none, |q, _| grid_bias(q, &variables))?.mul(&weights)?.sum_all()?.backward()?;
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &CPU);
    let layer = MultiHeadAttention::new(&with_positions(), vb)?;
    let found = layer.forward(&xs)?.mul(&weights)?.sum_all()?.backward()?;
    assert_same_gradients(&variables, &found, &expected);
    // And a frozen layer keeps them.
    assert_close(&layer.freeze()?.forward(&xs)?, &layer.forward(&xs)?, 1e-5, "frozen");
    Ok(())
}

#[test]
fn a_layer_saves_and_wants_its_tables() -> Result<()> {
    let variables = variables(&with_positions())?;
    let layer = MultiHeadAttention::new(&with_positions(), plain(&variables, DType::F32)?)?;
    let saved: Tensors = layer.state_dict(candle_attention::WeightLayout::Canonical)?.into_iter().collect();
    assert_eq!(saved["rel_pos_w"].dims(), [2 * WIDTH - 1, 6]);
    let again = MultiHeadAttention::new(&with_positions(), VarBuilder::from_tensors(saved, DType::F32, &CPU))?;
    let xs = Tensor::randn(0f32, 1.0, (2, HEIGHT * WIDTH, 24), &CPU)?;
    assert_eq!(values(&again.forward(&xs)?), values(&layer.forward(&xs)?));
    let refused = error_text(MultiHeadAttention::new(&grid(), plain(&variables, DType::F32)?));
    assert!(refused.contains("rel_pos_h is in the file"), "{refused}");
    let layer = |xs: &Tensor| layer.forward(xs);
    let wrong = error_text(layer(&xs.narrow(1, 0, 14)?));
    assert!(wrong.contains("queries have 14 tokens, expected the 3 × 5 of the grid"), "{wrong}");
    Ok(())
}

/// Windows by their definition, shifted and padded, and masks that keep apart what the shift put side by side.
#[test]
fn windows_are_parts_of_an_image_and_come_together_again() -> Result<()> {
    for (image, window, shift) in [([4, 6], 2, 0), ([4, 6], 2, 1), ([5, 7], 3, 0), ([5, 7], 3, 2), ([2, 2], 3, 1)] {
        let [height, width] = image;
        let windows = Windows::new(image, window)?.with_shift(shift)?;
        let xs = Tensor::arange(1f32, (2 * height * width) as f32 + 1.0, &CPU)?.reshape((2, height * width, 1))?;
        let parts = windows.partition(&xs)?;
        let [down, across] = image.map(|size| size.div_ceil(window));
        assert_eq!((windows.count(), parts.dims()), (down * across, &[2 * down * across, window * window, 1][..]));
        let keep = windows.mask(2, &CPU)?.to_additive(
            (2 * down * across, 1, window * window, window * window),
            DType::F32,
            &CPU,
        )?;
        let (keep, found) =
            (keep.broadcast_as((2 * down * across, 1, window * window, window * window))?, values(&parts));
        let keep = values(&keep.contiguous()?);
        let moved =
            |place: usize, by: usize, count: usize| ((place + by) % (count * window), place + by >= count * window);
        for (n, &value) in found.iter().enumerate() {
            let (w, token) = (n / (window * window), n % (window * window));
            let place = |token: usize| {
                let at = w % (down * across);
                let row = moved(at / across * window + token / window, shift, down);
                (row, moved(at % across * window + token % window, shift, across))
            };
            let ((row, below), (column, behind)) = place(token);
            let inside = row < height && column < width;
            let expected =
                if inside { (w / (down * across) * height * width + row * width + column + 1) as f64 } else { 0.0 };
            assert_eq!(value, expected, "{image:?}, {window}, {shift}: entry {n}");
            for key in 0..window * window {
                let ((_, key_below), (_, key_behind)) = place(key);
                let is_seen = (below, behind) == (key_below, key_behind);
                assert_eq!(
                    keep[n * window * window + key] == 0.0,
                    is_seen,
                    "{image:?}, {window}, {shift}: {n} and {key}"
                );
            }
        }
        assert_eq!(values(&windows.join(&parts)?), values(&xs));
    }
    Ok(())
}

/// Every kind of terms by distance, in layers of grouped heads where they may be.
fn kinds() -> Vec<Config> {
    let plain = || Config::new(24, HEADS).with_bias(true);
    let disentangled = |positions: DisentangledConfig| {
        let scale = 1.0 / ((6 * positions.num_terms()) as f64).sqrt();
        plain().with_scale(scale).with_content_positions(ContentPositions::Disentangled(positions))
    };
    let buckets = || DisentangledConfig::new(9).with_num_buckets(6);
    vec![
        grid().with_content_positions(ContentPositions::TransformerXl),
        grid().with_content_positions(ContentPositions::Clipped { left: 4, right: 2 }),
        disentangled(DisentangledConfig::new(8)),
        disentangled(buckets().with_terms(true, false)),
        disentangled(buckets().with_terms(false, true).with_layer_norm(1e-5)),
        disentangled(buckets().with_shared_projections(true).with_layer_norm(1e-5)),
    ]
}

fn with_terms(cfg: &Config, vb: VarBuilder) -> Result<MultiHeadAttention> {
    let layer = MultiHeadAttention::new(cfg, vb.clone())?;
    match cfg.content_positions() {
        Some(ContentPositions::Disentangled(positions)) => {
            layer.with_relative_embeddings(RelativeEmbeddings::new(positions, 24, vb)?)
        }
        _ => Ok(layer),
    }
}

fn variables_of(cfg: &Config) -> Result<VarMap> {
    let variables = VarMap::new();
    with_terms(cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    for var in variables.all_vars() {
        var.set(&Tensor::randn(0f32, 0.4, var.shape(), &CPU)?)?;
    }
    Ok(variables)
}

/// DeBERTa's 6 buckets for distances below 9, of which 3 are for one each: 3 + ceil(ln(d / 3) / ln(8 / 3) · 2) from 4
/// on.
fn bucket(distance: i64) -> i64 {
    let far = [0, 1, 2, 3, 4, 5, 5, 5, 5];
    let of = |distance: usize| far.get(distance).copied().unwrap_or(6);
    distance.signum() * of(distance.unsigned_abs() as usize)
}

/// The terms of each pair of tokens by their definitions, (B, H, T, T), without the scale.
fn terms(cfg: &Config, variables: &VarMap, q: &Tensor, k: &Tensor) -> Result<Tensor> {
    let data = variables.data().lock().expect("one thread");
    let get = |name: &str| data[name].as_tensor().clone();
    let (_, h, t, d) = q.dims4()?;
    let distances = || (0..t as i64).flat_map(move |i| (0..t as i64).map(move |j| i - j));
    // (H or 1, N, D) by pairs, as (H or 1, T, T, D).
    let by_pairs = |rows: &Tensor, index: &dyn Fn(i64) -> i64| -> Result<Tensor> {
        let indices = Tensor::from_iter(distances().map(|distance| index(distance) as u32), &CPU)?;
        rows.contiguous()?.index_select(&indices, 1)?.reshape((rows.dim(0)?, t, t, d))
    };
    let of_queries = |q: &Tensor, rows: &Tensor| q.unsqueeze(3)?.broadcast_mul(rows)?.sum(4);
    let of_keys = |rows: &Tensor| k.unsqueeze(2)?.broadcast_mul(rows)?.sum(4);
    let by_heads = |rows: Tensor| rows.reshape(((), h, d))?.transpose(0, 1);
    match cfg.content_positions().expect("terms") {
        ContentPositions::TransformerXl => {
            let first = -(t as i64);
            let waves = (first..t as i64).flat_map(|distance| {
                (0..24).map(move |n| {
                    let angle = distance as f64 / 10_000f64.powf((n / 2 * 2) as f64 / 24.0);
                    (if n % 2 == 0 { angle.sin() } else { angle.cos() }) as f32
                })
            });
            let rows = Tensor::from_iter(waves, &CPU)?.reshape((2 * t, 24))?.matmul(&get("linear_pos.weight").t()?)?;
            let rows = by_pairs(&by_heads(rows)?, &|distance| distance - first)?;
            let [u, v] = ["pos_bias_u", "pos_bias_v"].map(|name| get(name).unsqueeze(1));
            let group = h / k.dim(1)?;
            let k = k.unsqueeze(2)?.broadcast_as((k.dim(0)?, h / group, group, t, d))?.reshape(q.shape())?;
            let of_u = u?.broadcast_mul(&k)?.sum(3)?.unsqueeze(2)?;
            of_queries(&q.broadcast_add(&v?)?, &rows)?.broadcast_add(&of_u)
        }
        &ContentPositions::Clipped { left, right } => {
            let clipped = |distance: i64| left as i64 - distance.clamp(-(right as i64), left as i64);
            of_queries(q, &by_pairs(&get("distance_embedding.weight").unsqueeze(0)?, &clipped)?)
        }
        ContentPositions::Disentangled(positions) => {
            let (span, is_shared) = (
                positions.span() as i64,
                data.get("pos_key_proj.weight").is_none() && data.get("pos_query_proj.weight").is_none(),
            );
            let mut embeddings = get("rel_embeddings.weight");
            if data.contains_key("LayerNorm.weight") {
                let centred = embeddings.broadcast_sub(&embeddings.mean_keepdim(1)?)?;
                let deviation = (centred.sqr()?.mean_keepdim(1)? + 1e-5)?.sqrt()?;
                let normed = centred.broadcast_div(&deviation)?.broadcast_mul(&get("LayerNorm.weight"))?;
                embeddings = normed.broadcast_add(&get("LayerNorm.bias"))?;
            }
            let index = |distance: i64| {
                let place = if span == 6 { bucket(distance) } else { distance };
                (place + span).clamp(0, 2 * span - 1)
            };
            let rows = |own: &str, shared: &str| -> Result<Option<Tensor>> {
                let name = if is_shared { shared } else { own };
                if !data.contains_key(&format!("{name}.weight")) {
                    return Ok(None);
                }
                let rows = embeddings.matmul(&get(&format!("{name}.weight")).t()?)?;
                by_pairs(&by_heads(rows.broadcast_add(&get(&format!("{name}.bias")))?)?, &index).map(Some)
            };
            let [of_keys_, of_queries_] = [rows("pos_key_proj", "k_proj")?, rows("pos_query_proj", "q_proj")?];
            let zeros = Tensor::zeros((q.dim(0)?, h, t, t), DType::F32, &CPU)?;
            let by_queries = of_keys_.map_or(Ok(zeros.clone()), |rows| of_queries(q, &rows))?;
            by_queries + of_queries_.map_or(Ok(zeros), |rows| of_keys(&rows))?
        }
        other => panic!("{other:?}"),
    }
}

/// What a layer of the same projections gives, whose scores get the terms as a bias.
fn expected_of(cfg: &Config, variables: &VarMap, xs: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
    let scale = cfg.scale().unwrap_or(1.0 / 6f64.sqrt());
    let kv_heads = cfg.num_kv_heads();
    let plain = Config::new(24, HEADS).with_bias(true).with_num_kv_heads(kv_heads).with_scale(scale);
    by_bias_of(&plain, variables, xs, mask, |q, k| terms(cfg, variables, q, k)? * scale)
}

#[test]
fn terms_by_distance_give_the_numbers_of_their_bias() -> Result<()> {
    for cfg in kinds() {
        let variables = variables_of(&cfg)?;
        let xs = Tensor::randn(0f32, 1.0, (2, 17, 24), &CPU)?;
        let keep = Tensor::rand(0f32, 1.0, (2, HEADS, 17, 17), &CPU)?.ge(0.2)?;
        let masks = [
            AttentionMask::none(),
            AttentionMask::causal().with_valid_lens(vec![17, 9]),
            AttentionMask::none().with_keep(&keep).with_bias(&Tensor::randn(0f32, 1.0, (HEADS, 17, 17), &CPU)?),
        ];
        for mask in masks {
            let expected = expected_of(&cfg, &variables, &xs, &mask)?;
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-5), (DType::BF16, 0.06), (DType::F16, 0.008)]
            {
                let layer = with_terms(&cfg, plain(&variables, dtype)?)?;
                let backends =
                    if dtype == DType::F64 { vec![Backend::Auto] } else { vec![Backend::Fused, Backend::Reference] };
                let xs = xs.to_dtype(dtype)?;
                let input = || AttentionInput::new(&xs).with_mask(&mask);
                for backend in backends {
                    let ys = layer.forward_with(input().with_backend(backend))?.to_dtype(DType::F32)?;
                    let error = relative_error(&ys, &expected);
                    assert!(error < tolerance, "{cfg:?}, {dtype:?}, {backend:?}: off by {error:e}");
                }
                let output = layer.forward_with_weights(input())?;
                assert_eq!(output.weights.dims(), [2, HEADS, 17, 17]);
                let error = relative_error(&output.output.to_dtype(DType::F32)?, &expected);
                assert!(error < tolerance, "{cfg:?}, {dtype:?} with weights: off by {error:e}");
            }
        }
    }
    Ok(())
}

#[test]
fn parameters_of_terms_get_the_gradients_of_their_bias() -> Result<()> {
    for cfg in kinds() {
        let variables = variables_of(&cfg)?;
        let xs = Tensor::randn(0f32, 1.0, (2, 13, 24), &CPU)?;
        let weights = Tensor::randn(0f32, 1.0, xs.shape(), &CPU)?;
        let loss = |ys: Tensor| ys.mul(&weights)?.sum_all()?.backward();
        let expected = loss(expected_of(&cfg, &variables, &xs, &AttentionMask::none())?)?;
        let layer = with_terms(&cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
        assert_same_gradients(&variables, &loss(layer.forward(&xs)?)?, &expected);
        // A step later, the layer has what its variables hold then, and a frozen one what they held.
        let (frozen, before) = (layer.freeze()?, layer.forward(&xs)?);
        for var in variables.all_vars() {
            var.set(&(var.as_tensor() * 1.5)?)?;
        }
        let expected = expected_of(&cfg, &variables, &xs, &AttentionMask::none())?;
        assert!(relative_error(&layer.forward(&xs)?, &expected) < 1e-5, "{cfg:?}");
        assert!(relative_error(&frozen.forward(&xs)?, &before) < 1e-5, "{cfg:?} frozen");
    }
    Ok(())
}

/// So many tokens that each head has a bias of its own, and one call after the other of another length.
#[test]
fn heads_that_are_attended_to_one_by_one_give_the_numbers_of_all() -> Result<()> {
    let cfg = grid().with_content_positions(ContentPositions::TransformerXl).with_sinks(true);
    let layer = with_terms(&cfg, plain(&variables_of(&cfg)?, DType::F32)?)?;
    for (b, t) in [(2, 1030), (1, 5), (3, 7)] {
        let xs = Tensor::randn(0f32, 1.0, (b, t, 24), &CPU)?;
        let mask = AttentionMask::none().with_bias(&Tensor::randn(0f32, 1.0, (HEADS, 1, t), &CPU)?);
        let input = || AttentionInput::new(&xs).with_mask(&mask);
        let expected = layer.forward_with_weights(input())?.output;
        assert_eq!(layer.plan(&input())?.backend, Backend::Fused);
        let error = relative_error(&layer.forward_with(input())?, &expected);
        assert!(error < 1e-5, "{b} sequences of {t}: off by {error:e}");
    }
    Ok(())
}

#[test]
fn a_layer_saves_the_parameters_of_its_terms() -> Result<()> {
    for cfg in kinds() {
        let variables = variables_of(&cfg)?;
        let layer = with_terms(&cfg, plain(&variables, DType::F32)?)?;
        let mut saved: Tensors = layer.state_dict(candle_attention::WeightLayout::Canonical)?.into_iter().collect();
        let stack = variables.data().lock().expect("one thread");
        let of_stack =
            stack.iter().filter(|(name, _)| name.starts_with("rel_embeddings") || name.starts_with("LayerNorm"));
        saved.extend(of_stack.map(|(name, var)| (name.clone(), var.as_tensor().detach())));
        let again = with_terms(&cfg, VarBuilder::from_tensors(saved, DType::F32, &CPU))?;
        let xs = Tensor::randn(0f32, 1.0, (2, 6, 24), &CPU)?;
        assert_eq!(values(&again.forward(&xs)?), values(&layer.forward(&xs)?), "{cfg:?}");
    }
    Ok(())
}

/// Where the layer's projections are those of distances too, a clone with an adapter has vectors of its own, and an
/// adapter that changes has new ones.
#[test]
fn vectors_of_distances_follow_the_modules_of_a_clone() -> Result<()> {
    let cfg = kinds().pop().expect("shared projections");
    let variables = variables_of(&cfg)?;
    let frozen = || with_terms(&cfg, plain(&variables, DType::F32)?);
    let (xs, weights) = (Tensor::randn(0f32, 1.0, (2, 7, 24), &CPU)?, Tensor::randn(0f32, 1.0, (2, 7, 24), &CPU)?);
    for place in [ProjectionPlace::Query, ProjectionPlace::Key] {
        for is_trained in [false, true] {
            let adapter = Var::randn(0f32, 0.3, (24, 24), &CPU)?;
            let adapted = |layer: MultiHeadAttention| {
                let own = if is_trained { adapter.as_tensor().clone() } else { adapter.as_detached_tensor() };
                layer.map_projection(place, |module| {
                    Ok(Arc::new(move |xs: &Tensor| module.forward(xs)? + xs.broadcast_matmul(&own)?))
                })
            };
            let layer = frozen()?;
            let before = layer.forward(&xs)?;
            let clone = adapted(layer.clone())?;
            for step in 0..2 {
                let (found, expected) = (clone.forward(&xs)?, adapted(frozen()?)?.forward(&xs)?);
                assert_close(&found, &expected, 0.0, &format!("{place}, trained: {is_trained}, step {step}"));
                let gradient = |ys: &Tensor| -> Result<Option<Tensor>> {
                    Ok(ys.mul(&weights)?.sum_all()?.backward()?.get(&adapter).cloned())
                };
                match (gradient(&found)?, gradient(&expected)?) {
                    (Some(found), Some(expected)) if is_trained => assert_close(&found, &expected, 1e-5, "gradient"),
                    (None, None) if !is_trained => {}
                    other => panic!("{other:?}"),
                }
                adapter.set(&(adapter.as_detached_tensor() * -2.0)?)?;
            }
            assert_close(&layer.forward(&xs)?, &before, 0.0, "the layer itself");
        }
    }
    Ok(())
}

/// Swin's table, and Swin v2's cosine scores and network, in layers of grouped heads.
fn windows() -> Vec<Config> {
    let cosine = |trained| ContentPositions::CosineWindow { height: HEIGHT, width: WIDTH, trained };
    [ContentPositions::Window { height: HEIGHT, width: WIDTH }, cosine(None), cosine(Some([6, 4]))]
        .map(|positions| grid().with_content_positions(positions))
        .to_vec()
}

/// The bias of all pairs of tokens of a window by its definition, (1, H, T, T), and what makes products scores.
fn window_bias(cfg: &Config, variables: &VarMap, q: &Tensor, k: &Tensor) -> Result<Tensor> {
    let data = variables.data().lock().expect("one thread");
    let (b, h, t, d) = q.dims4()?;
    let pairs = || (0..t).flat_map(move |i| (0..t).map(move |j| [i, j].map(|n| [n / WIDTH, n % WIDTH])));
    let by_heads = |pairs: Tensor| pairs.t()?.reshape((1, h, t, t));
    let &ContentPositions::CosineWindow { trained, .. } = cfg.content_positions().expect("a window") else {
        let place = |[[y, x], [key_y, key_x]]: [[usize; 2]; 2]| {
            (((y + HEIGHT - 1) - key_y) * (2 * WIDTH - 1) + (x + WIDTH - 1) - key_x) as u32
        };
        let places = Tensor::from_iter(pairs().map(place), &CPU)?;
        return by_heads(data["relative_position_bias_table"].index_select(&places, 0)?);
    };
    let [down, across] = trained.unwrap_or([HEIGHT, WIDTH]).map(|size| (size - 1) as f64);
    let log = |x: f64| ((8.0 * x).abs() + 1.0).log2() / 8f64.log2() * if x < 0.0 { -1.0 } else { 1.0 };
    let coordinates = pairs().flat_map(|[[y, x], [key_y, key_x]]| {
        [log((y as f64 - key_y as f64) / down) as f32, log((x as f64 - key_x as f64) / across) as f32]
    });
    let network = |name: &str| data[&format!("continuous_position_bias_mlp.{name}")].as_tensor().clone();
    let xs = Tensor::from_iter(coordinates, &CPU)?.reshape((t * t, 2))?;
    let xs = xs.matmul(&network("0.weight").t()?)?.broadcast_add(&network("0.bias"))?.relu()?;
    let bias = (candle_nn::ops::sigmoid(&xs.matmul(&network("2.weight").t()?)?)? * 16.0)?;
    let group = h / k.dim(1)?;
    let k = k.unsqueeze(2)?.broadcast_as((b, h / group, group, t, d))?.reshape(q.shape())?;
    let length = |xs: &Tensor| xs.sqr()?.sum_keepdim(3)?.sqrt();
    let products = q.contiguous()?.matmul(&k.t()?)?;
    let cosines = products.broadcast_div(&length(q)?)?.broadcast_div(&length(&k)?.t()?)?;
    let scores = cosines.broadcast_mul(&data["logit_scale"].exp()?)?;
    (scores - (products / (d as f64).sqrt())?)?.broadcast_add(&by_heads(bias)?)
}

#[test]
fn windows_give_the_numbers_of_their_bias() -> Result<()> {
    for cfg in windows() {
        let variables = variables_of(&cfg)?;
        for b in [1, 3] {
            let xs = Tensor::randn(0f32, 1.0, (b, HEIGHT * WIDTH, 24), &CPU)?;
            let mask = AttentionMask::none().with_valid_lens(vec![11; b]);
            let expected = by_bias(&variables, &xs, &mask, |q, k| window_bias(&cfg, &variables, q, k))?;
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-5), (DType::BF16, 0.06), (DType::F16, 0.008)]
            {
                let layer = MultiHeadAttention::new(&cfg, plain(&variables, dtype)?)?;
                let fused = [Backend::Fused, Backend::Reference];
                for backend in if dtype == DType::F64 { &[Backend::Auto][..] } else { &fused } {
                    let xs = xs.to_dtype(dtype)?;
                    let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(*backend);
                    let error = relative_error(&layer.forward_with(input)?.to_dtype(DType::F32)?, &expected);
                    assert!(error < tolerance, "{cfg:?}, {dtype:?}, {backend:?}, {b} windows: off by {error:e}");
                }
            }
        }
        let short = error_text(MultiHeadAttention::new(&cfg, plain(&variables, DType::F32)?)?.forward(&Tensor::zeros(
            (1, 14, 24),
            DType::F32,
            &CPU,
        )?));
        assert!(short.contains("queries have 14 tokens, expected the 3 × 5 of the window"), "{short}");
    }
    Ok(())
}

#[test]
fn parameters_of_windows_get_the_gradients_of_their_bias() -> Result<()> {
    for cfg in windows() {
        let variables = variables_of(&cfg)?;
        let xs = Tensor::randn(0f32, 1.0, (2, HEIGHT * WIDTH, 24), &CPU)?;
        let weights = Tensor::randn(0f32, 1.0, xs.shape(), &CPU)?;
        let loss = |ys: Tensor| ys.mul(&weights)?.sum_all()?.backward();
        let by_definition =
            || by_bias(&variables, &xs, &AttentionMask::none(), |q, k| window_bias(&cfg, &variables, q, k));
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
        assert_same_gradients(&variables, &loss(layer.forward(&xs)?)?, &loss(by_definition()?)?);
        // A step later, the layer has what its variables hold then, and a frozen one what they held.
        let (frozen, before) = (layer.freeze()?, layer.forward(&xs)?);
        for var in variables.all_vars() {
            var.set(&(var.as_tensor() * 1.5)?)?;
        }
        assert!(relative_error(&layer.forward(&xs)?, &by_definition()?) < 1e-5, "{cfg:?}");
        assert!(relative_error(&frozen.forward(&xs)?, &before) < 1e-5, "{cfg:?} frozen");
        // What it saves is the layer again.
        let saved: Tensors = frozen.state_dict(candle_attention::WeightLayout::Canonical)?.into_iter().collect();
        let again = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(saved, DType::F32, &CPU))?;
        assert_eq!(values(&again.forward(&xs)?), values(&frozen.forward(&xs)?), "{cfg:?}");
    }
    Ok(())
}

/// Factors end at 100, and tokens of zeros have a cosine of zero.
#[test]
fn cosine_scores_are_bounded() -> Result<()> {
    let cfg = &windows()[1];
    let variables = variables_of(cfg)?;
    let with = |logit: f64| -> Result<MultiHeadAttention> {
        let logits = Tensor::full(logit as f32, (HEADS, 1, 1), &CPU)?;
        variables.data().lock().expect("one thread")["logit_scale"].set(&logits)?;
        MultiHeadAttention::new(cfg, plain(&variables, DType::F32)?)
    };
    let xs = Tensor::randn(0f32, 1.0, (2, HEIGHT * WIDTH, 24), &CPU)?;
    let most = with(100f64.ln())?.forward(&xs)?;
    assert_eq!(values(&with(7.0)?.forward(&xs)?), values(&most));
    assert!(max_error(&with(4.0)?.forward(&xs)?, &most) > 1e-3);
    variables.data().lock().expect("one thread").iter().try_for_each(|(_, var)| var.set(&var.zeros_like()?))?;
    let zeros = MultiHeadAttention::new(cfg, plain(&variables, DType::F32)?)?.forward(&xs)?;
    assert!(values(&zeros).iter().all(|&y| y == 0.0));
    Ok(())
}

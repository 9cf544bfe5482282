//! Relative positions by content: what every path and training make of them.

use std::sync::Arc;

use crate::layer_kind::{LayerKind, multi_head_layer};
use crate::registry::content;
use crate::*;

const HEADS: usize = 4;

/// Draws small numbers for every parameter, by name.
fn weights(cfg: &Config) -> Result<Tensors> {
    let of = LayerKind::MultiHead(cfg.clone()).parameters(3).into_iter();
    of.map(|(name, numbers)| Ok((name, (numbers.tensor(DType::F32, &CPU)? * 0.6)?))).collect()
}

fn layer(cfg: &Config, weights: &Tensors, dtype: DType) -> Result<MultiHeadAttention> {
    multi_head_layer(cfg, VarBuilder::from_tensors(weights.clone(), dtype, &CPU))
}

fn tokens(cfg: &Config) -> usize {
    LayerKind::MultiHead(cfg.clone()).tokens().unwrap_or(17)
}

/// Compares the paths. tests/hf compares each kind with transformers, in f32 on both paths.
#[test]
fn content_positions_on_every_path_and_dtype_match_f64_reference() -> Result<()> {
    for cfg in content() {
        let weights = weights(&cfg)?;
        let t = tokens(&cfg);
        let exact = layer(&cfg, &weights, DType::F64)?;
        let keep = Tensor::rand(0f32, 1.0, (2, HEADS, t, t), &CPU)?.ge(0.2)?;
        let masks = [
            (1, AttentionMask::none()),
            (3, AttentionMask::none().with_valid_lens(vec![11; 3])),
            (2, AttentionMask::causal().with_valid_lens(vec![t, 9])),
            (2, AttentionMask::none().with_bool_mask(&keep).with_bias(&random((HEADS, t, t))?)),
        ];
        for (b, mask) in masks {
            let xs = random((b, t, 24))?.to_dtype(DType::F64)?;
            let expected = exact.forward_with(AttentionInput::new(&xs).with_mask(&mask))?;
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 0.06), (DType::F16, 0.008)] {
                let layer = layer(&cfg, &weights, dtype)?;
                let xs = xs.to_dtype(dtype)?;
                let near = |ys: &Tensor, how: &str| {
                    let error = relative_error(ys, &expected);
                    assert!(error < tolerance, "{cfg:?}, {dtype:?}, {how}: off by {error:e}");
                };
                let input = || AttentionInput::new(&xs).with_mask(&mask);
                for backend in [Backend::Fused, Backend::Reference] {
                    near(&layer.forward_with(input().with_backend(backend))?, &format!("{backend:?}"));
                }
                let output = layer.forward_with_weights(input())?;
                assert_eq!(output.weights.dims(), [b, HEADS, t, t]);
                near(&output.output, "with weights");
            }
        }
    }
    Ok(())
}

/// Compares grouped heads with a layer that repeats key heads, and an absent term with a term whose projection is zero.
#[test]
fn content_positions_with_gqa_or_single_terms_match_whole_layer() -> Result<()> {
    for cfg in content() {
        let whole = match cfg.content_positions() {
            Some(ContentPositions::Disentangled(positions)) => {
                let both = ContentPositions::Disentangled(positions.clone().with_terms(true, true));
                cfg.clone().with_content_positions(both)
            }
            _ => cfg.clone().with_num_kv_heads(HEADS),
        };
        let own = weights(&cfg)?;
        let mut all = Tensors::new();
        for (name, other) in weights(&whole)? {
            let tensor = match own.get(&name) {
                Some(tensor) if tensor.dims() == other.dims() => tensor.clone(),
                Some(tensor) => {
                    let heads: Vec<_> = tensor.chunk(2, 0)?.into_iter().flat_map(|head| [head.clone(), head]).collect();
                    Tensor::cat(&heads, 0)?
                }
                None => other.zeros_like()?,
            };
            all.insert(name, tensor);
        }
        let xs = random((2, tokens(&cfg), 24))?;
        let [found, expected] =
            [layer(&cfg, &own, DType::F32)?, layer(&whole, &all, DType::F32)?].map(|layer| layer.forward(&xs));
        assert!(relative_error(&found?, &expected?) < 1e-5, "{cfg:?}");
    }
    Ok(())
}

/// Compares windows with their definition, shifted and padded, and the masks that separate tokens that a shift made
/// neighbours.
#[test]
fn image_windows_partition_and_merge_round_trips() -> Result<()> {
    for (image, window, shift) in [([4, 6], 2, 0), ([4, 6], 2, 1), ([5, 7], 3, 0), ([5, 7], 3, 2), ([2, 2], 3, 1)] {
        let [height, width] = image;
        let t = window * window;
        let windows = Windows::new(image, window)?.with_shift(shift)?;
        let xs = Tensor::arange(1f32, (2 * height * width) as f32 + 1.0, &CPU)?.reshape((2, height * width, 1))?;
        let parts = windows.partition(&xs)?;
        let [down, across] = image.map(|size| size.div_ceil(window));
        let count = down * across;
        assert_eq!((windows.count(), parts.dims()), (count, &[2 * count, t, 1][..]));
        let keep = windows.mask(2, &CPU)?.to_additive((2 * count, 1, t, t), DType::F32, &CPU)?;
        let keep = values(&keep.broadcast_as((2 * count, 1, t, t))?);
        // The position of a token in the shifted image, and whether it was wrapped around.
        let place = |w: usize, token: usize| {
            let moved =
                |place: usize, along: usize| ((place + shift) % (along * window), place + shift >= along * window);
            let at = w % count;
            let row = moved(at / across * window + token / window, down);
            (row, moved(at % across * window + token % window, across))
        };
        for (n, value) in values(&parts).into_iter().enumerate() {
            let w = n / t;
            let what = format!("{image:?}, {window}, {shift}: entry {n}");
            let ((row, below), (column, behind)) = place(w, n % t);
            let inside = row < height && column < width;
            let expected = if inside { w / count * height * width + row * width + column + 1 } else { 0 };
            assert_eq!(value, expected as f64, "{what}");
            for key in 0..t {
                let ((_, key_below), (_, key_behind)) = place(w, key);
                assert_eq!(keep[n * t + key] == 0.0, (below, behind) == (key_below, key_behind), "{what} and {key}");
            }
        }
        assert_eq!(values(&windows.join(&parts)?), values(&xs));
    }
    Ok(())
}

/// Runs calls of several lengths in turn. With many tokens, each head's bias is computed by itself.
#[test]
fn content_positions_computed_head_by_head_match_all_heads() -> Result<()> {
    let cfg = content()[1].clone().with_sinks(true);
    let layer = layer(&cfg, &weights(&cfg)?, DType::F32)?;
    for (b, t) in [(2, 1030), (1, 5), (3, 7)] {
        let xs = random((b, t, 24))?;
        let mask = AttentionMask::none().with_bias(&random((HEADS, 1, t))?);
        let input = || AttentionInput::new(&xs).with_mask(&mask);
        let expected = layer.forward_with_weights(input())?.output;
        assert_eq!(layer.plan(&input())?.backend, Backend::Fused);
        let error = relative_error(&layer.forward_with(input())?, &expected);
        assert!(error < 1e-5, "{b} sequences of {t}: off by {error:e}");
    }
    Ok(())
}

/// Checks layers whose projections apply to distances too. A clone with an adapter has other vectors of distances, and
/// an adapter that changes has new ones.
#[test]
fn content_positions_of_cloned_layer_follow_its_adapter() -> Result<()> {
    let cfg = content().pop().expect("shared projections");
    let own = weights(&cfg)?;
    let frozen = || layer(&cfg, &own, DType::F32);
    let xs = random((2, 7, 24))?;
    let weights = random((2, 7, 24))?;
    for (place, is_trained) in
        [Projection::Query, Projection::Key].into_iter().flat_map(|place| [(place, false), (place, true)])
    {
        let adapter = Var::randn(0f32, 0.3, (24, 24), &CPU)?;
        let adapted = |layer: MultiHeadAttention| {
            let added = if is_trained { adapter.as_tensor().clone() } else { adapter.as_detached_tensor() };
            layer.map_projection(place, |module| {
                Ok(Arc::new(move |input: &Tensor| module.forward(input)? + input.broadcast_matmul(&added)?))
            })
        };
        let layer = frozen()?;
        let before = layer.forward(&xs)?;
        let clone = adapted(layer.clone())?;
        for step in 0..2 {
            let found = clone.forward(&xs)?;
            let expected = adapted(frozen()?)?.forward(&xs)?;
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
    Ok(())
}

/// Checks that factors are at most 100, and that the cosine of a token of zeros is zero.
#[test]
fn cosine_window_scores_are_bounded() -> Result<()> {
    let cfg = content()[4].clone();
    let mut weights = weights(&cfg)?;
    let xs = random((2, tokens(&cfg), 24))?;
    let mut with = |logit: f64| {
        weights.insert("logit_scale".into(), Tensor::full(logit as f32, (HEADS, 1, 1), &CPU)?);
        layer(&cfg, &weights, DType::F32)?.forward(&xs)
    };
    let most = with(100f64.ln())?;
    assert_eq!(values(&with(7.0)?), values(&most));
    assert!(max_error(&with(4.0)?, &most) > 1e-3);
    let zeros = weights.iter().map(|(name, weight)| Ok((name.clone(), weight.zeros_like()?)));
    let of_zeros = layer(&cfg, &zeros.collect::<Result<_>>()?, DType::F32)?.forward(&xs)?;
    assert!(values(&of_zeros).iter().all(|&y| y == 0.0));
    Ok(())
}

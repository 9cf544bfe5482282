//! Relative positions by content: what a layer makes of them, against the same numbers as a bias.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, ContentPositions, MultiHeadAttention, MultiHeadAttentionConfig as Config,
    SdpaOptions, Windows, scaled_dot_product_attention,
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
    let own = data.iter().filter(|(name, _)| !name.starts_with("rel_pos"));
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
    let layer = MultiHeadAttention::new(&grid(), without_tables(variables)?)?;
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

//! Relative positions by content: what a layer makes of them, against the same numbers as a bias.

use std::sync::Arc;

use candle_attention::{
    AttentionInput, AttentionMask, Backend, ContentPositions, DisentangledConfig, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, ProjectionPlace, RelativeEmbeddings, SdpaOptions, WeightLayout, Windows,
    scaled_dot_product_attention,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, max_error, relative_error, values};
use crate::tensors::{CPU, Tensors, builder, named, random};

const HEADS: usize = 4;
const HEIGHT: usize = 3;
const WIDTH: usize = 5;

fn grouped() -> Config {
    Config::new(24, HEADS).with_num_kv_heads(2).with_bias(true)
}

/// Every kind of terms, in layers of grouped heads where they may be.
fn kinds() -> Vec<Config> {
    let buckets = || DisentangledConfig::new(9).with_num_buckets(6);
    let disentangled = [
        DisentangledConfig::new(8),
        buckets().with_terms(true, false),
        buckets().with_terms(false, true).with_layer_norm(1e-5),
        buckets().with_shared_projections(true).with_layer_norm(1e-5),
    ];
    let disentangled = disentangled.map(|positions| {
        let scale = 1.0 / ((6 * positions.num_terms()) as f64).sqrt();
        let positions = ContentPositions::Disentangled(positions);
        Config::new(24, HEADS).with_bias(true).with_scale(scale).with_content_positions(positions)
    });
    let cosine = |trained| ContentPositions::CosineWindow { height: HEIGHT, width: WIDTH, trained };
    let others = [
        ContentPositions::Grid { height: HEIGHT, width: WIDTH },
        ContentPositions::TransformerXl,
        ContentPositions::Clipped { left: 4, right: 2 },
        ContentPositions::Window { height: HEIGHT, width: WIDTH },
        cosine(None),
        cosine(Some([6, 4])),
    ];
    let others = others.map(|positions| grouped().with_content_positions(positions));
    others.into_iter().chain(disentangled).collect()
}

/// The tokens that a grid or a window has, if a layer is of one.
fn tokens(cfg: &Config) -> usize {
    match cfg.content_positions().expect("terms") {
        ContentPositions::TransformerXl | ContentPositions::Clipped { .. } | ContentPositions::Disentangled(_) => 17,
        _ => HEIGHT * WIDTH,
    }
}

fn layer(cfg: &Config, vb: VarBuilder) -> Result<MultiHeadAttention> {
    let layer = MultiHeadAttention::new(cfg, vb.clone())?;
    match cfg.content_positions() {
        Some(ContentPositions::Disentangled(positions)) => {
            layer.with_relative_embeddings(RelativeEmbeddings::new(positions, 24, vb)?)
        }
        _ => Ok(layer),
    }
}

/// Parameters that are not zero at first.
fn variables(cfg: &Config) -> Result<VarMap> {
    let variables = VarMap::new();
    layer(cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    variables.all_vars().iter().try_for_each(|var| var.set(&(random(var.shape())? * 0.4)?))?;
    Ok(variables)
}

fn plain(variables: &VarMap, dtype: DType) -> Result<VarBuilder<'static>> {
    let cast = |(name, var): (String, Var)| Ok((name, var.as_detached_tensor().to_dtype(dtype)?));
    Ok(VarBuilder::from_tensors(named(variables).into_iter().map(cast).collect::<Result<_>>()?, dtype, &CPU))
}

/// DeBERTa's 6 buckets for distances below 9, of which 3 are for one each: 3 + ceil(ln(d / 3) / ln(8 / 3) · 2) from 4
/// on.
fn bucket(distance: i64) -> i64 {
    let far = [0, 1, 2, 3, 4, 5, 5, 5, 5];
    distance.signum() * far.get(distance.unsigned_abs() as usize).copied().unwrap_or(6)
}

/// A layer's parameters, and the queries and keys (B, H or H_kv, T, D) between which its terms are asked for.
struct Terms<'a> {
    cfg: &'a Config,
    data: std::collections::HashMap<String, Var>,
    q: &'a Tensor,
    /// Repeated for the queries of each group.
    k: Tensor,
}

impl<'a> Terms<'a> {
    fn new(cfg: &'a Config, variables: &VarMap, q: &'a Tensor, k: &Tensor) -> Result<Self> {
        let (b, h, t, d) = q.dims4()?;
        let group = h / k.dim(1)?;
        let k = k.unsqueeze(2)?.broadcast_as((b, h / group, group, t, d))?.reshape(q.shape())?;
        Ok(Self { cfg, data: named(variables), q, k })
    }

    fn get(&self, name: &str) -> &Tensor {
        self.data[name].as_tensor()
    }

    fn tokens(&self) -> usize {
        self.q.dims()[2]
    }

    /// A number for each pair of a query and a key.
    fn pairs<T: candle_core::WithDType>(&self, number: impl Fn(usize, usize) -> T) -> Result<Tensor> {
        let t = self.tokens();
        let numbers: Vec<T> = (0..t * t).map(|n| number(n / t, n % t)).collect();
        Tensor::from_vec(numbers, t * t, &CPU)
    }

    /// Of rows (H or 1, N, D) one for each pair, times the queries, or times the keys: (B, H, T, T).
    fn products(
        &self,
        rows: &Tensor,
        row: impl Fn(usize, usize) -> usize,
        with: &Tensor,
        dim: usize,
    ) -> Result<Tensor> {
        let (t, d) = (self.tokens(), rows.dim(2)?);
        let index = self.pairs(|i, j| row(i, j) as u32)?;
        let rows = rows.contiguous()?.index_select(&index, 1)?.reshape((rows.dim(0)?, t, t, d))?;
        with.unsqueeze(dim)?.broadcast_mul(&rows)?.sum(4)
    }

    fn of_queries(&self, rows: &Tensor, row: impl Fn(usize, usize) -> usize) -> Result<Tensor> {
        self.products(rows, row, self.q, 3)
    }

    /// What is added to the scores by the definition of each kind, (B or 1, H, T, T).
    fn sum(&self) -> Result<Tensor> {
        let (t, (_, h, _, d)) = (self.tokens(), self.q.dims4()?);
        let scale = self.cfg.scale().unwrap_or(1.0 / 6f64.sqrt());
        let place = |n: usize| [n / WIDTH, n % WIDTH];
        let heads = |rows: Tensor| rows.reshape(((), h, d))?.transpose(0, 1);
        match self.cfg.content_positions().expect("terms") {
            ContentPositions::Grid { .. } => {
                let of = |name: &str, axis: usize, size: usize| {
                    self.of_queries(&self.get(name).unsqueeze(0)?, |i, j| place(i)[axis] + size - 1 - place(j)[axis])
                };
                of("rel_pos_h", 0, HEIGHT)? + of("rel_pos_w", 1, WIDTH)?
            }
            ContentPositions::TransformerXl => {
                let angle = |n: usize, at: usize| (at as f64 - t as f64) / 10_000f64.powf((n / 2 * 2) as f64 / 24.0);
                let wave =
                    |at: usize, n: usize| if n.is_multiple_of(2) { angle(n, at).sin() } else { angle(n, at).cos() };
                let waves = (0..2 * t).flat_map(|at| (0..24).map(move |n| wave(at, n) as f32));
                let rows = Tensor::from_iter(waves, &CPU)?.reshape((2 * t, 24))?;
                let rows = heads(rows.matmul(&self.get("linear_pos.weight").t()?)?)?;
                let [u, v] = ["pos_bias_u", "pos_bias_v"].map(|name| self.get(name).unsqueeze(1));
                let of_u = u?.broadcast_mul(&self.k)?.sum(3)?.unsqueeze(2)?;
                let of_v = self.products(&rows, |i, j| i + t - j, &self.q.broadcast_add(&v?)?, 3)?;
                of_v.broadcast_add(&of_u)? * scale
            }
            &ContentPositions::Clipped { left, right } => {
                let rows = self.get("distance_embedding.weight").unsqueeze(0)?;
                self.of_queries(&rows, |i, j| (left + j).saturating_sub(i).min(left + right))? * scale
            }
            ContentPositions::Disentangled(positions) => {
                let mut embeddings = self.get("rel_embeddings.weight").clone();
                if self.data.contains_key("LayerNorm.weight") {
                    let centred = embeddings.broadcast_sub(&embeddings.mean_keepdim(1)?)?;
                    let deviation = (centred.sqr()?.mean_keepdim(1)? + 1e-5)?.sqrt()?;
                    let normed = centred.broadcast_div(&deviation)?.broadcast_mul(self.get("LayerNorm.weight"))?;
                    embeddings = normed.broadcast_add(self.get("LayerNorm.bias"))?;
                }
                let span = positions.span() as i64;
                let row = |i: usize, j: usize| {
                    let distance = i as i64 - j as i64;
                    let place = if span == 6 { bucket(distance) } else { distance };
                    (place + span).clamp(0, 2 * span - 1) as usize
                };
                let is_shared = !self.data.keys().any(|name| name.starts_with("pos_"));
                let mut sum = Tensor::zeros((1, h, t, t), DType::F32, &CPU)?;
                let parts = [("pos_key_proj", "k_proj", self.q, 3), ("pos_query_proj", "q_proj", &self.k, 2)];
                for (own, shared, with, dim) in parts {
                    let name = if is_shared { shared } else { own };
                    if let Some(weight) = self.data.get(&format!("{name}.weight")) {
                        let rows = embeddings.matmul(&weight.t()?)?.broadcast_add(self.get(&format!("{name}.bias")))?;
                        sum = sum.broadcast_add(&self.products(&heads(rows)?, row, with, dim)?)?;
                    }
                }
                sum * scale
            }
            ContentPositions::Window { .. } => {
                let row = self.pairs(|i, j| {
                    let ([y, x], [key_y, key_x]) = (place(i), place(j));
                    ((y + HEIGHT - 1 - key_y) * (2 * WIDTH - 1) + x + WIDTH - 1 - key_x) as u32
                })?;
                self.get("relative_position_bias_table").index_select(&row, 0)?.t()?.reshape((1, h, t, t))
            }
            ContentPositions::CosineWindow { trained, .. } => {
                let sizes = trained.unwrap_or([HEIGHT, WIDTH]).map(|size| (size - 1) as f64);
                let log = |x: f64| ((8.0 * x).abs() + 1.0).log2() / 8f64.log2() * if x < 0.0 { -1.0 } else { 1.0 };
                let axis =
                    |n: usize| self.pairs(|i, j| log((place(i)[n] as f64 - place(j)[n] as f64) / sizes[n]) as f32);
                let network = |name: &str| self.get(&format!("continuous_position_bias_mlp.{name}"));
                let xs = Tensor::stack(&[axis(0)?, axis(1)?], 1)?.matmul(&network("0.weight").t()?)?;
                let xs = xs.broadcast_add(network("0.bias"))?.relu()?.matmul(&network("2.weight").t()?)?;
                let bias = (candle_nn::ops::sigmoid(&xs)? * 16.0)?.t()?.reshape((1, h, t, t))?;
                let length = |xs: &Tensor| xs.sqr()?.sum_keepdim(3)?.sqrt();
                let products = self.q.contiguous()?.matmul(&self.k.t()?)?;
                let cosines = products.broadcast_div(&length(self.q)?)?.broadcast_div(&length(&self.k)?.t()?)?;
                let scores = cosines.broadcast_mul(&self.get("logit_scale").exp()?)?;
                (scores - (products * scale)?)?.broadcast_add(&bias)
            }
            other => panic!("{other:?}"),
        }
    }
}

/// What a layer of the same projections gives, without the parameters that it would refuse, and whose scores get the
/// terms as a bias.
fn expected(cfg: &Config, variables: &VarMap, xs: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
    let scale = cfg.scale().unwrap_or(1.0 / 6f64.sqrt());
    let plain = Config::new(24, HEADS).with_bias(true).with_num_kv_heads(cfg.num_kv_heads()).with_scale(scale);
    let projections = ["q_proj.", "k_proj.", "v_proj.", "o_proj."];
    let own = named(variables).into_iter().filter(|(name, _)| projections.iter().any(|own| name.starts_with(own)));
    let own: Tensors = own.map(|(name, var)| (name, var.as_tensor().clone())).collect();
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
        let bias = Terms::new(cfg, variables, q, k)?.sum()?;
        scaled_dot_product_attention(q, k, v, &mask.clone().with_bias(&bias), options)
    };
    let layer = MultiHeadAttention::new(&plain, builder(own))?;
    layer.forward_with(AttentionInput::new(xs).with_mask(mask).with_function(&attend))
}

#[test]
fn terms_give_the_numbers_of_their_bias() -> Result<()> {
    for cfg in kinds() {
        let (variables, t) = (variables(&cfg)?, tokens(&cfg));
        let keep = Tensor::rand(0f32, 1.0, (2, HEADS, t, t), &CPU)?.ge(0.2)?;
        let masks = [
            (1, AttentionMask::none()),
            (3, AttentionMask::none().with_valid_lens(vec![11; 3])),
            (2, AttentionMask::causal().with_valid_lens(vec![t, 9])),
            (2, AttentionMask::none().with_keep(&keep).with_bias(&random((HEADS, t, t))?)),
        ];
        for (b, mask) in masks {
            let xs = random((b, t, 24))?;
            let expected = expected(&cfg, &variables, &xs, &mask)?;
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-5), (DType::BF16, 0.06), (DType::F16, 0.008)]
            {
                let (layer, xs) = (layer(&cfg, plain(&variables, dtype)?)?, xs.to_dtype(dtype)?);
                let near = |ys: &Tensor, how: &str| -> Result<()> {
                    let error = relative_error(&ys.to_dtype(DType::F32)?, &expected);
                    assert!(error < tolerance, "{cfg:?}, {dtype:?}, {how}: off by {error:e}");
                    Ok(())
                };
                let input = || AttentionInput::new(&xs).with_mask(&mask);
                let kernel = if dtype == DType::F64 { Backend::Auto } else { Backend::Fused };
                for backend in [kernel, Backend::Reference] {
                    near(&layer.forward_with(input().with_backend(backend))?, &format!("{backend:?}"))?;
                }
                let output = layer.forward_with_weights(input())?;
                assert_eq!(output.weights.dims(), [b, HEADS, t, t]);
                near(&output.output, "with weights")?;
            }
        }
    }
    Ok(())
}

/// A step later the layer has what its variables hold then, a frozen one what they held, and what that saves is the
/// layer again.
#[test]
fn parameters_of_terms_are_trained_frozen_and_saved() -> Result<()> {
    for cfg in kinds() {
        let (variables, none) = (variables(&cfg)?, AttentionMask::none());
        let xs = random((2, tokens(&cfg), 24))?;
        let weights = random(xs.shape())?;
        let loss = |ys: Tensor| ys.mul(&weights)?.sum_all()?.backward();
        let layer_of = |vb| layer(&cfg, vb);
        let layer = layer_of(VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
        let (found, exact) = (loss(layer.forward(&xs)?)?, loss(expected(&cfg, &variables, &xs, &none)?)?);
        let of = |name: &str, var: &Var| [&found, &exact].map(|store| store.get(var).expect(name).clone());
        let pairs: Vec<_> = named(&variables).iter().map(|(name, var)| (name.clone(), of(name, var))).collect();
        // That of a key's bias, which moves all scores of a query alike, is zero but for rounding.
        let largest = pairs.iter().flat_map(|(_, [_, exact])| values(exact)).fold(0f64, |most, x| most.max(x.abs()));
        for (name, [found, exact]) in pairs {
            let error = max_error(&found, &exact) / largest;
            assert!(error < 1e-5, "{cfg:?}, {name}: off by {error:e}");
        }

        let (frozen, before) = (layer.freeze()?, layer.forward(&xs)?);
        let mut saved: Tensors = frozen.state_dict(WeightLayout::Canonical)?.into_iter().collect();
        let of_stack = |name: &str| name.starts_with("rel_embeddings") || name.starts_with("LayerNorm");
        let shared = named(&variables).into_iter().filter(|(name, _)| of_stack(name));
        saved.extend(shared.map(|(name, var)| (name, var.as_tensor().copy().expect("memory").detach())));
        for var in variables.all_vars() {
            var.set(&(var.as_tensor() * 1.5)?)?;
        }
        let after = expected(&cfg, &variables, &xs, &none)?;
        assert!(relative_error(&layer.forward(&xs)?, &after) < 1e-5, "{cfg:?}");
        assert!(relative_error(&frozen.forward(&xs)?, &before) < 1e-5, "{cfg:?} frozen");
        assert_eq!(values(&layer_of(builder(saved))?.forward(&xs)?), values(&frozen.forward(&xs)?), "{cfg:?} saved");
    }
    Ok(())
}

#[test]
fn tables_are_refused_by_a_layer_without_positions() -> Result<()> {
    let of_grid = plain(&variables(&kinds()[0])?, DType::F32)?;
    let refused = error_text(MultiHeadAttention::new(&grouped(), of_grid));
    assert!(refused.contains("rel_pos_h is in the file"), "{refused}");
    Ok(())
}

/// Windows by their definition, shifted and padded, and masks that keep apart what the shift put side by side.
#[test]
fn windows_are_parts_of_an_image_and_come_together_again() -> Result<()> {
    for (image, window, shift) in [([4, 6], 2, 0), ([4, 6], 2, 1), ([5, 7], 3, 0), ([5, 7], 3, 2), ([2, 2], 3, 1)] {
        let ([height, width], t) = (image, window * window);
        let windows = Windows::new(image, window)?.with_shift(shift)?;
        let xs = Tensor::arange(1f32, (2 * height * width) as f32 + 1.0, &CPU)?.reshape((2, height * width, 1))?;
        let parts = windows.partition(&xs)?;
        let [down, across] = image.map(|size| size.div_ceil(window));
        let count = down * across;
        assert_eq!((windows.count(), parts.dims()), (count, &[2 * count, t, 1][..]));
        let keep = windows.mask(2, &CPU)?.to_additive((2 * count, 1, t, t), DType::F32, &CPU)?;
        let keep = values(&keep.broadcast_as((2 * count, 1, t, t))?);
        // Where a token stands in the shifted image, and whether it came around from the other end.
        let place = |w: usize, token: usize| {
            let moved =
                |place: usize, count: usize| ((place + shift) % (count * window), place + shift >= count * window);
            let at = w % count;
            let row = moved(at / across * window + token / window, down);
            (row, moved(at % across * window + token % window, across))
        };
        for (n, value) in values(&parts).into_iter().enumerate() {
            let (w, what) = (n / t, format!("{image:?}, {window}, {shift}: entry {n}"));
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

/// So many tokens that each head has a bias of its own, and one call after the other of another length.
#[test]
fn heads_that_are_attended_to_one_by_one_give_the_numbers_of_all() -> Result<()> {
    let cfg = grouped().with_content_positions(ContentPositions::TransformerXl).with_sinks(true);
    let layer = layer(&cfg, plain(&variables(&cfg)?, DType::F32)?)?;
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

/// Where the layer's projections are those of distances too, a clone with an adapter has vectors of its own, and an
/// adapter that changes has new ones.
#[test]
fn vectors_of_distances_follow_the_modules_of_a_clone() -> Result<()> {
    let cfg = kinds().pop().expect("shared projections");
    let variables = variables(&cfg)?;
    let frozen = || layer(&cfg, plain(&variables, DType::F32)?);
    let (xs, weights) = (random((2, 7, 24))?, random((2, 7, 24))?);
    for (place, is_trained) in
        [ProjectionPlace::Query, ProjectionPlace::Key].into_iter().flat_map(|place| [(place, false), (place, true)])
    {
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
    Ok(())
}

/// Factors end at 100, and tokens of zeros have a cosine of zero.
#[test]
fn cosine_scores_are_bounded() -> Result<()> {
    let positions = ContentPositions::CosineWindow { height: HEIGHT, width: WIDTH, trained: None };
    let cfg = grouped().with_content_positions(positions);
    let variables = variables(&cfg)?;
    let xs = random((2, HEIGHT * WIDTH, 24))?;
    let forward = || layer(&cfg, plain(&variables, DType::F32)?)?.forward(&xs);
    let with = |logit: f64| {
        named(&variables)["logit_scale"].set(&Tensor::full(logit as f32, (HEADS, 1, 1), &CPU)?)?;
        forward()
    };
    let most = with(100f64.ln())?;
    assert_eq!(values(&with(7.0)?), values(&most));
    assert!(max_error(&with(4.0)?, &most) > 1e-3);
    variables.all_vars().iter().try_for_each(|var| var.set(&var.zeros_like()?))?;
    assert!(values(&forward()?).iter().all(|&y| y == 0.0));
    Ok(())
}

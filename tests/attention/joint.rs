//! One product for q, k and v, or for k and v, against a product each.
//!
//! Inputs that are one tensor are projected at once; equal copies of it are projected apart. Both have to give the same.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, MultiHeadAttention, MultiHeadAttentionConfig as Config, QkNorm, QkNormKind,
    QkNormScope,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::array::Random;
use crate::by_hand::{parameters, tensors};
use crate::common::{assert_close, values};
use crate::layer::{configs, layer};
use crate::recipe::dtypes;

crate::on_each_device!(
    every_config_gives_the_numbers_of_separate_products,
    exact_products_give_the_same_bits,
    gradients_flow_through_one_product_to_the_input,
);

const SIZES: [[usize; 2]; 5] = [[2, 4], [1, 1], [3, 1], [1, 6], [2, 17]];

/// Another tensor with the same numbers.
fn copy(xs: &Tensor) -> Result<Tensor> {
    xs.force_contiguous()
}

/// Numbers of f64 and f32 within the rounding of sums of a dozen products, as in the tests of the layer.
fn every_config_gives_the_numbers_of_separate_products(device: &Device) -> Result<()> {
    let float =
        if device.is_metal() { vec![(DType::F32, 2e-5)] } else { vec![(DType::F64, 1e-12), (DType::F32, 2e-5)] };
    let mut calls = 0;
    for (name, cfg) in configs() {
        for (dtype, tolerance) in &float {
            let layer = layer(&cfg, *dtype, device)?;
            for [b, t] in SIZES {
                let what = format!("{name}, {b} × {t}, {dtype:?}");
                let random = |t: usize, width: usize| Tensor::randn(0f32, 1., (b, t, width), device)?.to_dtype(*dtype);
                let xs = random(t, cfg.embed_dim())?;
                let lens = AttentionMask::none().with_valid_lens(vec![t; b]);
                if cfg.key_size() == cfg.value_size() {
                    let keys = random(t + 2, cfg.key_size())?;
                    let one = AttentionInput::new(&xs).with_key_value(&keys, &keys);
                    let (other, copies) = (copy(&keys)?, AttentionInput::new(&xs));
                    let copies = copies.with_key_value(&keys, &other);
                    let (one, apart) = (layer.forward_with_weights(one)?, layer.forward_with_weights(copies)?);
                    assert_close(&one.context, &apart.context, *tolerance, &what);
                    assert_close(&one.weights, &apart.weights, *tolerance, &what);
                    calls += 1;
                }
                if [cfg.key_size(), cfg.value_size()] == [cfg.embed_dim(); 2] {
                    let (keys, vs) = (copy(&xs)?, copy(&xs)?);
                    let one = || AttentionInput::new(&xs).with_mask(&lens);
                    let apart = one().with_key_value(&keys, &vs);
                    assert_close(&layer.forward_with(one())?, &layer.forward_with(apart)?, *tolerance, &what);
                    calls += 1;
                }
            }
        }
    }
    assert!(calls > 200, "{calls}");
    Ok(())
}

/// Small whole numbers: every sum is exact, in whatever order it is taken, and so the products are the same to the bit.
fn exact_products_give_the_same_bits(device: &Device) -> Result<()> {
    let norm = |scope| QkNorm { kind: QkNormKind::Rms, scope, eps: 1e-5 };
    let grouped = || Config::new(12, 4).with_num_kv_heads(2).with_causal(true);
    for cfg in [
        Config::new(12, 4),
        grouped().with_qkv_bias(true),
        grouped().with_k_bias(true).with_value_head_dim(5),
        grouped().with_v_bias(true).with_sinks(true).with_head_dim(5),
        grouped().with_qk_norm(norm(QkNormScope::PerHead)),
        grouped().with_qk_norm(norm(QkNormScope::Projection)).with_q_bias(true),
        grouped().with_bias_kv(true).with_out_proj(false),
    ] {
        for &dtype in dtypes(device) {
            let mut random = Random::new(5);
            let mut whole = |shape: &[usize]| -> Result<Tensor> {
                let count = shape.iter().product();
                let numbers: Vec<f32> = (0..count).map(|_| random.between(-3.0, 3.0).round() as f32).collect();
                Tensor::from_vec(numbers, shape, device)?.to_dtype(dtype)
            };
            let mut weights = tensors(&parameters(&cfg, 3), dtype, device)?;
            for (name, tensor) in &mut weights {
                if ["q_proj", "k_proj", "v_proj"].iter().any(|part| name.starts_with(part)) {
                    *tensor = whole(tensor.dims())?;
                }
            }
            let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(weights, dtype, device))?;
            for [b, t] in SIZES {
                let xs = whole(&[b, t, 12])?;
                let (keys, vs) = (copy(&xs)?, copy(&xs)?);
                let one = || AttentionInput::new(&xs).with_backend(Backend::Reference);
                let pair = one().with_key_value(&keys, &keys);
                let apart = one().with_key_value(&keys, &vs);
                let what = format!("{cfg:?}, {b} × {t}, {dtype:?}");
                let expected = layer.forward_with_weights(apart)?;
                for input in [one(), pair] {
                    let output = layer.forward_with_weights(input)?;
                    assert_close(&output.weights, &expected.weights, 0.0, &what);
                    assert_close(&output.context, &expected.context, 0.0, &what);
                }
            }
        }
    }
    Ok(())
}

/// A layer of plain tensors is frozen, but what comes before it may learn.
fn gradients_flow_through_one_product_to_the_input(device: &Device) -> Result<()> {
    for (name, cfg) in configs() {
        if [cfg.key_size(), cfg.value_size()] != [cfg.embed_dim(); 2] {
            continue;
        }
        let frozen = layer(&cfg, DType::F32, device)?;
        // The same numbers in variables.
        let varmap = VarMap::new();
        let trained = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&varmap, DType::F32, device))?;
        let numbers = tensors(&parameters(&cfg, 3), DType::F32, device)?;
        for (name, var) in varmap.data().lock().expect("one thread").iter() {
            var.set(&numbers[name])?;
        }
        let xs = Var::from_tensor(&Tensor::randn(0f32, 1., (2, 4, cfg.embed_dim()), device)?)?;
        let gradient = |layer: &MultiHeadAttention| -> Result<Tensor> {
            let store = layer.forward(&xs)?.sqr()?.sum_all()?.backward()?;
            Ok(store.get(&xs).expect("the input has a gradient").clone())
        };
        let (got, expected) = (gradient(&frozen)?, gradient(&trained)?);
        let most = values(&expected).into_iter().fold(0.0, |most: f64, entry| most.max(entry.abs()));
        assert!(most > 0.0, "{name}");
        assert_close(&got, &expected, 2e-5 * most, name);
    }
    Ok(())
}

//! Biases and positions of encoders of images under the names of their first files: BEiT, EVA, VideoMAE, DINOv3, and
//! timm.

use std::collections::HashMap;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{HeadShard, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::VarBuilder;

use crate::common::{assert_close, error_text, sharded};
use crate::{DEVICE, wave};

const E: usize = 12;

type Tensors = HashMap<String, Tensor>;

fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(E, 3).with_bias(true)
}

fn packed() -> WeightLayout {
    "packed:qkv".parse().expect("a layout")
}

/// Returns a packed layer of timm with a bias (3 E,).
fn timm(bias: &Tensor) -> Result<Tensors> {
    Ok(HashMap::from([
        ("qkv.weight".to_string(), wave(0.37, (3 * E, E))?),
        ("qkv.bias".to_string(), bias.clone()),
        ("proj.weight".to_string(), wave(0.71, (E, E))?),
        ("proj.bias".to_string(), wave(0.53, E)?),
    ]))
}

fn load(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, tensors: &Tensors) -> Result<MultiHeadAttention> {
    MultiHeadAttention::load(cfg, layout, VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE))
}

/// Returns the sum of the outputs of three ranks.
fn sum_of_shards(cfg: &MultiHeadAttentionConfig, tensors: &Tensors, xs: &Tensor) -> Result<Tensor> {
    let vb = sharded(tensors)?;
    let of = |rank| MultiHeadAttention::load_shard(cfg, packed(), HeadShard::new(rank, 3)?, &vb)?.forward(xs);
    (of(0)? + of(1)?)? + of(2)?
}

/// Returns the bias of queries, keys and values with these factors.
fn times(bias: &Tensor, factors: &[f32]) -> Result<Tensor> {
    bias * &Tensor::new(factors, &DEVICE)?
}

#[test]
fn masked_bias_is_the_bias_times_its_mask() -> Result<()> {
    let xs = wave(0.19, (2, 5, E))?;
    let bias = wave(0.83, 3 * E)?;
    // The keys', as in DINOv3; every third entry; all; none; and factors other than 0 and 1.
    let masks: [&dyn Fn(usize) -> f32; 5] =
        [&|i| if i / E == 1 { 0.0 } else { 1.0 }, &|i| if i % 3 == 0 { 0.0 } else { 1.0 }, &|_| 0.0, &|_| 1.0, &|i| {
            i as f32 / 7.0
        }];
    for (case, mask) in masks.into_iter().enumerate() {
        let factors: Vec<f32> = (0..3 * E).map(mask).collect();
        let expected = load(&config(), packed(), &timm(&times(&bias, &factors)?)?)?.forward(&xs)?;
        for hidden in [0.5, f32::NAN, f32::INFINITY] {
            // What the mask hides is anything.
            let values = bias.to_vec1::<f32>()?;
            let hidden: Vec<f32> =
                values.iter().zip(&factors).map(|(&x, &factor)| if factor == 0.0 { hidden } else { x }).collect();
            let mut tensors = timm(&Tensor::new(hidden, &DEVICE)?)?;
            tensors.insert("qkv.bias_mask".into(), Tensor::new(factors.as_slice(), &DEVICE)?);
            let what = format!("mask {case}");
            assert_close(&load(&config(), packed(), &tensors)?.forward(&xs)?, &expected, 1e-5, &what);

            let folder = tempfile::tempdir()?;
            let file = folder.path().join("model.safetensors");
            candle_core::safetensors::save(&tensors, &file)?;
            let vb = weights::open(&file, DType::F32, &DEVICE)?;
            let inferred = Checkpoint::open(&file)?.infer_config("", packed(), Some(3))?;
            assert_close(&MultiHeadAttention::load(&inferred, packed(), vb)?.forward(&xs)?, &expected, 1e-5, &what);
            assert_close(&sum_of_shards(&config(), &tensors, &xs)?, &expected, 1e-5, &what);
        }
    }
    Ok(())
}

/// Checks the error: a product with the mask would not change with the variable.
#[test]
fn masked_bias_that_is_trained_is_refused() -> Result<()> {
    let mut tensors = timm(&wave(0.83, 3 * E)?)?;
    let bias = Var::from_tensor(&tensors["qkv.bias"])?;
    tensors.insert("qkv.bias".into(), bias.as_tensor().clone());
    tensors.insert("qkv.bias_mask".into(), Tensor::ones(3 * E, DType::F32, &DEVICE)?);
    let text = error_text(load(&config(), packed(), &tensors));
    assert!(text.contains("qkv.bias_mask is in the file, and qkv.bias is a variable"), "{text}");
    Ok(())
}

/// Returns a layer with `q_bias` and `v_bias` instead of the packed bias.
fn beit() -> Result<Tensors> {
    let mut tensors = timm(&wave(0.83, 3 * E)?)?;
    let bias = tensors.remove("qkv.bias").expect("it is there");
    tensors.insert("q_bias".into(), bias.narrow(0, 0, E)?);
    tensors.insert("v_bias".into(), bias.narrow(0, 2 * E, E)?);
    Ok(tensors)
}

#[test]
fn separate_biases_of_packed_weights_are_read_and_saved() -> Result<()> {
    let xs = wave(0.19, (2, 5, E))?;
    let mut factors = vec![1f32; 3 * E];
    factors[E..2 * E].fill(0.0);
    let expected = load(&config(), packed(), &timm(&times(&wave(0.83, 3 * E)?, &factors)?)?)?.forward(&xs)?;
    let tensors = beit()?;
    let cfg = config().with_k_bias(false);
    let layer = load(&cfg, packed(), &tensors)?;
    assert_close(&layer.forward(&xs)?, &expected, 1e-5, "q_bias and v_bias");

    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &file)?;
    let checkpoint = Checkpoint::open(&file)?;
    let inferred = checkpoint.infer_config("", checkpoint.detect("")?, Some(3))?;
    assert_eq!(
        [inferred.q_bias(), inferred.k_bias(), inferred.v_bias(), inferred.out_bias()],
        [true, false, true, true]
    );
    let vb = weights::open(&file, DType::F32, &DEVICE)?;
    assert_close(&MultiHeadAttention::load(&inferred, packed(), vb)?.forward(&xs)?, &expected, 1e-5, "inferred");

    let saved: Tensors = layer.state_dict(packed())?.into_iter().collect();
    assert_eq!(saved.len(), tensors.len());
    for (name, tensor) in &tensors {
        assert_close(&saved[name], tensor, 0.0, name);
    }
    let canonical: Tensors = layer.state_dict(WeightLayout::Canonical)?.into_iter().collect();
    assert_close(&load(&cfg, WeightLayout::Canonical, &canonical)?.forward(&xs)?, &expected, 1e-5, "canonical");
    assert_close(&sum_of_shards(&cfg, &tensors, &xs)?, &expected, 1e-5, "shards");
    Ok(())
}

#[test]
fn separate_biases_that_the_config_does_not_describe_are_refused() -> Result<()> {
    let tensors = beit()?;
    let text_of = |cfg: MultiHeadAttentionConfig, of: &Tensors| error_text(load(&cfg, packed(), of));
    let none = text_of(config().with_bias(false).with_out_bias(true), &tensors);
    assert!(none.contains("q_bias is in the file"), "{none}");
    let all = text_of(config(), &tensors);
    assert!(all.contains("k_bias is missing"), "{all}");
    let mut both = tensors.clone();
    both.insert("qkv.bias".into(), wave(0.83, 3 * E)?);
    let packed_too = text_of(config().with_k_bias(false), &both);
    assert!(packed_too.contains("qkv.bias is in the file"), "{packed_too}");
    let separate_too = text_of(config(), &both);
    assert!(separate_too.contains("q_bias is in the file"), "{separate_too}");
    let mut of_keys = tensors;
    of_keys.insert("k_bias".into(), wave(0.31, E)?);
    let keys_too = text_of(config().with_k_bias(false), &of_keys);
    assert!(keys_too.contains("k_bias is in the file"), "{keys_too}");
    load(&config(), packed(), &of_keys)?;
    Ok(())
}

/// Checks the biases of EVA, which are next to four projections.
#[test]
fn separate_biases_of_four_projections_are_read() -> Result<()> {
    let xs = wave(0.19, (2, 5, E))?;
    let cfg = config().with_k_bias(false);
    for layout in ["canonical", "opt", "mingpt", "albert", "bert", "vit", "phi", "internvl"] {
        let layout: WeightLayout = layout.parse()?;
        let layer = crate::invented(&cfg, layout)?;
        let expected = layer.forward(&xs)?;
        let mut tensors: Tensors = layer.state_dict(layout)?.into_iter().collect();
        let query = tensors.keys().find(|name| name.ends_with("bias") && name.contains('q')).expect("a bias").clone();
        let value = tensors.keys().find(|name| name.ends_with("bias") && name.contains('v')).expect("a bias").clone();
        let mut renamed = Vec::new();
        for (name, other) in [(query, "q_bias"), (value, "v_bias")] {
            let module = name.strip_suffix(".bias").expect("a module");
            let outer = module.rsplit_once('.').map_or(String::new(), |(outer, _)| format!("{outer}."));
            let bias = tensors.remove(&name).expect("it is there");
            tensors.insert(format!("{outer}{other}"), bias.clone());
            renamed.push((name, format!("{outer}{other}"), bias));
        }
        let what = layout.to_string();
        assert_close(&load(&cfg, layout, &tensors)?.forward(&xs)?, &expected, 1e-5, &what);
        let none = error_text(load(&cfg.clone().with_qkv_bias(false), layout, &tensors));
        assert!(none.contains(&renamed[0].1) && none.contains("is in the file"), "{what}: {none}");
        // Two biases of one projection.
        let (name, other, bias) = &renamed[0];
        tensors.insert(name.clone(), bias.clone());
        let twice = error_text(load(&cfg, layout, &tensors));
        assert!(twice.contains(other) && twice.contains("is in the file"), "{what}: {twice}");
    }
    Ok(())
}

/// Positions and norms of timm's attention change its output.
#[test]
fn parameters_of_timm_without_an_option_are_refused_by_name() -> Result<()> {
    let names = [
        "rel_pos.relative_position_bias_table",
        "rel_pos.mlp.fc1.weight",
        "relative_position_bias_table",
        "rel_pos_h",
        "rel_pos_w",
        "logit_scale",
        "cpb_mlp.0.weight",
        "meta_mlp.fc1.weight",
        "attention_biases",
        "norm.weight",
        "norm.bias",
    ];
    for name in names {
        let mut tensors = timm(&wave(0.83, 3 * E)?)?;
        tensors.insert(name.into(), wave(0.3, 4)?);
        let Err(error) = load(&config(), packed(), &tensors) else { panic!("{name} was passed over") };
        let text = error.to_string();
        assert!(text.contains(&format!("{name} is in the file")), "{name}: {text}");
    }
    Ok(())
}

//! Models with linear attention in most layers: however the tokens of a text come, the logits are transformers'.

use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::{Value, json};

use crate::common::{assert_near, error_text};
use crate::model::CausalLm;
use crate::model::attention::{Cache, Input};
use crate::{Golden, checkpoint, run};

const MODELS: [&str; 5] = ["kimi_linear", "olmo_hybrid", "qwen3_5_moe", "qwen3_5_text", "qwen3_next"];

fn load(model: &str) -> Result<CausalLm> {
    load_as(model, DType::F32, |_| {}, |name| name)
}

/// In a dtype, with another config and other names of tensors.
fn load_as(
    model: &str,
    dtype: DType,
    change: impl Fn(&mut Value),
    rename: impl Fn(String) -> String,
) -> Result<CausalLm> {
    let mut config = checkpoint(model).json("config.json");
    change(&mut config);
    let tensors = checkpoint(model).tensors("model.safetensors");
    let tensors = tensors.into_iter().map(|(name, tensor)| (rename(name), tensor)).collect();
    CausalLm::load(&config, VarBuilder::from_tensors(tensors, dtype, &Device::Cpu), |_, _| {})
}

/// The logits of whole texts are transformers'.
fn assert_golden(model: &CausalLm, name: &str) -> Result<()> {
    let (golden, mut caches) = (Golden::of(name)?, model.caches(|config| config)?);
    let hidden = model.forward(&Tensor::new(golden.ids, &Device::Cpu)?, None, &mut caches)?;
    assert_near(&model.logits(&hidden)?, &golden.logits, 1e-5, name);
    Ok(())
}

#[test]
fn doubles_give_the_same_logits() -> Result<()> {
    MODELS.iter().try_for_each(|name| assert_golden(&load_as(name, DType::F64, |_| {}, |name| name)?, name))
}

#[test]
fn pieces_of_any_length_give_the_logits_of_transformers() -> Result<()> {
    for name in MODELS {
        let (model, golden) = (load(name)?, Golden::of(name)?);
        let ids = Tensor::new(golden.ids, &Device::Cpu)?;
        let t = ids.dim(1)?;
        for piece in [1, 2, 5, 65] {
            let (mut caches, mut parts) = (model.caches(|config| config)?, Vec::new());
            for at in (0..t).step_by(piece) {
                let hidden = model.forward(&ids.narrow(1, at, piece.min(t - at))?, None, &mut caches)?;
                parts.push(model.logits(&hidden)?);
            }
            assert_near(&Tensor::cat(&parts, 1)?, &golden.logits, 1e-5, &format!("{name}, pieces of {piece}"));
        }
    }
    Ok(())
}

/// Both texts go on by other numbers of tokens in each call, one of them by none, and padding stands beside them.
#[test]
fn texts_of_different_lengths_do_not_touch_each_other() -> Result<()> {
    for name in MODELS {
        let (model, golden) = (load(name)?, Golden::of(name)?);
        let mut caches = model.caches(|config| config)?;
        let mut before = [0; 2];
        for lens in [[5, 1], [0, 3], [2, 4], [1, 0], [3, 3]] {
            let row = |(text, len): (usize, usize)| {
                // Padding is another token than the one that is next.
                let mut row = golden.ids[text][before[text]..before[text] + len].to_vec();
                row.resize(5, 36);
                row
            };
            let ids = Tensor::new(lens.into_iter().enumerate().map(row).collect::<Vec<_>>(), &Device::Cpu)?;
            let logits = model.logits(&model.forward(&ids, Some(&lens), &mut caches)?)?;
            for (text, len) in lens.into_iter().enumerate().filter(|&(_, len)| len > 0) {
                let expected = golden.logits.i((text, before[text]..before[text] + len))?;
                assert_near(&logits.i((text, ..len))?, &expected, 1e-5, &format!("{name}, text {text}"));
                before[text] += len;
            }
            assert!(caches.iter().all(|cache| cache.lens() == before), "{name}");
        }
    }
    Ok(())
}

/// What publishers write in config.json, and what they call tensors, where transformers saves both otherwise.
#[test]
fn checkpoints_as_published_are_the_same() -> Result<()> {
    type Case = (&'static str, fn(&mut Value), fn(String) -> String);
    let cases: [Case; 3] = [
        (
            "qwen3_next",
            |config| {
                let own = ["layer_types", "rope_parameters"];
                config.as_object_mut().expect("an object").retain(|name, _| !own.contains(&name.as_str()));
                config["full_attention_interval"] = 4.into();
                config["rope_theta"] = 10_000.into();
                config["partial_rotary_factor"] = 0.25.into();
            },
            |name| name,
        ),
        (
            "kimi_linear",
            |config| {
                let own = ["layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "qk_head_dim"];
                config.as_object_mut().expect("an object").retain(|name, _| !own.contains(&name.as_str()));
                config["linear_attn_config"] = json!({
                    "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 7, "num_heads": 4,
                    "short_conv_kernel_size": 4,
                });
                config["head_dim"] = 16.into();
                config["first_k_dense_replace"] = 1.into();
                config["moe_router_activation_func"] = "sigmoid".into();
                config["mla_use_nope"] = true.into();
            },
            |name| name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."),
        ),
        (
            "olmo_hybrid",
            |config| config["layer_types"] = Value::Null,
            |name| name.replace("layers.3.feedforward_layer_norm", "layers.3.post_attention_layernorm"),
        ),
    ];
    for (name, change, rename) in cases {
        assert_golden(&load_as(name, DType::F32, change, rename)?, name)?;
    }
    let softmax = |config: &mut Value| config["moe_router_activation_func"] = "softmax".into();
    let error = error_text(load_as("kimi_linear", DType::F32, softmax, |name| name));
    assert!(error.starts_with("[causal_lm] moe_router_activation_func is \"softmax\""), "{error}");
    Ok(())
}

/// What linear attention keeps of a text does not depend on its length.
#[test]
fn states_do_not_grow() -> Result<()> {
    let (model, ids) = (load("qwen3_5_text")?, Tensor::zeros((1, 300), DType::U32, &Device::Cpu)?);
    let held = |t: usize| -> Result<Vec<usize>> {
        let mut caches = model.caches(|config| config)?;
        model.forward(&ids.narrow(1, 0, t)?, None, &mut caches)?;
        Ok(caches.iter().map(Cache::memory).collect())
    };
    let (few, many) = (held(1)?, held(300)?);
    assert_eq!(few[..3], many[..3]);
    assert!(few[3] < many[3], "{few:?}, {many:?}");
    Ok(())
}

/// A layer of linear attention has no weights to show, and is told apart from those that have.
#[test]
fn what_linear_attention_has_not_is_said() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let path = file.path().to_str().expect("UTF-8");
    let ran = run("qwen3_next", &["--ids", "5,7,9", "--max-tokens", "1", "--page", path]);
    let note = "note: 3 of 4 layers have linear attention, which has no weights, and are left out";
    assert!(ran.stderr.contains(note), "{}", ran.stderr);
    assert!(std::fs::read_to_string(path)?.contains("layer 3 of the model"));

    let model = load("qwen3_next")?;
    let xs = Tensor::zeros((1, 2, 16), DType::F32, &Device::Cpu)?;
    let refused = model.through_blocks(xs, |_, attention, input| attention.forward(Input::Softmax(input.softmax()?)));
    assert_eq!(error_text(refused), "[causal_lm] a layer has linear attention, expected softmax attention in all");
    let mut caches = model.caches(|config| config)?;
    caches.reverse();
    let ids = Tensor::zeros((1, 2), DType::U32, &Device::Cpu)?;
    let error = error_text(model.forward(&ids, None, &mut caches));
    assert!(error.contains("a layer of linear attention got the cache of softmax attention"), "{error}");
    Ok(())
}

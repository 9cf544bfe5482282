//! Models that MLX converted, as mlx-lm's `sanitize` of each family changes them: against transformers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{
    AttentionInput, GatedDeltaNet, HeadShard, MultiHeadAttention, WeightLayout, hf, rms_norm_plus_one,
};
use candle_core::{DType, Result, Tensor};
use candle_nn::var_builder::ShardedSafeTensors;
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;
use tempfile::TempDir;

use crate::common::{assert_close, error_text, recorded};
use crate::golden::{mask, tokens};
use crate::{DEVICE, Model, Tensors};

/// Returns the tensors of a model in the form of mlx-lm.
fn converted(tensors: &Tensors, adds_one: bool) -> Result<Tensors> {
    let mut all = Tensors::new();
    for (name, tensor) in tensors {
        let is_norm = name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight");
        let tensor = if name.contains("conv1d.weight") {
            tensor.transpose(1, 2)?.contiguous()?
        } else if is_norm && adds_one {
            (tensor + 1.0)?
        } else {
            tensor.clone()
        };
        all.insert(name.clone(), tensor);
    }
    Ok(all)
}

/// A folder with the files of a model.
struct Folder(TempDir);

/// The files of a folder, and the headers in them.
#[derive(Debug, Clone, Copy)]
struct Form {
    /// Whether the headers of files say that MLX wrote them.
    header: bool,
    /// Whether a config.json is there.
    config: bool,
    /// Whether the tensors are in two files.
    shards: bool,
}

impl Form {
    const ALL: [Self; 6] = [
        Self { header: true, config: true, shards: false },
        Self { header: true, config: false, shards: false },
        Self { header: true, config: true, shards: true },
        Self { header: true, config: false, shards: true },
        Self { header: false, config: true, shards: false },
        Self { header: false, config: false, shards: true },
    ];

    fn write(self, model: &Model, tensors: &Tensors) -> Result<Folder> {
        let folder = Folder(tempfile::tempdir()?);
        if self.config {
            std::fs::write(folder.path("config.json"), model.config.to_string())?;
        }
        if !self.shards {
            save(tensors, self.header, &folder.path("model.safetensors"))?;
            return Ok(folder);
        }
        let mut names: Vec<_> = tensors.keys().collect();
        names.sort();
        let mut weight_map = serde_json::Map::new();
        for (part, file) in [(0, "a.safetensors"), (1, "b.safetensors")] {
            let mut shard = Tensors::new();
            for name in names.iter().skip(part).step_by(2) {
                shard.insert((*name).clone(), tensors[*name].clone());
                weight_map.insert((*name).clone(), file.into());
            }
            save(&shard, self.header, &folder.path(file))?;
        }
        let index = json!({"weight_map": weight_map}).to_string();
        std::fs::write(folder.path("model.safetensors.index.json"), index)?;
        Ok(folder)
    }
}

impl Folder {
    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn open(&self) -> Result<VarBuilder<'static>> {
        weights::open(self.0.path(), DType::F32, &DEVICE)
    }
}

fn save(tensors: &Tensors, header: bool, file: &Path) -> Result<()> {
    let metadata = header.then(|| HashMap::from([("format".to_string(), "mlx".to_string())]));
    Ok(safetensors::serialize_to_file(tensors, metadata, file)?)
}

/// Returns a model of one layer of softmax attention, with the convolution of another layer next to it, so that a file
/// without a header tells that MLX wrote it.
fn next_to_a_convolution(folder: &str) -> Result<Model> {
    let mut model = Model::named(folder);
    let other = Model::open(&recorded("hf/linear_models/qwen3_next"));
    for (name, tensor) in &other.weights {
        let Some((_, rest)) = name.split_once("linear_attn.") else { continue };
        model.weights.insert(format!("model.layers.1.linear_attn.{rest}"), tensor.clone());
    }
    Ok(model)
}

fn assert_golden(model: &Model, attention: &MultiHeadAttention, what: &str) -> Result<()> {
    let mask = mask(model)?;
    let ys = attention.forward_with(AttentionInput::new(&model.golden["layer0.in"]).with_mask(&mask))?;
    model.assert_close(&tokens(model, &ys)?, &tokens(model, &model.golden["layer0.out"])?, what);
    Ok(())
}

#[test]
fn mlx_norms_of_one_plus_w_match_transformers_in_every_form() -> Result<()> {
    let model = next_to_a_convolution("qwen3_next")?;
    let mut config = model.config.clone();
    config["num_hidden_layers"] = 2.into();
    config["layer_types"] = json!(["full_attention", "linear_attention"]);
    let tensors = converted(&model.weights, true)?;
    for form in Form::ALL {
        let what = format!("{form:?}");
        let folder = form.write(&model, &tensors)?;
        let vb = folder.open()?;
        assert_golden(&model, &hf::load_attention(&config, 0, vb.clone())?, &what)?;
        // The layer without its family: the builder has PyTorch's norms.
        let own = hf::attention_config(&config, 0)?;
        let layer = vb.pp("model.layers.0.self_attn");
        assert_golden(&model, &MultiHeadAttention::load(&own, WeightLayout::Canonical, layer)?, &what)?;
        // As PyTorch stores it, bit for bit where w is a difference of neighbours.
        let norm = vb.get(16, "model.layers.0.self_attn.q_norm.weight")?;
        assert_close(&norm, &model.weights["model.layers.0.self_attn.q_norm.weight"], 1e-6, &what);
        let shapes = Checkpoint::open(folder.0.path())?;
        let convolution = "model.layers.1.linear_attn.conv1d.weight";
        let shape = shapes.shapes().find(|(name, _)| *name == convolution).map(|(_, shape)| shape.to_vec());
        assert_eq!(shape.as_deref(), Some(model.weights[convolution].dims()), "{what}");
    }
    Ok(())
}

#[test]
fn mlx_norms_without_linear_layers_in_the_file_match_transformers() -> Result<()> {
    let model = Model::named("qwen3_next");
    let tensors = converted(&model.weights, true)?;
    for form in Form::ALL.into_iter().filter(|form| form.header) {
        let folder = form.write(&model, &tensors)?;
        let vb = folder.open()?;
        assert_golden(&model, &hf::load_attention(&model.config, 0, vb.clone())?, &format!("{form:?}"))?;
        if form.config {
            continue;
        }
        // Nothing there tells the model.
        let own = hf::attention_config(&model.config, 0)?;
        let layer = vb.pp("model.layers.0.self_attn");
        let refused = MultiHeadAttention::load(&own, WeightLayout::Canonical, layer.clone());
        let text = error_text(refused);
        assert!(text.contains("MLX converted this model") && text.contains("config.json"), "{text}");
        let norm = rms_norm_plus_one(16, 1e-6, layer.pp("q_norm"));
        assert!(error_text(norm).contains("MLX"));
    }
    Ok(())
}

/// Gemma's norms multiply by 1 + w too, and MLX stores w.
#[test]
fn mlx_norms_of_gemma_match_transformers() -> Result<()> {
    for name in ["gemma3", "llama", "qwen3", "olmo2"] {
        let model = Model::named(name);
        let tensors = converted(&model.weights, false)?;
        for form in Form::ALL.into_iter().filter(|form| form.header) {
            let folder = form.write(&model, &tensors)?;
            let vb = folder.open()?;
            assert_golden(&model, &hf::load_attention(&model.config, 0, vb)?, &format!("{form:?}"))?;
        }
    }
    Ok(())
}

/// Checks that convolutions in PyTorch's order show that a file is not converted, as they do in mlx-lm.
#[test]
fn mlx_header_with_convolutions_of_pytorch_matches_transformers() -> Result<()> {
    let model = next_to_a_convolution("qwen3_next")?;
    for form in Form::ALL.into_iter().filter(|form| form.header) {
        let folder = form.write(&model, &model.weights)?;
        let vb = folder.open()?;
        assert_golden(&model, &hf::load_attention(&model.config, 0, vb)?, &format!("{form:?}"))?;
    }
    Ok(())
}

#[test]
fn mlx_convolutions_of_linear_attention_match_transformers_in_every_form() -> Result<()> {
    for model in Model::all(&recorded("hf/linear_models")) {
        let tensors = converted(&model.weights, true)?;
        for form in Form::ALL {
            let what = format!("{form:?}");
            let folder = form.write(&model, &tensors)?;
            let net = hf::load_linear_attention(&model.config, 0, folder.open()?)?;
            model.assert_close(&net.forward(&model.golden["in"])?, &model.golden["out"], &what);
        }
    }
    Ok(())
}

/// Checks mlx-lm's other names for Kimi Linear's convolutions.
#[test]
fn mlx_names_of_kimi_convolutions_match_transformers() -> Result<()> {
    let model = Model::open(&recorded("hf/linear_models/kimi_linear"));
    let mut tensors = Tensors::new();
    for (name, tensor) in converted(&model.weights, false)? {
        tensors.insert(name.replace("_conv1d.", "_conv.conv."), tensor);
    }
    let form = Form { header: true, config: true, shards: false };
    let folder = form.write(&model, &tensors)?;
    let net: GatedDeltaNet = hf::load_linear_attention(&model.config, 0, folder.open()?)?;
    model.assert_close(&net.forward(&model.golden["in"])?, &model.golden["out"], "renamed convolutions");
    Ok(())
}

/// Candle's own builder does not know the header; the convolutions tell that MLX wrote the file.
#[test]
fn mlx_file_in_candles_builders_is_read_or_refused() -> Result<()> {
    let model = next_to_a_convolution("qwen3_next")?;
    let mut config = model.config.clone();
    config["num_hidden_layers"] = 2.into();
    config["layer_types"] = json!(["full_attention", "linear_attention"]);
    let tensors = converted(&model.weights, true)?;
    let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE);
    assert_golden(&model, &hf::load_attention(&config, 0, vb)?, "tensors")?;
    let linear = Model::open(&recorded("hf/linear_models/qwen3_5"));
    let own = converted(&linear.weights, true)?;
    let net = hf::load_linear_attention(&linear.config, 0, VarBuilder::from_tensors(own, DType::F32, &DEVICE))?;
    linear.assert_close(&net.forward(&linear.golden["in"])?, &linear.golden["out"], "tensors");

    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    save(&tensors, true, &file)?;
    // SAFETY: nothing writes to the file while it is mapped.
    let sharded = unsafe { ShardedSafeTensors::var_builder(&[file], DType::F32, &DEVICE)? };
    let shard = HeadShard::new(0, 2)?;
    let text = error_text(hf::load_attention_shard(&config, 0, shard, &sharded));
    assert!(text.contains("MLX converted this model"), "{text}");
    Ok(())
}

/// Checks Falcon H1, whose weights MLX multiplies by the factors of its config.
#[test]
fn mlx_weights_times_factors_are_errors_that_name_mlx() -> Result<()> {
    let model = Model::named("llama");
    let mut tensors = model.weights.clone();
    tensors.insert("model.layers.0.mamba.A_log".into(), Tensor::ones(4, DType::F32, &DEVICE)?);
    tensors.insert("model.layers.0.mamba.conv1d.weight".into(), Tensor::ones((8, 4, 1), DType::F32, &DEVICE)?);
    for form in Form::ALL {
        let folder = form.write(&model, &tensors)?;
        let vb = folder.open()?;
        let text = error_text(hf::load_attention(&model.config, 0, vb));
        assert!(text.contains("q_proj.weight: MLX multiplied it by the factors"), "{text}");
    }
    Ok(())
}

/// Checks GPT-NeoX, for which mlx-lm has other names.
#[test]
fn mlx_names_that_are_not_known_are_errors_that_name_mlx() -> Result<()> {
    let model = Model::named("gpt_neox");
    let mut tensors = Tensors::new();
    for (name, tensor) in &model.weights {
        tensors.insert(name.replace("gpt_neox.layers.", "model.h."), tensor.clone());
    }
    let folder = Form { header: true, config: true, shards: false }.write(&model, &tensors)?;
    let text = error_text(hf::load_attention(&model.config, 0, folder.open()?));
    assert!(text.contains("no attention of layer 0") && text.contains("MLX converted this model"), "{text}");
    Ok(())
}

/// Checks latent attention, whose matrix from latents to keys and values MLX splits.
#[test]
fn mlx_split_of_latent_attention_is_an_error_that_names_mlx() -> Result<()> {
    let model = Model::named("deepseek_v3");
    let mut tensors = model.weights.clone();
    let name = tensors.keys().find(|name| name.contains("layers.0") && name.contains("kv_b_proj")).cloned();
    let name = name.expect("latent attention has it");
    let whole = tensors.remove(&name).expect("it is there");
    tensors.insert(name.replace("kv_b_proj", "embed_q"), whole);
    let folder = Form { header: true, config: true, shards: false }.write(&model, &tensors)?;
    let vb = folder.open()?;
    let text = error_text(hf::load_latent_attention(&model.config, 0, vb));
    assert!(text.contains("kv_b_proj.weight is missing") && text.contains("MLX converted this model"), "{text}");
    Ok(())
}

/// Checks Step 3.5, which has no layers of linear attention, and the norms of its blocks.
#[test]
fn mlx_norms_of_step_match_the_model_before_its_conversion() -> Result<()> {
    let config = json!({
        "model_type": "step3p5", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
        "num_attention_groups": 1, "head_dim": 16,
    });
    let vars = VarMap::new();
    let own = hf::attention_config(&config, 0)?;
    let fresh = MultiHeadAttention::new(&own, VarBuilder::from_varmap(&vars, DType::F32, &DEVICE))?;
    let mut tensors = Tensors::new();
    for (name, tensor) in fresh.state_dict(WeightLayout::Canonical)? {
        let tensor = if name.contains("_norm") { Tensor::randn(0f32, 1., tensor.shape(), &DEVICE)? } else { tensor };
        tensors.insert(format!("model.layers.0.self_attn.{name}"), tensor);
    }
    let xs = Tensor::randn(0f32, 1., (1, 4, 32), &DEVICE)?;
    let expected =
        hf::load_attention(&config, 0, VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE))?.forward(&xs)?;
    let mut changed = converted(&tensors, true)?;
    let blocks = ["model.norm.weight", "model.layers.0.input_layernorm.weight"];
    for name in blocks {
        changed.insert(name.into(), Tensor::full(1.25f32, 32, &DEVICE)?);
    }
    let model = Model { name: "step3p5".into(), config, weights: tensors, golden: Tensors::new() };
    for form in Form::ALL.into_iter().filter(|form| form.header) {
        let folder = form.write(&model, &changed)?;
        let vb = folder.open()?;
        let ys = hf::load_attention(&model.config, 0, vb.clone())?.forward(&xs)?;
        model.assert_close(&ys, &expected, &format!("{form:?}"));
        if form.config {
            for name in blocks {
                assert_close(&vb.get(32, name)?, &Tensor::full(0.25f32, 32, &DEVICE)?, 0.0, name);
            }
        }
    }
    Ok(())
}

//! Layers over the codes of quantised weights, in every layout.

use std::collections::HashMap;
use std::fs;

use candle_attention::weights::{self, PackedNaming, QkvOrder};
use candle_attention::{
    DeltaLayout, GateActivation, GateLayout, GateScope, GatedDeltaNet, GatedDeltaNetConfig, HeadShard,
    MultiHeadAttention, MultiHeadAttentionConfig as Config, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig,
    OutputGate, WeightLayout, packed_linear, packed_linear_no_bias,
};
use candle_core::{DType, Device, Module, Result, Tensor, safetensors};
use candle_nn::VarBuilder;
use serde_json::json;
use tempfile::TempDir;

use crate::common::allocations;
use crate::common::{assert_near, error_text, skips_device};
use crate::{DEVICE, Invented, invented, wave};

const GROUP: usize = 32;
/// The tensors that MLX stores for a layer.
const PARTS: [&str; 3] = ["weight", "scales", "biases"];

/// The weights of a layer in a file, some of them quantised.
struct Weights {
    quantized: VarBuilder<'static>,
    /// Floats in f32 of the same numbers.
    plain: VarBuilder<'static>,
    /// The folder of the file, which `quantized` reads.
    _folder: TempDir,
}

/// Writes a file in which the weights that `bits` returns bits for are quantised as MLX does, with random codes. With
/// `is_transposed` the plain weights are (in, out).
fn weights(
    tensors: Vec<(String, Tensor)>,
    is_transposed: bool,
    bits: impl Fn(&str) -> Option<usize>,
    dtype: DType,
) -> Result<Weights> {
    let mut in_file = HashMap::new();
    let mut settings = json!({"group_size": GROUP, "bits": 4});
    let mut modules = Vec::new();
    for (name, tensor) in tensors {
        let module = name.strip_suffix(".weight").filter(|_| tensor.rank() == 2);
        let Some((module, bits)) = module.and_then(|module| Some((module.to_string(), bits(module)?))) else {
            in_file.insert(name, tensor.to_device(&Device::Cpu)?);
            continue;
        };
        let (first, second) = tensor.dims2()?;
        let (outputs, inputs) = if is_transposed { (second, first) } else { (first, second) };
        let seed = module.len() as u32 + outputs as u32;
        let words = (0..outputs * inputs * bits / 32).map(|n| (n as u32 + seed).wrapping_mul(0x9e37_79b9));
        let words = Tensor::from_iter(words, &Device::Cpu)?.reshape((outputs, inputs * bits / 32))?;
        let groups = (0..outputs * inputs / GROUP).map(|n| 1.0 + (n % 7) as f32 / 8.0);
        let scales = Tensor::from_iter(groups, &Device::Cpu)?.reshape((outputs, inputs / GROUP))?;
        let scales = (scales / f64::from(1u32 << (bits + 2)))?.to_dtype(DType::F16)?;
        // The middle of the codes is near 0.
        let biases = (&scales * -f64::from(1u32 << (bits - 1)))?;
        for (part, own) in PARTS.iter().zip([words, scales, biases]) {
            in_file.insert(format!("{module}.{part}"), own);
        }
        settings[&module] = json!({"group_size": GROUP, "bits": bits});
        modules.push(module);
    }
    let folder = tempfile::tempdir()?;
    safetensors::save(&in_file, folder.path().join("model.safetensors"))?;
    fs::write(folder.path().join("config.json"), json!({"quantization": settings}).to_string())?;
    let wide = weights::open(folder.path(), DType::F32, &DEVICE)?;
    let mut numbers = HashMap::new();
    for (name, tensor) in in_file {
        let is_part = |module: &String| PARTS.iter().any(|part| name == format!("{module}.{part}"));
        if !modules.iter().any(is_part) {
            numbers.insert(name, tensor.to_device(&DEVICE)?);
        }
    }
    for module in modules {
        let name = format!("{module}.weight");
        let weight = wide.get_unchecked(&name)?;
        numbers.insert(name, if is_transposed { weight.t()?.contiguous()? } else { weight });
    }
    Ok(Weights {
        quantized: weights::open(folder.path(), dtype, &DEVICE)?,
        plain: VarBuilder::from_tensors(numbers, DType::F32, &DEVICE),
        _folder: folder,
    })
}

fn of_layer(layer: &MultiHeadAttention, layout: WeightLayout) -> Result<Weights> {
    let name = layout.to_string();
    let is_transposed = name.contains("conv1d") || name.starts_with("in-out:");
    weights(layer.state_dict(layout)?, is_transposed, four_bits, DType::F32)
}

fn config() -> Config {
    Config::new(64, 4).with_head_dim(16).with_causal(true)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn four_bits(_: &str) -> Option<usize> {
    Some(4)
}

#[test]
fn quantized_weights_in_every_layout_match_dequantized_weights() -> Result<()> {
    let xs = wave(0.37, (2, 5, 64))?;
    let gate = |layout| OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::Elementwise, layout };
    let grouped = || config().with_num_kv_heads(2);
    let configs = [
        config(),
        config().with_bias(true),
        grouped(),
        grouped().with_output_gate(gate(GateLayout::FusedWithQuery)),
        grouped().with_output_gate(gate(GateLayout::Separate { bias: false })),
    ];
    let mut tried = Vec::new();
    for layout in WeightLayout::all() {
        for cfg in &configs {
            let Ok(drawn) = invented(cfg, layout) else { continue };
            let files = of_layer(&drawn, layout)?;
            let own = MultiHeadAttention::load(cfg, layout, files.quantized.clone())?;
            let expected = MultiHeadAttention::load(cfg, layout, files.plain.clone())?;
            let what = format!("{layout}, {cfg:?}");
            assert_near(&own.forward(&xs)?, &expected.forward(&xs)?, 1e-5, &what);
            assert_near(&own.freeze()?.forward(&xs)?, &expected.forward(&xs)?, 1e-5, &what);
            for ((name, tensor), (_, number)) in own.state_dict(layout)?.iter().zip(expected.state_dict(layout)?) {
                assert_eq!(numbers(tensor)?, numbers(&number)?, "{what}, {name}");
            }
            tried.push(layout);
        }
    }
    let by_head = WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead);
    assert!(tried.contains(&by_head) && tried.contains(&WeightLayout::Conv1d) && tried.len() > 40, "{}", tried.len());
    Ok(())
}

#[test]
fn layers_with_some_quantized_weights_match_dequantized_weights() -> Result<()> {
    let cfg = config().with_num_kv_heads(2).with_bias(true);
    let drawn = invented(&cfg, WeightLayout::Canonical)?;
    let bits = |module: &str| match module {
        "q_proj" => Some(4),
        "v_proj" => Some(8),
        "o_proj" => Some(3),
        _ => None,
    };
    let files = weights(drawn.state_dict(WeightLayout::Canonical)?, false, bits, DType::F32)?;
    let xs = wave(0.21, (1, 7, 64))?;
    let own = MultiHeadAttention::new(&cfg, files.quantized.clone())?.forward(&xs)?;
    assert_near(&own, &MultiHeadAttention::new(&cfg, files.plain.clone())?.forward(&xs)?, 1e-5, "4, 8 and 3 bits");
    Ok(())
}

#[test]
fn quantized_weights_are_computed_in_the_dtype_of_the_builder() -> Result<()> {
    let cfg = config();
    let drawn = invented(&cfg, WeightLayout::Canonical)?;
    let xs = wave(0.21, (1, 7, 64))?;
    for (dtype, tolerance) in [(DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        let files = weights(drawn.state_dict(WeightLayout::Canonical)?, false, four_bits, dtype)?;
        let ys = MultiHeadAttention::new(&cfg, files.quantized.clone())?.forward(&xs.to_dtype(dtype)?)?;
        assert_eq!(ys.dtype(), dtype);
        let expected = MultiHeadAttention::new(&cfg, files.plain.clone())?.forward(&xs)?;
        assert_near(&ys.to_dtype(DType::F32)?, &expected, tolerance, &format!("{dtype:?}"));
    }
    Ok(())
}

#[test]
fn quantized_shards_have_whole_groups() -> Result<()> {
    let cfg = config().with_num_kv_heads(2);
    let drawn = invented(&cfg, WeightLayout::Canonical)?;
    let files = of_layer(&drawn, WeightLayout::Canonical)?;
    let xs = wave(0.21, (1, 7, 64))?;
    let expected = MultiHeadAttention::new(&cfg, files.plain.clone())?.forward(&xs)?;
    let load = |shard| MultiHeadAttention::load_shard(&cfg, WeightLayout::Canonical, shard, &files.quantized);
    let mut sum = expected.zeros_like()?;
    for shard in HeadShard::new(0, 2)?.all() {
        sum = (sum + load(shard)?.forward(&xs)?)?;
    }
    assert_near(&sum, &expected, 1e-5, "two ranks");
    // Four ranks would have half a group each.
    let error = error_text(load(HeadShard::new(1, 4)?));
    assert!(error.contains("o_proj.weight: [quantized_weight] expected whole groups of 32 inputs"), "{error}");
    Ok(())
}

#[test]
fn quantized_latent_and_linear_attention_match_dequantized_weights() -> Result<()> {
    let xs = wave(0.43, (1, 6, 64))?;
    let draw = || VarBuilder::from_backend(Box::new(Invented), DType::F32, DEVICE.clone());

    let delta = GatedDeltaNetConfig::new(64, 4).with_num_key_heads(2).with_key_head_dim(16).with_value_head_dim(16);
    for layout in [DeltaLayout::Separate, DeltaLayout::Qwen3Next, DeltaLayout::Qwen3_5] {
        let drawn = GatedDeltaNet::load(&delta, layout, draw())?;
        let files = weights(drawn.state_dict(layout)?, false, four_bits, DType::F32)?;
        let own = GatedDeltaNet::load(&delta, layout, files.quantized.clone())?;
        let expected = GatedDeltaNet::load(&delta, layout, files.plain.clone())?;
        assert_near(&own.forward(&xs)?, &expected.forward(&xs)?, 1e-4, &format!("{layout}"));
    }

    let latent = MultiHeadLatentAttentionConfig::new(64, 4)
        .with_q_lora_rank(32)
        .with_kv_lora_rank(32)
        .with_nope_head_dim(16)
        .with_rope_head_dim(8)
        .with_value_head_dim(16);
    let shapes = [
        ("q_a_proj", [32, 64]),
        ("q_b_proj", [4 * 24, 32]),
        ("kv_a_proj_with_mqa", [40, 64]),
        ("kv_b_proj", [4 * 32, 32]),
        ("o_proj", [64, 64]),
    ];
    let mut tensors = Vec::new();
    for (name, shape) in shapes {
        tensors.push((format!("{name}.weight"), draw().get(&shape, name)?));
    }
    for norm in ["q_a_layernorm", "kv_a_layernorm"] {
        tensors.push((format!("{norm}.weight"), draw().get(32, norm)?));
    }
    let files = weights(tensors, false, four_bits, DType::F32)?;
    let own = MultiHeadLatentAttention::new(&latent, files.quantized.clone())?;
    let expected = MultiHeadLatentAttention::new(&latent, files.plain.clone())?;
    assert_near(&own.forward(&xs)?, &expected.forward(&xs)?, 1e-5, "latent attention");
    Ok(())
}

#[test]
fn packed_linear_reads_the_codes_of_a_builder() -> Result<()> {
    let tensors = vec![("up.weight".to_string(), wave(0.3, (48, 64))?), ("up.bias".to_string(), wave(0.2, 48)?)];
    let files = weights(tensors, false, four_bits, DType::F32)?;
    let Weights { quantized, plain, .. } = &files;
    let xs = wave(0.21, (3, 64))?;
    let read = |vb: &VarBuilder| packed_linear(64, 48, vb.pp("up"))?.forward(&xs);
    assert_near(&read(quantized)?, &read(plain)?, 1e-5, "with a bias");
    let unbiased = |vb: &VarBuilder| packed_linear_no_bias(64, 48, vb.pp("up"))?.forward(&xs);
    assert_near(&unbiased(quantized)?, &unbiased(plain)?, 1e-5, "without a bias");
    let error = error_text(packed_linear(64, 40, quantized.pp("up")));
    assert!(error.contains("[packed_linear] up.weight has shape (48, 64), expected (40, 64)"), "{error}");
    Ok(())
}

/// Checks the largest allocation, which a copy of one weight in f32 would be.
#[test]
fn quantized_weights_are_packed_without_a_dequantized_copy() -> Result<()> {
    if skips_device("the codes are packed on a CPU") {
        return Ok(());
    }
    let cfg = Config::new(256, 4);
    let drawn = invented(&cfg, WeightLayout::Canonical)?;
    let files = of_layer(&drawn, WeightLayout::Canonical)?;
    allocations::reset();
    MultiHeadAttention::new(&cfg, files.quantized.clone())?;
    let largest = allocations::asked().largest;
    // The codes of three projections, a byte each.
    assert!(largest <= 3 * 256 * 256 + 4096, "{largest} bytes at once");
    Ok(())
}

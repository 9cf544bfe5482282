//! Other forms of latent and linear attention in GGUF files: the forms of older files, and quantised weights.

use candle_attention::{DeltaLayout, MultiHeadAttention, gguf, hf};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{Result, Tensor};
use serde_json::json;

use crate::DEVICE;
use crate::common::gguf::File;
use crate::common::{error_text, recorded, recorded_tensors, relative_error};

const EXACT: f64 = 1e-6;

/// Reads one of the recorded files, to change it. Weights become f32.
fn recorded_file(name: &str) -> Result<File> {
    let mut reader = std::fs::File::open(recorded(&format!("hf/gguf_models/{name}.gguf")))?;
    let content = gguf::read(&mut reader)?;
    let mut file = File { metadata: content.metadata.clone().into_iter().collect(), tensors: Vec::new() };
    for tensor in content.tensor_infos.keys() {
        file.add(tensor, &content.tensor(&mut reader, tensor, &DEVICE)?.dequantize(&DEVICE)?, GgmlDType::F32)?;
    }
    Ok(file)
}

impl File {
    /// Returns a tensor and removes it.
    fn take(&mut self, name: &str) -> Result<Tensor> {
        let place = self.tensors.iter().position(|(own, _)| own == name).expect(name);
        self.tensors.remove(place).1.dequantize(&DEVICE)
    }

    fn remove_key(&mut self, key: &str) {
        self.metadata.retain(|(own, _)| own != key);
    }
}

#[test]
fn gguf_latent_attention_of_older_files_matches_that_of_newer_files() -> Result<()> {
    let golden = recorded_tensors("hf/gguf_models/deepseek2.safetensors")?;
    let mut file = recorded_file("deepseek2")?;
    let heads = 4;
    for layer in 0..2 {
        let keys = file.take(&format!("blk.{layer}.attn_k_b.weight"))?.transpose(1, 2)?.contiguous()?;
        let values = file.take(&format!("blk.{layer}.attn_v_b.weight"))?;
        let rank = values.dim(2)?;
        let together = Tensor::cat(&[keys, values], 1)?.reshape(((), rank))?;
        file.add(&format!("blk.{layer}.attn_kv_b.weight"), &together, GgmlDType::F32)?;
    }
    for part in ["key_length", "value_length"] {
        let width = file.metadata.iter().find(|(key, _)| *key == format!("deepseek2.attention.{part}_mla"));
        let width = width.expect(part).1.clone();
        file.set(&format!("deepseek2.attention.{part}"), width);
        file.remove_key(&format!("deepseek2.attention.{part}_mla"));
    }
    file.set("deepseek2.attention.head_count_kv", Value::U32(heads));
    let (content, mut reader) = file.open()?;
    for layer in 0..2 {
        let attention = gguf::load_latent_attention(&content, &mut reader, layer, &DEVICE)?;
        assert_eq!(*attention.config(), gguf::latent_attention_config(&content)?);
        let error = relative_error(
            &attention.forward(&golden[&format!("layer{layer}.in")])?,
            &golden[&format!("layer{layer}.out")],
        );
        assert!(error < 1e-5, "layer {layer}: off by {error:e}");
    }
    Ok(())
}

/// Joins rows of parts, each divided among the key heads, as Qwen3-Next's checkpoints have them.
fn grouped_by_key_head(parts: &[Tensor], key_heads: usize) -> Result<Tensor> {
    let width = parts[0].dim(1)?;
    let by_head = |part: &Tensor| part.reshape((key_heads, part.dim(0)? / key_heads, width));
    Tensor::cat(&parts.iter().map(by_head).collect::<Result<Vec<_>>>()?, 1)?.reshape(((), width))
}

#[test]
fn gguf_linear_attention_of_older_files_matches_that_of_newer_files() -> Result<()> {
    let golden = recorded_tensors("hf/gguf_models/qwen3next.safetensors")?;
    let mut file = recorded_file("qwen3next")?;
    let qkv = file.take("blk.0.attn_qkv.weight")?;
    let gate = file.take("blk.0.attn_gate.weight")?;
    let key_rows = (qkv.dim(0)? - gate.dim(0)?) / 2;
    let part = |first: usize, count: usize| qkv.narrow(0, first, count)?.contiguous();
    let parts = [part(0, key_rows)?, part(key_rows, key_rows)?, part(2 * key_rows, gate.dim(0)?)?, gate.clone()];
    file.add("blk.0.ssm_in.weight", &grouped_by_key_head(&parts, 2)?, GgmlDType::F32)?;
    let (content, mut reader) = file.open()?;
    let net = gguf::load_linear_attention(&content, &mut reader, 0, &DEVICE)?;
    let error = relative_error(&net.forward(&golden["layer0.in"])?, &golden["layer0.out"]);
    assert!(error < 1e-5, "off by {error:e}");
    Ok(())
}

/// Checks a layer with fewer key heads, where llama.cpp's order of value heads is another one.
#[test]
fn gguf_linear_attention_with_other_head_order_is_saved_in_order_of_checkpoint() -> Result<()> {
    let golden = recorded_tensors("hf/gguf_models/qwen35.safetensors")?;
    let (content, mut reader) = recorded_file("qwen35")?.open()?;
    let net = gguf::load_linear_attention(&content, &mut reader, 0, &DEVICE)?;
    assert!(net.config().num_value_heads() > net.config().num_key_heads());
    let expected = net.forward(&golden["layer0.in"])?;
    let saved = net.state_dict(DeltaLayout::Qwen3_5)?.into_iter().collect();
    let vb = candle_nn::VarBuilder::from_tensors(saved, candle_core::DType::F32, &DEVICE);
    let loaded = candle_attention::GatedDeltaNet::load(net.config(), DeltaLayout::Qwen3_5, vb)?;
    for other in [loaded, net.freeze()?] {
        let error = relative_error(&other.forward(&golden["layer0.in"])?, &expected);
        assert!(error < EXACT, "off by {error:e}");
    }
    Ok(())
}

#[test]
fn gguf_configs_of_hybrids_are_those_of_the_first_layer_of_a_kind() -> Result<()> {
    for (name, linear, full) in [("qwen3next", 0, 1), ("qwen35", 0, 1)] {
        let (content, mut reader) = recorded_file(name)?.open()?;
        let config = gguf::hf_config(&content)?;
        let net = gguf::load_linear_attention(&content, &mut reader, linear, &DEVICE)?;
        assert_eq!(*net.config(), gguf::linear_attention_config(&content)?, "{name}");
        assert_eq!(*net.config(), hf::linear_attention_config(&config, linear)?, "{name}");
        let attention = gguf::load_attention(&content, &mut reader, full, &DEVICE)?;
        assert_eq!(*attention.config(), gguf::attention_config(&content)?, "{name}");
        let kinds = (0..2).map(|layer| gguf::is_linear_attention(&content, layer)).collect::<Result<Vec<_>>>()?;
        assert_eq!(kinds, [true, false], "{name}");
        let wrong = gguf::load_attention(&content, &mut reader, linear, &DEVICE).expect_err("linear attention");
        assert!(wrong.to_string().contains("load_linear_attention"), "{name}: {wrong}");
        let softmax = gguf::load_linear_attention(&content, &mut reader, full, &DEVICE).expect_err("softmax attention");
        assert!(softmax.to_string().contains("load_attention"), "{name}: {softmax}");
    }
    Ok(())
}

fn numbers(shape: &[usize], seed: f64) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    (Tensor::arange(0f32, count as f32, &DEVICE)?.affine(0.731, seed)?.sin()? * 0.1)?.reshape(shape)
}

/// Returns a layer of latent attention and a layer of linear attention, wide enough for blocks of every type.
fn wide(dtype: GgmlDType) -> Result<[File; 2]> {
    let latent = json!({
        "block_count": 1, "embedding_length": 256, "context_length": 64, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.key_length": 288, "attention.key_length_mla": 288,
        "attention.value_length_mla": 128, "attention.kv_lora_rank": 256, "rope.dimension_count": 32,
    });
    let mut latent = File::of("deepseek2", &latent);
    let linear = json!({
        "block_count": 2, "embedding_length": 256, "context_length": 64, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.key_length": 128, "rope.dimension_count": 32, "ssm.conv_kernel": 4,
        "ssm.inner_size": 512, "ssm.state_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2,
        "full_attention_interval": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    });
    let mut linear = File::of("qwen35", &linear);
    for (i, (part, shape)) in [
        ("attn_q", &[576, 256][..]),
        ("attn_kv_a_mqa", &[288, 256]),
        ("attn_k_b", &[2, 256, 256]),
        ("attn_v_b", &[2, 128, 256]),
        ("attn_output", &[256, 256]),
    ]
    .into_iter()
    .enumerate()
    {
        latent.add(&format!("blk.0.{part}.weight"), &numbers(shape, i as f64)?, dtype)?;
    }
    latent.add("blk.0.attn_kv_a_norm.weight", &(numbers(&[256], 7.0)? + 1.0)?, GgmlDType::F32)?;
    for (i, (part, shape)) in [
        ("attn_qkv", &[768, 256][..]),
        ("attn_gate", &[512, 256]),
        ("ssm_beta", &[4, 256]),
        ("ssm_alpha", &[4, 256]),
        ("ssm_out", &[256, 512]),
    ]
    .into_iter()
    .enumerate()
    {
        linear.add(&format!("blk.0.{part}.weight"), &numbers(shape, i as f64)?, dtype)?;
    }
    linear.add("blk.0.ssm_conv1d.weight", &numbers(&[768, 4], 0.3)?, GgmlDType::F32)?;
    linear.add("blk.0.ssm_norm.weight", &(numbers(&[128], 0.4)? + 1.0)?, GgmlDType::F32)?;
    linear.add("blk.0.ssm_dt.bias", &numbers(&[4], 0.5)?, GgmlDType::F32)?;
    linear.add("blk.0.ssm_a", &(numbers(&[4], 0.6)? - 1.0)?, GgmlDType::F32)?;
    Ok([latent, linear])
}

/// Computes the layer of a file.
fn forward(file: &File, xs: &Tensor) -> Result<Tensor> {
    let (content, mut reader) = file.open()?;
    if gguf::latent_attention_config(&content).is_ok() {
        return gguf::load_latent_attention(&content, &mut reader, 0, &DEVICE)?.forward(xs);
    }
    gguf::load_linear_attention(&content, &mut reader, 0, &DEVICE)?.forward(xs)
}

/// Compares with the same file with dequantised weights.
#[test]
fn gguf_latent_and_linear_weights_of_every_type_match_dequantised_layer() -> Result<()> {
    use GgmlDType::*;
    let xs = numbers(&[2, 7, 256], 0.5)?;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        for file in wide(dtype)? {
            let mut plain = File { metadata: file.metadata.clone(), tensors: Vec::new() };
            for (name, tensor) in &file.tensors {
                plain.add(name, &tensor.dequantize(&DEVICE)?, F32)?;
            }
            let error = relative_error(&forward(&file, &xs)?, &forward(&plain, &xs)?);
            assert!(error < 1e-5, "{dtype:?}: off by {error:e}");
        }
    }
    Ok(())
}

#[test]
fn gguf_tensors_that_latent_or_linear_layers_cannot_use_are_named() -> Result<()> {
    let [latent, linear] = wide(GgmlDType::F32)?;
    let xs = numbers(&[1, 3, 256], 0.5)?;
    let failed = |file: &File| forward(file, &xs).map(|_| ()).map_err(|error| error.to_string()).unwrap_err();

    let mut file = File { metadata: latent.metadata.clone(), tensors: Vec::new() };
    assert!(failed(&file).contains("blk.0.attn_q.weight is missing"), "{}", failed(&file));
    file = File { metadata: linear.metadata.clone(), tensors: Vec::new() };
    assert!(failed(&file).contains("blk.0.attn_qkv.weight is missing"), "{}", failed(&file));

    let [mut biased, mut growing] = wide(GgmlDType::F32)?;
    biased.add("blk.0.attn_output.bias", &numbers(&[256], 0.1)?, GgmlDType::F32)?;
    assert!(failed(&biased).contains("blk.0.attn_output.bias is in the file"), "{}", failed(&biased));
    growing.add("blk.0.ssm_a", &Tensor::new(&[-1f32, 0.5, -1.0, -1.0], &DEVICE)?, GgmlDType::F32)?;
    assert!(failed(&growing).contains("blk.0.ssm_a has 0.5, expected numbers below 0"), "{}", failed(&growing));

    growing.set("qwen35.ssm.inner_size", Value::U32(510));
    let error = gguf::hf_config(&growing.open()?.0).expect_err("a remainder").to_string();
    assert!(error.contains("ssm.inner_size is 510, expected a multiple of ssm.time_step_rank, 4"), "{error}");
    biased.set("deepseek2.rope.dimension_count", Value::U32(288));
    let biased_error = gguf::hf_config(&biased.open()?.0).expect_err("no width without positions").to_string();
    assert!(biased_error.contains("keys are 288 wide, expected more than rope.dimension_count, 288"), "{biased_error}");
    Ok(())
}

/// Checks the errors of one part of a model that is in several files, and of a tensor of another type.
#[test]
fn gguf_part_of_a_model_is_named_in_errors() -> Result<()> {
    let mut file = File::llama()?;
    file.set("split.no", Value::U16(1));
    file.set("split.count", Value::U16(2));
    file.take("blk.0.attn_k.weight")?;
    let load = |of: &File| -> Result<MultiHeadAttention> {
        let (content, mut reader) = of.open()?;
        gguf::load_attention(&content, &mut reader, 0, &DEVICE)
    };
    let text = error_text(load(&file));
    assert!(text.contains("attn_k.weight is missing") && text.contains("the file is part 2 of 2"), "{text}");
    file.metadata.retain(|(key, _)| key.starts_with("split."));
    let text_of_metadata = error_text(load(&file));
    assert!(text_of_metadata.contains("the file is part 2 of 2"), "{text_of_metadata}");

    let mut bytes = File::llama()?.bytes()?;
    let name = b"blk.0.attn_q.weight";
    let place = bytes.windows(name.len()).position(|window| window == name).expect("the name");
    // After the name: the number of dimensions, two of them, the type.
    let dtype = place + name.len() + 4 + 2 * 8;
    for (number, expected) in [(39u32, "expected whole blocks of 32 numbers of MXFP4"), (9, "has type 9 (Q8_1")] {
        bytes[dtype..dtype + 4].copy_from_slice(&number.to_le_bytes());
        let mut reader = std::io::Cursor::new(bytes.clone());
        let content = gguf::read(&mut reader)?;
        let text_of_type = error_text(gguf::load_attention(&content, &mut reader, 0, &DEVICE));
        assert!(text_of_type.contains(expected) && text_of_type.contains("blk.0.attn_q.weight"), "{text_of_type}");
    }
    Ok(())
}

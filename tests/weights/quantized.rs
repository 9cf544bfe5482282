//! Quantised weights of other libraries. Those that are not read are errors that name the method.

use std::collections::HashMap;
use std::path::Path;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, hf};
use candle_core::{DType, Result};
use candle_nn::VarBuilder;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::DEVICE;
use crate::common::root;

const E: usize = 64;

/// A tensor below the module of a projection.
struct Part {
    name: &'static str,
    dtype: Dtype,
    shape: &'static [usize],
}

const fn part(name: &'static str, dtype: Dtype, shape: &'static [usize]) -> Part {
    Part { name, dtype, shape }
}

/// A way of quantising projections (64, 64), with groups of 32.
struct Method {
    name: &'static str,
    parts: &'static [Part],
    /// The words of an error without a config, and with the config.
    by_names: &'static str,
    config: &'static str,
    by_config: &'static str,
    loads: Loads,
}

/// Whether the weights of a method are read.
#[derive(PartialEq)]
enum Loads {
    Never,
    /// If the config has the settings of the method.
    WithConfig,
    /// With or without a config.
    Always,
}

const METHODS: &[Method] = &[
    Method {
        name: "GPTQ",
        parts: &[
            part("qweight", Dtype::I32, &[8, 64]),
            part("qzeros", Dtype::I32, &[2, 8]),
            part("scales", Dtype::F16, &[2, 64]),
            part("g_idx", Dtype::I32, &[64]),
        ],
        by_names: "GPTQ",
        config: r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}"#,
        by_config: "GPTQ, 4 bits",
        loads: Loads::WithConfig,
    },
    Method {
        name: "AWQ",
        parts: &[
            part("qweight", Dtype::I32, &[64, 8]),
            part("qzeros", Dtype::I32, &[2, 8]),
            part("scales", Dtype::F16, &[2, 64]),
        ],
        by_names: "AWQ",
        config: r#"{"text_config": {"quantization_config": {"quant_method": "awq", "w_bit": 4}}}"#,
        by_config: "AWQ, 4 bits",
        loads: Loads::WithConfig,
    },
    Method {
        name: "MLX",
        parts: &[
            part("weight", Dtype::U32, &[64, 8]),
            part("scales", Dtype::F16, &[64, 2]),
            part("biases", Dtype::F16, &[64, 2]),
        ],
        by_names: "MLX",
        config: r#"{"quantization": {"group_size": 32, "bits": 4}}"#,
        by_config: "MLX, 4 bits",
        loads: Loads::WithConfig,
    },
    Method {
        name: "MLX, 8 bits in rows that are full",
        parts: &[
            part("weight", Dtype::U32, &[64, 64]),
            part("scales", Dtype::F16, &[64, 2]),
            part("biases", Dtype::F16, &[64, 2]),
        ],
        by_names: "MLX",
        config: r#"{"quantization": {"group_size": 32, "bits": 8}}"#,
        by_config: "MLX, 8 bits",
        loads: Loads::Never,
    },
    Method {
        name: "MXFP4 of MLX",
        parts: &[part("weight", Dtype::U32, &[64, 8]), part("scales", Dtype::U8, &[64, 2])],
        by_names: "MLX (MXFP4",
        config: r#"{"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}"#,
        by_config: "MLX, 4 bits",
        loads: Loads::WithConfig,
    },
    Method {
        name: "bitsandbytes, 4 bits, with a quant_state that is no JSON",
        parts: &[
            part("weight", Dtype::U8, &[2048, 1]),
            part("weight.absmax", Dtype::F32, &[64]),
            part("weight.quant_map", Dtype::F32, &[16]),
            part("weight.quant_state.bitsandbytes__nf4", Dtype::U8, &[80]),
        ],
        by_names: "bitsandbytes, 4 bits (NF4)",
        config: r#"{"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}}"#,
        by_config: "bitsandbytes, 4 bits",
        loads: Loads::Never,
    },
    Method {
        name: "bitsandbytes, 8 bits",
        parts: &[part("weight", Dtype::I8, &[64, 64]), part("SCB", Dtype::F32, &[64])],
        by_names: "bitsandbytes, 8 bits",
        config: r#"{"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}"#,
        by_config: "bitsandbytes, 8 bits",
        loads: Loads::Always,
    },
    Method {
        name: "compressed-tensors, 4 bits",
        parts: &[
            part("weight_packed", Dtype::I32, &[64, 8]),
            part("weight_scale", Dtype::BF16, &[64, 2]),
            part("weight_shape", Dtype::I64, &[2]),
        ],
        by_names: "compressed-tensors",
        config: r#"{"quantization_config": {"quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}"#,
        by_config: "compressed-tensors, 4 bits",
        loads: Loads::WithConfig,
    },
    Method {
        name: "compressed-tensors, 8 bits",
        parts: &[part("weight", Dtype::I8, &[64, 64]), part("weight_scale", Dtype::BF16, &[64, 1])],
        by_names: "dtype I8",
        config: r#"{"compression_config": {"quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}}"#,
        by_config: "compressed-tensors",
        loads: Loads::WithConfig,
    },
    Method {
        name: "HQQ",
        parts: &[
            part("W_q", Dtype::U8, &[64, 64]),
            part("scale", Dtype::F16, &[64, 1]),
            part("zero", Dtype::F16, &[64, 1]),
        ],
        by_names: "HQQ",
        config: r#"{"quantization_config": {"quant_method": "hqq", "nbits": 8}}"#,
        by_config: "HQQ, 8 bits",
        loads: Loads::Never,
    },
    Method {
        name: "torchao",
        parts: &[part("_weight_qdata", Dtype::I8, &[64, 64]), part("_weight_scale", Dtype::F32, &[64, 1])],
        by_names: "torchao",
        config: r#"{"quantization_config": {"quant_method": "torchao"}}"#,
        by_config: "torchao",
        loads: Loads::Never,
    },
    Method {
        name: "NVFP4",
        parts: &[
            part("weight", Dtype::U8, &[64, 32]),
            part("weight_scale", Dtype::F8_E4M3, &[64, 4]),
            part("weight_scale_2", Dtype::F32, &[]),
        ],
        by_names: "NVFP4",
        config: r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#,
        by_config: "NVFP4",
        loads: Loads::Always,
    },
    Method {
        name: "MXFP4 of Quark",
        parts: &[part("weight", Dtype::U8, &[64, 32]), part("weight_scale", Dtype::U8, &[64, 2])],
        by_names: "dtype U8",
        config: r#"{"quantization_config": {"quant_method": "quark"}}"#,
        by_config: "quark",
        loads: Loads::Never,
    },
    Method {
        name: "float8 of E5M2",
        parts: &[part("weight", Dtype::F8_E5M2, &[64, 64]), part("weight_scale", Dtype::F32, &[])],
        by_names: "dtype F8_E5M2",
        config: r#"{"quantization_config": {"quant_method": "fp8"}}"#,
        by_config: "FP8",
        loads: Loads::Always,
    },
];

/// A projection that is not quantised.
const FLOAT: Method = Method {
    name: "floats",
    parts: &[part("weight", Dtype::F32, &[64, 64])],
    by_names: "",
    config: "{}",
    by_config: "",
    loads: Loads::Never,
};

impl Method {
    /// Writes a layer below `model.layers.0.self_attn`, with a config if it has one.
    fn write(&self, folder: &Path, config: Option<&Value>) -> Result<()> {
        if let Some(config) = config {
            std::fs::write(folder.join("config.json"), config.to_string())?;
        }
        let bytes = vec![1u8; 4 * E * E];
        let group_of_inputs = vec![0u8; 4 * E];
        let shape_of_weight = [E as u64; 2].map(u64::to_le_bytes).concat();
        let mut tensors = HashMap::new();
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            for Part { name, dtype, shape } in self.parts {
                let size = shape.iter().product::<usize>() * dtype.bitsize() / 8;
                let content = match *name {
                    "g_idx" => &group_of_inputs,
                    "weight_shape" => &shape_of_weight,
                    _ => &bytes,
                };
                let view = TensorView::new(*dtype, shape.to_vec(), &content[..size])?;
                tensors.insert(format!("model.layers.0.self_attn.{projection}.{name}"), view);
            }
        }
        Ok(safetensors::serialize_to_file(tensors, None, &folder.join("model.safetensors"))?)
    }
}

fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(E, 4)
}

/// Asserts that an error says that a weight is quantised by a method, and does not advise what was done.
#[track_caller]
fn assert_names<T>(result: Result<T>, method: &str, what: &str) {
    let Err(error) = result else { panic!("{what}: it was accepted") };
    let text = error.to_string();
    let text = text.lines().next().unwrap_or_default();
    assert!(text.contains("quantis") && text.contains(method), "{what}, expected {method}: {text}");
    for wrong in ["weights::open", "has shape", "is missing"] {
        assert!(!text.contains(wrong), "{what}: {text}");
    }
}

#[test]
fn quantized_weights_are_read_or_are_errors_that_name_the_method() -> Result<()> {
    for method in METHODS {
        let own_config: Value = serde_json::from_str(method.config).expect("a config");
        for (model, expected) in [(None, method.by_names), (Some(&own_config), method.by_config)] {
            let what = format!("{}, config {}", method.name, model.is_some());
            let folder = tempfile::tempdir()?;
            method.write(folder.path(), model)?;
            let vb = weights::open(folder.path(), DType::F32, &DEVICE)?.pp("model.layers.0.self_attn");
            if method.loads == Loads::Always || model.is_some() && method.loads == Loads::WithConfig {
                MultiHeadAttention::new(&config(), vb)?;
                continue;
            }
            assert_names(MultiHeadAttention::new(&config(), vb.clone()), expected, &what);
            let linear = candle_nn::linear_no_bias(E, E, vb.pp("q_proj"));
            assert_names(linear, expected, &what);
            let checkpoint = Checkpoint::open(folder.path())?;
            let prefix = "model.layers.0.self_attn";
            let inferred = checkpoint.infer_config(prefix, WeightLayout::Canonical, Some(4));
            assert_names(inferred, expected, &what);
            if let Err(error) = checkpoint.detect(prefix) {
                assert_names::<()>(Err(error), expected, &what);
            }
        }
    }
    Ok(())
}

#[test]
fn quantized_weights_in_models_are_read_or_are_errors_that_name_the_method() -> Result<()> {
    let llama = json!({"model_type": "llama", "hidden_size": E, "num_attention_heads": 4, "num_hidden_layers": 1});
    for method in METHODS {
        let folder = tempfile::tempdir()?;
        let mut own: Value = serde_json::from_str(method.config).expect("a config");
        method.write(folder.path(), None)?;
        let open = || weights::open(folder.path(), DType::F32, &DEVICE);
        let without = hf::load_attention(&llama, 0, open()?);
        if method.loads == Loads::Always {
            without?;
        } else {
            assert_names(without, method.by_names, method.name);
        }
        own.as_object_mut().expect("an object").extend(llama.as_object().expect("an object").clone());
        method.write(folder.path(), Some(&own))?;
        match method.loads {
            Loads::WithConfig | Loads::Always => drop(hf::load_attention(&own, 0, open()?)?),
            Loads::Never => {
                // An error about a missing module knows the names alone.
                let loaded = hf::load_attention(&own, 0, open()?);
                let is_by_names = loaded.as_ref().err().is_some_and(|error| error.to_string().contains("looked for"));
                let expected = if is_by_names { method.by_names } else { method.by_config };
                assert_names(loaded.map(drop), expected, method.name);
            }
        }
    }
    Ok(())
}

/// Tries the methods that docs/quantised.md lists as refused, which `crates/compare/census/quantized.py` writes.
#[test]
fn methods_that_the_page_lists_as_refused_are_errors_that_name_them() -> Result<()> {
    let page = std::fs::read_to_string(root().join("docs/quantised.md"))?;
    let (_, table) = page.split_once("| refused | why |").expect("a table of refused methods");
    let mut tried = 0;
    for line in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let name = line.split('`').nth(1).expect("the name of a method");
        let folder = tempfile::tempdir()?;
        const BYTES: &[Part] = &[part("weight", Dtype::U8, &[64, 32])];
        let bytes = Method { name: "bytes", parts: BYTES, ..FLOAT };
        bytes.write(folder.path(), Some(&json!({"quantization_config": {"quant_method": name}})))?;
        let vb = weights::open(folder.path(), DType::F32, &DEVICE)?.pp("model.layers.0.self_attn");
        assert_names(MultiHeadAttention::new(&config(), vb), name, line);
        tried += 1;
    }
    assert!(tried > 5, "{tried} lines");
    Ok(())
}

/// Candle's own builder has no dtypes, so that the tensors next to a weight tell the method.
#[test]
fn quantized_weights_in_candles_builder_are_errors_that_name_the_method() -> Result<()> {
    let is_known = |method: &&Method| !method.by_names.starts_with("dtype");
    for method in METHODS.iter().filter(is_known) {
        let folder = tempfile::tempdir()?;
        method.write(folder.path(), None)?;
        // SAFETY: nothing writes to the file while it is mapped.
        let vb = unsafe {
            VarBuilder::from_mmaped_safetensors(&[folder.path().join("model.safetensors")], DType::F32, &DEVICE)?
        };
        let layer = vb.pp("model.layers.0.self_attn");
        assert_names(MultiHeadAttention::new(&config(), layer.clone()), method.by_names, method.name);
        if method.parts.iter().all(|part| part.name != "weight") {
            assert_names(WeightLayout::detect(&layer), method.by_names, method.name);
        }
    }
    Ok(())
}

/// Integers of the shape of a weight do not become floats, under any name, without other tensors next to them.
#[test]
fn integers_of_full_shape_are_not_read_as_weights() -> Result<()> {
    for dtype in [Dtype::U8, Dtype::I16, Dtype::I32, Dtype::U32, Dtype::I64] {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("model.safetensors");
        let bytes = vec![1u8; E * E * dtype.bitsize() / 8];
        for (layout, names) in [
            (WeightLayout::Canonical, ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]),
            ("raw:book".parse()?, ["W_query", "W_key", "W_value", "out_proj"]),
        ] {
            let view = TensorView::new(dtype, vec![E, E], &bytes)?;
            let tensors = HashMap::from(names.map(|name| (name, view.clone())));
            safetensors::serialize_to_file(tensors, None, &file)?;
            let vb = weights::open(&file, DType::F32, &DEVICE)?;
            let Err(error) = MultiHeadAttention::load(&config(), layout, vb.clone()) else {
                panic!("{dtype:?} of {layout} was accepted")
            };
            let text = error.to_string();
            assert!(text.contains(names[0]) && text.contains("floats"), "{text}");
            // As integers they can be read.
            if let Ok(own) = DType::try_from(dtype) {
                assert_eq!(vb.get_with_hints_dtype((E, E), names[0], Default::default(), own)?.dtype(), own);
            }
        }
    }
    Ok(())
}

/// Checks a layer that MLX did not quantise in a quantised model.
#[test]
fn float_weights_in_a_model_with_mlx_quantization_are_read() -> Result<()> {
    let model = json!({
        "model_type": "llama", "hidden_size": E, "num_attention_heads": 4, "num_hidden_layers": 1,
        "quantization": {"group_size": 32, "bits": 4, "model.layers.0.self_attn.q_proj": false},
    });
    let folder = tempfile::tempdir()?;
    FLOAT.write(folder.path(), Some(&model))?;
    hf::load_attention(&model, 0, weights::open(folder.path(), DType::F32, &DEVICE)?)?;
    let checkpoint = Checkpoint::open(folder.path())?;
    let inferred = checkpoint.infer_config("model.layers.0.self_attn", WeightLayout::Canonical, Some(4))?;
    assert_eq!(inferred.embed_dim(), E);
    Ok(())
}

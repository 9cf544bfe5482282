//! Quantised layers whose tensors do not fit each other: errors that say what does not fit.

use std::collections::HashMap;

use candle_attention::weights;
use candle_core::{DType, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::DEVICE;
use crate::common::error_text;

/// A tensor of the layer `q_proj`.
#[derive(Clone)]
pub(crate) struct Part {
    pub name: &'static str,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Returns a tensor whose bytes are all 1, if there are no others.
pub(crate) fn part(name: &'static str, dtype: Dtype, shape: &[usize]) -> Part {
    let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Part { name, dtype, shape: shape.to_vec(), bytes: vec![1; len] }
}

fn bytes(name: &'static str, text: &str) -> Part {
    Part { name, dtype: Dtype::U8, shape: vec![text.len()], bytes: text.as_bytes().to_vec() }
}

/// A layer (2, 64) of a format, which is read if nothing is changed.
pub(crate) struct Layer {
    pub config: &'static str,
    pub parts: Vec<Part>,
    /// The text in the header of the file for the weight.
    pub metadata: Option<&'static str>,
}

impl Layer {
    /// Reads the weight after a part was replaced by another of its name, or added.
    pub fn read_with(&self, changed: &Part) -> Result<()> {
        let mut parts = self.parts.clone();
        parts.retain(|part| part.name != changed.name);
        parts.push(changed.clone());
        self.read(&parts)
    }

    /// Reads the weight without a part.
    pub fn read_without(&self, name: &str) -> Result<()> {
        let mut parts = self.parts.clone();
        parts.retain(|part| part.name != name);
        self.read(&parts)
    }

    pub fn read(&self, parts: &[Part]) -> Result<()> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("config.json"), self.config)?;
        let mut tensors = HashMap::new();
        for Part { name, dtype, shape, bytes } in parts {
            tensors.insert(format!("q_proj.{name}"), TensorView::new(*dtype, shape.clone(), bytes)?);
        }
        let texts = self.metadata.map(|text| HashMap::from([("q_proj.weight".to_string(), text.to_string())]));
        safetensors::serialize_to_file(tensors, texts, &folder.path().join("model.safetensors"))?;
        weights::open(folder.path(), DType::F32, &DEVICE)?.get((2, 64), "q_proj.weight")?;
        Ok(())
    }
}

#[track_caller]
pub(crate) fn assert_fault(result: Result<()>, expected: &str) {
    let text = error_text(result);
    assert!(text.contains("q_proj.weight") && text.contains(expected), "expected {expected}: {text}");
}

const NF4: &str = "weight.quant_state.bitsandbytes__nf4";

fn nf4() -> Layer {
    Layer {
        config: "{}",
        parts: vec![
            part("weight", Dtype::U8, &[64, 1]),
            part("weight.absmax", Dtype::U8, &[2]),
            part("weight.quant_map", Dtype::F32, &[16]),
            part("weight.nested_absmax", Dtype::F32, &[1]),
            part("weight.nested_quant_map", Dtype::F32, &[256]),
            bytes(NF4, r#"{"shape": [2, 64], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}"#),
        ],
        metadata: None,
    }
}

#[test]
fn bitsandbytes_four_bits_with_misfit_tensors_is_an_error() -> Result<()> {
    let layer = nf4();
    layer.read(&layer.parts)?;
    let state = |text: &str| layer.read_with(&bytes(NF4, text));
    assert_fault(state("[1"), "cannot be read");
    assert_fault(state("{}"), "missing field `shape`");
    assert_fault(state(r#"{"shape": [2, -64], "blocksize": 64}"#), "cannot be read");
    assert_fault(state(r#"{"shape": [2, 8, 8], "blocksize": 64}"#), "has shape [2, 8, 8], expected a matrix");
    assert_fault(state(r#"{"shape": [0, 64], "blocksize": 64}"#), "expected numbers that fit in memory");
    let huge = r#"{"shape": [4294967296, 4294967296], "blocksize": 64}"#;
    assert_fault(state(huge), "expected numbers that fit in memory");
    assert_fault(state(r#"{"shape": [2000000000, 64], "blocksize": 64}"#), "weight has 64 bytes, expected 64000000000");
    assert_fault(state(r#"{"shape": [2, 64], "blocksize": 0}"#), "blocks of 0 numbers");
    assert_fault(state(r#"{"shape": [2, 64], "blocksize": 64}"#), "no nested_blocksize");
    let other_blocks = r#"{"shape": [2, 64], "blocksize": 32, "nested_blocksize": 256, "nested_offset": 0.5}"#;
    assert_fault(state(other_blocks), "weight.absmax has [2] numbers, expected 4");
    for (name, dtype, len, expected) in [
        ("weight", Dtype::U8, 65, "weight has 65 bytes, expected 64"),
        ("weight.absmax", Dtype::U8, 3, "weight.absmax has [3] numbers, expected 2"),
        ("weight.absmax", Dtype::F32, 2, "weight.absmax has 8 bytes, expected 2"),
        ("weight.quant_map", Dtype::F32, 15, "weight.quant_map has [15] numbers, expected 16"),
        ("weight.quant_map", Dtype::I32, 16, "weight.quant_map has dtype I32"),
        ("weight.nested_absmax", Dtype::F32, 2, "weight.nested_absmax has [2] numbers, expected 1"),
        ("weight.nested_quant_map", Dtype::F32, 16, "weight.nested_quant_map has [16] numbers, expected 256"),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, &[len])), expected);
    }
    assert_fault(layer.read_without("weight.quant_map"), "expected the tensor weight.quant_map");
    assert_fault(layer.read_without("weight.nested_quant_map"), "expected the tensor weight.nested_quant_map");
    assert_fault(layer.read_without(NF4), "bitsandbytes, 4 bits");
    Ok(())
}

#[test]
fn bitsandbytes_eight_bits_with_misfit_tensors_is_an_error() -> Result<()> {
    let parts = vec![part("weight", Dtype::I8, &[2, 64]), part("SCB", Dtype::F32, &[2])];
    let layer = Layer { config: "{}", parts, metadata: None };
    layer.read(&layer.parts)?;
    assert_fault(layer.read_with(&part("SCB", Dtype::F32, &[3])), "SCB has [3] numbers, expected 2");
    assert_fault(layer.read_with(&part("SCB", Dtype::I32, &[2])), "SCB has dtype I32");
    assert_fault(layer.read_with(&part("weight", Dtype::I8, &[128])), "weight is no matrix");
    assert_fault(layer.read_with(&part("weight_format", Dtype::U8, &[1])), "weight_format is col32, expected row");
    assert_fault(layer.read_without("SCB"), "I8");
    Ok(())
}

#[test]
fn hqq_with_misfit_tensors_is_an_error() -> Result<()> {
    let number = |name, value: i32| Part { bytes: value.to_le_bytes().to_vec(), ..part(name, Dtype::I32, &[]) };
    let shape = |numbers: [i64; 2]| Part {
        bytes: numbers.iter().flat_map(|size| size.to_le_bytes()).collect(),
        ..part("shape", Dtype::I64, &[2])
    };
    let parts = vec![
        part("W_q", Dtype::U8, &[2, 32]),
        part("scale", Dtype::F16, &[4, 1]),
        part("zero", Dtype::F16, &[4, 1]),
        number("nbits", 4),
        number("axis", 1),
        shape([2, 64]),
    ];
    let layer = Layer { config: "{}", parts, metadata: None };
    layer.read(&layer.parts)?;
    assert_fault(layer.read_with(&number("nbits", 7)), "`nbits` is 7, expected 1 to 6, or 8");
    assert_fault(layer.read_with(&number("nbits", -4)), "nbits has a number below 0");
    assert_fault(layer.read_with(&number("nbits", 3)), "`W_q` has 64 bytes, expected 1 rows of 32 codes of 3 bits");
    assert_fault(layer.read_with(&part("nbits", Dtype::I32, &[2])), "nbits has 2 numbers, expected one");
    assert_fault(layer.read_with(&number("axis", 2)), "`axis` is 2, expected 0 or 1");
    assert_fault(layer.read_with(&number("axis", 0)), "expected `scale` (1, groups)");
    assert_fault(layer.read_with(&number("quant_zero", 1)), "`quant_zero` is true");
    assert_fault(layer.read_with(&shape([2, -64])), "shape has a number below 0");
    assert_fault(layer.read_with(&shape([0, 64])), "`shape` is [0, 64], which 4 groups do not divide");
    assert_fault(layer.read_with(&shape([1 << 40, 1 << 40])), "which 4 groups do not divide");
    assert_fault(layer.read_with(&shape([1 << 40, 1 << 20])), "`W_q` has 64 bytes, expected 2 rows");
    assert_fault(layer.read_with(&shape([1 << 40, 4])), "`W_q` has 64 bytes, expected 2 rows");
    assert_fault(layer.read_with(&part("shape", Dtype::I64, &[3])), "expected a matrix");
    assert_fault(layer.read_with(&part("scale", Dtype::F16, &[1, 4])), "expected `scale` (groups, 1)");
    assert_fault(layer.read_with(&part("scale", Dtype::F16, &[0, 1])), "which 0 groups do not divide");
    assert_fault(layer.read_with(&part("zero", Dtype::F16, &[3, 1])), "zero has [3, 1] numbers, expected 4");
    for name in ["shape", "nbits", "axis", "zero"] {
        assert_fault(layer.read_without(name), &format!("expected the tensor {name}"));
    }
    Ok(())
}

const MXFP4: &str = r#"{"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}"#;

#[test]
fn mlx_modes_with_misfit_tensors_are_errors() -> Result<()> {
    let parts = vec![part("weight", Dtype::U32, &[2, 8]), part("scales", Dtype::U8, &[2, 2])];
    let with = |config| Layer { config, parts: parts.clone(), metadata: None };
    let layer = with(MXFP4);
    layer.read(&layer.parts)?;
    assert_fault(layer.read_with(&part("scales", Dtype::F16, &[2, 2])), "`scales` has dtype F16, expected U8");
    assert_fault(layer.read_with(&part("scales", Dtype::U8, &[2, 4])), "4 bits in groups of 32, which does not fit");
    assert_fault(layer.read_with(&part("scales", Dtype::U8, &[1, 2])), "which does not fit");
    assert_fault(layer.read_with(&part("global_scale", Dtype::F32, &[1])), "`global_scale` multiplies the weight");
    let read = |config| with(config).read(&parts);
    assert_fault(read(r#"{"quantization": {"mode": "mxfp5"}}"#), "the mode \"mxfp5\"");
    assert_fault(read(r#"{"quantization": {"bits": 8, "mode": "mxfp4"}}"#), "8 bits in groups of 32");
    assert_fault(
        read(r#"{"quantization": {"bits": 4, "group_size": 32}}"#),
        "`biases` is not a matrix of shape (2, 2)",
    );
    assert_fault(read(r#"{"quantization": {"bits": 4, "group_size": 0}}"#), "4 bits in groups of 0");
    assert_fault(read("{}"), "expected `bits` and `group_size`");
    // The settings of the module replace the settings of the model.
    read(r#"{"quantization": {"bits": 8, "q_proj": {"mode": "mxfp4"}}}"#)
}

#[test]
fn quanto_with_misfit_tensors_is_an_error() -> Result<()> {
    let parts = vec![
        part("weight._data._data", Dtype::U8, &[2, 32]),
        part("weight._scale", Dtype::F16, &[4, 1]),
        part("weight._shift", Dtype::F16, &[4, 1]),
    ];
    let layer = Layer { config: r#"{"hidden_size": 64}"#, parts, metadata: None };
    layer.read(&layer.parts)?;
    let scale = |shape: &[usize]| part("weight._scale", Dtype::F16, shape);
    assert_fault(layer.read_with(&scale(&[1, 4])), "not both there");
    assert_fault(layer.read_with(&scale(&[5, 1])), "weight._shift has [4, 1] numbers, expected 5");
    let two_groups = vec![
        part("weight._data._data", Dtype::U8, &[1, 64]),
        part("weight._scale", Dtype::F16, &[2, 1]),
        part("weight._shift", Dtype::F16, &[2, 1]),
    ];
    assert_fault(layer.read(&two_groups), "has 1 rows for 2 groups, expected rows of 2 or 4 bits");
    let with = |config| Layer { config, parts: layer.parts.clone(), metadata: None }.read(&layer.parts);
    assert_fault(with("{}"), "the shape of the weight is not in the file");
    assert_fault(with(r#"{"hidden_size": 48}"#), "4 groups of 32 numbers do not have rows of 48");
    let eight =
        Layer { config: "{}", parts: vec![part("weight._data", Dtype::I8, &[2, 64]), scale(&[2, 1])], metadata: None };
    eight.read(&eight.parts)?;
    assert_fault(eight.read_with(&scale(&[3, 1])), "weight._scale has shape [3, 1], which does not fit");
    assert_fault(eight.read_with(&part("weight._data", Dtype::U8, &[2, 64])), "weight._data has dtype U8");
    assert_fault(eight.read_without("weight._scale"), "weight._scale is not there");
    Ok(())
}

#[test]
fn nvfp4_with_misfit_tensors_is_an_error() -> Result<()> {
    let parts = vec![
        part("weight", Dtype::U8, &[2, 32]),
        part("weight_scale", Dtype::F8_E4M3, &[2, 4]),
        part("weight_scale_2", Dtype::F32, &[]),
        part("input_scale", Dtype::F32, &[]),
    ];
    let layer = Layer { config: "{}", parts, metadata: None };
    layer.read(&layer.parts)?;
    let scale = |dtype, shape: &[usize]| part("weight_scale", dtype, shape);
    assert_fault(layer.read_with(&scale(Dtype::F8_E4M3, &[3, 4])), "weight_scale is no matrix of F8_E4M3 with 2 rows");
    assert_fault(layer.read_with(&scale(Dtype::U8, &[2, 4])), "weight_scale is no matrix of F8_E4M3");
    assert_fault(layer.read_with(&scale(Dtype::F8_E4M3, &[2, 0])), "weight_scale has 0 columns");
    assert_fault(layer.read_with(&scale(Dtype::F8_E4M3, &[2, 5])), "weight_scale has 5 columns");
    assert_fault(layer.read_with(&scale(Dtype::F8_E4M3, &[8])), "are not both there as matrices");
    assert_fault(
        layer.read_with(&part("weight_scale_2", Dtype::F32, &[2])),
        "weight_scale_2 has [2] numbers, expected 1",
    );
    layer.read_with(&part("pre_quant_scale", Dtype::F32, &[64]))?;
    let factors = part("pre_quant_scale", Dtype::F32, &[65]);
    assert_fault(layer.read_with(&factors), "pre_quant_scale has [65] numbers, expected 64");
    Ok(())
}

#[test]
fn bitnet_with_misfit_tensors_is_an_error() -> Result<()> {
    let parts = vec![part("weight", Dtype::U8, &[1, 64]), part("weight_scale", Dtype::BF16, &[1])];
    let with = |config| Layer { config, parts: parts.clone(), metadata: None };
    let layer = with(r#"{"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}"#);
    let of_two = "shape mismatch for q_proj.weight";
    assert_fault(layer.read(&layer.parts), of_two);
    let shapes = "expected `weight` (out / 4, in) of U8 and `weight_scale`, one number";
    assert_fault(layer.read_with(&part("weight", Dtype::U8, &[64])), shapes);
    assert_fault(layer.read_with(&part("weight", Dtype::U8, &[0, 64])), shapes);
    assert_fault(layer.read_with(&part("weight_scale", Dtype::BF16, &[2])), shapes);
    assert_fault(layer.read_without("weight_scale"), shapes);
    for (config, expected) in [
        (r#"{"quantization_config": {"quant_method": "bitnet", "use_rms_norm": true}}"#, "`use_rms_norm` of BitNet"),
        (r#"{"quantization_config": {"quant_method": "bitnet", "linear_class": "other"}}"#, "\"other\" of BitNet"),
    ] {
        assert_fault(with(config).read(&parts), expected);
    }
    let online = with(r#"{"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}}"#);
    let floats = [part("weight", Dtype::BF16, &[2, 64])];
    assert_fault(online.read(&floats), "`quantization_mode` \"online\" of BitNet");
    Ok(())
}

#[test]
fn torchao_with_misfit_tensors_is_an_error() -> Result<()> {
    let parts = vec![part("_weight_qdata", Dtype::I8, &[2, 64]), part("_weight_scale", Dtype::F32, &[2, 1])];
    let mut layer = Layer { config: "{}", parts, metadata: None };
    layer.metadata = Some(r#"{"_type": "Int8Tensor"}"#);
    layer.read(&layer.parts)?;
    assert_fault(layer.read_with(&part("_weight_scale", Dtype::F32, &[3, 1])), "_weight_scale has shape [3, 1]");
    assert_fault(layer.read_with(&part("_weight_zero_point", Dtype::I8, &[3])), "_weight_zero_point has [3] numbers");
    assert_fault(layer.read_with(&part("_weight_zero_point", Dtype::I32, &[2])), "_weight_zero_point has dtype I32");
    assert_fault(layer.read_with(&part("_weight_act_pre_scale", Dtype::F32, &[64])), "multiplies the inputs");
    assert_fault(layer.read_with(&part("_weight_qdata", Dtype::I32, &[2, 64])), "an Int8Tensor of I32, expected");
    assert_fault(layer.read_without("_weight_scale"), "_weight_scale is not there");
    let four = Part { bytes: vec![1; 64], ..part("_weight_qdata", Dtype::I8, &[2, 32]) };
    for (metadata, expected) in [
        (None, "no metadata of the weight"),
        (Some("{"), "the metadata of the weight cannot be read"),
        (Some("[]"), "the weight is an  of I8, expected"),
        (Some(r#"{"_type": "Int4TilePackedTo4dTensor"}"#), "an Int4TilePackedTo4dTensor of I8, expected"),
        (Some(r#"{"_type": "IntxUnpackedToInt8Tensor"}"#), "target_dtype is \"\", expected int1 to int8"),
        (Some(r#"{"_type": "Int4Tensor"}"#), "_weight_scale and _weight_zero_point are not both of shape (1, 2)"),
    ] {
        layer.metadata = metadata;
        let scales = part("_weight_scale", Dtype::F32, &[1, 2]);
        assert_fault(layer.read(&[four.clone(), scales]), expected);
    }
    // 3 bits have numbers from -4 to 3.
    layer.metadata = Some(r#"{"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": "int3"}}}"#);
    let large = Part { bytes: vec![4; 128], ..part("_weight_qdata", Dtype::I8, &[2, 64]) };
    assert_fault(layer.read_with(&large), "_weight_qdata has the number 4, expected 3 bits");
    Ok(())
}

/// Checks that the file that ModelOpt writes next to the config names the method.
#[test]
fn methods_of_modelopt_are_named_by_its_own_file() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let codes = vec![1u8; 32];
    let scales = vec![1u8; 16];
    let tensors = HashMap::from([
        ("q_proj.weight", TensorView::new(Dtype::U8, vec![1, 32], &codes)?),
        ("q_proj.weight_scale", TensorView::new(Dtype::F32, vec![2, 2], &scales)?),
    ]);
    safetensors::serialize_to_file(tensors, None, &folder.path().join("model.safetensors"))?;
    let text = r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ", "group_size": 128}}"#;
    std::fs::write(folder.path().join("hf_quant_config.json"), text)?;
    for config in [None, Some(r#"{"model_type": "llama"}"#)] {
        if let Some(config) = config {
            std::fs::write(folder.path().join("config.json"), config)?;
        }
        let read = weights::open(folder.path(), DType::F32, &DEVICE)?.get((2, 64), "q_proj.weight");
        assert_fault(read.map(drop), "it looks like W4A16_AWQ");
    }
    Ok(())
}

#[test]
fn float8_with_scales_of_another_shape_names_the_blocks_of_the_config() -> Result<()> {
    let parts = vec![part("weight", Dtype::F8_E4M3, &[2, 64]), part("weight_scale_inv", Dtype::F32, &[1, 2])];
    let config = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 48]}}"#;
    let layer = Layer { config, parts, metadata: None };
    layer.read(&layer.parts)?;
    let scale = |shape: &[usize]| part("weight_scale_inv", Dtype::F32, shape);
    assert_fault(
        layer.read_with(&scale(&[2, 3])),
        "weight_scale_inv has shape [2, 3], expected one number, one for each",
    );
    assert_fault(layer.read_with(&scale(&[1, 3])), "or one for each block of 32 by 48");
    assert_fault(layer.read_with(&part("weight_scale_inv", Dtype::I32, &[1, 2])), "weight_scale_inv has dtype I32");
    assert_fault(layer.read_without("weight_scale_inv"), "a builder of F8E4M3 returns weights as stored");
    let read_with_config = |text| Layer { config: text, parts: layer.parts.clone(), metadata: None }.read(&layer.parts);
    for text in [
        r#"{"quantization_config": {"weight_block_size": [0, 48]}}"#,
        r#"{"quantization_config": {"weight_block_size": [-1, 48]}}"#,
        r#"{"quantization_config": {"weight_block_size": [32]}}"#,
        r#"{"quantization_config": {"weight_block_size": "32"}}"#,
    ] {
        assert_fault(read_with_config(text), "or one for each block of 128 by 128");
    }
    let e5m2 = |shape: &[usize]| [part("weight", Dtype::F8_E5M2, &[2, 64]), scale(shape)];
    layer.read(&e5m2(&[1, 2]))?;
    assert_fault(layer.read(&e5m2(&[1, 3])), "or one for each block of 32 by 48");
    Ok(())
}

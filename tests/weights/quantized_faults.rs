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
struct Part {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Returns a tensor whose bytes are all 1, if there are no others.
fn part(name: &'static str, dtype: Dtype, shape: &[usize]) -> Part {
    let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Part { name, dtype, shape: shape.to_vec(), bytes: vec![1; len] }
}

fn bytes(name: &'static str, text: &str) -> Part {
    Part { name, dtype: Dtype::U8, shape: vec![text.len()], bytes: text.as_bytes().to_vec() }
}

/// A layer (2, 64) of a format, which is read if nothing is changed.
struct Layer {
    config: &'static str,
    parts: Vec<Part>,
}

impl Layer {
    /// Reads the weight after a part was replaced by another of its name, or added.
    fn read_with(&self, changed: &Part) -> Result<()> {
        let mut parts = self.parts.clone();
        parts.retain(|part| part.name != changed.name);
        parts.push(changed.clone());
        self.read(&parts)
    }

    /// Reads the weight without a part.
    fn read_without(&self, name: &str) -> Result<()> {
        let mut parts = self.parts.clone();
        parts.retain(|part| part.name != name);
        self.read(&parts)
    }

    fn read(&self, parts: &[Part]) -> Result<()> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("config.json"), self.config)?;
        let mut tensors = HashMap::new();
        for Part { name, dtype, shape, bytes } in parts {
            tensors.insert(format!("q_proj.{name}"), TensorView::new(*dtype, shape.clone(), bytes)?);
        }
        safetensors::serialize_to_file(tensors, None, &folder.path().join("model.safetensors"))?;
        weights::open(folder.path(), DType::F32, &DEVICE)?.get((2, 64), "q_proj.weight")?;
        Ok(())
    }
}

#[track_caller]
fn assert_fault(result: Result<()>, expected: &str) {
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
    assert_fault(layer.read_without("weight.quant_map"), "weight.quant_map of a quantised layer is missing");
    assert_fault(layer.read_without("weight.nested_quant_map"), "nested_quant_map of a quantised layer is missing");
    assert_fault(layer.read_without(NF4), "bitsandbytes, 4 bits");
    Ok(())
}

#[test]
fn bitsandbytes_eight_bits_with_misfit_tensors_is_an_error() -> Result<()> {
    let parts = vec![part("weight", Dtype::I8, &[2, 64]), part("SCB", Dtype::F32, &[2])];
    let layer = Layer { config: "{}", parts };
    layer.read(&layer.parts)?;
    assert_fault(layer.read_with(&part("SCB", Dtype::F32, &[3])), "SCB has [3] numbers, expected 2");
    assert_fault(layer.read_with(&part("SCB", Dtype::I32, &[2])), "SCB has dtype I32");
    assert_fault(layer.read_with(&part("weight", Dtype::I8, &[128])), "weight is no matrix");
    assert_fault(layer.read_with(&part("weight_format", Dtype::U8, &[1])), "weight_format is col32, expected row");
    assert_fault(layer.read_without("SCB"), "I8");
    Ok(())
}

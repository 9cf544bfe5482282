//! Tensors of every type of GGUF files, whose numbers `crates/compare/conformance/gguf_types.py` recorded from the
//! package gguf and from llama.cpp.

use std::fs::File;
use std::io::{Cursor, Read};
use std::sync::Arc;

use candle_attention::gguf::{self, LinearShard};
use candle_attention::weights;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Module, Result, Tensor};

use crate::DEVICE;
use crate::common::gguf::File as Described;
use crate::common::{error_text, recorded, recorded_tensors, relative_error};

const FILE: &str = "hf/gguf_types.gguf";

fn open() -> Result<(Content, File)> {
    let mut reader = File::open(recorded(FILE))?;
    Ok((gguf::read(&mut reader)?, reader))
}

fn bits(numbers: &Tensor) -> Result<Vec<u32>> {
    Ok(numbers.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}

#[test]
fn gguf_types_have_the_recorded_numbers() -> Result<()> {
    let recorded = recorded_tensors("hf/gguf_types.safetensors")?;
    let (content, reader) = open()?;
    assert_eq!(gguf::tensor_names(&content).count(), recorded.len());
    let vb = gguf::var_builder(Arc::new(content), reader, DType::F32, &DEVICE);
    for (name, expected) in recorded {
        let numbers = vb.get((2, 256), &format!("{name}.weight"))?;
        assert_eq!(bits(&numbers.get(0)?)?, bits(&expected)?, "{name}");
    }
    Ok(())
}

#[test]
fn gguf_linear_layers_of_every_type_have_the_recorded_weights() -> Result<()> {
    let recorded = recorded_tensors("hf/gguf_types.safetensors")?;
    let (content, mut reader) = open()?;
    let inputs = Tensor::eye(256, DType::F32, &DEVICE)?;
    for (name, expected) in recorded {
        let outputs = gguf::load_linear(&content, &mut reader, &name, &DEVICE)?.forward(&inputs)?;
        let found = outputs.t()?.get(0)?;
        // A sum over inputs, all but one of which are 0, is the weight, but for the sign of zeros.
        assert_eq!(found.to_vec1::<f32>()?, expected.to_vec1::<f32>()?, "{name}");
        let part = LinearShard::Outputs(std::iter::once(0..1).collect());
        let first = gguf::load_linear_part(&content, &mut reader, &name, &part, &DEVICE)?.forward(&inputs)?;
        assert_eq!(first.flatten_all()?.to_vec1::<f32>()?, expected.to_vec1::<f32>()?, "{name}, the first output");
    }
    Ok(())
}

#[test]
fn gguf_file_as_weights_is_an_error_that_names_the_call() {
    let error = error_text(weights::open(recorded(FILE), DType::F32, &DEVICE));
    assert!(error.ends_with("gguf_types.gguf is a GGUF file, expected a call of `gguf::open`"), "{error}");
}

#[test]
fn gguf_experts_have_the_numbers_of_their_tensor() -> Result<()> {
    let numbers = Tensor::arange(0f32, 3. * 4. * 256., &DEVICE)?.affine(0.71, 0.3)?.sin()?.reshape((3, 4, 256))?;
    let biases = Tensor::arange(0f32, 12., &DEVICE)?.reshape((3, 4))?;
    let inputs = Tensor::eye(256, DType::F32, &DEVICE)?;
    for dtype in [GgmlDType::F16, GgmlDType::Q8_0, GgmlDType::Q4K, GgmlDType::Q6K] {
        let mut file = Described::default();
        file.add("experts.weight", &numbers, dtype)?;
        file.add("experts.bias", &biases, GgmlDType::F32)?;
        let expected = file.tensors[0].1.dequantize(&DEVICE)?;
        let (content, mut reader) = file.open()?;
        for expert in 0..3 {
            let linear = gguf::load_expert(&content, &mut reader, "experts", expert, &DEVICE)?;
            let outputs = linear.forward(&inputs)?.broadcast_sub(&biases.get(expert)?)?.t()?;
            let error = relative_error(&outputs, &expected.get(expert)?);
            assert!(error < 1e-5, "{dtype:?}, expert {expert}: off by {error:e}");
            let part = LinearShard::Outputs(vec![3..4, 0..1]);
            let rows = gguf::load_expert_part(&content, &mut reader, "experts", expert, &part, &DEVICE)?;
            let zeros = Tensor::zeros((1, 256), DType::F32, &DEVICE)?;
            let bias = [(expert * 4 + 3) as f32, (expert * 4) as f32];
            assert_eq!(rows.forward(&zeros)?.flatten_all()?.to_vec1::<f32>()?, bias);
        }
        let past = error_text(gguf::load_expert(&content, &mut reader, "experts", 3, &DEVICE));
        assert_eq!(past, "[gguf] experts.weight has 3 experts, expected an index below 3, found 3");
    }
    let (content, mut reader) = open()?;
    let flat = error_text(gguf::load_expert(&content, &mut reader, "F32", 0, &DEVICE));
    assert_eq!(flat, "[gguf] F32.weight has shape [2, 256], expected (experts, out, in)");
    Ok(())
}

#[test]
fn gguf_tensor_of_unknown_type_is_an_error_where_it_is_asked_for() -> Result<()> {
    let mut bytes = Vec::new();
    File::open(recorded(FILE))?.read_to_end(&mut bytes)?;
    // In the header, a type comes after the name, the number of dimensions, and two dimensions.
    let name = b"MXFP4.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).expect("the name of a tensor");
    bytes[at + name.len() + 20] = 99;
    let mut reader = Cursor::new(bytes);
    let content = gguf::read(&mut reader)?;
    assert_eq!(gguf::tensor_info(&content, "MXFP4.weight").map(|info| info.type_number), Some(99));
    let error = error_text(gguf::load_linear(&content, &mut reader, "MXFP4", &DEVICE));
    assert!(error.starts_with("[gguf] MXFP4.weight has type 99, which is not known, expected one of: F32"), "{error}");
    assert!(gguf::load_linear(&content, &mut reader, "NVFP4", &DEVICE).is_ok());
    Ok(())
}

//! GGUF files compared with the checkpoints that they are made of, as llama.cpp's converter makes them: `gguf.jsonl`
//! has the metadata that it writes for each.

use std::io::Cursor;

use candle_attention::{
    MultiHeadAttention, MultiHeadAttentionConfig, PackedLinear, QkNorm, QkNormKind, RopeScaling, RopeStyle, gguf, hf,
};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_core::{Module, Result, Tensor};
use serde_json::json;

use crate::common::gguf::{Converted, File, Rows};
use crate::common::relative_error;
use crate::{DEVICE, Model};

fn converted() -> Vec<Converted> {
    Converted::all("hf/gguf.jsonl")
}

/// Returns the config of a layer as it is read from a file.
fn expected(converted: &Converted, own: &MultiHeadAttentionConfig) -> MultiHeadAttentionConfig {
    let mut cfg = own.clone();
    if let Some(norm @ QkNorm { kind: QkNormKind::RmsPlusOne, .. }) = cfg.qk_norm() {
        cfg = cfg.with_qk_norm(QkNorm { kind: QkNormKind::Rms, ..norm });
    }
    match cfg.rope().cloned() {
        Some(rope) if converted.rows == Rows::Permuted => cfg.with_rope(rope.with_style(RopeStyle::Interleaved)),
        _ => cfg,
    }
}

fn load((content, reader): &mut (Content, Cursor<Vec<u8>>), layer: usize) -> Result<MultiHeadAttention> {
    gguf::load_attention(content, reader, layer, &DEVICE)
}

#[test]
fn gguf_architectures_all_have_a_converted_file() {
    let mut shown: Vec<_> = converted().into_iter().map(|converted| converted.architecture).collect();
    assert!(shown.is_sorted());
    shown.extend(crate::gguf_models::architectures().expect("files that can be read"));
    shown.sort();
    shown.dedup();
    assert_eq!(gguf::architectures().collect::<Vec<_>>(), shown);
}

#[test]
fn gguf_layers_match_layers_of_checkpoint() -> Result<()> {
    for converted in converted() {
        let mut model = Model::named(&converted.model);
        model.config.as_object_mut().expect("fields").extend(converted.config.clone());
        let layers = (0..model.layers()).map(|i| hf::load_attention(&model.config, i, model.vb()));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let layout = if converted.rows == Rows::Packed { "packed:qkv_proj" } else { "canonical" }.parse()?;
        let mut tensors = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            let own = layer.state_dict(layout)?.into_iter();
            tensors.extend(own.map(|(name, tensor)| (format!("model.layers.{i}.self_attn.{name}"), tensor)));
        }
        let mut file = converted.file(tensors)?.open()?;
        for (i, own) in layers.iter().enumerate() {
            let layer = load(&mut file, i).unwrap_or_else(|error| panic!("{}: {error}", converted.model));
            let mut expected = expected(&converted, own.config());
            if let Some(rope) = layer.config().rope()
                && matches!(rope.scaling(), RopeScaling::LongRope { .. })
            {
                // The factors of a file are f32, and say nothing of where they come from.
                expected = expected.with_rope(rope.clone());
            }
            assert_eq!(*layer.config(), expected, "{}, layer {i}", converted.model);
            let xs = &model.golden[&format!("layer{i}.in")];
            model.assert_close(&layer.forward(xs)?, &own.forward(xs)?, &format!("layer {i}"));
        }
        let has_factors = file.0.tensor_infos.keys().any(|name| name.starts_with("rope_"));
        match gguf::attention_config(&file.0) {
            Ok(cfg) => assert_eq!((has_factors, &cfg), (false, load(&mut file, 0)?.config()), "{}", converted.model),
            Err(error) => assert!(has_factors, "{}: {error}", converted.model),
        }
    }
    Ok(())
}

fn numbers(shape: &[usize], seed: f64) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    (Tensor::arange(0f32, count as f32, &DEVICE)?.affine(0.731, seed)?.sin()? * 0.1)?.reshape(shape)
}

/// Returns a layer of 4 heads over 2 of width 64, wide enough for blocks of every type.
fn wide(name: &str, dtype: GgmlDType) -> Result<File> {
    let metadata = json!({
        "block_count": 1, "embedding_length": 256, "context_length": 64, "attention.head_count": 4,
        "attention.head_count_kv": 2, "rope.dimension_count": 64,
    });
    let mut file = File::of(name, &metadata);
    let projections: &[_] = match name {
        "phi3" => &[("attn_output", 256), ("attn_qkv", 512)],
        _ => &[("attn_output", 256), ("attn_q", 256), ("attn_k", 128), ("attn_v", 128)],
    };
    for (i, &(part, rows)) in projections.iter().enumerate() {
        file.add(&format!("blk.0.{part}.weight"), &numbers(&[rows, 256], i as f64)?, dtype)?;
        if name == "llama" {
            file.add(&format!("blk.0.{part}.bias"), &numbers(&[rows], 3.0 + i as f64)?, GgmlDType::F32)?;
        }
    }
    Ok(file)
}

/// Compares with the same file with dequantised weights.
#[test]
fn gguf_weights_of_every_type_match_dequantised_layer() -> Result<()> {
    use GgmlDType::*;
    let xs = numbers(&[2, 7, 256], 0.5)?;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let check = |ys: &Tensor, expected: &Tensor| {
            let error = relative_error(ys, expected);
            assert!(error < 1e-5, "{dtype:?}: off by {error:e}");
        };
        for architecture in ["llama", "phi3"] {
            let file = wide(architecture, dtype)?;
            let mut plain = File { metadata: file.metadata.clone(), tensors: Vec::new() };
            for (name, tensor) in &file.tensors {
                plain.add(name, &tensor.dequantize(&DEVICE)?, F32)?;
            }
            let mut file = file.open()?;
            let mut plain = plain.open()?;
            check(&load(&mut file, 0)?.forward(&xs)?, &load(&mut plain, 0)?.forward(&xs)?);
            if architecture == "llama" {
                let (content, reader) = &mut plain;
                let [weight, bias] = ["weight", "bias"]
                    .map(|part| content.tensor(reader, &format!("blk.0.attn_v.{part}"), &DEVICE)?.dequantize(&DEVICE));
                let expected = PackedLinear::new(&weight?, Some(&bias?))?.forward(&xs)?;
                let linear = gguf::load_linear(&file.0, &mut file.1, "blk.0.attn_v", &DEVICE)?;
                check(&linear.forward(&xs)?, &expected);
            }
        }
    }
    Ok(())
}

//! GGUF files in parts, which `crates/compare/conformance/gguf_parts.py` writes with the package gguf.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_attention::gguf;
use candle_core::{DType, Result, Tensor};

use crate::DEVICE;
use crate::common::{error_text, recorded};

const PARTS: [&str; 2] = ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"];

fn part(index: usize) -> PathBuf {
    recorded("hf/gguf_parts").join(PARTS[index])
}

#[test]
fn gguf_parts_have_the_layers_of_the_whole_file() -> Result<()> {
    let mut whole = gguf::open(recorded("hf/gguf_parts/whole.gguf"))?;
    let mut parts = gguf::open(part(0))?;
    assert_eq!(gguf::attention_config(&parts.content)?, gguf::attention_config(&whole.content)?);
    assert_eq!(gguf::hf_config(&parts.content)?, gguf::hf_config(&whole.content)?);
    let xs = Tensor::arange(0f32, 160., &DEVICE)?.sin()?.reshape((1, 5, 32))?;
    for layer in [1, 0] {
        let own = gguf::load_attention(&parts.content, &mut parts.reader, layer, &DEVICE)?;
        let expected = gguf::load_attention(&whole.content, &mut whole.reader, layer, &DEVICE)?;
        assert_eq!(own.forward(&xs)?.to_vec3::<f32>()?, expected.forward(&xs)?.to_vec3::<f32>()?, "layer {layer}");
    }
    // Candle's own reader finds the tensors in the same places.
    let name = "blk.1.attn_v.weight";
    let by_candle = parts.content.tensor(&mut parts.reader, name, &DEVICE)?.dequantize(&DEVICE)?;
    let vb = gguf::var_builder(Arc::new(parts.content), parts.reader.reopen()?, DType::F32, &DEVICE);
    assert_eq!(vb.get((16, 32), name)?.to_vec2::<f32>()?, by_candle.to_vec2::<f32>()?);
    Ok(())
}

#[test]
fn gguf_part_without_the_others_is_an_error_that_names_it() -> Result<()> {
    let error = error_text(gguf::open(part(1)));
    assert!(error.contains("is part 2 of 2") && error.contains(PARTS[0]), "{error}");
    let folder = tempfile::tempdir()?;
    let first = folder.path().join(PARTS[0]);
    fs::copy(part(0), &first)?;
    let missing = error_text(gguf::open(&first));
    assert!(missing.contains(PARTS[1]), "{missing}");
    let renamed = folder.path().join("model.gguf");
    fs::rename(&first, &renamed)?;
    let unnamed = error_text(gguf::open(&renamed));
    assert!(unnamed.contains("is part 1 of 2") && unnamed.contains("-00001-of-00002.gguf"), "{unnamed}");
    // The second part alone has no architecture.
    let mut alone = fs::File::open(part(1))?;
    let content = gguf::read(&mut alone)?;
    let second = error_text(gguf::attention_config(&content));
    assert!(second.contains("part 2 of 2"), "{second}");
    Ok(())
}

/// Copies both parts to a folder, with one sequence of bytes of the second replaced by another of the same length.
fn with_changed_second(folder: &Path, from: &[u8], to: &[u8]) -> Result<PathBuf> {
    let mut bytes = fs::read(part(1))?;
    let at = bytes.windows(from.len()).position(|window| window == from).expect("bytes of the part");
    bytes[at..at + to.len()].copy_from_slice(to);
    fs::copy(part(0), folder.join(PARTS[0]))?;
    fs::write(folder.join(PARTS[1]), bytes)?;
    Ok(folder.join(PARTS[0]))
}

#[test]
fn gguf_parts_of_different_files_are_an_error() -> Result<()> {
    // A key, the type of its value (2 is U16, 5 is I32), and the value.
    let key = |name: &str, kind: u8, value: &[u8]| [name.as_bytes(), &[kind, 0, 0, 0], value].concat();
    for (from, to, expected) in [
        (key("split.no", 2, &[1, 0]), key("split.no", 2, &[0, 0]), "split.no is 0, expected 1"),
        (key("split.count", 2, &[2, 0]), key("split.count", 2, &[3, 0]), "split.count is 3, expected 2"),
        (
            key("split.tensors.count", 5, &[8, 0, 0, 0]),
            key("split.tensors.count", 5, &[9, 0, 0, 0]),
            "split.tensors.count is 9, and 8 in the first part",
        ),
        (b"blk.1.attn_q".to_vec(), b"blk.0.attn_q".to_vec(), "blk.0.attn_q.weight is in an earlier part too"),
        (b"GGUF".to_vec(), b"GGML".to_vec(), "expected GGUF's 0x46554747"),
    ] {
        let folder = tempfile::tempdir()?;
        let first = with_changed_second(folder.path(), &from, &to)?;
        let error = error_text(gguf::open(&first));
        assert!(error.contains(expected) && error.contains(PARTS[1]), "{error}");
    }
    Ok(())
}

#[test]
fn gguf_part_that_ends_early_is_an_error() -> Result<()> {
    for (index, bytes) in [(0, 64), (1, 64), (0, 5_000), (1, 5_000)] {
        let folder = tempfile::tempdir()?;
        for other in [0, 1] {
            let whole = fs::read(part(other))?;
            let end = if other == index { whole.len() - bytes } else { whole.len() };
            fs::write(folder.path().join(PARTS[other]), &whole[..end])?;
        }
        let error = error_text(gguf::open(folder.path().join(PARTS[0])));
        assert!(error.contains(PARTS[index]) && error.contains("ends at byte"), "{error}");
    }
    Ok(())
}

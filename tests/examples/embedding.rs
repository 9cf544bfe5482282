//! Checkpoints of sentence-transformers against its vectors and scores. `tests/sentence_embedding/pipelines.py` and
//! `cross_encoders.py` and `late.py` in `tests/rerank` write them.

use candle_core::{DType, Device, IndexOp, Result, Tensor, safetensors};
use rayon::prelude::*;
use serde_json::Value;

use crate::common::{listed, read_json, recorded, relative_error};
use crate::process::{Checkpoint, copy};

const QUESTION: &str = "someone plays guitar in the rain";
const SENTENCES: &str = "tests/sentence_embedding/sentences.txt";

/// Returns a folder's copy with the files of a run replaced.
fn replaced(folder: &std::path::Path, run: &Value) -> Result<tempfile::TempDir> {
    let copied = tempfile::tempdir()?;
    copy(folder, copied.path())?;
    for (file, content) in run["files"].as_object().into_iter().flatten() {
        std::fs::write(copied.path().join(file), content.to_string())?;
    }
    Ok(copied)
}

/// Runs every recorded case in batches of several sizes, and compares vectors, and the similarities that are printed.
#[test]
fn embeddings_of_pipelines_match_sentence_transformers() -> Result<()> {
    let device = std::env::var("TEST_DEVICE").unwrap_or("cpu".into());
    let folders = listed(recorded("sentence_embedding").join("pipelines"));
    assert_eq!(folders.len(), 15);
    folders.par_iter().try_for_each(|folder| {
        let golden = safetensors::load(folder.join("golden.safetensors"), &Device::Cpu)?;
        for (number, run) in read_json::<Value>(folder.join("golden.json")).as_array().expect("runs").iter().enumerate()
        {
            let name = run["name"].as_str().expect("a name");
            let what = format!("{} {name}", folder.display());
            let copied = replaced(folder, run)?;
            let model = Checkpoint { example: "sentence_embedding", path: copied.path().into() };
            let options = run["args"].as_array().expect("options").iter().map(|word| word.as_str().expect("a word"));
            // Later batches are of longer texts.
            let batch = ["32", "2", "4"][number % 3];
            let fixed = ["--file", SENTENCES, "--device", &device, "--batch", batch];
            let args: Vec<_> = options.chain(fixed).collect();
            let written = safetensors::load_buffer(&model.written("--out", &args), &Device::Cpu)?;
            let vectors = written["embeddings"].to_dtype(DType::F64)?;
            let error = relative_error(&vectors, &golden[name].to_dtype(DType::F64)?);
            assert!(error <= 1e-5, "{what}: off by {error:e} of the largest");

            if let Some(expected) = golden.get(&format!("{name}.similarity")) {
                let printed = model.printed(&args);
                let rows = printed.lines().skip_while(|line| !line.starts_with("1 ")).collect::<Vec<_>>();
                assert_eq!(rows.len(), expected.dim(0)?, "{what}: {printed}");
                for (row, line) in rows.iter().enumerate() {
                    let numbers = line.split_whitespace().skip(1).take(rows.len());
                    let numbers: Vec<f32> = numbers.map(|word| word.parse().expect("a number")).collect();
                    let own = Tensor::new(numbers, &Device::Cpu)?;
                    // Four digits are printed.
                    let difference = (own - expected.i(row)?)?.abs()?.max(0)?.to_scalar::<f32>()?;
                    assert!(difference < 1e-4, "{what}: similarities off by {difference:e}");
                }
            }
        }
        Ok(())
    })
}

/// Compares vectors of weights in other types with the vectors in f32: they are near, and not equal.
#[test]
fn embeddings_of_bf16_and_int8_weights_are_near_sentence_transformers() -> Result<()> {
    for (folder, name) in [("qwen3_embedding", "left"), ("layers", "default")] {
        let path = recorded("sentence_embedding").join("pipelines").join(folder);
        let golden = safetensors::load(path.join("golden.safetensors"), &Device::Cpu)?;
        let model = Checkpoint { example: "sentence_embedding", path };
        for (options, most) in [(["--dtype", "bf16"], 0.1), (["--quantize", "int8"], 0.1)] {
            let bytes = model.written("--out", &[&options[..], &["--file", SENTENCES]].concat());
            let vectors = safetensors::load_buffer(&bytes, &Device::Cpu)?["embeddings"].to_dtype(DType::F64)?;
            let error = relative_error(&vectors, &golden[name].to_dtype(DType::F64)?);
            assert!(error <= most && error > 1e-5, "{folder} {options:?}: off by {error:e} of the largest");
        }
    }
    Ok(())
}

/// Runs every recorded case in batches of several sizes, and compares scores.
#[test]
fn rerank_scores_match_sentence_transformers() -> Result<()> {
    let device = std::env::var("TEST_DEVICE").unwrap_or("cpu".into());
    let mut folders = listed(recorded("rerank").join("cross_encoders"));
    assert_eq!(folders.len(), 11);
    folders.extend(listed(recorded("rerank").join("late")));
    assert_eq!(folders.len(), 13);
    folders.par_iter().try_for_each(|folder| {
        let golden = safetensors::load(folder.join("golden.safetensors"), &Device::Cpu)?;
        for (number, run) in read_json::<Value>(folder.join("golden.json")).as_array().expect("runs").iter().enumerate()
        {
            let name = run["name"].as_str().expect("a name");
            let copied = replaced(folder, run)?;
            let model = Checkpoint { example: "rerank", path: copied.path().into() };
            let options = run["args"].as_array().expect("options").iter().map(|word| word.as_str().expect("a word"));
            let batch = ["32", "2", "4"][number % 3];
            let fixed = [QUESTION, "--file", SENTENCES, "--device", &device, "--batch", batch];
            let written = model.written("--out", &options.chain(fixed).collect::<Vec<_>>());
            let scores = safetensors::load_buffer(&written, &Device::Cpu)?["scores"].to_dtype(DType::F64)?;
            let error = relative_error(&scores, &golden[name].to_dtype(DType::F64)?);
            assert!(error <= 1e-5, "{} {name}: off by {error:e} of the largest", folder.display());
        }
        Ok(())
    })
}

/// Compares scores of weights in other types with the scores in f32: they are near, and not equal.
#[test]
fn rerank_scores_of_bf16_and_int8_weights_are_near_sentence_transformers() -> Result<()> {
    for folder in ["modernbert", "qwen3_template"] {
        let path = recorded("rerank").join("cross_encoders").join(folder);
        let golden = safetensors::load(path.join("golden.safetensors"), &Device::Cpu)?;
        let model = Checkpoint { example: "rerank", path };
        for options in [["--dtype", "bf16"], ["--quantize", "int8"]] {
            let bytes = model.written("--out", &[&options[..], &[QUESTION, "--file", SENTENCES]].concat());
            let scores = safetensors::load_buffer(&bytes, &Device::Cpu)?["scores"].to_dtype(DType::F64)?;
            let error = relative_error(&scores, &golden["default"].to_dtype(DType::F64)?);
            assert!(error <= 0.1 && error > 1e-5, "{folder} {options:?}: off by {error:e} of the largest");
        }
    }
    Ok(())
}

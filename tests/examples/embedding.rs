//! Checkpoints of sentence-transformers against its vectors and scores. `pipelines.py` and `published.py` in
//! `tests/sentence_embedding`, and `cross_encoders.py` and `late.py` in `tests/rerank` write them.

use std::path::PathBuf;

use candle_core::{DType, Device, IndexOp, Result, Tensor, safetensors};
use rayon::prelude::*;
use serde_json::Value;

use crate::common::{listed, read_json, recorded, relative_error};
use crate::process::{Checkpoint, Tensors, copy};

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

/// A recorded case of a checkpoint, as it is run.
struct RecordedRun<'a> {
    model: Checkpoint,
    args: Vec<&'a str>,
    /// The name of its numbers.
    name: &'a str,
    golden: &'a Tensors,
    /// The description in failures.
    what: String,
}

impl RecordedRun<'_> {
    /// Runs the case, and compares the tensor of this name in the file that it writes.
    fn check_written(&self, tensor: &str) -> Result<()> {
        let written = safetensors::load_buffer(&self.model.written("--out", &self.args), &Device::Cpu)?;
        let found = written[tensor].to_dtype(DType::F64)?;
        let error = relative_error(&found, &self.golden[self.name].to_dtype(DType::F64)?);
        assert!(error <= 1e-5, "{}: off by {error:e} of the largest", self.what);
        Ok(())
    }
}

/// Calls `check` with every recorded case of the checkpoints in these folders, in batches of several sizes. The
/// arguments are `first`, the ones of the case, and the sentences.
fn for_each_run(
    folders: &[PathBuf],
    example: &'static str,
    first: &[&str],
    check: impl Fn(&RecordedRun) -> Result<()> + Sync,
) -> Result<()> {
    let device = std::env::var("TEST_DEVICE").unwrap_or("cpu".into());
    folders.par_iter().try_for_each(|folder| {
        let golden = safetensors::load(folder.join("golden.safetensors"), &Device::Cpu)?;
        for (number, run) in read_json::<Value>(folder.join("golden.json")).as_array().expect("runs").iter().enumerate()
        {
            let name = run["name"].as_str().expect("a name");
            let what = format!("{} {name}", folder.display());
            let copied = replaced(folder, run)?;
            let model = Checkpoint { example, path: copied.path().into() };
            let mut args = first.to_vec();
            args.extend(run["args"].as_array().expect("options").iter().map(|word| word.as_str().expect("a word")));
            // Later batches are of longer texts.
            let batch = ["32", "2", "4"][number % 3];
            args.extend(["--file", SENTENCES, "--device", &device, "--batch", batch]);
            check(&RecordedRun { model, args, name, golden: &golden, what })?;
        }
        Ok(())
    })
}

/// Compares vectors, and the similarities that are printed.
#[test]
fn embeddings_of_pipelines_match_sentence_transformers() -> Result<()> {
    let folders = listed(recorded("sentence_embedding").join("pipelines"));
    assert_eq!(folders.len(), 26);
    for_each_run(&folders, "sentence_embedding", &[], |run| {
        run.check_written("embeddings")?;
        let RecordedRun { model, args, name, golden, what } = run;
        let Some(expected) = golden.get(&format!("{name}.similarity")) else { return Ok(()) };
        let printed = model.printed(args);
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

#[test]
fn rerank_scores_match_sentence_transformers() -> Result<()> {
    let mut folders = listed(recorded("rerank").join("cross_encoders"));
    assert_eq!(folders.len(), 15);
    folders.extend(listed(recorded("rerank").join("late")));
    assert_eq!(folders.len(), 19);
    for_each_run(&folders, "rerank", &[QUESTION], |run| run.check_written("scores"))
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

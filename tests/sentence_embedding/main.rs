//! The example `sentence_embedding`, run as a user would, against the vectors of transformers: `models/`, by `make.py`.

mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod misuse;
#[path = "../../examples/sentence_embedding/model.rs"]
mod model;
#[path = "../examples/process.rs"]
#[allow(dead_code, reason = "the other examples' part")]
mod process;
mod training;
mod vectors;

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};

use process::{Run, run_example};

const MODELS: [&str; 7] = ["bert", "distilbert", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta"];
const SENTENCES: &str = "tests/sentence_embedding/sentences.txt";

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sentence_embedding/models").join(model)
}

/// The vectors of that name that transformers gives for [`SENTENCES`].
fn golden(model: &str, name: &str) -> Tensor {
    let tensors = candle_core::safetensors::load(folder(model).join("golden.safetensors"), &Device::Cpu);
    tensors.expect("the golden file").remove(name).expect(name)
}

fn run(model: &Path, args: &[&str]) -> Run {
    run_example("sentence_embedding", &[&["--model", model.to_str().expect("UTF-8")], args].concat())
}

/// The vectors (N, E) that a run with these arguments writes.
#[track_caller]
fn vectors(model: &Path, args: &[&str]) -> Tensor {
    let out = tempfile::tempdir().expect("a folder");
    let file = out.path().join("out.safetensors");
    let run = run(model, &[args, &["--out", file.to_str().expect("UTF-8")]].concat());
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("a file of safetensors");
    assert_eq!(tensors.len(), 1);
    tensors["embeddings"].clone()
}

/// Rows at length 1, in f64.
fn unit(vectors: &Tensor) -> Tensor {
    let unit = || {
        let vectors = vectors.to_dtype(candle_core::DType::F64)?;
        vectors.broadcast_div(&vectors.sqr()?.sum_keepdim(1)?.sqrt()?)
    };
    unit().expect("vectors that are not zero")
}

fn sentences() -> Vec<String> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(SENTENCES)).expect("the sentences");
    text.lines().filter(|line| !line.is_empty()).map(str::to_string).collect()
}

/// A copy of a checkpoint in a folder of its own, to change.
fn copy(model: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(copy.path().join("1_Pooling")).expect("a folder");
    let files = ["config.json", "tokenizer.json", "model.safetensors", "modules.json", "sentence_bert_config.json"];
    for file in files.into_iter().chain(["1_Pooling/config.json"]) {
        std::fs::copy(folder(model).join(file), copy.path().join(file)).expect(file);
    }
    copy
}

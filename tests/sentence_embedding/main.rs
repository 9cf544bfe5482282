//! The example `sentence_embedding`, run as a user would, against the vectors of transformers: `models/`, by `make.py`.

mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod misuse;
#[path = "../../examples/sentence_embedding/model.rs"]
mod model;
#[path = "../examples/process.rs"]
mod process;
mod training;
mod vectors;

use candle_core::Tensor;

use process::Checkpoint;

const MODELS: [&str; 7] = ["bert", "distilbert", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta"];
const SENTENCES: &str = "tests/sentence_embedding/sentences.txt";

fn checkpoint(model: &str) -> Checkpoint {
    Checkpoint::of("sentence_embedding", model)
}

/// The vectors of that name that transformers gives for [`SENTENCES`].
fn golden(model: &str, name: &str) -> Tensor {
    checkpoint(model).tensors("golden.safetensors").remove(name).expect(name)
}

/// The vectors (N, E) that a run with these arguments writes.
#[track_caller]
fn vectors(model: &Checkpoint, args: &[&str]) -> Tensor {
    let tensors = model.written("--out", args);
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
    process::lines(SENTENCES)
}

//! The example `rerank`, run as a user would, against the scores of transformers: `models/`, by `make.py`.

#[path = "../common/mod.rs"]
mod common;
#[path = "../examples/process.rs"]
mod process;

use candle_core::{DType, Device, Tensor};
use process::{Checkpoint, Run, Tensors};
use serde_json::json;

const MODELS: [&str; 4] = ["bert", "distilbert", "mpnet", "xlm-roberta"];
const QUESTION: &str = "someone plays guitar in the rain";
const PASSAGES: &str = "tests/sentence_embedding/sentences.txt";

fn checkpoint(model: &str) -> Checkpoint {
    Checkpoint::of("rerank", model)
}

fn golden(model: &str) -> Vec<f32> {
    checkpoint(model).tensors("golden.safetensors")["scores"].to_vec1().expect("a list")
}

fn passages() -> Vec<String> {
    process::lines(PASSAGES)
}

fn run(model: &Checkpoint, args: &[&str]) -> Run {
    model.run(&[&[QUESTION], args].concat())
}

/// Score, probability and passage of each row, in the order in which they are printed.
fn rows(run: Run) -> Vec<(f32, f32, String)> {
    let row = |line: &str| {
        let number = |text: &str| text.trim().parse().expect("a number");
        (number(&line[..8]), number(&line[8..21]), line[23..].to_string())
    };
    run.succeeded().stdout.lines().skip(4).map(row).collect()
}

fn shown(passage: &str) -> String {
    match passage.char_indices().nth(50) {
        Some((end, _)) => format!("{}..", passage[..end].trim_end()),
        None => passage.to_string(),
    }
}

/// Two texts in one, segments where a model has them, the longer text cut, and the best first.
#[test]
fn scores_are_those_of_transformers_in_batches_of_any_size() {
    for model in MODELS {
        let mut expected: Vec<_> = golden(model).into_iter().zip(passages()).collect();
        expected.sort_by(|a, b| b.0.total_cmp(&a.0));
        for batch in ["1", "4", "32"] {
            let rows = rows(run(&checkpoint(model), &["--file", PASSAGES, "--batch", batch]));
            assert_eq!(rows.len(), expected.len());
            for ((score, probability, passage), (expected, text)) in rows.iter().zip(&expected) {
                assert!((score - expected).abs() < 1e-4, "{model}: {score}, expected {expected}");
                assert!((probability - 1.0 / (1.0 + (-expected).exp())).abs() < 1e-4, "{model}: {probability}");
                assert_eq!(*passage, shown(text), "{model}");
            }
        }
    }
}

#[test]
fn a_run_says_what_it_read_and_shows_the_best() {
    let run = run(&checkpoint("bert"), &["--file", PASSAGES, "--top", "2", "man"]);
    let lines: Vec<_> = run.stdout.lines().collect();
    let head = ["model     bert, 2 layers of width 16", "passages  7, 3 cut at 16 tokens", "", "   score  probability"];
    assert_eq!(lines[..4], head);
    assert_eq!(lines.len(), 6);
}

/// The first token's segment alone would give other numbers.
#[test]
fn segments_matter() {
    let (own, copy) = (checkpoint("bert"), checkpoint("bert").copied());
    copy.edit("tokenizer.json", |tokenizer| {
        for piece in tokenizer["post_processor"]["pair"].as_array_mut().expect("a list") {
            let kind = if piece["Sequence"].is_null() { "SpecialToken" } else { "Sequence" };
            piece[kind]["type_id"] = json!(0);
        }
    });
    let [with, without] = [own, copy].map(|model| rows(run(&model, &["man"]))[0].0);
    assert!((with - without).abs() > 1e-3, "{with} {without}");
}

#[test]
fn half_precision_runs_and_comes_close() {
    for model in MODELS {
        let expected = golden(model)[0];
        let (score, ..) = rows(run(&checkpoint(model), &[&passages()[0], "--dtype", "bf16"]))[0];
        assert!((score - expected).abs() < 0.1, "{model}: {score}, expected {expected}");
    }
}

#[test]
fn what_cannot_be_done_is_one_line() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("memory");
    let copy = checkpoint("xlm-roberta").copied();
    let says = |message: &str| {
        let run = run(&copy, &["man"]);
        assert!(run.error().contains(message), "{}", run.stderr);
    };
    let linear = |tensors: &mut Tensors, name: &str, rows: usize| {
        tensors.insert(format!("classifier.{name}.weight"), zeros(&[rows, 16]));
        tensors.insert(format!("classifier.{name}.bias"), zeros(&[rows]));
    };
    copy.edit_weights(|tensors| linear(tensors, "out_proj", 3));
    says("expected one label");
    copy.edit_weights(|tensors| tensors.retain(|name, _| !name.starts_with("classifier")));
    says("[rerank] no head in the checkpoint, looked for classifier.dense with");
    copy.write("tokenizer_config.json", &json!({"model_max_length": 4}));
    copy.edit_weights(|tensors| {
        linear(tensors, "out_proj", 1);
        linear(tensors, "dense", 16);
    });
    says("texts are cut at 4 tokens, expected more than the 4 that are added");
    assert_eq!(run(&copy, &[]).code, Some(2), "no passage");
    let empty = copy.file("empty.txt");
    std::fs::write(&empty, "\n").expect("a file");
    let run = run(&checkpoint("bert"), &["--file", empty.to_str().expect("UTF-8")]);
    assert!(run.error().contains("there is no text"), "{}", run.stderr);
}

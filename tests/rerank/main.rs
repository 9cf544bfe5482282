//! The example `rerank`, run as a user would, against the scores of transformers: `models/`, by `make.py`.

#[path = "../common/mod.rs"]
mod common;
#[path = "../examples/process.rs"]
#[allow(dead_code, reason = "the other examples' part")]
mod process;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use process::{Run, run_example};
use serde_json::json;

const MODELS: [&str; 4] = ["bert", "distilbert", "mpnet", "xlm-roberta"];
const QUESTION: &str = "someone plays guitar in the rain";
const PASSAGES: &str = "tests/sentence_embedding/sentences.txt";

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rerank/models").join(model)
}

fn golden(model: &str) -> Vec<f32> {
    let tensors = candle_core::safetensors::load(folder(model).join("golden.safetensors"), &Device::Cpu);
    tensors.expect("the golden file")["scores"].to_vec1().expect("a list")
}

fn passages() -> Vec<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(PASSAGES)).expect("the passages");
    text.lines().filter(|line| !line.is_empty()).map(str::to_string).collect()
}

fn run(model: &Path, args: &[&str]) -> Run {
    run_example("rerank", &[&["--model", model.to_str().expect("UTF-8"), QUESTION], args].concat())
}

/// Score, probability and passage of each row, in the order in which they are printed.
fn rows(run: &Run) -> Vec<(f32, f32, String)> {
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
    let row = |line: &str| {
        let number = |text: &str| text.trim().parse().expect("a number");
        (number(&line[..8]), number(&line[8..21]), line[23..].to_string())
    };
    run.stdout.lines().skip(4).map(row).collect()
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
            let rows = rows(&run(&folder(model), &["--file", PASSAGES, "--batch", batch]));
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
    let run = run(&folder("bert"), &["--file", PASSAGES, "--top", "2", "man"]);
    let lines: Vec<_> = run.stdout.lines().collect();
    let head = ["model     bert, 2 layers of width 16", "passages  7, 3 cut at 16 tokens", "", "   score  probability"];
    assert_eq!(lines[..4], head);
    assert_eq!(lines.len(), 6);
}

/// The first token's segment alone would give other numbers.
#[test]
fn segments_matter() {
    let (own, copy) = (folder("bert"), copy("bert"));
    let path = copy.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&path).expect("the file")).expect("JSON");
    for piece in tokenizer["post_processor"]["pair"].as_array_mut().expect("a list") {
        let kind = if piece["Sequence"].is_null() { "SpecialToken" } else { "Sequence" };
        piece[kind]["type_id"] = json!(0);
    }
    fs::write(path, tokenizer.to_string()).expect("the file");
    let [with, without] = [own.as_path(), copy.path()].map(|model| rows(&run(model, &["man"]))[0].0);
    assert!((with - without).abs() > 1e-3, "{with} {without}");
}

#[test]
fn half_precision_runs_and_comes_close() {
    for model in MODELS {
        let expected = golden(model)[0];
        let (score, ..) = rows(&run(&folder(model), &[&passages()[0], "--dtype", "bf16"]))[0];
        assert!((score - expected).abs() < 0.1, "{model}: {score}, expected {expected}");
    }
}

/// A copy of a checkpoint, to change.
fn copy(model: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(folder(model).join(file), copy.path().join(file)).expect(file);
    }
    copy
}

fn change(folder: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let file = folder.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
    fs::remove_file(&file).expect("the file");
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, &file).expect("weights");
}

#[test]
fn what_cannot_be_done_is_one_line() {
    let said = |model: &Path, args: &[&str]| {
        let run = run(model, args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        run.stderr
    };
    let copy = copy("xlm-roberta");
    let head = |tensors: &mut HashMap<String, Tensor>, rows: usize| {
        let weight = Tensor::zeros((rows, 16), DType::F32, &Device::Cpu).expect("memory");
        let bias = Tensor::zeros(rows, DType::F32, &Device::Cpu).expect("memory");
        tensors.insert("classifier.out_proj.weight".into(), weight);
        tensors.insert("classifier.out_proj.bias".into(), bias);
    };
    change(copy.path(), |tensors| head(tensors, 3));
    assert!(said(copy.path(), &["man"]).contains("expected one label"));
    change(copy.path(), |tensors| tensors.retain(|name, _| !name.starts_with("classifier")));
    assert!(
        said(copy.path(), &["man"]).contains("[rerank] no head in the checkpoint, looked for classifier.dense with")
    );
    fs::write(copy.path().join("tokenizer_config.json"), r#"{"model_max_length": 4}"#).expect("the file");
    change(copy.path(), |tensors| {
        head(tensors, 1);
        let square = Tensor::zeros((16, 16), DType::F32, &Device::Cpu).expect("memory");
        tensors.insert("classifier.dense.weight".into(), square);
        tensors.insert("classifier.dense.bias".into(), Tensor::zeros(16, DType::F32, &Device::Cpu).expect("memory"));
    });
    assert!(said(copy.path(), &["man"]).contains("texts are cut at 4 tokens, expected more than the 4 that are added"));
    assert_eq!(run(&folder("bert"), &[]).code, Some(2), "no passage");
    let empty = copy.path().join("empty.txt");
    fs::write(&empty, "\n").expect("a file");
    assert!(said(&folder("bert"), &["--file", empty.to_str().expect("UTF-8")]).contains("there is no text"));
}

//! Whatever a caller gets wrong is an error that says what was expected and what was found; nothing panics, and nothing
//! wrong is accepted in silence.
//!
//! `snapshot.txt` holds the text of every error. Where texts change on purpose, `UPDATE_ERRORS=1 cargo test --test
//! errors` writes them anew; the change to the file is what there is to review.

#[path = "../common/mod.rs"]
mod common;

/// Cases as data: what is done wrong, and the call that has to fail for it.
macro_rules! cases {
    ($($name:literal => $call:expr,)*) => {
        &[$(($name, || {
            let _ = $call?;
            Ok(())
        })),*]
    };
}

mod additive;
mod cache;
mod configs;
mod devices;
mod embedding;
mod extremes;
mod files;
mod function;
mod fuzz;
mod gguf;
mod hf;
mod latent;
mod layer;
mod layouts;
mod linear;
mod masks;
mod memory;
mod modules;
mod norms;
mod plot;
mod pth;
mod rope;
mod shards;
mod tensors;
mod text;
mod varlen;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Shape, Tensor};
use tempfile::TempDir;

const CPU: Device = Device::Cpu;

/// What is done wrong, and how.
type Case = (&'static str, fn() -> Result<()>);

/// Every case, by what it is about.
const CASES: &[(&str, &[Case])] = &[
    ("additive", additive::CASES),
    ("calls with a cache", cache::CALLS),
    ("padding without a cache", cache::WITHOUT),
    ("edits of a cache", cache::EDITS),
    ("cache config", cache::CONFIGS),
    ("projected memory", memory::PROJECTIONS),
    ("calls with a memory", memory::CALLS),
    ("keys of an earlier layer", memory::SHARED),
    ("tensor parallel", shards::CASES),
    ("config", configs::CASES),
    ("embedding", embedding::CASES),
    ("sdpa shapes", function::SHAPES),
    ("sdpa dtypes", function::DTYPES),
    ("sdpa options", function::OPTIONS),
    ("pieces", function::PIECES),
    ("files", files::FILES),
    ("safetensors", files::SAFETENSORS),
    ("shards", files::SHARDS),
    ("pth archives", pth::ARCHIVES),
    ("pth tensors", pth::TENSORS),
    ("pickles", pth::PICKLES),
    ("gguf metadata", gguf::METADATA),
    ("gguf tensors", gguf::TENSORS),
    ("gguf tokenizers", gguf::TOKENIZERS),
    ("hf", hf::CASES),
    ("hf latent", hf::LATENT),
    ("loading a layout", layouts::LOADING),
    ("saving a layout", layouts::SAVING),
    ("detection", layouts::DETECTION),
    ("latent config", latent::CONFIGS),
    ("latent tensors", latent::TENSORS),
    ("latent inputs", latent::INPUTS),
    ("layer", layer::CASES),
    ("linear weights", linear::WEIGHTS),
    ("linear inputs", linear::INPUTS),
    ("linear quantized", linear::QUANTIZED),
    ("linear followed", linear::FOLLOWED),
    ("linear sizes", linear::SIZES),
    ("heat map", plot::CASES),
    ("lengths", masks::LENGTHS),
    ("mask tensors", masks::TENSORS),
    ("modules", modules::MODULES),
    ("norms", modules::NORMS),
    ("norms between layers", norms::WEIGHTS),
    ("inputs of norms between layers", norms::INPUTS),
    ("relative bias", modules::RELATIVE),
    ("rope", rope::CASES),
    ("missing tensors", tensors::MISSING),
    ("misshapen tensors", tensors::MISSHAPEN),
    ("surplus tensors", tensors::SURPLUS),
    ("inferred configs", tensors::INFERENCE),
    ("tokenizer", text::CASES),
    ("packed sequences", varlen::SEQUENCES),
    ("varlen tensors", varlen::TENSORS),
    ("varlen masks", varlen::MASKS),
];

/// The first line of the error that a case gives, with DIR for the folder of [`file`] and ROOT for that of the package.
fn found(run: fn() -> Result<()>) -> String {
    match catch_unwind(AssertUnwindSafe(run)) {
        Err(_) => "a panic".to_string(),
        Ok(Ok(())) => "no error".to_string(),
        Ok(Err(error)) => {
            let text = error.to_string();
            let text = text.lines().next().unwrap_or_default();
            text.replace(&DIR.path().display().to_string(), "DIR").replace(env!("CARGO_MANIFEST_DIR"), "ROOT")
        }
    }
}

/// Lines of `area: case`, a tab and the text, in which `…` stands for any text: what an operating system or a
/// dependency says.
#[test]
fn every_error_reads_as_it_was_reviewed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/errors/snapshot.txt");
    let reviewed = std::fs::read_to_string(&path).unwrap_or_default();
    let mut reviewed: HashMap<&str, &str> = reviewed.lines().filter_map(|line| line.split_once('\t')).collect();
    let (mut lines, mut differences) = (String::new(), Vec::new());
    let of_area = |(area, cases): &(&str, &'static [Case])| {
        cases.iter().map(|(case, run)| (format!("{area}: {case}"), run)).collect::<Vec<_>>()
    };
    for (name, run) in CASES.iter().flat_map(of_area) {
        let found = found(*run);
        assert!(found != "a panic" && found != "no error", "{name} gives {found}");
        let expected = reviewed.remove(name.as_str());
        let same = expected.filter(|text| matches(text, &found));
        if same.is_none() {
            let expected = expected.unwrap_or("nothing: the case is new, or there twice");
            differences.push(format!("{name}\n   expected: {expected}\n      found: {found}"));
        }
        lines.push_str(&format!("{name}\t{}\n", same.unwrap_or(&found)));
    }
    if std::env::var_os("UPDATE_ERRORS").is_some() {
        return std::fs::write(path, lines).expect("the snapshot can be written");
    }
    assert!(differences.is_empty(), "{} texts differ:\n{}", differences.len(), differences.join("\n"));
    assert!(reviewed.is_empty(), "the snapshot has texts of cases that went: {:?}", reviewed.keys());
}

fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = parts.next().and_then(|start| text.strip_prefix(start)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

#[test]
fn patterns_match_whole_texts() {
    assert!(matches("a … c … e", "a b c d e") && matches("ab", "ab") && matches("a…", "a") && matches("…a", "bca"));
    assert!(!matches("a", "ab") && !matches("a…c", "abcd") && !matches("a…b…c", "acb") && !matches("b…", "ab"));
}

static DIR: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

/// A file of this name with these bytes, written once for each name.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = DIR.path().join(name);
    std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("the folder can be made");
    std::fs::write(&path, bytes).expect("the file can be written");
    path
}

fn zeros(shape: impl Into<Shape>) -> Tensor {
    of(DType::F32, shape)
}

fn of(dtype: DType, shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::F32, &CPU).and_then(|zeros| zeros.to_dtype(dtype)).expect("zeros have every dtype")
}

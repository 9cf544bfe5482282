//! Whatever a caller gets wrong is an error that says what was expected and what was found; nothing panics, and nothing
//! wrong is accepted in silence.
//!
//! The files of `texts/` hold the text of every error. Where texts change on purpose, `UPDATE_EXPECT=1 cargo test
//! --test errors` writes them anew; the change to the files is what there is to review.

#[path = "../common/mod.rs"]
mod common;

/// Calls that have to fail, by what is wrong with them.
macro_rules! cases {
    ($($name:literal => $call:expr,)*) => {
        vec![$(crate::case($name, || {
            let _ = $call?;
            Ok(())
        })),*]
    };
}

mod additive;
mod cache;
mod config;
mod delta;
mod delta_net;
mod devices;
mod extremes;
mod files;
mod function;
mod fuzz;
mod gguf;
mod hf;
mod latent;
mod layer;
mod linear;
mod masks;
mod modules;
mod norms;
mod plot;
mod pth;
mod rope;
mod shards;
mod tensors;
mod text;
mod wrong;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

// What every module of these tests uses.
use candle_attention::MultiHeadAttentionConfig as Config;
use candle_attention::*;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use tempfile::TempDir;

const CPU: Device = Device::Cpu;

/// What is wrong, and what is said of it.
type Case = (String, String);

/// A call that has to fail.
fn case(name: impl Into<String>, call: impl FnOnce() -> Result<()>) -> Case {
    let (name, text) = outcome(name, call);
    assert!(text != ACCEPTED, "{name}: no error");
    (name, text)
}

const ACCEPTED: &str = "accepted";

/// The first line of the error that a call gives, if it gives one, with DIR for the folder of [`file`], ROOT for that
/// of the package, and `…` for what the operating system or the tokenizers crate says.
fn outcome(name: impl Into<String>, call: impl FnOnce() -> Result<()>) -> Case {
    let name = name.into();
    let Err(error) = call() else { return (name, ACCEPTED.into()) };
    let text = error.to_string();
    let text = text.lines().next().unwrap_or_default();
    let text = text.replace(&DIR.path().display().to_string(), "DIR").replace(env!("CARGO_MANIFEST_DIR"), "ROOT");
    let of_system = text.split_once(" (os error ").and_then(|(said, _)| said.rsplit_once(": "));
    match of_system.or(text.split_once(": ").filter(|(said, _)| said.ends_with("tokenizer.json that can be used"))) {
        Some((said, _)) => (name, format!("{said}: …")),
        None => (name, text),
    }
}

/// The same call with each of these values, which has to fail.
fn each<V: Debug, T>(what: &str, values: impl IntoIterator<Item = V>, call: impl Fn(V) -> Result<T>) -> Vec<Case> {
    values.into_iter().map(|value| case(format!("{what} {value:?}"), || call(value).map(drop))).collect()
}

/// The same call with each of these values, some of which may do.
fn sweep<V: Debug, T>(what: &str, values: impl IntoIterator<Item = V>, call: impl Fn(V) -> Result<T>) -> Vec<Case> {
    values.into_iter().map(|value| outcome(format!("{what} {value:?}"), || call(value).map(drop))).collect()
}

/// Compares the texts with those of a file.
fn assert_reviewed(file: &str, cases: &[Vec<Case>]) {
    let texts: String = cases.iter().flatten().map(|(name, text)| format!("{name}\n    {text}\n")).collect();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/errors/texts").join(file).with_extension("txt");
    expect_test::expect_file![file].assert_eq(&texts);
}

static DIR: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

/// A file of this name with these bytes.
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

/// A checkpoint that has a tensor of zeros for every name.
fn any_weights() -> VarBuilder<'static> {
    VarBuilder::zeros(DType::F32, &CPU)
}

/// A checkpoint of tensors of these shapes.
fn weights_of(shapes: &[(&str, &[usize])]) -> VarBuilder<'static> {
    let tensors = shapes.iter().map(|(name, shape)| (name.to_string(), zeros(*shape))).collect();
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

/// Variables that are made as they are asked for.
fn variables() -> VarBuilder<'static> {
    VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &CPU)
}

/// A layer of seeded weights.
fn layer(cfg: Config) -> Result<MultiHeadAttention> {
    layer_in(DType::F32, cfg)
}

fn layer_in(dtype: DType, cfg: Config) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(&cfg, TorchSeed::new(3).var_builder(dtype, &CPU))
}

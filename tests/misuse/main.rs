//! Whatever a caller gets wrong is an error that says what was expected and what was found; nothing panics, and nothing
//! wrong is accepted in silence.

#[path = "../common/mod.rs"]
mod common;

mod additive;
mod configs;
mod devices;
mod extremes;
mod files;
mod function;
mod fuzz;
mod layer;
mod layouts;
mod masks;
mod pth;
mod tensors;
mod text;
mod varlen;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Shape, Tensor};
use tempfile::TempDir;

const CPU: Device = Device::Cpu;

/// What is done wrong, how, and the error it gives: `…` stands for any text, DIR for the folder of [`file`].
type Misuse = (&'static str, fn() -> Result<()>, &'static str);

/// Runs every row and reports all that went otherwise.
#[track_caller]
fn check(rows: &[Misuse]) {
    let mut otherwise = Vec::new();
    for (what, run, expected) in rows {
        let found = match catch_unwind(AssertUnwindSafe(run)) {
            Err(_) => "a panic".to_string(),
            Ok(Ok(())) => "no error".to_string(),
            Ok(Err(error)) => {
                let text = error.to_string();
                let text = text.lines().next().unwrap_or_default();
                text.replace(&DIR.path().display().to_string(), "DIR")
            }
        };
        if !matches(expected, &found) {
            otherwise.push(format!("{what}\n   expected: {expected}\n      found: {found}"));
        }
    }
    assert!(otherwise.is_empty(), "{} of {} rows:\n{}", otherwise.len(), rows.len(), otherwise.join("\n"));
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
fn file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = DIR.path().join(name);
    std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("the folder can be made");
    std::fs::write(&path, bytes).expect("the file can be written");
    path
}

fn zeros(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::F32, &CPU).expect("zeros")
}

fn of(dtype: DType, shape: impl Into<Shape>) -> Tensor {
    zeros(shape).to_dtype(dtype).expect("zeros have every dtype")
}

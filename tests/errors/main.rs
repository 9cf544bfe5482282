//! Every wrong input of a caller is an error that says what was expected and what was found. Nothing panics, and
//! nothing wrong is accepted in silence.
//!
//! The files of `texts/` have calls, and the text of each result:
//!
//! ```text
//! > layer {"config": {"embed_dim": 8, "num_heads": 4}, "xs": "1 3 8"}
//! {"config": {"window": 0}}
//!     [multi_head_attention] window is 0, expected at least 1
//! ```
//!
//! A heading names one of [`SUBJECTS`] and a call of it. A line below has the differences of a call, as a JSON merge
//! patch; `each tensor` and `each weight` are abbreviations of many lines (`wrong.rs`). If the heading has no call,
//! each subject defines the syntax of its lines. `words.rs` and the subjects describe how a call is written.
//!
//! If texts change on purpose, `UPDATE_EXPECT=1 cargo test --test errors` writes them; review the changes of the files.

#[path = "../common/mod.rs"]
mod common;

mod additive;
mod cache;
mod checkpoint;
mod delta;
mod devices;
mod extremes;
mod files;
mod function;
mod gguf;
mod hf;
mod layer;
mod linear;
mod modules;
mod pth;
mod rope;
mod shards;
mod text;
mod words;
mod wrong;

use std::path::PathBuf;

// What every module of these tests uses.
use candle_attention::MultiHeadAttentionConfig as Config;
use candle_attention::*;
use candle_core::{D, DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::{VarBuilder, VarMap};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;
use words::Fields;

const CPU: Device = Device::Cpu;

/// A function that is called with a line, and with its JSON merged into that of the heading.
type Subject = fn(&str, &Fields) -> Result<String>;

const SUBJECTS: &[&[(&str, Subject)]] = &[
    additive::SUBJECTS,
    cache::SUBJECTS,
    checkpoint::SUBJECTS,
    delta::SUBJECTS,
    files::SUBJECTS,
    function::SUBJECTS,
    gguf::SUBJECTS,
    hf::SUBJECTS,
    layer::SUBJECTS,
    linear::SUBJECTS,
    modules::SUBJECTS,
    pth::SUBJECTS,
    rope::SUBJECTS,
    shards::SUBJECTS,
    text::SUBJECTS,
];

/// Calls that are not data, with the names that lines use for them.
type Named = (&'static str, fn() -> Result<()>);

fn named(calls: &[Named], line: &str) -> Result<String> {
    calls.iter().find(|(name, _)| *name == line).expect("the line names a call").1().map(accepted)
}

/// [`Named`] calls.
macro_rules! calls {
    ($($name:literal => $call:expr,)*) => {
        &[$(($name, || {
            let _ = $call?;
            Ok(())
        })),*]
    };
}
use calls;

const ACCEPTED: &str = "accepted";

fn accepted<T>(_: T) -> String {
    ACCEPTED.into()
}

struct Heading {
    subject: Subject,
    call: Option<wrong::Fitting>,
}

impl Heading {
    fn new(line: &str) -> Self {
        let (name, call) = line.split_once(" {").map_or((line, None), |(name, _)| (name, Some(&line[name.len()..])));
        let subject = SUBJECTS.iter().copied().flatten().find(|(known, _)| *known == name);
        let (_, subject) = subject.unwrap_or_else(|| panic!("no subject {name}"));
        let call = call.map(|call| wrong::Fitting::new(serde_json::from_str(call).expect("the heading is JSON")));
        Self { subject: *subject, call }
    }

    fn said(&self, line: &str) -> Vec<String> {
        let said = |call: Value| text_of(Fields::all(&call, |call| (self.subject)(line, call)));
        let Some(fitting) = &self.call else { return vec![said(Value::Null)] };
        match line {
            "each tensor" => wrong::tensors(fitting, said),
            "each weight" => wrong::weights(fitting, said),
            _ => {
                let patch = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
                vec![said(merged(fitting.whole(), patch))]
            }
        }
    }
}

/// Applies a JSON merge patch: fields are replaced, and removed by null.
fn merged(call: Value, patch: Value) -> Value {
    match (call, patch) {
        (Value::Object(mut call), Value::Object(patch)) => {
            for (name, field) in patch {
                match field {
                    Value::Null => drop(call.remove(&name)),
                    _ => {
                        let own = call.remove(&name).unwrap_or_default();
                        call.insert(name, merged(own, field));
                    }
                }
            }
            call.into()
        }
        (_, patch) => patch,
    }
}

/// Returns the result of a call, or the first line of its error: with DIR for the folder of [`file`], ROOT for the
/// folder of the repository, and `…` for texts of the operating system and of the tokenizers crate, and for the
/// instruction set.
fn text_of(outcome: Result<String>) -> String {
    let text = outcome.unwrap_or_else(|error| error.to_string());
    let text = text.lines().next().unwrap_or_default();
    let folder = FOLDER.with(|folder| folder.path().display().to_string());
    let text = text.replace(&folder, "DIR").replace(common::root().to_str().expect("UTF-8"), "ROOT");
    let of_system = text.split_once(" (os error ").and_then(|(said, _)| said.rsplit_once(": "));
    match of_system.or(text.split_once(": ").filter(|(said, _)| said.ends_with("tokenizer.json that can be used"))) {
        Some((said, _)) => format!("{said}: …"),
        None => match text.split_once("the CPU kernel, ") {
            Some((said, _)) => format!("{said}the CPU kernel, …"),
            None => text,
        },
    }
}

/// Compares the texts of a subject, or of the files that belong to no subject.
fn match_reviewed_files(subject: Option<&[&str]>) {
    let files = std::fs::read_dir(common::recorded("errors/texts")).expect("the texts are there");
    let mut count = 0;
    for file in files.map(|file| file.expect("it can be listed").path()) {
        let name = file.file_stem().expect("a file has a name").to_string_lossy();
        let own = PREFIXES.iter().copied().find(|prefixes| prefixes.iter().any(|prefix| name.starts_with(prefix)));
        if own != subject {
            continue;
        }
        count += 1;
        let mut said = String::new();
        let mut heading = None;
        let written = std::fs::read_to_string(&file).expect("a file of texts");
        for line in written.lines().filter(|line| !line.starts_with("    ")) {
            said += &format!("{line}\n");
            // Where a call panics, the last line is its own.
            println!("{}: {line}", file.display());
            match line.strip_prefix("> ") {
                Some(line) => heading = Some(Heading::new(line)),
                None => {
                    let heading = heading.as_ref().expect("a heading comes first");
                    heading.said(line).iter().for_each(|text| said += &format!("    {text}\n"));
                }
            }
        }
        expect_test::expect_file![file].assert_eq(&said);
    }
    assert!(count > 0, "no file of {subject:?}");
}

/// Makes a test for the files of each subject, whose names begin with one of its prefixes. The first subject that fits
/// has the file.
macro_rules! test_subjects {
    ($($name:ident => $prefixes:expr;)+) => {
        const PREFIXES: &[&[&str]] = &[$(&$prefixes),+];

        $( #[test] fn $name() { match_reviewed_files(Some(&$prefixes)) } )+
    };
}

test_subjects! {
    error_texts_of_gguf_match_reviewed_files => ["gguf"];
    error_texts_of_rope_match_reviewed_files => ["rope", "config_rope"];
    error_texts_of_packed_sequences_match_reviewed_files => ["packed", "layer_packed", "paged"];
    error_texts_of_masks_match_reviewed_files => ["mask"];
    error_texts_of_layouts_match_reviewed_files => ["layout"];
    error_texts_of_hugging_face_configs_match_reviewed_files => ["hf"];
    error_texts_of_pth_match_reviewed_files => ["pth"];
    error_texts_of_linear_attention_match_reviewed_files => ["delta"];
}

#[test]
fn error_texts_of_other_subjects_match_reviewed_files() {
    match_reviewed_files(None);
}

thread_local! {
    /// The folder of the files that this test writes.
    static FOLDER: TempDir = tempfile::tempdir().expect("a temporary folder");
}

/// Returns the path of [`FOLDER`], or of a file in it.
fn in_folder(name: &str) -> PathBuf {
    FOLDER.with(|folder| folder.path().join(name))
}

/// Writes a file of this name with these bytes.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = in_folder(name);
    std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("the folder can be made");
    std::fs::write(&path, bytes).expect("the file can be written");
    path
}

fn zeros(shape: impl Into<Shape>) -> Tensor {
    of(DType::F32, shape)
}

/// Returns zeros: a view of one zero if they would be large, and a view that begins past the end of its buffer if they
/// are empty and their shape allows that.
fn of(dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    if let ([.., last @ 1..=64], 0) = (shape.dims(), shape.elem_count()) {
        let twice = [&shape.dims()[..shape.rank() - 1], &[2 * last]].concat();
        let zeros = Tensor::zeros(twice, DType::F32, &CPU).and_then(|zeros| zeros.to_dtype(dtype));
        return zeros.and_then(|zeros| zeros.narrow(D::Minus1, *last, *last)).expect("zeros have every dtype");
    }
    let is_large = shape.dims().iter().map(|&size| size as f64).product::<f64>() > 1e7;
    let stored = if is_large { vec![1; shape.rank()].into() } else { shape.clone() };
    let zeros = Tensor::zeros(stored, DType::F32, &CPU).and_then(|zeros| zeros.to_dtype(dtype)?.broadcast_as(shape));
    zeros.expect("zeros have every dtype")
}

/// Returns a checkpoint that has a tensor of zeros for every name.
fn any_weights() -> VarBuilder<'static> {
    VarBuilder::zeros(DType::F32, &CPU)
}

/// Returns a checkpoint of tensors of these shapes.
fn weights_of(shapes: &[(&str, &[usize])]) -> VarBuilder<'static> {
    let tensors = shapes.iter().map(|(name, shape)| (name.to_string(), zeros(*shape))).collect();
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

/// Returns a builder that creates variables when they are requested.
fn variables() -> VarBuilder<'static> {
    VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU)
}

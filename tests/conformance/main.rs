//! The attention test cases of ONNX and PyTorch, on the reference path and on the fused path.
//!
//! `crates/compare/conformance/run.py` records them. Their results are in `docs/conformance.md`, which `UPDATE_EXPECT=1
//! cargo test --test conformance` writes.

#[path = "../common/mod.rs"]
mod common;

mod layers;
mod onnx;
mod page;
mod pytorch;

use std::collections::HashMap;

use candle_attention::Backend;
use candle_core::{DType, Device, Result, Tensor};
use common::{max_error, read_json, recorded, root, values};
use serde::Deserialize;
use serde_json::Value;

/// The cases of one project.
#[derive(Deserialize)]
struct Judge {
    judge: String,
    version: String,
    cases: Vec<Case>,
}

/// The inputs and the expected outputs of a case.
#[derive(Deserialize)]
struct Case {
    group: String,
    name: String,
    attributes: HashMap<String, Value>,
    inputs: Tensors,
    outputs: Tensors,
}

/// Tensors of a file that names each tensor once.
#[derive(Deserialize)]
struct Tensors {
    #[serde(flatten)]
    names: HashMap<String, String>,
    #[serde(skip)]
    by_name: HashMap<String, Tensor>,
}

/// The answer of the crate to a case.
enum Answer {
    Outputs(Vec<(&'static str, Tensor)>),
    NotExpressible(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Equal,
    NotExpressible(String),
    /// By one path; the other has it.
    NoFusedPath(String),
    Wrong(String),
}

impl Judge {
    fn open(name: &str) -> Self {
        let path = recorded("conformance").join(name);
        let mut judge: Self = read_json(path.with_extension("json"));
        let file = path.with_extension("safetensors");
        let tensors = candle_core::safetensors::load(file, &Device::Cpu).expect("the tensors are there");
        for part in judge.cases.iter_mut().flat_map(|case| [&mut case.inputs, &mut case.outputs]) {
            part.by_name = part.names.iter().map(|(own, stored)| (own.clone(), tensors[stored].clone())).collect();
        }
        judge
    }
}

impl Case {
    fn input(&self, name: &str) -> &Tensor {
        self.find(name).unwrap_or_else(|| panic!("{} has no {name}", self.name))
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.inputs.by_name.get(name)
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.attributes.get(name)?.as_f64()
    }

    fn count(&self, name: &str) -> Option<usize> {
        self.number(name).map(|count| count as usize)
    }

    /// Returns whether an attribute is true or 1.
    fn has(&self, name: &str) -> bool {
        self.attributes.get(name).is_some_and(|value| *value == Value::Bool(true) || value.as_i64() == Some(1))
    }

    fn verdict(&self, answer: Result<Answer>) -> Verdict {
        let outputs = match answer {
            Ok(Answer::Outputs(outputs)) => outputs,
            Ok(Answer::NotExpressible(reason)) => return Verdict::NotExpressible(reason.into()),
            Err(error) => {
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                return match line.split_once("no fused path: ") {
                    Some((_, reason)) => Verdict::NoFusedPath(reason.into()),
                    None => Verdict::Wrong(line.into()),
                };
            }
        };
        let found: HashMap<_, _> = outputs.into_iter().collect();
        for (name, expected) in &self.outputs.by_name {
            let Some(found) = found.get(name.as_str()) else { return Verdict::Wrong(format!("no {name}")) };
            if found.dtype() != expected.dtype() {
                return Verdict::Wrong(format!("{name} is {:?}, expected {:?}", found.dtype(), expected.dtype()));
            }
            let finite = values(expected).into_iter().map(f64::abs).filter(|number| number.is_finite());
            let error = max_error(found, expected);
            let largest = finite.fold(0.0, f64::max);
            if error > tolerance(expected.dtype()) * largest {
                return Verdict::Wrong(format!("{name} is off by {error:.1e} where the largest is {largest:.1e}"));
            }
        }
        Verdict::Equal
    }
}

/// Returns the tolerance, relative to the largest number. In half precision it is the tolerance of ONNX for each
/// number.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1e-3,
        _ => 1e-5,
    }
}

#[test]
fn conformance_cases_are_equal_or_have_a_reason() {
    let path = root().join("docs/conformance.md");
    let written = std::fs::read_to_string(&path).expect("the page is there");
    let (head, _) = written.split_once("\n## ").expect("a part for each project");
    let mut text = head.to_string();
    let mut wrong = Vec::new();
    let answers: [fn(&Case, Backend) -> Result<Answer>; 2] = [onnx::answer, pytorch::answer];
    for (name, answer) in ["onnx", "pytorch"].into_iter().zip(answers) {
        let judge = Judge::open(name);
        let verdicts = judge.cases.iter().map(|case| {
            let verdicts = [Backend::Reference, Backend::Fused].map(|backend| case.verdict(answer(case, backend)));
            let is_wrong = verdicts.iter().any(|verdict| matches!(verdict, Verdict::Wrong(_)));
            wrong.extend(is_wrong.then(|| format!("{} {}: {verdicts:?}", case.group, case.name)));
            (case, verdicts)
        });
        text += &page::part(&judge, &verdicts.collect::<Vec<_>>());
    }
    expect_test::expect_file![path].assert_eq(&text);
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

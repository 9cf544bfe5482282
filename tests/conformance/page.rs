//! `docs/conformance.md`.

use std::fmt::Write;
use std::path::PathBuf;

use crate::{Case, Judge, Verdict, root};

const HEAD: &str = "# Conformance

The cases by which other projects test attention, on both paths of this crate.
`python crates/compare/conformance/run.py` records them from the packages in
`crates/compare/conformance/requirements.txt`. `cargo test --test conformance` runs them, without Python, and fails
where one is wrong or this page does not say what it found.

Equal means: off by no more than 1e-5 of the largest number of the output; in f16 1e-3 and in bf16 1/64, as ONNX's own
runner allows. A case is wrong if any of its outputs is off by more, or if it gives an error.

How a case is asked, where an operator says it in other words:

- Heads side by side, (B, T, H · D), are `reshape` and `transpose`; a past is `Tensor::cat` before the keys.
- A causal mask counts from the past, or from `nonpad_kv_seqlen - T_q` in each sequence: `causal_with_offsets`. A window
  from `left` keys before a query to `right` after it is `causal_with_offsets` moved by `right`, with
  `with_window(left + right + 1)`.
- Scores before the softmax are `ln(weights) + log-sum-exp`. A fused path has no weights; they are the reference path's.
- A `score_mod` of FlexAttention that adds a tensor is `with_bias`; `cap · tanh(scores / cap)` is `with_softcap`.
- A rotary embedding has no backend: both columns are one rotation, by `RotaryEmbedding::from_tables`.
- The rule of a LinearAttention is that of the inputs it is given; its last state is rounded to the dtype of its inputs.
- PyTorch's dropout is its own mask, drawn from its seed by `TorchSeed`. Samples are in f32, and numbered as PyTorch
  yields them. Queries without a batch beside keys with one are `broadcast_as` first.
- A layer of an encoder or decoder is asked for its attention: with the inputs, masks and weights of the layer.
";

pub struct Page {
    text: String,
}

impl Page {
    pub fn new() -> Self {
        Self { text: HEAD.into() }
    }

    pub fn add(&mut self, judge: &Judge, verdicts: Vec<(&Case, [Verdict; 2])>) {
        // Cases of a group with the same verdicts, in the order of the first of them.
        let mut rows: Vec<(&str, &[Verdict; 2], Vec<&str>)> = Vec::new();
        for (case, verdicts) in &verdicts {
            match rows.iter_mut().find(|(group, of, _)| *group == case.group && *of == verdicts) {
                Some((_, _, names)) => names.push(&case.name),
                None => rows.push((&case.group, verdicts, vec![&case.name])),
            }
        }
        let count = |path: usize| verdicts.iter().filter(|(_, both)| both[path] == Verdict::Equal).count();
        let _ = write!(
            self.text,
            "\n## {} {}\n\n{} cases: {} equal on the reference path, {} on the fused path.\n\n\
             | of | cases | reference | fused |\n| --- | --- | --- | --- |\n",
            judge.judge,
            judge.version,
            verdicts.len(),
            count(0),
            count(1)
        );
        for (group, [reference, fused], names) in rows {
            let (n, names) = (names.len(), listed(&names));
            let _ = writeln!(self.text, "| {group} | {n}: {names} | {} | {} |", said(reference), said(fused));
        }
    }

    pub fn write(&self) {
        std::fs::write(Self::path(), &self.text).expect("the page can be written");
    }

    pub fn assert_written(&self) {
        let written = std::fs::read_to_string(Self::path()).unwrap_or_default();
        assert!(
            written == self.text,
            "docs/conformance.md says something else than\n{}UPDATE_CONFORMANCE=1 writes it",
            self.text
        );
    }

    fn path() -> PathBuf {
        root().join("docs/conformance.md")
    }
}

fn said(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Equal => "equal".into(),
        Verdict::NotExpressible(reason) => format!("not expressible: {reason}"),
        Verdict::NoFusedPath(reason) => format!("none: {reason}"),
        Verdict::Wrong(how) => format!("**wrong**: {how}"),
    }
}

/// Names, or runs of numbers.
fn listed(names: &[&str]) -> String {
    let Ok(numbers) = names.iter().map(|name| name.parse::<usize>()).collect::<Result<Vec<_>, _>>() else {
        return names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    };
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    let said = runs.map(|run| match run {
        [one] => one.to_string(),
        run => format!("{} to {}", run[0], run[run.len() - 1]),
    });
    said.collect::<Vec<_>>().join(", ")
}

//! `docs/conformance.md`, whose head, above the first project, is written by hand.

use std::fmt::Write;
use std::path::PathBuf;

use crate::{Case, Judge, Verdict, root};

pub struct Page {
    text: String,
}

impl Page {
    pub fn new() -> Self {
        let written = std::fs::read_to_string(Self::path()).expect("the page is there");
        let (head, _) = written.split_once("\n## ").expect("a part for each project");
        Self { text: head.into() }
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
        let (written, text) = (std::fs::read_to_string(Self::path()).expect("the page is there"), &self.text);
        assert!(written == *text, "docs/conformance.md is another than\n{text}UPDATE_CONFORMANCE=1 writes it");
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

//! `docs/conformance.md`. Its head, above the first project, is not generated.

use std::fmt::Write;

use crate::{Case, Judge, Verdict};

/// Returns the cases of a project as a table.
pub fn part(judge: &Judge, verdicts: &[(&Case, [Verdict; 2])]) -> String {
    // Cases of a group with the same verdicts, in the order of the first of them.
    let mut rows: Vec<(&str, &[Verdict; 2], Vec<&str>)> = Vec::new();
    for (case, both) in verdicts {
        match rows.iter_mut().find(|(group, of, _)| *group == case.group && *of == both) {
            Some((_, _, names)) => names.push(&case.name),
            None => rows.push((&case.group, both, vec![&case.name])),
        }
    }
    let [reference, fused] =
        [0, 1].map(|path| verdicts.iter().filter(|(_, both)| both[path] == Verdict::Equal).count());
    let mut text = format!(
        "\n## {} {}\n\n{} cases: {reference} equal on the reference path, {fused} on the fused path.\n\n\
         | operator | cases | reference | fused |\n| --- | --- | --- | --- |\n",
        judge.judge,
        judge.version,
        verdicts.len(),
    );
    for (group, [on_reference, on_fused], names) in rows {
        let n = names.len();
        let names = listed(&names);
        let _ = writeln!(text, "| {group} | {n}: {names} | {} | {} |", said(on_reference), said(on_fused));
    }
    text
}

fn said(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Equal => "equal".into(),
        Verdict::NotExpressible(reason) => format!("not expressible: {reason}"),
        Verdict::NoFusedPath(reason) => format!("none: {reason}"),
        Verdict::Wrong(how) => format!("**wrong**: {how}"),
    }
}

/// Joins names, or runs of numbers.
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

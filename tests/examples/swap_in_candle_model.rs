//! The program that swaps the attention of a Candle model: equal logits, and what is left of the code.

use std::path::PathBuf;

use crate::process::{Run, run_example};

fn run(args: &[&str]) -> Run {
    run_example("swap_in_candle_model", args)
}

/// The largest logit, the largest difference, and their ratio, as a row ends with them.
fn numbers(row: &str) -> [f64; 3] {
    let cells: Vec<f64> = row.split_whitespace().rev().take(3).map(|cell| cell.parse().expect("a number")).collect();
    [cells[2], cells[1], cells[0]]
}

#[test]
fn logits_are_equal_before_and_after() {
    let run = run(&[]).succeeded();
    let lines: Vec<_> = run.stdout.lines().collect();
    let rows = &lines[1..lines.len() - 1];
    let names = ["prompt", "a second", "one by one"];
    assert_eq!(rows.len(), 2 * names.len(), "{}", run.stdout);
    for (row, name) in rows.iter().zip(names.iter().cycle()) {
        assert!(row.starts_with(name), "{row}");
        let [logit, difference, part] = numbers(row);
        // Two ways to compute differ in their rounding, or they are one.
        assert!(logit > 1.0 && difference > 0.0 && part <= 1e-5, "{row}");
        assert!((difference / logit / part - 1.0).abs() < 0.1, "{row}");
    }
    // Cleared caches give the numbers of the first time.
    for (first, again) in rows.iter().zip(&rows[names.len()..]) {
        assert_eq!(numbers(first), numbers(again));
    }
}

#[test]
fn lines_are_those_of_the_sources() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/swap_in_candle_model");
    let count = |name: &str| {
        let source = std::fs::read_to_string(folder.join(name)).expect("the source");
        source.lines().filter(|line| !matches!(line.trim().as_bytes(), [] | [b'/', b'/', ..])).count()
    };
    let (before, after) = (count("before.rs"), count("after.rs"));
    assert!(4 * after < before, "{before} {after}");
    let stdout = run(&[]).stdout;
    assert_eq!(stdout.lines().last(), Some(format!("lines of attention: {before} before, {after} after").as_str()));
}

#[test]
fn a_difference_fails() {
    let run = run(&["--tolerance", "0"]);
    assert_eq!(run.code, Some(1));
    let message = "error: [swap_in_candle_model] the logits differ by ";
    assert!(run.stderr.starts_with(message) && run.stderr.ends_with(", expected at most 0e0\n"), "{}", run.stderr);
}

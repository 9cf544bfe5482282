//! The program `device_times`, run on the CPU.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::process::Command;

use common::Run;
use serde_json::Value;

fn run(args: &[&str]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_device_times"));
    command.args(args).env("RUST_BACKTRACE", "1");
    common::run(command)
}

/// Returns the lines of a run that ends well, as JSON.
fn entries(args: &[&str]) -> Vec<Value> {
    let run = run(args);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
    run.stdout.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

fn names(entries: &[Value]) -> Vec<&str> {
    entries.iter().map(|entry| entry["name"].as_str().expect("a name")).collect()
}

#[test]
fn device_times_of_the_cpu_are_of_every_listed_cell() {
    let listed = entries(&["--list", "--longest", "16"]);
    let timed = entries(&["--device", "cpu", "--longest", "16", "--turns", "1"]);
    assert_eq!(names(&listed), names(&timed));
    for entry in &timed {
        let is_memory = entry["name"].as_str().is_some_and(|name| name.starts_with("memory "));
        let is_timed = entry["ms"].as_f64().is_some_and(|ms| ms > 0.0);
        assert!(is_timed != is_memory && entry["skipped"].is_string() == is_memory, "{entry}");
    }
}

#[test]
fn device_times_lists_cells_with_their_aims() {
    let listed = entries(&["--list"]);
    let unique: BTreeSet<_> = names(&listed).into_iter().collect();
    assert_eq!(unique.len(), listed.len());
    let longest = "bf16 b1 h16 t16384 d128 causal";
    let longest_cell = listed.iter().find(|cell| cell["name"] == longest).expect("the longest");
    // A triangle with its diagonal.
    assert_eq!(longest_cell["pairs"], 16_384 * 16_385 / 2);
    assert_eq!(longest_cell["mark"], serde_json::json!({"kind": "pytorch", "share": 0.95}));
    // Every row that an aim refers to is there.
    for cell in &listed {
        if let Some(other) = cell["mark"]["other"].as_str() {
            assert!(unique.contains(other), "{cell}");
        }
    }
    let window = listed.iter().find(|cell| cell["name"] == "bf16 b4 h16 t4096 d64 window").expect("a window");
    assert_eq!(window["pairs"], 4 * (512 * 513 / 2 + (4096 - 512) * 512));
}

#[test]
fn device_times_first_call_has_parts() {
    let first = entries(&["--device", "cpu", "--longest", "16", "--first-call"]);
    assert_eq!(first.len(), 1);
    let part = |name: &str| first[0]["parts"][name].as_f64().unwrap_or(f64::NAN);
    let sum = part("device") + part("weights") + part("first prompt");
    assert!((first[0]["ms"].as_f64().unwrap_or(0.0) - sum).abs() < 1e-6 && part("second prompt") > 0.0, "{first:?}");
}

#[test]
fn device_times_errors_are_one_line() {
    for (args, code, message) in [
        (&["--sections", "backward"][..], 2, "error: invalid value 'backward' for '--sections <SECTIONS>'"),
        (&["--longest", "3"], 2, "error: invalid value '3' for '--longest <T>'"),
        (&["--list", "--first-call"], 2, "error: the argument '--list' cannot be used with '--first-call'"),
    ] {
        let run = run(args);
        assert_eq!(run.code, Some(code), "{args:?}");
        assert!(run.stderr.starts_with(message) && run.stderr.lines().count() == 1, "{args:?}: {}", run.stderr);
    }
    if !cfg!(feature = "cuda") {
        let run = run(&[]);
        assert_eq!(run.code, Some(1));
        let is_one_line = run.stderr.starts_with("error: no cuda device: ") && run.stderr.lines().count() == 1;
        assert!(is_one_line, "{}", run.stderr);
    }
}

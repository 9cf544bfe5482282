//! The program `device_check`, run on the CPU.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::process::Command;

use common::Run;

fn run(args: &[&str]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_device_check"));
    command.args(args).args(["--models", "../../models"]).env("RUST_BACKTRACE", "1");
    common::run(command)
}

/// A row of the table.
struct Row {
    passed: usize,
    skipped: usize,
    failed: usize,
    /// In f32, f16 and bf16.
    errors: [f64; 3],
}

/// Returns the row of a name.
fn row(output: &str, name: &str) -> Row {
    let line = output.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no row {name}:\n{output}"));
    let cells: Vec<_> = line[28..].split_whitespace().collect();
    let count = |n: usize| cells[n].parse().expect("a count");
    let error = |n: usize| cells[n].parse().expect("an error");
    Row { passed: count(0), skipped: count(1), failed: count(2), errors: [error(4), error(5), error(6)] }
}

#[test]
fn device_check_of_the_cpu_passes() {
    let run = run(&["--short", "--device", "cpu", "--widths", "16", "--explain"]);
    // One of the layers is called with a length above the number of keys.
    let warning = "warning: [multi_head_attention] the mask has a length of 100, and there are 6 keys: it masks none of \
                   them; expected the number of tokens of each sequence\n";
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), warning), "{}", run.stdout);
    for name in [
        "no mask",
        "causal, offsets",
        "chunks",
        "left padding",
        "starts by query",
        "boolean mask by head",
        "bias in f32",
        "ALiBi",
        "relative bias",
        "dropout",
        "everything",
        "odd rows",
        "keys of one sequence",
        "a long cache",
        "log-sum-exp",
        "gradients  ",
        "gradients, relative bias",
        "gradients, sinks",
        "gradients, everything",
        "gradients, other masks",
        "gradients, other widths",
        "packed sequences",
        "packed, gradients",
        "a layer",
        "a layer with a cache",
        "gradients of a layer",
        "norms and rotation",
        "gated delta rule",
        "delta rule, gradients",
        "a layer, linear",
        "linear layers of few rows",
        "a token of a block",
    ] {
        let Row { passed, skipped, failed, errors } = row(&run.stdout, name);
        assert!(passed >= 9 && skipped == 0 && failed == 0, "{name}: {passed} passed");
        // Rounding shows in each dtype, and more in the shorter ones.
        assert!(
            0.0 < errors[0] && errors[0] < errors[1] && errors[1] < errors[2] && errors[2] < 3e-2,
            "{name}: {errors:?}"
        );
    }
    // The error of 8 bits is larger than that of any dtype.
    let cached = row(&run.stdout, "a layer, cache of 8 bits");
    let errors_are_small = cached.errors.iter().all(|&error| 1e-3 < error && error < 2e-2);
    assert!(cached.passed == 12 && cached.failed == 0 && errors_are_small, "{:?}", cached.errors);
    // Three dtypes of each layer that the golden tests read.
    let layers = row(&run.stdout, "layers of models/");
    let counts = format!("{} {} {}", layers.passed, layers.skipped, layers.failed);
    assert!(layers.passed >= 3 * 29 && layers.skipped > 0 && layers.failed == 0, "{counts}");
    assert!(run.stdout.contains(" Fused: the CPU kernel, "), "{}", run.stdout);
    let last = run.stdout.lines().last().unwrap_or_default();
    assert!(last.ends_with(" skipped, 0 failed"), "{last}");
}

#[test]
fn device_check_of_first_use_on_the_cpu_says_that_there_are_no_kernels() {
    let run = run(&["--first-use", "--device", "cpu"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
    assert_eq!(run.stdout, "cpu\nno kernels: the tensors are on the CPU\n\n");
}

#[test]
fn device_check_without_tolerance_fails() {
    let run = run(&["--short", "--device", "cpu", "--tolerance", "0", "--part", "2/60"]);
    assert_eq!(run.code, Some(1));
    let Row { passed, failed, .. } = row(&run.stdout, "causal");
    assert!(passed + failed == 12 && failed > 6, "{passed} {failed}");
    let failures = run.stdout.lines().filter(|line| line.starts_with("FAILED: ")).count();
    assert!(run.stdout.ends_with(&format!(" skipped, {failures} failed\n")), "{failures}");
    assert!(run.stdout.contains("FAILED: causal, b2 h4/4 t32/32 d64/64 in f16: off by "));
}

/// Checks that the parts of several processes are different rows.
#[test]
fn device_check_parts_have_rows_in_turn() {
    for (part, expected) in [("1/60", "no mask"), ("3/60", "causal, upper left")] {
        let run = run(&["--short", "--device", "cpu", "--widths", "8", "--part", part]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
        let first = run.stdout.lines().nth(2).unwrap_or_default();
        assert!(first.starts_with(expected) && run.stdout.lines().count() < 9, "{}", run.stdout);
    }
}

#[test]
fn device_check_errors_are_one_line() {
    for (args, code, message) in [
        (&["--tolerance", "-1"][..], 2, "error: "),
        (&["--device", "tpu"], 2, "error: invalid value 'tpu' for '--device <DEVICE>'"),
        (&["--part", "3/2"], 2, "error: invalid value '3/2' for '--part <I/N>'"),
    ] {
        let run = run(args);
        assert_eq!(run.code, Some(code), "{args:?}");
        assert!(run.stderr.starts_with(message) && run.stderr.lines().count() == 1, "{args:?}: {}", run.stderr);
    }
    if !cfg!(feature = "metal") {
        let run = run(&["--short", "--device", "metal"]);
        assert_eq!(run.code, Some(1));
        assert!(
            run.stderr.starts_with("error: no metal device: ") && run.stderr.lines().count() == 1,
            "{}",
            run.stderr
        );
    }
}

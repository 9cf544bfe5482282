//! The program `device_check`, run on the CPU.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::process::Command;

use common::Run;

fn run(args: &[&str]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_device_check"));
    command.args(args).env("RUST_BACKTRACE", "1");
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
    let cells: Vec<_> = line[22..].split_whitespace().collect();
    let count = |n: usize| cells[n].parse().expect("a count");
    let error = |n: usize| cells[n].parse().expect("an error");
    Row { passed: count(0), skipped: count(1), failed: count(2), errors: [error(4), error(5), error(6)] }
}

#[test]
fn device_check_of_the_cpu_passes() {
    let run = run(&["--short", "--device", "cpu", "--explain"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
    for name in [
        "no mask",
        "causal",
        "left padding",
        "boolean mask",
        "ALiBi",
        "odd rows",
        "log-sum-exp",
        "gradients",
        "a layer",
    ] {
        let Row { passed, skipped, failed, errors } = row(&run.stdout, name);
        assert!(passed >= 12 && skipped == 0 && failed == 0, "{name}");
        // Rounding shows in each dtype, and more in the shorter ones.
        assert!(
            0.0 < errors[0] && errors[0] < errors[1] && errors[1] < errors[2] && errors[2] < 3e-2,
            "{name}: {errors:?}"
        );
    }
    // Three dtypes of each layer that the golden tests read.
    let Row { passed, skipped, failed, .. } = row(&run.stdout, "layers of models/");
    assert!(passed >= 3 * 29 && skipped > 0 && failed == 0, "{passed} {skipped} {failed}");
    assert!(run.stdout.contains(" Fused: the CPU kernel, "), "{}", run.stdout);
    let last = run.stdout.lines().last().unwrap_or_default();
    assert!(last.ends_with(" skipped, 0 failed"), "{last}");
}

#[test]
fn device_check_without_tolerance_fails() {
    let run = run(&["--short", "--device", "cpu", "--tolerance", "0"]);
    assert_eq!(run.code, Some(1));
    let Row { passed, failed, .. } = row(&run.stdout, "causal");
    assert!(passed + failed == 12 && failed > 6, "{passed} {failed}");
    let failures = run.stdout.lines().filter(|line| line.starts_with("FAILED: ")).count();
    assert!(run.stdout.ends_with(&format!(" skipped, {failures} failed\n")), "{failures}");
    assert!(run.stdout.contains("FAILED: causal, b2 h4/4 t32/32 d64/64 in f16: off by "));
}

#[test]
fn device_check_times_have_units() {
    let run = run(&["--short", "--device", "cpu", "--bench", "--longest", "64"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
    let (_, times) = run.stdout.split_once("times on cpu").expect("a table of times");
    let header = "cell                                                 ms   TFLOP/s    GB/s  path";
    assert!(times.contains(header), "{times}");
    for cell in ["bf16 decode b1 h32/8 t64 d128", "f16 decode b32 h32/8 t64 d128"] {
        let rows: Vec<_> = times.lines().filter(|line| line.starts_with(cell)).collect();
        assert!(rows.len() == 2 && rows[0].contains("Fused: ") && rows[1].contains("Reference: requested"), "{times}");
    }
}

/// Checks the list that PyTorch's script reads.
#[test]
fn device_check_lists_cells_as_json() {
    let run = run(&["--list"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let cells: Vec<serde_json::Value> =
        run.stdout.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect();
    assert_eq!(cells.len(), 2 * (2 * 4 * 2 + 2));
    let longest =
        cells.iter().find(|cell| cell["name"] == "bf16 prefill b1 h16 t16384 d128 causal").expect("the longest");
    // Two products of 2 D operations for each pair of the triangle with its diagonal.
    assert_eq!(longest["flops"], 4.0 * 128.0 * 16.0 * (16_384.0 * 16_385.0 / 2.0));
    let decode = cells.iter().find(|cell| cell["name"] == "f16 decode b32 h32/8 t8192 d128").expect("decoding");
    assert_eq!(decode["kv_bytes"], 2 * 32 * 8 * 8192 * 128 * 2);
}

#[test]
fn device_check_errors_are_one_line() {
    for (args, code, message) in [
        (&["--tolerance", "-1"][..], 2, "error: "),
        (&["--device", "tpu"], 2, "error: invalid value 'tpu' for '--device <DEVICE>'"),
        (&["--list", "--bench"], 2, "error: the argument '--list' cannot be used with '--bench'"),
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

//! The environment variable that turns the kernels off, in separate processes.

use std::process::Command;

use candle_attention_cuda::is_available;
use candle_core::Device;

/// Runs the test `child_prints_whether_kernels_are_available` with a value of the variable.
fn output_of_child(value: &str) -> String {
    let mut command = Command::new(std::env::current_exe().expect("the test's own program"));
    command.args(["--ignored", "--nocapture", "--exact", "switches::child_prints_whether_kernels_are_available"]);
    let output = command.env("CANDLE_ATTENTION_CUDA_KERNELS", value).output().expect("the program runs");
    assert!(output.status.success());
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "run by another test"]
fn child_prints_whether_kernels_are_available() {
    println!("found: {:?}", is_available(&Device::Cpu).map_err(|reason| reason.to_string()));
}

#[test]
fn cuda_kernels_switched_off_by_the_environment_are_not_available() {
    let reason = "the environment variable CANDLE_ATTENTION_CUDA_KERNELS is 0, which turns the CUDA kernels off";
    let off = output_of_child("0");
    assert!(off.contains(&format!("found: Err({reason:?})")), "{off}");
    let on = output_of_child("1");
    assert!(on.contains("found: ") && !on.contains(reason), "{on}");
}

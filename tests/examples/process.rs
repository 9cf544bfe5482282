//! Building and running the examples.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use candle_core::{Device, Tensor};

pub const SENTENCE: &str = "hello world how are you ?";

/// What a run left behind.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// An example's executable, built once with this test's features.
pub fn executable(example: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().expect("every example is built");
    built.entry(example.to_string()).or_insert_with(|| build(example)).clone()
}

fn build(example: &str) -> PathBuf {
    let on = [
        ("plot", cfg!(feature = "plot")),
        ("hub", cfg!(feature = "hub")),
        ("cuda", cfg!(feature = "cuda")),
        ("flash-attn", cfg!(feature = "flash-attn")),
        ("metal", cfg!(feature = "metal")),
        ("accelerate", cfg!(feature = "accelerate")),
        ("mkl", cfg!(feature = "mkl")),
    ];
    let features: Vec<_> = on.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--message-format=json", "--example", example])
        .args(["--features", &features.join(",")])
        // Those that this test was built with, so that nothing is compiled twice.
        .args(std::env::var("EXAMPLE_BUILD_ARGS").unwrap_or_default().split_whitespace())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let messages = String::from_utf8(built.stdout).expect("cargo writes UTF-8");
    let mut executables = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == example).then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executables.next().expect("cargo names the executable")
}

pub fn run(args: &[&str]) -> Run {
    run_example("tokenize_attend", args)
}

/// Runs an example in the package's folder. Backtraces are on, since a user may have them on.
pub fn run_example(example: &str, args: &[&str]) -> Run {
    let output = Command::new(executable(example))
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("RUST_BACKTRACE", "1")
        .env_remove("NO_COLOR")
        .output()
        .expect("the example starts");
    Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("output is UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("errors are UTF-8"),
    }
}

/// A run that has to succeed, as the JSON it prints.
#[track_caller]
pub fn json(args: &[&str]) -> serde_json::Value {
    let run = run(&[args, &["--json"]].concat());
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(run.stderr, "");
    serde_json::from_str(&run.stdout).expect("--json prints JSON")
}

/// A nested list of numbers as a tensor.
pub fn tensor(value: &serde_json::Value) -> Tensor {
    fn walk(value: &serde_json::Value, depth: usize, dims: &mut Vec<usize>, flat: &mut Vec<f64>) {
        match value.as_array() {
            Some(list) => {
                if dims.len() == depth {
                    dims.push(list.len());
                }
                list.iter().for_each(|inner| walk(inner, depth + 1, dims, flat));
            }
            None => flat.push(value.as_f64().expect("a number")),
        }
    }
    let (mut dims, mut flat) = (Vec::new(), Vec::new());
    walk(value, 0, &mut dims, &mut flat);
    Tensor::from_vec(flat, dims, &Device::Cpu).expect("the list is regular")
}

//! Building and running the examples.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

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

/// A run of `tokenize_attend` that has to succeed.
#[track_caller]
pub fn shown(args: &[&str]) -> Run {
    let run = run(args);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    run
}

impl Run {
    /// What is said after a name at the beginning of a line.
    #[track_caller]
    pub fn line(&self, name: &str) -> &str {
        let line = self.stdout.lines().find(|line| line.split(' ').next() == Some(name));
        line.unwrap_or_else(|| panic!("no line {name:?} in\n{}", self.stdout))[name.len()..].trim()
    }

    /// The first numbers of the output.
    pub fn first(&self) -> Vec<f64> {
        let numbers = self.stdout.split("[0, 0, ..] = [").nth(1).and_then(|rest| rest.split(", ..]").next());
        numbers.expect("the first numbers").split(", ").map(|n| n.parse().expect("a number")).collect()
    }

    /// The weights of each heat map, to two digits.
    pub fn maps(&self) -> Vec<Vec<Vec<f64>>> {
        let cell = |cell: &str| cell.trim_start_matches(['░', '▒', '▓', '█']).parse::<f64>();
        let map = |map: &str| {
            let rows = map.lines().skip(1).take_while(|line| !line.contains("blank is exactly 0"));
            rows.map(|row| row.split_whitespace().skip(1).map(cell).collect::<Result<_, _>>().expect("cells")).collect()
        };
        self.stdout.split(" heads\n").skip(1).map(map).collect()
    }
}

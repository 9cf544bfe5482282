//! Building and running the examples, and the checkpoints that they read.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;

use crate::common::{Run, listed, read_json, recorded, root, run};

pub const SENTENCE: &str = "hello world how are you ?";

pub type Tensors = HashMap<String, Tensor>;

/// Returns the command of an example, built once with this test's features, in the repository's folder and with
/// backtraces.
pub fn command(example: &str) -> Command {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().expect("every example is built");
    let mut command = Command::new(built.entry(example.to_string()).or_insert_with(|| build(example)));
    command.current_dir(root()).env("RUST_BACKTRACE", "1").env_remove("NO_COLOR");
    command
}

fn build(example: &str) -> PathBuf {
    let on = [
        ("plot", cfg!(feature = "plot")),
        ("hub", cfg!(feature = "hub")),
        ("cuda", cfg!(feature = "cuda")),
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
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let messages = String::from_utf8(built.stdout).expect("cargo writes UTF-8");
    let mut executables = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == example).then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executables.next().expect("cargo names the executable")
}

/// Runs an example, which has to succeed, and returns its output.
#[track_caller]
pub fn printed(example: &str, args: &[&str]) -> String {
    let mut command = command(example);
    command.args(args);
    let Run { code, stdout, stderr } = run(command);
    assert_eq!(code, Some(0), "{example} {args:?}: {stderr}");
    stdout
}

/// A checkpoint for an example's `--model`: a folder of `tests/{example}/models`, or another folder or file.
pub struct Checkpoint {
    pub example: &'static str,
    pub path: PathBuf,
}

impl Checkpoint {
    pub fn of(example: &'static str, model: &str) -> Self {
        Self { example, path: recorded(example).join("models").join(model) }
    }

    /// Lists all checkpoints of an example, in order.
    pub fn all(example: &'static str) -> Vec<Self> {
        listed(recorded(example).join("models")).into_iter().map(|path| Self { example, path }).collect()
    }

    pub fn config(&self) -> Value {
        read_json(self.path.join("config.json"))
    }

    pub fn tensors(&self, file: &str) -> Tensors {
        safetensors::load(self.path.join(file), &Device::Cpu).expect(file)
    }

    #[track_caller]
    pub fn printed(&self, args: &[&str]) -> String {
        printed(self.example, &[&["--model", self.path.to_str().expect("UTF-8")], args].concat())
    }

    /// Runs the example and returns the file that it writes, which `option` names.
    #[track_caller]
    pub fn written(&self, option: &str, args: &[&str]) -> Vec<u8> {
        let out = tempfile::tempdir().expect("a folder");
        // The file of a picture has the extension of its format.
        let name = if option == "--attention" { "out.png" } else { "out" };
        let file = out.path().join(name);
        self.printed(&[args, &[option, file.to_str().expect("UTF-8")]].concat());
        std::fs::read(file).expect("the file is written")
    }
}

impl std::fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} {}", self.example, self.path.display())
    }
}

/// Copies a file, or all that a folder has.
pub fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    if from.is_file() {
        std::fs::create_dir_all(to.parent().expect("a file has a folder"))?;
        return std::fs::copy(from, to).map(drop);
    }
    listed(from).iter().try_for_each(|path| copy(path, &to.join(path.file_name().expect("a name"))))
}

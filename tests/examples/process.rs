//! Building and running the examples, and the checkpoints that they read.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;
use tempfile::TempDir;

pub const SENTENCE: &str = "hello world how are you ?";

pub type Tensors = HashMap<String, Tensor>;

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
    run(args).succeeded()
}

impl Run {
    /// It succeeded, and said nothing on stderr.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self
    }

    /// The one line of an error that ended it.
    #[track_caller]
    pub fn error(&self) -> &str {
        assert_eq!((self.code, self.stdout.as_str(), self.stderr.lines().count()), (Some(1), "", 1), "{}", self.stderr);
        self.stderr.trim_end().strip_prefix("error: ").unwrap_or_else(|| panic!("{}", self.stderr))
    }

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

/// What an example reads as its `--model`: a folder of `tests/{example}/models`, a copy of one that a test changes, or
/// something else.
pub struct Checkpoint {
    example: &'static str,
    pub path: PathBuf,
    copy: Option<TempDir>,
}

impl Checkpoint {
    pub fn at(example: &'static str, path: impl Into<PathBuf>) -> Self {
        Self { example, path: path.into(), copy: None }
    }

    pub fn of(example: &'static str, model: &str) -> Self {
        Self::at(example, models(example).join(model))
    }

    pub fn copied(self) -> Self {
        let copy = tempfile::tempdir().expect("a folder");
        copy_files(&self.path, copy.path());
        Self { path: copy.path().into(), copy: Some(copy), ..self }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn json(&self, file: &str) -> Value {
        let text = std::fs::read_to_string(self.file(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        serde_json::from_str(&text).expect("JSON")
    }

    pub fn write(&self, file: &str, value: &Value) {
        assert!(self.copy.is_some(), "only a copy is changed");
        std::fs::write(self.file(file), value.to_string()).expect(file);
    }

    pub fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.json(file);
        change(&mut value);
        self.write(file, &value);
    }

    pub fn tensors(&self, file: &str) -> Tensors {
        safetensors::load(self.file(file), &Device::Cpu).expect(file)
    }

    pub fn edit_weights(&self, change: impl FnOnce(&mut Tensors)) {
        assert!(self.copy.is_some(), "only a copy is changed");
        let mut tensors = self.tensors("model.safetensors");
        change(&mut tensors);
        safetensors::save(&tensors, self.file("model.safetensors")).expect("weights are written");
    }

    pub fn run(&self, args: &[&str]) -> Run {
        run_example(self.example, &[&["--model", self.path.to_str().expect("UTF-8")], args].concat())
    }

    /// The tensors that a run writes into the file which `option` names.
    #[track_caller]
    pub fn written(&self, option: &str, args: &[&str]) -> Tensors {
        let out = tempfile::NamedTempFile::new().expect("a file");
        self.run(&[args, &[option, out.path().to_str().expect("UTF-8")]].concat()).succeeded();
        safetensors::load(out.path(), &Device::Cpu).expect("a file of safetensors")
    }
}

/// The lines of a file of this package, but for blank ones.
pub fn lines(file: &str) -> Vec<String> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect(file);
    text.lines().filter(|line| !line.is_empty()).map(str::to_string).collect()
}

/// The folder of the checkpoints that a test has for an example.
pub fn models(example: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(example).join("models")
}

/// The names of these checkpoints, in order.
pub fn names(example: &str) -> Vec<String> {
    let folders = std::fs::read_dir(models(example)).expect("the folder of models is there");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("it can be listed").file_name();
    let mut names: Vec<_> = folders.map(|entry| name(entry).into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a folder") {
        let path = entry.expect("it can be listed").path();
        let copy = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            std::fs::create_dir(&copy).expect("a folder");
            copy_files(&path, &copy);
        } else {
            std::fs::copy(&path, &copy).expect("a copy");
        }
    }
}

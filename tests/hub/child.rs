//! Fetches in processes of their own: a test cannot change its own environment, which other threads read.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_attention::hub::HubModel;
use tempfile::TempDir;

use crate::server::COMMIT;

/// A process of its own, with nothing of this one's environment that bears on the hub: its cache is below `home`.
pub struct Child(Command, TempDir);

impl Child {
    pub fn new(home: &Path, model: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command.args(["--exact", "child::fetch_as_told", "--quiet", "--nocapture"]);
        for (name, _) in std::env::vars_os() {
            let upper = name.to_string_lossy().to_uppercase();
            if ["HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_"].iter().any(|start| upper.starts_with(start))
                || upper.ends_with("_PROXY")
            {
                command.env_remove(name);
            }
        }
        command.env("HF_HOME", home).env("RUST_BACKTRACE", "1").env("HUB_TEST_MODEL", model);
        Self(command, TempDir::new().expect("a temporary folder"))
    }

    pub fn at(self, endpoint: &str) -> Self {
        self.with(&[("HF_ENDPOINT", endpoint)])
    }

    pub fn with(mut self, environment: &[(&str, &str)]) -> Self {
        self.0.envs(environment.iter().copied());
        self
    }

    /// Runs it: the paths of the commit's files that were found, config first, or the message of the error.
    pub fn fetch(mut self) -> Result<Vec<String>, String> {
        let result = self.1.path().join("result");
        let output = self.0.env("HUB_TEST_RESULT", &result).output().map_err(|e| e.to_string())?;
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "written to a stderr that is no terminal: {output:?}");
        let text = fs::read_to_string(result).map_err(|e| e.to_string())?;
        match text.strip_prefix("ok\n") {
            Some(paths) => Ok(paths.lines().map(str::to_string).collect()),
            None => Err(text),
        }
    }
}

/// What the child processes run; by itself it does nothing.
#[test]
fn fetch_as_told() -> Result<(), Box<dyn Error>> {
    let (Ok(model), Ok(result)) = (std::env::var("HUB_TEST_MODEL"), std::env::var("HUB_TEST_RESULT")) else {
        return Ok(());
    };
    let mut model = HubModel::new(&model)?;
    if let Ok(prefix) = std::env::var("HUB_TEST_TENSORS") {
        model = model.with_tensors(&prefix);
    }
    for file in std::env::var("HUB_TEST_FILES").iter().flat_map(|files| files.split(',')) {
        model = model.with_file(file)?;
    }
    let text = match model.fetch() {
        Ok(found) => {
            assert_eq!(found.commit, COMMIT);
            let paths = [found.config].into_iter().chain(found.tokenizer).chain(found.files).chain(found.weights);
            paths.fold("ok\n".to_string(), |text, path| format!("{text}{}\n", path.display()))
        }
        Err(e) => e.to_string(),
    };
    Ok(fs::write(result, text)?)
}

/// The last parts of paths that a child found.
pub fn found(result: Result<Vec<String>, String>) -> Result<Vec<String>, String> {
    result.map(|paths| names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>()))
}

/// The last parts of paths.
pub fn names(paths: &[PathBuf]) -> Vec<String> {
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    paths.iter().filter_map(name).collect()
}

/// Asserts that a fetch failed with one line that begins with `[hub]` and holds all the `parts`.
#[track_caller]
pub fn assert_fails(result: Result<Vec<String>, String>, parts: &[&str]) {
    let message = result.unwrap_err();
    assert!(message.starts_with("[hub] "), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

//! Fetches in subprocesses: a test cannot change its environment, which other threads read.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use candle_attention::hub::HubModel;
use candle_core::Result;
use tempfile::TempDir;

/// The commit that all branches of the model are at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Returns the result of a fetch in a process without this process's environment variables for the hub: the cache is
/// below `home`.
pub fn fetch(home: &Path, model: &str, environment: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    let folder = TempDir::new();
    let result = folder.as_ref().expect("a folder").path().join("result");
    command.args(["--exact", "child::child_fetches_and_writes_result", "--ignored", "--quiet", "--nocapture"]);
    for (name, _) in std::env::vars_os() {
        let upper = name.to_string_lossy().to_uppercase();
        let starts = ["HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_"];
        if starts.iter().any(|start| upper.starts_with(start)) || upper.ends_with("_PROXY") {
            command.env_remove(name);
        }
    }
    command
        .env("HF_HOME", home)
        .env("RUST_BACKTRACE", "1")
        .env("HUB_TEST_MODEL", model)
        .env("HUB_TEST_RESULT", &result);
    let output = command.envs(environment.iter().copied()).output().expect("this test starts");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "written to a stderr that is no terminal: {output:?}");
    std::fs::read_to_string(result).expect("what came of it")
}

#[test]
#[ignore = "runs in a process that another test starts"]
fn child_fetches_and_writes_result() -> std::result::Result<(), Box<dyn Error>> {
    let var = |name: &str| std::env::var(name).ok();
    let model = var("HUB_TEST_MODEL").expect("a test that starts this one");
    let result = var("HUB_TEST_RESULT").expect("a file for the result");
    let model = HubModel::new(&model).and_then(|mut model| {
        if let Some(prefix) = var("HUB_TEST_TENSORS") {
            model = model.with_tensors(&prefix);
        }
        var("HUB_TEST_FILES").iter().flat_map(|files| files.split(',')).try_fold(model, HubModel::with_file)
    });
    Ok(std::fs::write(result, outcome(model))?)
}

/// Returns the files that a fetch finds, relative to the snapshot, or the one line of its error.
pub fn outcome(model: Result<HubModel>) -> String {
    let found = match model.and_then(|model| model.fetch()) {
        Ok(found) => found,
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("[hub] ") && text.lines().count() == 1, "{text}");
            return text;
        }
    };
    let folder = found.config.parent().expect("a folder").to_path_buf();
    assert!(found.commit == COMMIT && folder.ends_with(COMMIT), "{found:?}");
    let paths = [found.config].into_iter().chain(found.tokenizer).chain(found.files).chain(found.weights);
    let names = paths.map(|path| path.strip_prefix(&folder).expect("a file of the snapshot").display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

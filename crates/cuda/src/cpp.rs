//! The C++ compiler for tests that compare Rust with the kernels' source.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the compiler with the folders of the kernels and the emulator; `None` if it is not installed, after the
/// message that a test is skipped.
fn compiler() -> Option<Command> {
    let name = env::var("CXX").unwrap_or_else(|_| "c++".into());
    if Command::new(&name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: the C++ compiler {name} is not installed");
        return None;
    }
    let mut command = Command::new(name);
    command
        .arg("-std=c++17")
        .arg("-w")
        .arg("-DEMULATOR")
        .arg("-I")
        .arg(folder("kernels"))
        .arg("-I")
        .arg(folder("emulator"));
    Some(command)
}

/// Returns a folder of the package.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Compiles a program of `emulator/`, runs it, and returns what it prints.
pub(crate) fn run(file: &str, options: &[&str]) -> Option<String> {
    let mut compiler = compiler()?;
    let folder_of_program = tempfile::tempdir().expect("a folder");
    let program = folder_of_program.path().join("program");
    let status = compiler.args(options).arg("-o").arg(&program).arg(folder("emulator").join(file)).status();
    assert!(status.expect("the compiler").success(), "{file} does not compile");
    let output = Command::new(program).output().expect("the program");
    Some(String::from_utf8(output.stdout).expect("text"))
}

/// Checks that a text compiles, without making a program. Returns the messages if it does not.
pub(crate) fn check(text: &str, options: &[String]) -> Option<Result<(), String>> {
    let mut compiler = compiler()?;
    compiler.args(options).args(["-fsyntax-only", "-x", "c++", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut process = compiler.spawn().expect("the compiler");
    process.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("the text is read");
    let output = process.wait_with_output().expect("the compiler");
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() { Ok(()) } else { Err(messages) })
}

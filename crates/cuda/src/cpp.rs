//! The C++ compiler for tests that compare Rust with the kernels' source.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::kernel_struct::Header;

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

/// Checks that a text compiles, which can include some headers besides the files of the package, without making a
/// program. Returns the messages if it does not.
pub(crate) fn check(text: &str, headers: &[Header], options: &[String]) -> Option<Result<(), String>> {
    let mut compiler = compiler()?;
    let folder_of_headers = tempfile::tempdir().expect("a folder");
    for header in headers {
        std::fs::write(folder_of_headers.path().join(&header.name), &header.text).expect("a file");
    }
    compiler
        .arg("-I")
        .arg(folder_of_headers.path())
        .args(options)
        .args(["-fsyntax-only", "-x", "c++", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = compiler.spawn().expect("the compiler");
    process.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("the text is read");
    let output = process.wait_with_output().expect("the compiler");
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() { Ok(()) } else { Err(messages) })
}

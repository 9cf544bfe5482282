//! The sizes and offsets that the source has, for tests that compare the Rust side with it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::program::Program;

/// The names and numbers that a program prints.
type PrintedSizes = BTreeMap<String, usize>;

/// The sizes for the options of earlier calls.
static PRINTED: Mutex<BTreeMap<Vec<String>, PrintedSizes>> = Mutex::new(BTreeMap::new());

/// Returns what `emulator/row_offsets.cpp` prints for the constants of a program: the size of each argument struct, the
/// offset of each field as `Struct.field`, and the values of macros.
pub(crate) fn source_sizes(program: &Program) -> PrintedSizes {
    // The program includes the sources of all programs, which need these constants.
    let mut options: Vec<_> = program.define_options().collect();
    for (name, value) in [("ELEMENT", 2), ("KEY_WIDTH", 16), ("VALUE_WIDTH", 16), ("CHUNK", 16)] {
        if program.defines.iter().all(|define| define.name != name) {
            options.push(format!("-D{name}={value}"));
        }
    }
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    printed.entry(options).or_insert_with_key(|own| printed_sizes(own)).clone()
}

/// Compiles and runs the program with some options.
fn printed_sizes(options: &[String]) -> PrintedSizes {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("offsets");
    let compilation = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()))
        .args(["-std=c++17", "-w", "-DEMULATOR"])
        .args(options)
        .arg("-I")
        .arg(package.join("kernels"))
        .arg("-I")
        .arg(package.join("emulator"))
        .arg(package.join("emulator/row_offsets.cpp"))
        .arg("-o")
        .arg(&path)
        .output()
        .expect("the C++ compiler starts");
    assert!(compilation.status.success(), "{}", String::from_utf8_lossy(&compilation.stderr));
    let run = Command::new(&path).output().expect("the program starts");
    let text = String::from_utf8(run.stdout).expect("the program prints UTF-8");
    let entry = |line: &str| {
        let (name, value) = line.split_once(' ').expect("a name and a number");
        (name.to_string(), value.parse().expect("a number"))
    };
    text.lines().map(entry).collect()
}

/// Compares the size and the offsets of the fields of a struct with the source.
macro_rules! assert_same_layout {
    ($sizes:expr, $Struct:ident, [$($field:ident),* $(,)?]) => {{
        let name = stringify!($Struct);
        assert_eq!($sizes[name], size_of::<$Struct>(), "{name}");
        let mut found = std::collections::BTreeMap::new();
        $(found.insert(format!("{name}.{}", stringify!($field)), std::mem::offset_of!($Struct, $field));)*
        let is_field = |(key, _): &(&String, &usize)| key.starts_with(&format!("{name}."));
        let expected: std::collections::BTreeMap<_, _> =
            $sizes.iter().filter(is_field).map(|(key, value)| (key.clone(), *value)).collect();
        assert_eq!(found, expected);
    }};
}
pub(crate) use assert_same_layout;

//! The kernels' source: files of one role each, which include each other by name.

use std::collections::BTreeSet;

/// A file of the source.
struct SourceFile {
    name: &'static str,
    text: &'static str,
}

/// Lists files in `kernels/`.
macro_rules! source_files {
    ($($name:literal),* $(,)?) => {
        &[$(SourceFile { name: $name, text: include_str!(concat!("../kernels/", $name)) }),*]
    };
}

const FILES: &[SourceFile] = source_files![
    "arguments.cuh",
    "device.cuh",
    "activations.cuh",
    "convolution.cu",
    "convolution.cuh",
    "convolution_arguments.cuh",
    "delta.cu",
    "delta_arguments.cuh",
    "delta_gradients.cuh",
    "delta_prepare.cuh",
    "delta_row_gradients.cuh",
    "delta_rows.cuh",
    "delta_scan.cuh",
    "delta_step.cuh",
    "delta_step_backward.cuh",
    "delta_tile.cuh",
    "gated_norm.cu",
    "gated_norm.cuh",
    "gated_norm_arguments.cuh",
    "row_elements.cuh",
    "tf32_products.cuh",
];

/// Returns a file with the files that it includes in the place of the first `#include` of each, as NVRTC compiles it.
///
/// # Panics
/// If a file includes one that is not in the list, which a test checks for every root.
pub(crate) fn assemble(root: &str) -> String {
    let mut text = String::new();
    append(root, &mut BTreeSet::new(), &mut text);
    text
}

/// Appends a file that was not included before.
fn append(name: &str, included: &mut BTreeSet<String>, text: &mut String) {
    if !included.insert(name.into()) {
        return;
    }
    let file = FILES.iter().find(|file| file.name == name);
    let file = file.unwrap_or_else(|| panic!("the kernels have no file {name}"));
    for line in file.text.lines() {
        if line.trim() == "#pragma once" {
            continue;
        }
        match included_name(line) {
            Some(inner) => append(inner, included, text),
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

/// Returns the name in `#include "name.cuh"`. Other files are the emulator's.
fn included_name(line: &str) -> Option<&str> {
    let name = line.trim().strip_prefix("#include \"")?.strip_suffix('"')?;
    name.ends_with(".cuh").then_some(name)
}

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
    "activations.cuh",
    "attention.cu",
    "backward_keys.cuh",
    "backward_prepare.cuh",
    "backward_queries.cuh",
    "codes.cuh",
    "combine.cuh",
    "convolution.cu",
    "convolution.cuh",
    "convolution_arguments.cuh",
    "decode.cuh",
    "delta.cu",
    "delta_arguments.cuh",
    "delta_gates.cu",
    "delta_gates_arguments.cuh",
    "delta_gradients.cuh",
    "delta_prepare.cuh",
    "delta_row_gradients.cuh",
    "delta_rows.cuh",
    "delta_scan.cuh",
    "delta_step.cuh",
    "delta_step_backward.cuh",
    "delta_tile.cuh",
    "device.cuh",
    "dropout.cuh",
    "elements.cuh",
    "forward.cuh",
    "gate.cu",
    "gate.cuh",
    "gate_arguments.cuh",
    "gated_norm.cu",
    "gated_norm.cuh",
    "gated_norm_arguments.cuh",
    "key_block.cuh",
    "linear_rows.cu",
    "linear_rows.cuh",
    "linear_rows_arguments.cuh",
    "loads.cuh",
    "masks.cuh",
    "modifier_gradients.cuh",
    "modifier_sums.cuh",
    "modifiers.cuh",
    "norm.cu",
    "norm.cuh",
    "norm_arguments.cuh",
    "products.cuh",
    "query_block.cuh",
    "query_gradients.cuh",
    "quantize_rows.cu",
    "quantize_rows.cuh",
    "quantize_rows_arguments.cuh",
    "rotation.cu",
    "rotation.cuh",
    "rotation_arguments.cuh",
    "row_elements.cuh",
    "shared_layout.cuh",
    "softmax.cuh",
    "specialization.cuh",
    "tf32_products.cuh",
];

/// Returns the text of a file in which the first `#include` of each other file is replaced by its text.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assembled_source_has_every_file_once_and_no_include_of_its_own() {
        let text = assemble("attention.cu");
        for definition in
            ["struct AttentionArguments {", "KERNEL(attention_forward,", "KERNEL(attention_backward_keys,"]
        {
            assert_eq!(text.matches(definition).count(), 1, "{definition}");
        }
        assert!(!text.contains(".cuh\"") && !text.contains("#pragma once"));
    }

    #[test]
    fn list_of_source_files_has_every_file_of_the_folder() -> std::io::Result<()> {
        for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"))? {
            let name = entry?.file_name();
            assert!(FILES.iter().any(|file| *file.name == *name), "{name:?} is not in the list");
        }
        Ok(())
    }
}

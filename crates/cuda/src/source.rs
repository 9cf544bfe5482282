//! The kernels' source: files of one role each, which include each other by name, and headers that are printed from
//! structs in Rust.

use std::collections::BTreeSet;

use candle_attention_device::Fnv;

use crate::kernel_struct::StructDefinition;

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
    "activations.cuh",
    "attention.cu",
    "backward_keys.cuh",
    "backward_prepare.cuh",
    "backward_queries.cuh",
    "code_format.cuh",
    "code_numbers.cuh",
    "codes.cuh",
    "combine.cuh",
    "combine_rows.cuh",
    "convolution.cu",
    "decode.cuh",
    "delta.cu",
    "delta_gates.cu",
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
    "dropout_words.cuh",
    "elements.cuh",
    "forward.cuh",
    "gate.cu",
    "gated_norm.cu",
    "gradient_sums.cuh",
    "key_block.cuh",
    "key_rows.cuh",
    "linear_codes.cu",
    "linear_codes.cuh",
    "linear_pairs.cuh",
    "linear_rows.cu",
    "linear_rows.cuh",
    "loads.cuh",
    "masks.cuh",
    "modifier_gradients.cuh",
    "modifier_sums.cuh",
    "modifiers.cuh",
    "norm.cu",
    "products.cuh",
    "query_block.cuh",
    "query_gradients.cuh",
    "quantize_rows.cu",
    "rotate.cuh",
    "rotation.cu",
    "row_elements.cuh",
    "row_places.cuh",
    "row_results.cuh",
    "row_weights.cuh",
    "softmax.cuh",
    "specialization.cuh",
    "tf32_products.cuh",
    "tile_intervals.cuh",
];

/// Returns a hash of all files.
pub(crate) fn hash() -> u128 {
    let mut hash = Fnv::new();
    for file in FILES {
        hash.add_text(file.name);
        hash.add_text(file.text);
    }
    hash.value()
}

/// The files that the Metal kernels share. Their pointers and references have address spaces.
const SHARED_FILES: &[&str] = &[
    "activations.cuh",
    "code_format.cuh",
    "code_numbers.cuh",
    "combine_rows.cuh",
    "dropout.cuh",
    "elements.cuh",
    "gradient_sums.cuh",
    "masks.cuh",
    "modifiers.cuh",
    "rotate.cuh",
    "row_places.cuh",
    "row_results.cuh",
    "row_weights.cuh",
    "specialization.cuh",
];

/// Returns the text of a file that the Metal kernels share.
pub fn shared_file(name: &str) -> Option<&'static str> {
    let is_shared = SHARED_FILES.contains(&name);
    FILES.iter().find(|file| is_shared && file.name == name).map(|file| file.text)
}

/// Returns the source of a program whose first file is `root`. The headers of `arguments` can be included too.
///
/// # Panics
/// As [`join_files`].
pub(crate) fn assemble(root: &str, arguments: &StructDefinition) -> String {
    let headers = arguments.headers();
    join_files(root, &|name| {
        let header = headers.iter().find(|header| header.name == name).map(|header| &header.text[..]);
        header.or_else(|| FILES.iter().find(|file| file.name == name).map(|file| file.text))
    })
}

/// Returns the text of a file in which the first `#include` of each other file is replaced by its text.
///
/// # Panics
/// If a file includes one without a text, which a test checks for every program.
pub fn join_files<'t>(root: &str, text_of: &dyn Fn(&str) -> Option<&'t str>) -> String {
    let mut joined = JoinedFiles { text_of, included: BTreeSet::new(), text: String::new() };
    joined.append(root);
    joined.text
}

/// The source as far as it was put together.
struct JoinedFiles<'f, 't> {
    text_of: &'f dyn Fn(&str) -> Option<&'t str>,
    included: BTreeSet<String>,
    text: String,
}

impl JoinedFiles<'_, '_> {
    /// Appends a file, unless it was included before.
    fn append(&mut self, name: &str) {
        if !self.included.insert(name.into()) {
            return;
        }
        let file = (self.text_of)(name).unwrap_or_else(|| panic!("the kernels have no file {name}"));
        for line in file.lines() {
            if line.trim() == "#pragma once" {
                continue;
            }
            match included_name(line) {
                Some(inner) => self.append(inner),
                None => {
                    self.text.push_str(line);
                    self.text.push('\n');
                }
            }
        }
    }
}

/// Returns the name in `#include "name.cuh"` or `#include "name.metal"`. Other files are the emulator's.
fn included_name(line: &str) -> Option<&str> {
    let name = line.trim().strip_prefix("#include \"")?.strip_suffix('"')?;
    (name.ends_with(".cuh") || name.ends_with(".metal")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::AttentionArguments;
    use crate::kernel_struct::KernelStruct;

    #[test]
    fn assembled_source_has_every_file_once_and_no_include_of_its_own() {
        let text = assemble("attention.cu", &AttentionArguments::DEFINITION);
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

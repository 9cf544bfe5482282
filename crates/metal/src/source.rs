//! The kernels' source as one text: files in `kernels/`, files of the CUDA kernels, and texts that are printed from
//! structs in Rust.

use candle_attention_cuda::shared::{AttentionArguments, Define, KernelStruct, join_files, shared_file};

use crate::buffers;

/// A file of the source.
struct KernelFile {
    name: &'static str,
    text: &'static str,
}

const FILES: [KernelFile; 10] = [
    KernelFile { name: "attention.metal", text: include_str!("../kernels/attention.metal") },
    KernelFile { name: "backward.metal", text: include_str!("../kernels/backward.metal") },
    KernelFile { name: "backward_keys.metal", text: include_str!("../kernels/backward_keys.metal") },
    KernelFile { name: "backward_queries.metal", text: include_str!("../kernels/backward_queries.metal") },
    KernelFile { name: "backward_sums.metal", text: include_str!("../kernels/backward_sums.metal") },
    KernelFile { name: "dropped_weights.metal", text: include_str!("../kernels/dropped_weights.metal") },
    KernelFile { name: "decode.metal", text: include_str!("../kernels/decode.metal") },
    KernelFile { name: "forward.metal", text: include_str!("../kernels/forward.metal") },
    KernelFile { name: "tiles.metal", text: include_str!("../kernels/tiles.metal") },
    // The shared files include the machine by the name that it has in CUDA.
    KernelFile { name: "device.cuh", text: include_str!("../kernels/device.metal") },
];

/// The file that includes all others.
const ROOT: &str = "attention.metal";

/// Returns the source without the constants of a program.
pub(crate) fn assemble() -> String {
    let headers = AttentionArguments::DEFINITION.headers();
    let buffers_header = buffers::header();
    join_files(ROOT, &|name| {
        if name == buffers::HEADER {
            return Some(&buffers_header);
        }
        let header = headers.iter().find(|header| header.name == name).map(|header| &header.text[..]);
        let own = || FILES.iter().find(|file| file.name == name).map(|file| file.text);
        header.or_else(own).or_else(|| shared_file(name))
    })
}

/// Returns the source of a program.
pub(crate) fn of_program(defines: &[Define]) -> String {
    let mut text = String::new();
    for define in defines {
        text += &format!("#define {} {}\n", define.name, define.value);
    }
    text + &assemble()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metal_source_has_every_definition_once_and_no_include_of_its_own() {
        let text = of_program(&[Define { name: "HEAD_DIM", value: 64 }]);
        assert!(text.starts_with("#define HEAD_DIM 64\n"));
        for definition in [
            "struct AttentionArguments {",
            "struct AttentionNumbers {",
            "KERNEL(attention_forward,",
            "KERNEL_OF(BACKWARD, attention_backward_keys,",
        ] {
            assert_eq!(text.matches(definition).count(), 1, "{definition}");
        }
        assert!(!text.contains(".cuh\"") && !text.contains("#pragma once"));
    }

    /// Checks what Metal requires of every pointer and of every reference, and a C++ compiler does not.
    #[test]
    fn metal_source_has_an_address_space_for_every_pointer_and_reference() {
        let mut is_emulator = false;
        for line in assemble().lines() {
            match line {
                "#ifdef EMULATOR" => is_emulator = true,
                "#else" | "#endif" => is_emulator = false,
                _ => {}
            }
            let code = line.split("//").next().unwrap_or_default();
            if is_emulator || code.trim_start().starts_with('#') {
                continue;
            }
            for (at, _) in code.match_indices(['&', '*']) {
                let (before, after) = code.split_at(at);
                let names_type = before.ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
                let is_declared = after.len() > 1 && after[1..].starts_with([' ', ')', ',']);
                if !names_type || !is_declared {
                    continue;
                }
                let declaration = before.rsplit(['(', ',', ';', '{']).next().unwrap_or_default();
                let has_space = ["LOCAL ", "GLOBAL ", "CONSTANT ", "thread ", "device ", "threadgroup "];
                assert!(has_space.iter().any(|space| declaration.contains(space)), "{line}");
            }
        }
    }

    /// Checks what a C++ compiler does not know: words of the Metal Shading Language that are no names of variables.
    #[test]
    fn metal_source_has_no_variable_with_the_name_of_an_address_space() {
        for line in assemble().lines() {
            let code = line.split("//").next().unwrap_or_default();
            let words: Vec<&str> = code.split(|letter: char| !letter.is_alphanumeric() && letter != '_').collect();
            for pair in words.windows(2) {
                let is_type = ["int", "float", "bool", "u32", "i64", "float2", "int2"].contains(&pair[0]);
                let is_space = ["thread", "device", "constant", "threadgroup", "kernel"].contains(&pair[1]);
                assert!(!(is_type && is_space), "{line}");
            }
        }
    }
}

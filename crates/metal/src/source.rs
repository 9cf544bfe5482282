//! The kernels' source as one text: files in `kernels/`, files of the CUDA kernels, and texts that are printed from
//! structs in Rust.

use candle_attention_cuda::shared::{
    AttentionArguments, GateArguments, GatedNormArguments, LinearCodesArguments, LinearRowsArguments, NormArguments,
    RotationArguments, StructHeader, join_files, shared_file,
};

use crate::bindings::{LaunchArguments, header};
use crate::launch::MetalLaunch;

/// A file of the source.
struct KernelFile {
    name: &'static str,
    text: &'static str,
}

const FILES: [KernelFile; 21] = [
    KernelFile { name: "attention.metal", text: include_str!("../kernels/attention.metal") },
    KernelFile { name: "backward.metal", text: include_str!("../kernels/backward.metal") },
    KernelFile { name: "backward_keys.metal", text: include_str!("../kernels/backward_keys.metal") },
    KernelFile { name: "backward_queries.metal", text: include_str!("../kernels/backward_queries.metal") },
    KernelFile { name: "backward_sums.metal", text: include_str!("../kernels/backward_sums.metal") },
    KernelFile { name: "dropped_weights.metal", text: include_str!("../kernels/dropped_weights.metal") },
    KernelFile { name: "decode.metal", text: include_str!("../kernels/decode.metal") },
    KernelFile { name: "forward.metal", text: include_str!("../kernels/forward.metal") },
    KernelFile { name: "stored_rows.metal", text: include_str!("../kernels/stored_rows.metal") },
    KernelFile { name: "tiles.metal", text: include_str!("../kernels/tiles.metal") },
    KernelFile { name: "rows.metal", text: include_str!("../kernels/rows.metal") },
    KernelFile { name: "norm.metal", text: include_str!("../kernels/norm.metal") },
    KernelFile { name: "gated_norm.metal", text: include_str!("../kernels/gated_norm.metal") },
    KernelFile { name: "rotation.metal", text: include_str!("../kernels/rotation.metal") },
    KernelFile { name: "gate.metal", text: include_str!("../kernels/gate.metal") },
    KernelFile { name: "linear_pairs.metal", text: include_str!("../kernels/linear_pairs.metal") },
    KernelFile { name: "linear_rows.metal", text: include_str!("../kernels/linear_rows.metal") },
    KernelFile { name: "codes.metal", text: include_str!("../kernels/codes.metal") },
    KernelFile { name: "linear_codes.metal", text: include_str!("../kernels/linear_codes.metal") },
    // The shared files include the machine and functions of numbers by the names that these have in CUDA.
    KernelFile { name: "row_elements.cuh", text: include_str!("../kernels/row_elements.metal") },
    KernelFile { name: "device.cuh", text: include_str!("../kernels/device.metal") },
];

/// A source: kernels that are compiled with the same constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KernelSource {
    /// The kernels of attention.
    Attention,
    /// The kernels over rows.
    Rows,
    /// The kernels of weights of codes.
    Codes,
}

impl KernelSource {
    /// All sources.
    pub const ALL: [Self; 3] = [Self::Attention, Self::Rows, Self::Codes];

    /// Returns the source that has a kernel.
    pub fn of_kernel(kernel: &str) -> Self {
        match kernel {
            "norm_forward" | "gated_norm_forward" | "rotate_heads" | "gate_forward" | "linear_rows" => Self::Rows,
            "linear_codes" | "dequantize_codes" => Self::Codes,
            _ => Self::Attention,
        }
    }

    /// Returns the text, without the constants of a program.
    pub fn text(self) -> String {
        match self {
            Self::Attention => joined("attention.metal", &headers_of::<AttentionArguments>()),
            Self::Rows => {
                let headers = [
                    headers_of::<NormArguments>(),
                    headers_of::<GatedNormArguments>(),
                    headers_of::<RotationArguments>(),
                    headers_of::<GateArguments>(),
                    headers_of::<LinearRowsArguments>(),
                ];
                joined("rows.metal", &headers.concat())
            }
            Self::Codes => joined("codes.metal", &headers_of::<LinearCodesArguments>()),
        }
    }
}

/// Returns the headers that are printed from a struct of arguments.
fn headers_of<A: LaunchArguments>() -> Vec<StructHeader> {
    let mut headers = A::DEFINITION.headers();
    headers.push(header::<A>());
    headers
}

/// Returns the source of the program of a launch.
pub(crate) fn of_program(launch: &MetalLaunch) -> String {
    let mut text = String::new();
    for define in &launch.defines {
        text += &format!("#define {} {}\n", define.name, define.value);
    }
    text + &KernelSource::of_kernel(launch.kernel).text()
}

/// Returns the text of a file with all that it includes.
fn joined(root: &str, headers: &[StructHeader]) -> String {
    join_files(root, &|name| {
        let header = headers.iter().find(|header| header.name == name).map(|header| &header.text[..]);
        let own = || FILES.iter().find(|file| file.name == name).map(|file| file.text);
        header.or_else(own).or_else(|| shared_file(name))
    })
}

#[cfg(test)]
mod tests {
    use candle_attention_cuda::shared::Define;

    use super::*;

    #[test]
    fn metal_source_has_every_definition_once_and_no_include_of_its_own() {
        let defines = vec![Define { name: "HEAD_DIM", value: 64 }];
        let kernel = "attention_forward";
        let launch = MetalLaunch { kernel, defines, groups: 1, threads: 32, shared_bytes: 0, pairs: None };
        let text = of_program(&launch);
        assert!(text.starts_with("#define HEAD_DIM 64\n"));
        for definition in [
            "struct AttentionArguments {",
            "struct AttentionNumbers {",
            "KERNEL(attention_forward,",
            "KERNEL_OF(BACKWARD, attention_backward_keys,",
        ] {
            assert_eq!(text.matches(definition).count(), 1, "{definition}");
        }
        let rows = of_program(&MetalLaunch { kernel: "gate_forward", ..launch.clone() });
        for definition in ["struct GateArguments {", "struct LinearRowsNumbers {", "KERNEL_WITH(NormArguments,"] {
            assert_eq!(rows.matches(definition).count(), 1, "{definition}");
        }
        let codes = of_program(&MetalLaunch { kernel: "linear_codes", ..launch });
        for definition in [
            "struct LinearCodesArguments {",
            "struct WeightCodes {",
            "struct LinearRowsArguments {",
            "float code_number(",
        ] {
            assert_eq!(codes.matches(definition).count(), 1, "{definition}");
        }
        for source in [text, rows, codes] {
            assert!(!source.contains(".cuh\"") && !source.contains("#pragma once"));
        }
    }

    fn all_sources() -> String {
        KernelSource::ALL.map(KernelSource::text).concat()
    }

    /// Checks what Metal requires of every pointer and of every reference, and a C++ compiler does not.
    #[test]
    fn metal_source_has_an_address_space_for_every_pointer_and_reference() {
        let mut is_emulator = false;
        for line in all_sources().lines() {
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
        for line in all_sources().lines() {
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

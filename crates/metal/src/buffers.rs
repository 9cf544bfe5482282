//! The buffers that the kernels are bound to, and the text by which a kernel reads its arguments from them.
//!
//! The struct of arguments is the one of the CUDA kernels, with pointers. Candle binds buffers to indices, so that it
//! knows which ones a launch reads and writes. A kernel therefore gets the numbers of the struct as bytes, in which a
//! pointer is null or not, and the pointers as buffers.

use candle_attention_cuda::shared::{AttentionArguments, CppType, KernelStruct};

/// The name of the text among the files of the source.
pub(crate) const HEADER: &str = "attention_buffers.metal";

/// A field of the arguments that is bound as a buffer.
pub(crate) struct BoundField {
    pub name: &'static str,
    /// Returns the address in some arguments.
    pub address: fn(&AttentionArguments) -> u64,
}

/// Lists fields of the arguments.
macro_rules! bound_fields {
    ($($field:ident),* $(,)?) => {
        &[$(BoundField { name: stringify!($field), address: |arguments| arguments.$field.address() }),*]
    };
}

/// The bound fields, in the order of their indices, from 1 on: index 0 has the numbers. Metal has 31 indices.
pub(crate) const FIELDS: &[BoundField] = bound_fields![
    queries,
    keys,
    values,
    output,
    log_sum_exp,
    row_statistics,
    bias,
    boolean_mask,
    alibi_slopes,
    relative_bias,
    relative_bias_origins,
    sinks,
    cumulative_queries,
    cumulative_keys,
    first_positions,
    key_lengths,
    key_starts,
    prefix_lengths,
    first_keys,
    end_keys,
    partial_outputs,
    partial_statistics,
];

/// Returns the text.
pub(crate) fn header() -> String {
    let fields = AttentionArguments::DEFINITION.fields;
    let is_bound = |name: &str| FIELDS.iter().any(|bound| bound.name == name);
    let is_pointer = |cpp_type| matches!(cpp_type, CppType::Input(_) | CppType::Output(_));
    let mut numbers =
        String::from("// The arguments as bytes. A pointer is 0 if it is null.\nstruct AttentionNumbers {\n");
    let mut reads = String::from("#define READ_ATTENTION_ARGUMENTS(arguments)");
    for field in fields {
        let name = field.name;
        if !is_pointer(field.cpp_type) {
            numbers += &format!("    {} {name};\n", field.cpp_type.name());
            reads += &format!(" \\\n    arguments.{name} = numbers.{name};");
            continue;
        }
        numbers += &format!("    u64 {name};\n");
        reads += &match is_bound(name) {
            true => format!(
                " \\\n    if (numbers.{name}) arguments.{name} = {name}_buffer; else arguments.{name} = nullptr;"
            ),
            false => format!(" \\\n    arguments.{name} = nullptr;"),
        };
    }
    numbers += "};\nstatic_assert(sizeof(AttentionNumbers) == sizeof(AttentionArguments), \"the size in Rust\");\n";
    let mut buffers = String::from("#define ATTENTION_BUFFERS const CONSTANT AttentionNumbers& numbers BUFFER(0)");
    let mut of_arguments = String::from("#define ATTENTION_BUFFERS_OF(arguments) (const AttentionNumbers&)arguments");
    for (index, bound) in FIELDS.iter().enumerate() {
        let name = bound.name;
        let field = fields.iter().find(|field| field.name == name);
        let pointer = field.map_or_else(String::new, |field| field.cpp_type.name());
        buffers += &format!(", \\\n    {pointer} {name}_buffer BUFFER({})", index + 1);
        of_arguments += &format!(", \\\n    arguments.{name}");
    }
    format!("#include \"attention_arguments.cuh\"\n\n{numbers}\n{buffers}\n\n{of_arguments}\n\n{reads}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_fields_are_pointers_of_the_arguments_and_fit_the_indices_of_metal() {
        assert!(FIELDS.len() < 31);
        for bound in FIELDS {
            let field = AttentionArguments::DEFINITION.fields.iter().find(|field| field.name == bound.name);
            let pointer = field.map(|field| field.cpp_type.name()).unwrap_or_default();
            assert!(pointer.ends_with('*'), "{}", bound.name);
        }
        let text = header();
        assert!(text.contains("GLOBAL const int* end_keys_buffer BUFFER(20)"), "{text}");
        assert!(text.contains("arguments.query_gradient = nullptr;"), "{text}");
    }
}

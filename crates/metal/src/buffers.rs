//! The buffers that the kernels are bound to, and the text by which a kernel reads its arguments from them.
//!
//! The struct of arguments is the one of the CUDA kernels, with pointers. Candle binds buffers to indices, so that it
//! knows which ones a launch reads and writes. A kernel therefore gets the numbers of the struct as bytes, in which a
//! pointer is null or not, and pointers as buffers. Metal has 31 indices for them, fewer than there are pointers, so
//! that each kernel has one of several lists.

use candle_attention_cuda::shared::{AttentionArguments, CppType, KernelStruct};

use crate::bindings::{BoundField, LaunchArguments, bound_fields};
use crate::launch::MetalLaunch;

/// The name of the text among the files of the source.
pub(crate) const HEADER: &str = "attention_buffers.metal";

/// A field of the arguments that is bound as a buffer.
type AttentionField = BoundField<AttentionArguments>;

/// The bound fields of some kernels, in the order of their indices, from 1 on: index 0 has the numbers.
pub(crate) struct BufferList {
    /// The name in the source.
    name: &'static str,
    pub fields: &'static [AttentionField],
}

/// The fields of the forward kernels.
const FORWARD: &[AttentionField] = bound_fields![
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
    dropout_seed,
    key_scales,
    value_scales,
    page_table,
];

/// The fields of the backward kernels that read the tensors of the call.
const BACKWARD: &[AttentionField] = bound_fields![
    queries,
    keys,
    values,
    output,
    row_statistics,
    bias,
    boolean_mask,
    alibi_slopes,
    relative_bias,
    relative_bias_origins,
    dropout_seed,
    cumulative_queries,
    cumulative_keys,
    first_positions,
    key_lengths,
    key_starts,
    prefix_lengths,
    first_keys,
    end_keys,
    output_gradient,
    log_sum_exp_gradient,
    query_gradient,
    key_gradient,
    value_gradient,
    score_gradient,
    delta,
    slope_gradient_parts,
    relative_bias_parts,
];

/// The fields of the kernels that sum what the backward kernels stored.
const SUMS: &[AttentionField] = bound_fields![
    row_statistics,
    sinks,
    cumulative_queries,
    delta,
    score_gradient,
    slope_gradient_parts,
    relative_bias_parts,
    bias_gradient,
    sink_gradient,
    slope_gradient,
    relative_bias_gradient,
];

/// All lists.
const LISTS: [BufferList; 3] = [
    BufferList { name: "ATTENTION", fields: FORWARD },
    BufferList { name: "BACKWARD", fields: BACKWARD },
    BufferList { name: "SUMS", fields: SUMS },
];

/// Returns the fields that a kernel is bound to.
pub(crate) fn fields_of(kernel: &str) -> &'static [AttentionField] {
    match kernel {
        "attention_backward_delta" | "attention_backward_queries" | "attention_backward_keys" => BACKWARD,
        _ if kernel.starts_with("attention_backward") => SUMS,
        _ => FORWARD,
    }
}

impl LaunchArguments for AttentionArguments {
    fn fields_of(kernel: &str) -> &'static [AttentionField] {
        fields_of(kernel)
    }

    fn of_launch(&self, launch: &MetalLaunch) -> Self {
        launch.arguments(self)
    }
}

/// Returns the text.
pub(crate) fn header() -> String {
    let mut numbers =
        String::from("// The arguments as bytes. A pointer is 0 if it is null.\nstruct AttentionNumbers {\n");
    for field in AttentionArguments::DEFINITION.fields {
        let cpp_type = if is_pointer(field.cpp_type) { "u64".into() } else { field.cpp_type.name() };
        numbers += &format!("    {cpp_type} {};\n", field.name);
    }
    numbers += "};\nstatic_assert(sizeof(AttentionNumbers) == sizeof(AttentionArguments), \"the size in Rust\");\n";
    let lists: Vec<String> = LISTS.iter().map(BufferList::text).collect();
    format!("#include \"attention_arguments.cuh\"\n\n{numbers}\n{}", lists.join("\n"))
}

/// Returns whether a type is a pointer.
fn is_pointer(cpp_type: CppType) -> bool {
    matches!(cpp_type, CppType::Input(_) | CppType::Output(_))
}

impl BufferList {
    /// Returns the macros of a kernel with these buffers: its parameters, the arguments for them on the emulator, and
    /// the statements that read the arguments.
    fn text(&self) -> String {
        let Self { name: list, fields } = self;
        let all = AttentionArguments::DEFINITION.fields;
        let mut reads = format!("#define READ_{list}_ARGUMENTS(arguments)");
        for field in all {
            let name = field.name;
            let is_bound = fields.iter().any(|bound| bound.name == name);
            reads += &match (is_pointer(field.cpp_type), is_bound) {
                (false, _) => format!(" \\\n    arguments.{name} = numbers.{name};"),
                (true, false) => format!(" \\\n    arguments.{name} = nullptr;"),
                (true, true) => format!(
                    " \\\n    if (numbers.{name}) arguments.{name} = {name}_buffer; else arguments.{name} = nullptr;"
                ),
            };
        }
        let mut parameters = format!("#define {list}_BUFFERS const CONSTANT AttentionNumbers& numbers BUFFER(0)");
        let mut of_arguments = format!("#define {list}_BUFFERS_OF(arguments) (const AttentionNumbers&)arguments");
        for (index, bound) in fields.iter().enumerate() {
            let name = bound.name;
            let pointer =
                all.iter().find(|field| field.name == name).map_or_else(String::new, |field| field.cpp_type.name());
            parameters += &format!(", \\\n    {pointer} {name}_buffer BUFFER({})", index + 1);
            of_arguments += &format!(", \\\n    arguments.{name}");
        }
        format!("{parameters}\n\n{of_arguments}\n\n{reads}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_fields_are_pointers_of_the_arguments_and_fit_the_indices_of_metal() {
        for list in LISTS {
            assert!(list.fields.len() < 31, "{}", list.name);
            for bound in list.fields {
                let field = AttentionArguments::DEFINITION.fields.iter().find(|field| field.name == bound.name);
                let pointer = field.map(|field| field.cpp_type.name()).unwrap_or_default();
                assert!(pointer.ends_with('*'), "{}", bound.name);
            }
        }
        let text = header();
        assert!(text.contains("GLOBAL const int* end_keys_buffer BUFFER(20)"), "{text}");
        assert!(text.contains("arguments.query_gradient = nullptr;"), "{text}");
        assert!(
            text.contains("if (numbers.query_gradient) arguments.query_gradient = query_gradient_buffer;"),
            "{text}"
        );
    }

    #[test]
    fn kernels_are_bound_to_the_list_that_their_source_names() {
        let source = crate::source::assemble();
        let mut kernels = 0;
        for line in source.lines() {
            let of_list = line.strip_prefix("KERNEL_OF(").and_then(|rest| rest.split_once(", "));
            let of_forward = line.strip_prefix("KERNEL(").map(|rest| ("ATTENTION", rest));
            let Some((list, rest)) = of_list.or(of_forward) else { continue };
            let kernel = rest.split(',').next().unwrap_or_default();
            let named = LISTS.iter().find(|own| own.name == list).expect(list);
            let names = |fields: &[AttentionField]| fields.iter().map(|field| field.name).collect::<Vec<_>>();
            assert_eq!(names(fields_of(kernel)), names(named.fields), "{kernel}");
            kernels += 1;
        }
        assert_eq!(kernels, 10);
    }
}

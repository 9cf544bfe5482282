//! The buffers that the kernels of attention are bound to. Metal has 31 indices for them, fewer than there are pointers
//! in the arguments, so that each kernel has one of several lists.

use candle_attention_cuda::shared::AttentionArguments;

use crate::bindings::{BoundField, BufferList, LaunchArguments, bound_fields};
use crate::launch::{MetalLaunch, PairRange};

/// A field of the arguments that is bound as a buffer.
type AttentionField = BoundField<AttentionArguments>;

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

impl LaunchArguments for AttentionArguments {
    const LISTS: &'static [BufferList<Self>] = &[
        BufferList { name: "ATTENTION", fields: FORWARD },
        BufferList { name: "BACKWARD", fields: BACKWARD },
        BufferList { name: "SUMS", fields: SUMS },
    ];

    fn fields_of(kernel: &str) -> &'static [AttentionField] {
        match kernel {
            "attention_backward_delta" | "attention_backward_queries" | "attention_backward_keys" => BACKWARD,
            _ if kernel.starts_with("attention_backward") => SUMS,
            _ => FORWARD,
        }
    }

    fn of_launch(&self, launch: &MetalLaunch) -> Self {
        match launch.pairs {
            Some(PairRange { first, count }) => Self { first_pair: first as i32, pairs: count as i32, ..*self },
            None => *self,
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_attention_cuda::shared::KernelStruct;

    use super::*;
    use crate::bindings::header;

    const LISTS: &[BufferList<AttentionArguments>] = AttentionArguments::LISTS;

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
        let text = header::<AttentionArguments>().text;
        assert!(text.contains("GLOBAL const int* end_keys_buffer BUFFER(20)"), "{text}");
        assert!(text.contains("arguments.query_gradient = nullptr;"), "{text}");
        assert!(
            text.contains("if (numbers.query_gradient) arguments.query_gradient = query_gradient_buffer;"),
            "{text}"
        );
    }

    #[test]
    fn every_pointer_is_in_a_list_except_scratch_of_cuda_kernels() {
        // A pointer that no list has is null in every Metal kernel.
        let of_cuda = ["query_intervals", "tile_intervals", "query_gradient_sums", "query_gradient_turns"];
        let bound: Vec<&str> = LISTS.iter().flat_map(|list| list.fields).map(|field| field.name).collect();
        for field in AttentionArguments::DEFINITION.fields.iter().filter(|field| field.cpp_type.name().ends_with('*')) {
            assert_ne!(bound.contains(&field.name), of_cuda.contains(&field.name), "{}", field.name);
        }
    }

    #[test]
    fn kernels_are_bound_to_the_list_that_their_source_names() {
        let source = crate::source::KernelSource::Attention.text();
        let mut kernels = 0;
        for line in source.lines() {
            let of_list = line.strip_prefix("KERNEL_OF(").and_then(|rest| rest.split_once(", "));
            let of_forward = line.strip_prefix("KERNEL(").map(|rest| ("ATTENTION", rest));
            let Some((list, rest)) = of_list.or(of_forward) else { continue };
            let kernel = rest.split(',').next().unwrap_or_default();
            let named = LISTS.iter().find(|own| own.name == list).expect(list);
            let names = |fields: &[AttentionField]| fields.iter().map(|field| field.name).collect::<Vec<_>>();
            assert_eq!(names(AttentionArguments::fields_of(kernel)), names(named.fields), "{kernel}");
            kernels += 1;
        }
        assert_eq!(kernels, 10);
    }
}

//! The argument of the attention kernels, as `kernels/arguments.cuh` declares it.

/// The address of memory on the device; 0 for a pointer that a call does not need.
pub(crate) type Address = u64;

/// The strides of a tensor (B, H, T, D) in elements. Its last dimension is contiguous.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowStrides {
    pub sequence: i64,
    pub head: i64,
    pub row: i64,
}

/// The strides in elements of a tensor that is broadcast to the scores (B, H, T_q, T_kv).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ScoreStrides {
    pub sequence: i64,
    pub head: i64,
    pub query: i64,
    pub key: i64,
}

/// The argument of every attention kernel. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AttentionArguments {
    pub queries: Address,
    pub keys: Address,
    pub values: Address,
    pub key_scales: Address,
    pub value_scales: Address,
    pub output: Address,
    pub log_sum_exp: Address,
    pub row_statistics: Address,

    pub bias: Address,
    pub boolean_mask: Address,
    pub alibi_slopes: Address,
    pub relative_bias: Address,
    pub relative_bias_origins: Address,
    pub sinks: Address,
    pub dropout_seed: Address,

    pub cumulative_queries: Address,
    pub cumulative_keys: Address,
    pub offsets: Address,
    pub key_lengths: Address,
    pub key_starts: Address,
    pub prefix_lengths: Address,
    pub first_keys: Address,
    pub end_keys: Address,

    pub partial_outputs: Address,
    pub partial_statistics: Address,

    pub output_gradient: Address,
    pub log_sum_exp_gradient: Address,
    pub query_gradient: Address,
    pub key_gradient: Address,
    pub value_gradient: Address,
    pub score_gradient: Address,
    pub bias_gradient: Address,
    pub sink_gradient: Address,
    pub slope_gradient: Address,
    pub relative_bias_gradient: Address,

    pub delta: Address,
    pub query_intervals: Address,
    pub tile_intervals: Address,
    pub query_gradient_sums: Address,
    pub query_gradient_turns: Address,
    pub slope_gradient_parts: Address,
    pub relative_bias_parts: Address,

    pub query_strides: RowStrides,
    pub key_strides: RowStrides,
    pub value_strides: RowStrides,
    pub key_scale_strides: RowStrides,
    pub value_scale_strides: RowStrides,
    pub output_strides: RowStrides,
    pub output_gradient_strides: RowStrides,
    pub query_gradient_strides: RowStrides,
    pub key_gradient_strides: RowStrides,
    pub value_gradient_strides: RowStrides,
    pub bias_strides: ScoreStrides,
    pub boolean_mask_strides: ScoreStrides,
    pub relative_bias_sequence_stride: i64,
    pub relative_bias_head_stride: i64,

    pub sequences: i32,
    pub heads: i32,
    pub key_heads: i32,
    pub query_count: i32,
    pub key_count: i32,

    pub has_offset: i32,
    pub offset: i32,
    pub causal: i32,
    pub window_left: i32,
    pub window_right: i32,
    pub chunk: i32,

    pub relative_bias_origin: i32,
    pub relative_bias_length: i32,

    pub splits: i32,
    pub blocks: i32,
    pub section_heads: i32,
    pub query_tiles: i32,
    pub key_blocks: i32,
    pub first_pair: i32,
    pub pairs: i32,

    pub scale: f32,
    pub softcap: f32,
    pub kept_weight_factor: f32,
    pub dropout_threshold: u32,
    pub dropout_seed_low: u32,
    pub dropout_seed_high: u32,

    pub bias_sequences: i32,
    pub bias_heads: i32,
    pub bias_queries: i32,
    pub bias_keys: i32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpp;
    use std::mem::offset_of;

    /// Lists the names and the offsets of fields.
    macro_rules! offsets {
        ($($field:ident),* $(,)?) => {
            vec![$((stringify!($field), offset_of!(AttentionArguments, $field))),*]
        };
    }

    #[test]
    fn fields_of_arguments_have_the_offsets_of_the_source() {
        let Some(printed) = cpp::run("offsets.cpp", &["-DELEMENT=1"]) else { return };
        let mut expected = vec![("AttentionArguments", size_of::<AttentionArguments>())];
        expected.extend(offsets![
            queries,
            keys,
            values,
            key_scales,
            value_scales,
            output,
            log_sum_exp,
            row_statistics,
            bias,
            boolean_mask,
            alibi_slopes,
            relative_bias,
            relative_bias_origins,
            sinks,
            dropout_seed,
            cumulative_queries,
            cumulative_keys,
            offsets,
            key_lengths,
            key_starts,
            prefix_lengths,
            first_keys,
            end_keys,
            partial_outputs,
            partial_statistics,
            output_gradient,
            log_sum_exp_gradient,
            query_gradient,
            key_gradient,
            value_gradient,
            score_gradient,
            bias_gradient,
            sink_gradient,
            slope_gradient,
            relative_bias_gradient,
            delta,
            query_intervals,
            tile_intervals,
            query_gradient_sums,
            query_gradient_turns,
            slope_gradient_parts,
            relative_bias_parts,
            query_strides,
            key_strides,
            value_strides,
            key_scale_strides,
            value_scale_strides,
            output_strides,
            output_gradient_strides,
            query_gradient_strides,
            key_gradient_strides,
            value_gradient_strides,
            bias_strides,
            boolean_mask_strides,
            relative_bias_sequence_stride,
            relative_bias_head_stride,
            sequences,
            heads,
            key_heads,
            query_count,
            key_count,
            has_offset,
            offset,
            causal,
            window_left,
            window_right,
            chunk,
            relative_bias_origin,
            relative_bias_length,
            splits,
            blocks,
            section_heads,
            query_tiles,
            key_blocks,
            first_pair,
            pairs,
            scale,
            softcap,
            kept_weight_factor,
            dropout_threshold,
            dropout_seed_low,
            dropout_seed_high,
            bias_sequences,
            bias_heads,
            bias_queries,
            bias_keys,
        ]);
        // After the fields come sizes that depend on macros.
        let printed: Vec<_> = printed.lines().take(expected.len()).collect();
        let expected: Vec<_> = expected.into_iter().map(|(name, offset)| format!("{name} {offset}")).collect();
        assert_eq!(printed, expected);
    }
}

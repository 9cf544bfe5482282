// Prints the size of the argument of the kernels and the offset of each of its fields, then the sizes that follow from
// the specialisation: what another language repeats, for a test that compares.
#include <cstddef>
#include <cstdio>
#include "attention.cu"

#define FIELD(name) printf("%s %zu\n", #name, offsetof(AttentionArguments, name))
#define SIZE(name) printf("%s %d\n", #name, int(name))

int main() {
    printf("AttentionArguments %zu\n", sizeof(AttentionArguments));
    FIELD(queries);
    FIELD(keys);
    FIELD(values);
    FIELD(key_scales);
    FIELD(value_scales);
    FIELD(output);
    FIELD(log_sum_exp);
    FIELD(row_statistics);
    FIELD(bias);
    FIELD(boolean_mask);
    FIELD(alibi_slopes);
    FIELD(relative_bias);
    FIELD(relative_bias_origins);
    FIELD(sinks);
    FIELD(dropout_seed);
    FIELD(cumulative_queries);
    FIELD(cumulative_keys);
    FIELD(offsets);
    FIELD(key_lengths);
    FIELD(key_starts);
    FIELD(prefix_lengths);
    FIELD(first_keys);
    FIELD(end_keys);
    FIELD(partial_outputs);
    FIELD(partial_statistics);
    FIELD(output_gradient);
    FIELD(log_sum_exp_gradient);
    FIELD(query_gradient);
    FIELD(key_gradient);
    FIELD(value_gradient);
    FIELD(score_gradient);
    FIELD(bias_gradient);
    FIELD(sink_gradient);
    FIELD(slope_gradient);
    FIELD(relative_bias_gradient);
    FIELD(delta);
    FIELD(query_intervals);
    FIELD(tile_intervals);
    FIELD(query_gradient_sums);
    FIELD(query_gradient_turns);
    FIELD(slope_gradient_parts);
    FIELD(relative_bias_parts);
    FIELD(query_strides);
    FIELD(key_strides);
    FIELD(value_strides);
    FIELD(key_scale_strides);
    FIELD(value_scale_strides);
    FIELD(output_strides);
    FIELD(output_gradient_strides);
    FIELD(query_gradient_strides);
    FIELD(key_gradient_strides);
    FIELD(value_gradient_strides);
    FIELD(bias_strides);
    FIELD(boolean_mask_strides);
    FIELD(relative_bias_sequence_stride);
    FIELD(relative_bias_head_stride);
    FIELD(sequences);
    FIELD(heads);
    FIELD(key_heads);
    FIELD(query_count);
    FIELD(key_count);
    FIELD(has_offset);
    FIELD(offset);
    FIELD(causal);
    FIELD(window_left);
    FIELD(window_right);
    FIELD(chunk);
    FIELD(relative_bias_origin);
    FIELD(relative_bias_length);
    FIELD(splits);
    FIELD(blocks);
    FIELD(section_heads);
    FIELD(query_tiles);
    FIELD(key_blocks);
    FIELD(first_pair);
    FIELD(pairs);
    FIELD(scale);
    FIELD(softcap);
    FIELD(kept_weight_factor);
    FIELD(dropout_threshold);
    FIELD(dropout_seed_low);
    FIELD(dropout_seed_high);
    FIELD(bias_sequences);
    FIELD(bias_heads);
    FIELD(bias_queries);
    FIELD(bias_keys);

    SIZE(ELEMENT_BYTES);
    SIZE(HEAD_COLUMNS);
    SIZE(VALUE_COLUMNS);
    SIZE(FORWARD_THREADS);
    SIZE(FORWARD_QUERIES);
    SIZE(FORWARD_SHARED_BYTES);
    SIZE(DECODE_THREADS);
    SIZE(DECODE_SHARED_BYTES);
    SIZE(TILES_SHARED_BYTES);
    SIZE(QUERY_THREADS);
    SIZE(QUERY_BLOCK);
    SIZE(QUERY_SHARED_BYTES);
    SIZE(KEY_THREADS);
    SIZE(KEY_BLOCK);
    SIZE(KEY_SHARED_BYTES);
    SIZE(BACKWARD_QUERIES);
}

// Prints the size of the argument of each kernel of this list and the offset of each of its fields, then the sizes that
// follow from a specialisation: what another language repeats, for a test that compares.
#include <cstddef>
#include <cstdio>
#include "delta.cu"
#include "convolution.cu"
#include "gated_norm.cu"
#include "delta_gates.cu"
#include "rotation.cu"

#define ARGUMENTS(type) printf("%s %zu\n", #type, sizeof(type))
#define FIELD(type, name) printf("%s.%s %zu\n", #type, #name, offsetof(type, name))
#define SIZE(name) printf("%s %d\n", #name, int(name))

int main() {
    ARGUMENTS(DeltaArguments);
    FIELD(DeltaArguments, queries);
    FIELD(DeltaArguments, keys);
    FIELD(DeltaArguments, values);
    FIELD(DeltaArguments, decays);
    FIELD(DeltaArguments, betas);
    FIELD(DeltaArguments, initial_states);
    FIELD(DeltaArguments, output);
    FIELD(DeltaArguments, final_states);
    FIELD(DeltaArguments, cumulative_tokens);
    FIELD(DeltaArguments, cumulative_chunks);
    FIELD(DeltaArguments, tiles);
    FIELD(DeltaArguments, recurrent_heads);
    FIELD(DeltaArguments, output_gradient);
    FIELD(DeltaArguments, final_state_gradient);
    FIELD(DeltaArguments, query_gradient);
    FIELD(DeltaArguments, key_gradient);
    FIELD(DeltaArguments, value_gradient);
    FIELD(DeltaArguments, decay_gradient);
    FIELD(DeltaArguments, beta_gradient);
    FIELD(DeltaArguments, initial_state_gradient);
    FIELD(DeltaArguments, chunk_states);
    FIELD(DeltaArguments, chunk_state_gradients);
    FIELD(DeltaArguments, errors);
    FIELD(DeltaArguments, error_gradients);
    FIELD(DeltaArguments, query_strides);
    FIELD(DeltaArguments, key_strides);
    FIELD(DeltaArguments, value_strides);
    FIELD(DeltaArguments, decay_strides);
    FIELD(DeltaArguments, beta_strides);
    FIELD(DeltaArguments, output_strides);
    FIELD(DeltaArguments, output_gradient_strides);
    FIELD(DeltaArguments, sequences);
    FIELD(DeltaArguments, heads);
    FIELD(DeltaArguments, query_heads);
    FIELD(DeltaArguments, key_heads);
    FIELD(DeltaArguments, value_heads);
    FIELD(DeltaArguments, tokens);
    FIELD(DeltaArguments, chunks);
    FIELD(DeltaArguments, decay_per_channel);
    FIELD(DeltaArguments, has_norm);
    FIELD(DeltaArguments, only_recurrent_heads);
    FIELD(DeltaArguments, scale);
    FIELD(DeltaArguments, norm_epsilon);
    ARGUMENTS(ConvolutionArguments);
    FIELD(ConvolutionArguments, inputs);
    FIELD(ConvolutionArguments, taps);
    FIELD(ConvolutionArguments, state);
    FIELD(ConvolutionArguments, output);
    FIELD(ConvolutionArguments, next_state);
    FIELD(ConvolutionArguments, cumulative_tokens);
    FIELD(ConvolutionArguments, output_gradient);
    FIELD(ConvolutionArguments, input_gradient);
    FIELD(ConvolutionArguments, tap_gradient_parts);
    FIELD(ConvolutionArguments, tap_gradient);
    FIELD(ConvolutionArguments, input_entry_stride);
    FIELD(ConvolutionArguments, input_token_stride);
    FIELD(ConvolutionArguments, tap_stride);
    FIELD(ConvolutionArguments, state_entry_stride);
    FIELD(ConvolutionArguments, state_token_stride);
    FIELD(ConvolutionArguments, next_state_entry_stride);
    FIELD(ConvolutionArguments, next_state_token_stride);
    FIELD(ConvolutionArguments, output_gradient_entry_stride);
    FIELD(ConvolutionArguments, output_gradient_token_stride);
    FIELD(ConvolutionArguments, entries);
    FIELD(ConvolutionArguments, tokens);
    FIELD(ConvolutionArguments, channels);
    FIELD(ConvolutionArguments, sequences);
    ARGUMENTS(GatedNormArguments);
    FIELD(GatedNormArguments, inputs);
    FIELD(GatedNormArguments, gates);
    FIELD(GatedNormArguments, weights);
    FIELD(GatedNormArguments, output);
    FIELD(GatedNormArguments, output_gradient);
    FIELD(GatedNormArguments, input_gradient);
    FIELD(GatedNormArguments, gate_gradient);
    FIELD(GatedNormArguments, weight_gradient_parts);
    FIELD(GatedNormArguments, weight_gradient);
    FIELD(GatedNormArguments, input_strides);
    FIELD(GatedNormArguments, gate_strides);
    FIELD(GatedNormArguments, output_gradient_strides);
    FIELD(GatedNormArguments, weight_head_stride);
    FIELD(GatedNormArguments, entries);
    FIELD(GatedNormArguments, tokens);
    FIELD(GatedNormArguments, heads);
    FIELD(GatedNormArguments, parts);
    FIELD(GatedNormArguments, activation);
    FIELD(GatedNormArguments, epsilon);
    ARGUMENTS(DeltaGatesArguments);
    FIELD(DeltaGatesArguments, beta_inputs);
    FIELD(DeltaGatesArguments, decay_inputs);
    FIELD(DeltaGatesArguments, biases);
    FIELD(DeltaGatesArguments, log_rates);
    FIELD(DeltaGatesArguments, betas);
    FIELD(DeltaGatesArguments, decays);
    FIELD(DeltaGatesArguments, beta_entry_stride);
    FIELD(DeltaGatesArguments, beta_token_stride);
    FIELD(DeltaGatesArguments, decay_entry_stride);
    FIELD(DeltaGatesArguments, decay_token_stride);
    FIELD(DeltaGatesArguments, entries);
    FIELD(DeltaGatesArguments, tokens);
    FIELD(DeltaGatesArguments, heads);
    FIELD(DeltaGatesArguments, decay_width);
    FIELD(DeltaGatesArguments, has_lower_bound);
    FIELD(DeltaGatesArguments, lower_bound);
    FIELD(DeltaGatesArguments, beta_factor);
    FIELD(DeltaGatesArguments, reserved);
    ARGUMENTS(RotationArguments);
    FIELD(RotationArguments, inputs);
    FIELD(RotationArguments, output);
    FIELD(RotationArguments, cosines);
    FIELD(RotationArguments, sines);
    FIELD(RotationArguments, angle_rows);
    FIELD(RotationArguments, input_strides);
    FIELD(RotationArguments, angle_rows_stride);
    FIELD(RotationArguments, entries);
    FIELD(RotationArguments, tokens);
    FIELD(RotationArguments, heads);
    FIELD(RotationArguments, width);
    FIELD(RotationArguments, pairs);
    FIELD(RotationArguments, angle_row_count);
    FIELD(RotationArguments, first_angle_row);
    FIELD(RotationArguments, interleaved);
    FIELD(RotationArguments, inverse);
    FIELD(RotationArguments, reserved);
    SIZE(TILE_WORDS);
    SIZE(PREPARE_SHARED);
    SIZE(SCAN_SHARED);
    SIZE(STEP_SHARED);
    SIZE(GRADIENT_SHARED);
    SIZE(BACKWARD_STEP_SHARED);
    SIZE(GRADIENT_WARPS);
    SIZE(CONVOLUTION_TOKENS);
    SIZE(CONVOLUTION_THREADS);
    SIZE(NORM_WARPS);
    SIZE(NORM_SHARED);
    SIZE(GATES_THREADS);
    SIZE(ROTATION_THREADS);
    return 0;
}

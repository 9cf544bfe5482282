// A linear layer of few rows, whose weights have the element type of the inputs.
//
// Such a call takes the time of reading the weights, so each weight is read once, for all rows.
#pragma once
#include "linear_pairs.metal"
#include "linear_rows_buffers.metal"

DEVICE GLOBAL const void* weights_of(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair, int p) {
    return p == 1 && pair.has_up ? arguments.up_weights : arguments.weights;
}

// Adds the products of this thread's chunks.
DEVICE void add_chunks(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair, LOCAL float* sums) {
    const int width = arguments.width, count = width / LINEAR_CHUNK;
    for (int chunk = pair.first; chunk < count; chunk += pair.step) {
        float weights[2 * LINEAR_CHUNK];
        UNROLL for (int p = 0; p < 2; p++)
            load_numbers(weights + p * LINEAR_CHUNK, weights_of(arguments, pair, p), pair.rows[p], width, chunk);
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            float xs[LINEAR_CHUNK];
            load_numbers(xs, arguments.inputs, linear_input_row(arguments, row), width, chunk);
            UNROLL for (int p = 0; p < 2; p++) {
                float sum = sums[p * LINEAR_ROWS + row];
                UNROLL for (int e = 0; e < LINEAR_CHUNK; e++)
                    sum = fused_multiply_add(xs[e], weights[p * LINEAR_CHUNK + e], sum);
                sums[p * LINEAR_ROWS + row] = sum;
            }
        }
    }
}

// As add_chunks, for rows of any alignment.
DEVICE void add_columns(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair, LOCAL float* sums) {
    const i64 width = arguments.width;
    for (int column = pair.first; column < arguments.width; column += pair.step) {
        float weights[2];
        UNROLL for (int p = 0; p < 2; p++)
            weights[p] = load_element(weights_of(arguments, pair, p), pair.rows[p] * width + column);
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float x = load_element(arguments.inputs, linear_input_row(arguments, row) * width + column);
            UNROLL for (int p = 0; p < 2; p++)
                sums[p * LINEAR_ROWS + row] = fused_multiply_add(x, weights[p], sums[p * LINEAR_ROWS + row]);
        }
    }
}

KERNEL_WITH(LinearRowsArguments, LINEAR_ROWS, linear_rows, LINEAR_WARPS * 32) {
    SHARED_MEMORY(LINEAR_SUMS_BYTES);
    LinearRowsArguments arguments;
    READ_LINEAR_ROWS_ARGUMENTS(arguments)
    const LinearPair pair = linear_pair(arguments, (int)group_index, (int)thread_index);
    float sums[2 * LINEAR_ROWS];
    clear_linear_sums(sums);
    if (arguments.is_aligned) add_chunks(arguments, pair, sums);
    else add_columns(arguments, pair, sums);
    finish_linear_pair(arguments, pair, SHARED_AT(float, 0), sums);
}

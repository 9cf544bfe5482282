// A linear layer of few rows, f(x W' + bias) * (x U' + up bias) + residual, where all but x W' can be absent. Weights
// have the element type of the inputs.
//
// Such a call takes the time of reading the weights, so each weight is read once, for all rows. One or more simdgroups
// of a threadgroup compute two products: two neighbouring outputs, or an output and its factor. Simdgroups that share a
// product have every product_warps-th part of its columns, and their sums are added in their order. The bits of an
// output depend on its row of the input alone, not on the number of rows.
#pragma once
#include "activations.cuh"
#include "linear_rows_arguments.cuh"
#include "linear_rows_buffers.metal"

// LINEAR_ROWS is the most rows of a program: 1, 2, 4 or 8.
#define LINEAR_SUMS_BYTES (LINEAR_WARPS * 2 * LINEAR_ROWS * 4)
#define LINEAR_CHUNK (ELEMENT == 2 ? 4 : 8) // elements of a load of 16 bytes

// The two rows of weights of a simdgroup, and its part of their columns.
struct LinearPair {
    int index;     // in the threadgroup
    int block;     // of the grid
    bool has_up;   // whether the second product is the factor of the first one
    int rows[2];
    int first;     // the first chunk or column of this thread
    int step;      // from one to the next
};

// The number of a pair, which may be past the last one.
DEVICE int linear_pair_index(const LOCAL LinearRowsArguments& arguments, int block, int group) {
    return block * (LINEAR_WARPS / arguments.product_warps) + group;
}

DEVICE LinearPair linear_pair(const LOCAL LinearRowsArguments& arguments, int block, int thread_index) {
    const int warp = thread_index / 32, last = arguments.outputs - 1;
    const int number = linear_pair_index(arguments, block, warp / arguments.product_warps);
    LinearPair pair;
    pair.index = thread_index, pair.block = block, pair.has_up = arguments.up_weights != nullptr;
    // All threads reach the barrier: those without an output compute the last one again.
    pair.rows[0] = smaller(pair.has_up ? number : 2 * number, last);
    pair.rows[1] = smaller(pair.has_up ? number : 2 * number + 1, last);
    pair.first = warp % arguments.product_warps * 32 + thread_index % 32;
    pair.step = arguments.product_warps * 32;
    return pair;
}

DEVICE GLOBAL const void* weights_of(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair, int p) {
    return p == 1 && pair.has_up ? arguments.up_weights : arguments.weights;
}

// The numbers of a chunk of a row of `width` elements.
DEVICE void load_numbers(LOCAL float* numbers, GLOBAL const void* matrix, i64 row, int width, int chunk) {
    const i64 byte = (row * width + (i64)chunk * LINEAR_CHUNK) * (16 / LINEAR_CHUNK);
    const uint4 loaded = load_global((GLOBAL const uint4*)((GLOBAL const char*)matrix + byte));
    u32 words[4];
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
    UNROLL for (int w = 0; w < 4; w++) {
#if ELEMENT == 2
        numbers[w] = as_float(words[w]);
#else
        numbers[2 * w] = unpack_half((u16)words[w]);
        numbers[2 * w + 1] = unpack_half((u16)(words[w] >> 16));
#endif
    }
}

// Adds the products of this thread's chunks. Rows past the last one repeat it, and their sums are not stored.
DEVICE void add_chunks(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair, LOCAL float* sums) {
    const int width = arguments.width, count = width / LINEAR_CHUNK;
    for (int chunk = pair.first; chunk < count; chunk += pair.step) {
        float weights[2 * LINEAR_CHUNK];
        UNROLL for (int p = 0; p < 2; p++)
            load_numbers(weights + p * LINEAR_CHUNK, weights_of(arguments, pair, p), pair.rows[p], width, chunk);
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            float xs[LINEAR_CHUNK];
            load_numbers(xs, arguments.inputs, smaller(row, arguments.rows - 1), width, chunk);
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
            const float x = load_element(arguments.inputs, smaller(row, arguments.rows - 1) * width + column);
            UNROLL for (int p = 0; p < 2; p++)
                sums[p * LINEAR_ROWS + row] = fused_multiply_add(x, weights[p], sums[p * LINEAR_ROWS + row]);
        }
    }
}

// The place of the sum of a simdgroup in threadgroup memory.
DEVICE int linear_sum_place(int warp, int p, int row) { return (warp * 2 + p) * LINEAR_ROWS + row; }

// The product p of a group of simdgroups for a row, plus the bias.
DEVICE float linear_product(const LOCAL LinearRowsArguments& arguments, SHARED(float) sums, int group, int p, int row,
                            GLOBAL const void* biases, int output) {
    float sum = 0;
    for (int n = 0; n < arguments.product_warps; n++)
        sum += load_shared(sums + linear_sum_place(group * arguments.product_warps + n, p, row));
    return biases ? sum + load_element(biases, output) : sum;
}

DEVICE float linear_activation(const LOCAL LinearRowsArguments& arguments, float x) {
    if (arguments.activation == LINEAR_NO_ACTIVATION) return x;
    return activate(arguments.activation, x).value;
}

// Stores an output of this thread, if it has one.
DEVICE void store_linear_output(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair,
                                SHARED(float) sums) {
    const int outputs_of_group = pair.has_up ? 1 : 2;
    const int row = pair.index % LINEAR_ROWS, place = pair.index / LINEAR_ROWS;
    const int group = place / outputs_of_group, p = place % outputs_of_group;
    const int output = linear_pair_index(arguments, pair.block, group) * outputs_of_group + p;
    const bool has_group = group < LINEAR_WARPS / arguments.product_warps;
    if (!has_group || row >= arguments.rows || output >= arguments.outputs) return;
    float y = linear_product(arguments, sums, group, p, row, arguments.biases, output);
    if (pair.has_up) {
        // Rounded, as the products of separate operations are.
        const float up = linear_product(arguments, sums, group, 1, row, arguments.up_biases, output);
        y = linear_activation(arguments, rounded_to_element(y)) * rounded_to_element(up);
    } else {
        y = linear_activation(arguments, y);
    }
    const i64 to = (i64)row * arguments.outputs + output;
    if (arguments.residuals) y += load_element(arguments.residuals, to);
    store_element(arguments.output, to, y);
}

KERNEL_WITH(LinearRowsArguments, LINEAR_ROWS, linear_rows, LINEAR_WARPS * 32) {
    SHARED_MEMORY(LINEAR_SUMS_BYTES);
    LinearRowsArguments arguments;
    READ_LINEAR_ROWS_ARGUMENTS(arguments)
    const LinearPair pair = linear_pair(arguments, (int)group_index, (int)thread_index);
    float sums[2 * LINEAR_ROWS];
    UNROLL for (int n = 0; n < 2 * LINEAR_ROWS; n++) sums[n] = 0;
    if (arguments.is_aligned) add_chunks(arguments, pair, sums);
    else add_columns(arguments, pair, sums);
    SHARED(float) shared_sums = SHARED_AT(float, 0);
    UNROLL for (int p = 0; p < 2; p++) {
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float sum = warp_sum(sums[p * LINEAR_ROWS + row]);
            if (pair.index % 32 == 0) store_shared(shared_sums + linear_sum_place(pair.index / 32, p, row), sum);
        }
    }
    block_barrier();
    store_linear_output(arguments, pair, shared_sums);
}

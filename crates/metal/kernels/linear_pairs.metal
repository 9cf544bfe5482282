// Functions of the kernels of linear layers of few rows, f(x W' + bias) * (x U' + up bias) + residual, where all but
// x W' can be absent: the pairs of outputs of simdgroups, and the operations after a product.
//
// One or more simdgroups of a threadgroup compute two products: two neighbouring outputs, or an output and its factor.
// Simdgroups that share a product have every product_warps-th part of its columns, and their sums are added in their
// order. The bits of an output depend on its row of the input alone, not on the number of rows.
#pragma once
#include "activations.cuh"
#include "linear_rows_arguments.cuh"

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

// The row of the input that is read as row `row`: rows past the last one repeat it, and their sums are not stored.
DEVICE int linear_input_row(const LOCAL LinearRowsArguments& arguments, int row) {
    return smaller(row, arguments.rows - 1);
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

DEVICE void clear_linear_sums(LOCAL float* sums) {
    UNROLL for (int n = 0; n < 2 * LINEAR_ROWS; n++) sums[n] = 0;
}

// Adds the sums of all threads and simdgroups of each pair, and stores the outputs of the threadgroup.
DEVICE void finish_linear_pair(const LOCAL LinearRowsArguments& arguments, const LOCAL LinearPair& pair,
                               SHARED(float) shared_sums, const LOCAL float* sums) {
    UNROLL for (int p = 0; p < 2; p++) {
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float sum = warp_sum(sums[p * LINEAR_ROWS + row]);
            if (pair.index % 32 == 0) store_shared(shared_sums + linear_sum_place(pair.index / 32, p, row), sum);
        }
    }
    block_barrier();
    store_linear_output(arguments, pair, shared_sums);
}

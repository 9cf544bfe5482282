// A linear layer of few rows: f(x W' + bias) * (x U' + up bias) + residual. All but x W' can be absent.
//
// Such a call takes the time of reading the weights, so each weight is read once, for all rows, and many loads are
// underway at a time. One or more warps of a block compute two products: two neighbouring outputs, or an output and its
// factor. Warps that share a product have every product_warps-th part of its columns, and their sums are added in the
// order of the warps. The bits of an output depend on its row of the input alone, not on the number of rows.
//
// Grid: ceil(pairs * product_warps / LINEAR_WARPS), with ceil(N / 2) pairs, or N pairs if there are up weights. Threads:
// LINEAR_WARPS * 32. Shared memory: two floats for each warp and row.
#pragma once

#include "activations.cuh"
#include "linear_rows_arguments.cuh"

#ifndef LINEAR_ROWS // the most rows of a call: 1, 2, 4 or 8
#define LINEAR_ROWS 1
#endif
#define LINEAR_CHUNK (ELEMENT == 2 ? 4 : 8)     // elements of a load of 16 bytes
#define LINEAR_LOADS (LINEAR_ROWS <= 2 ? 4 : 2) // loads of a row of weights that are underway at a time

// The blocks that a processor has at a time. More of them would leave too few registers for the loads.
#define LINEAR_BLOCKS (LINEAR_ROWS == 1 ? 4 : LINEAR_ROWS == 2 ? 3 : 2)

// The two rows of weights of a warp, and its part of their columns.
struct LinearPair {
    const void* weights[2];
    i64 rows[2];
    int first; // the first chunk or column of this lane
    int step;  // from one to the next
};

// The number of a pair, which may be past the last one.
DEVICE int linear_pair_index(const LinearRowsArguments& arguments, int group) {
    return block_index() * (LINEAR_WARPS / arguments.product_warps) + group;
}

DEVICE LinearPair linear_pair(const LinearRowsArguments& arguments) {
    const int warp = thread_index() / 32, last = arguments.outputs - 1;
    const int index = linear_pair_index(arguments, warp / arguments.product_warps);
    LinearPair pair;
    // All threads reach the barrier: those without an output compute the last one again.
    if (arguments.up_weights) {
        pair.weights[0] = arguments.weights, pair.weights[1] = arguments.up_weights;
        pair.rows[0] = pair.rows[1] = smaller(index, last);
    } else {
        pair.weights[0] = pair.weights[1] = arguments.weights;
        pair.rows[0] = smaller(2 * index, last), pair.rows[1] = smaller(2 * index + 1, last);
    }
    pair.first = warp % arguments.product_warps * 32 + thread_index() % 32;
    pair.step = arguments.product_warps * 32;
    return pair;
}

// The chunk of a row of `width` elements.
DEVICE uint4 load_chunk(const void* matrix, i64 row, int width, int chunk) {
    const int element_bytes = 16 / LINEAR_CHUNK;
    return load_global((const uint4*)((const char*)matrix + row * width * element_bytes) + chunk);
}

DEVICE void unpack_chunk(float (&numbers)[LINEAR_CHUNK], uint4 chunk) {
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
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
DEVICE int linear_input_row(const LinearRowsArguments& arguments, int row) {
    return smaller(row, arguments.rows - 1);
}

// Adds the products of this lane's chunks.
DEVICE void add_chunks(float (&sums)[2][LINEAR_ROWS], const LinearRowsArguments& arguments, const LinearPair& pair) {
    const int width = arguments.width, count = width / LINEAR_CHUNK;
    for (int first = pair.first; first < count; first += pair.step * LINEAR_LOADS) {
        uint4 chunks[2][LINEAR_LOADS];
        UNROLL for (int n = 0; n < LINEAR_LOADS; n++) {
            // The last chunk is read again in place of those behind it, and not added.
            const int chunk = smaller(first + n * pair.step, count - 1);
            UNROLL for (int p = 0; p < 2; p++) {
                chunks[p][n] = load_chunk(pair.weights[p], pair.rows[p], width, chunk);
            }
        }
        UNROLL for (int n = 0; n < LINEAR_LOADS; n++) {
            const int chunk = first + n * pair.step;
            float weights[2][LINEAR_CHUNK];
            UNROLL for (int p = 0; p < 2; p++) unpack_chunk(weights[p], chunks[p][n]);
            UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
                const uint4 x_chunk = load_chunk(arguments.inputs, linear_input_row(arguments, row), width,
                                                 smaller(chunk, count - 1));
                float xs[LINEAR_CHUNK];
                unpack_chunk(xs, x_chunk);
                UNROLL for (int p = 0; p < 2; p++) {
                    float sum = sums[p][row];
                    UNROLL for (int e = 0; e < LINEAR_CHUNK; e++) sum = fused_multiply_add(xs[e], weights[p][e], sum);
                    sums[p][row] = chunk < count ? sum : sums[p][row];
                }
            }
        }
    }
}

// As add_chunks, for rows of any alignment.
DEVICE void add_columns(float (&sums)[2][LINEAR_ROWS], const LinearRowsArguments& arguments, const LinearPair& pair) {
    const i64 width = arguments.width;
#pragma unroll 4
    for (int column = pair.first; column < arguments.width; column += pair.step) {
        float weights[2];
        UNROLL for (int p = 0; p < 2; p++) weights[p] = load_element(pair.weights[p], pair.rows[p] * width + column);
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float x = load_element(arguments.inputs, linear_input_row(arguments, row) * width + column);
            UNROLL for (int p = 0; p < 2; p++) sums[p][row] = fused_multiply_add(x, weights[p], sums[p][row]);
        }
    }
}

DEVICE u32 linear_sum_address(int warp, int p, int row) { return ((warp * 2 + p) * LINEAR_ROWS + row) * 4; }

// The product p of a group of warps for a row, plus the bias.
DEVICE float linear_product(const LinearRowsArguments& arguments, int group, int p, int row, const void* biases,
                            int output) {
    float sum = 0;
    for (int n = 0; n < arguments.product_warps; n++) {
        sum += load_shared<float>(linear_sum_address(group * arguments.product_warps + n, p, row));
    }
    return biases ? sum + load_element(biases, output) : sum;
}

DEVICE float linear_activation(const LinearRowsArguments& arguments, float x) {
    if (arguments.activation == LINEAR_NO_ACTIVATION) return x;
    return activate(arguments.activation, x).value;
}

// Stores an output of this thread, if it has one.
DEVICE void store_linear_output(const LinearRowsArguments& arguments) {
    const bool has_up = arguments.up_weights != 0;
    const int outputs_of_group = has_up ? 1 : 2;
    const int row = thread_index() % LINEAR_ROWS, place = thread_index() / LINEAR_ROWS;
    const int group = place / outputs_of_group, p = place % outputs_of_group;
    const int output = linear_pair_index(arguments, group) * outputs_of_group + p;
    const bool has_group = group < LINEAR_WARPS / arguments.product_warps;
    if (!has_group || row >= arguments.rows || output >= arguments.outputs) return;
    float y = linear_product(arguments, group, p, row, arguments.biases, output);
    if (has_up) {
        // Rounded, as the products of separate operations are.
        const float up = linear_product(arguments, group, 1, row, arguments.up_biases, output);
        y = linear_activation(arguments, rounded_to_element(y)) * rounded_to_element(up);
    } else {
        y = linear_activation(arguments, y);
    }
    const i64 to = (i64)row * arguments.outputs + output;
    if (arguments.residuals) y += load_element(arguments.residuals, to);
    store_element(arguments.output, to, y);
}

KERNEL(linear_rows, LINEAR_WARPS * 32, LINEAR_BLOCKS, LinearRowsArguments) {
    const LinearPair pair = linear_pair(arguments);
    float sums[2][LINEAR_ROWS];
    UNROLL for (int p = 0; p < 2; p++) {
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) sums[p][row] = 0;
    }
    if (arguments.is_aligned) add_chunks(sums, arguments, pair);
    else add_columns(sums, arguments, pair);
    UNROLL for (int p = 0; p < 2; p++) {
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float sum = warp_sum(sums[p][row]);
            if (thread_index() % 32 == 0) store_shared(linear_sum_address(thread_index() / 32, p, row), sum);
        }
    }
    block_barrier();
    store_linear_output(arguments);
}

// Functions of all kernels of linear layers with few rows, f(x W' + bias) * (x U' + up bias) + residual, where all but
// x W' can be absent: the pairs of outputs of warps, and the operations after a product.
//
// One or more warps of a block compute two products: two neighbouring outputs, or an output and its factor. Warps that
// share a product have every product_warps-th part of its columns, and their sums are added in the order of the warps.
// The bits of an output depend on its row of the input alone, not on the number of rows.
//
// Grid: ceil(pairs * product_warps / LINEAR_WARPS), with ceil(N / 2) pairs, or N pairs if there are up weights. Threads:
// LINEAR_WARPS * 32. Shared memory: two floats for each warp and row, LINEAR_SUMS_BYTES.
#pragma once

#include "activations.cuh"
#include "linear_rows_arguments.cuh"

#ifndef LINEAR_ROWS // the most rows of a call: 1, 2, 4 or 8
#define LINEAR_ROWS 1
#endif
#define LINEAR_SUMS_BYTES (LINEAR_WARPS * 2 * LINEAR_ROWS * 4)

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

// The row of the input that is read as row `row`: rows past the last one repeat it, and their sums are not stored.
DEVICE int linear_input_row(const LinearRowsArguments& arguments, int row) {
    return smaller(row, arguments.rows - 1);
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

DEVICE void clear_linear_sums(float (&sums)[2][LINEAR_ROWS]) {
    UNROLL for (int p = 0; p < 2; p++) {
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) sums[p][row] = 0;
    }
}

// Adds the sums of all lanes and warps of each pair, and stores the outputs of the block.
DEVICE void finish_linear_pair(const LinearRowsArguments& arguments, const float (&sums)[2][LINEAR_ROWS]) {
    UNROLL for (int p = 0; p < 2; p++) {
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float sum = warp_sum(sums[p][row]);
            if (thread_index() % 32 == 0) store_shared(linear_sum_address(thread_index() / 32, p, row), sum);
        }
    }
    block_barrier();
    store_linear_output(arguments);
}

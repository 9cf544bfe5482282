// Norms over rows: (x - mean) / sqrt(variance + epsilon) * weight + bias. Without subtracts_mean the mean is 0.
//
// A row is computed by one warp, or by all warps of a block. It is read once for each statistic and once for the result,
// all but the first time from a cache, so that rows have any width. Rows are counted over (B, T, H).
//
// Grid of norm_forward and norm_backward: ceil(B * T * H * row_warps / ROW_NORM_WARPS), of norm_parameter_gradients:
// (ceil(D / ROW_NORM_COLUMNS), parts, 1, or H with weights of heads), of norm_sum_parameters: ceil(number of weights /
// ROW_NORM_COLUMNS). Threads: ROW_NORM_WARPS * 32 in the first two, ROW_NORM_COLUMNS in the others. Shared memory of the
// first two: ROW_NORM_SHARED bytes.
#pragma once

#include "norm_arguments.cuh"
#include "row_elements.cuh"
#include "row_places.cuh"

// The threads of a row.
struct RowThreads {
    int row;   // past the last row in threads that have none
    int lane;  // the first column of the thread
    int count; // the columns between two of the thread
};

DEVICE RowThreads row_threads(const NormArguments& arguments) {
    RowThreads threads;
    threads.count = arguments.row_warps * 32;
    threads.lane = thread_index() % threads.count;
    threads.row = block_index() * (ROW_NORM_WARPS / arguments.row_warps) + thread_index() / threads.count;
    return threads;
}

// Returns whether there is such a row. All threads of a barrier have the same answer.
DEVICE bool has_row(const NormArguments& arguments, int row) {
    return row < arguments.entries * arguments.tokens * arguments.heads;
}

// The first weight of a row.
DEVICE i64 weight_start(const NormArguments& arguments, int row) {
    return row % arguments.heads * arguments.weight_head_stride;
}

// The sum over the threads of a row, in every thread.
DEVICE float row_sum(const NormArguments& arguments, float x) {
    x = warp_sum(x);
    if (arguments.row_warps == 1) return x;
    if (thread_index() % 32 == 0) store_shared(thread_index() / 32 * 4, x);
    block_barrier();
    float sum = 0;
    UNROLL for (int warp = 0; warp < ROW_NORM_WARPS; warp++) sum += load_shared<float>(warp * 4);
    block_barrier();
    return sum;
}

struct Moments {
    float mean;
    float factor; // 1 / sqrt(variance + epsilon)
};

DEVICE Moments row_moments(const NormArguments& arguments, const RowThreads& threads) {
    const i64 from = row_start(arguments.input_strides, arguments.tokens, arguments.heads, threads.row);
    Moments moments;
    moments.mean = 0;
    if (arguments.subtracts_mean) {
        float sum = 0;
        for (int c = threads.lane; c < arguments.width; c += threads.count) sum += load_element(arguments.inputs, from + c);
        moments.mean = row_sum(arguments, sum) / arguments.width;
    }
    float squares = 0;
    for (int c = threads.lane; c < arguments.width; c += threads.count) {
        const float x = load_element(arguments.inputs, from + c) - moments.mean;
        squares += x * x;
    }
    moments.factor = 1.0f / square_root(row_sum(arguments, squares) / arguments.width + arguments.epsilon);
    return moments;
}

KERNEL(norm_forward, ROW_NORM_WARPS * 32, 1, NormArguments) {
    const RowThreads threads = row_threads(arguments);
    if (!has_row(arguments, threads.row)) return;
    const Moments moments = row_moments(arguments, threads);
    const i64 from = row_start(arguments.input_strides, arguments.tokens, arguments.heads, threads.row);
    const i64 to = (i64)threads.row * arguments.width, weights = weight_start(arguments, threads.row);
    for (int c = threads.lane; c < arguments.width; c += threads.count) {
        const float normed = (load_element(arguments.inputs, from + c) - moments.mean) * moments.factor;
        const float bias = arguments.biases ? load_global(arguments.biases + weights + c) : 0.0f;
        store_element(arguments.output, to + c, normed * load_global(arguments.weights + weights + c) + bias);
    }
}

// Writes the gradient of a row, and the row's mean and factor for norm_parameter_gradients.
KERNEL(norm_backward, ROW_NORM_WARPS * 32, 1, NormArguments) {
    const RowThreads threads = row_threads(arguments);
    if (!has_row(arguments, threads.row)) return;
    const Moments moments = row_moments(arguments, threads);
    const i64 from = row_start(arguments.input_strides, arguments.tokens, arguments.heads, threads.row);
    const i64 gradients = row_start(arguments.output_gradient_strides, arguments.tokens, arguments.heads, threads.row);
    const i64 to = (i64)threads.row * arguments.width, weights = weight_start(arguments, threads.row);
    // The components of the normed row's gradient along ones and along the normed row do not reach the inputs.
    float sum = 0, along = 0;
    for (int c = threads.lane; c < arguments.width; c += threads.count) {
        const float normed = (load_element(arguments.inputs, from + c) - moments.mean) * moments.factor;
        const float of_normed =
            load_element(arguments.output_gradient, gradients + c) * load_global(arguments.weights + weights + c);
        sum += of_normed;
        along += of_normed * normed;
    }
    const float mean = arguments.subtracts_mean ? row_sum(arguments, sum) / arguments.width : 0.0f;
    along = row_sum(arguments, along) / arguments.width;
    for (int c = threads.lane; c < arguments.width; c += threads.count) {
        const float normed = (load_element(arguments.inputs, from + c) - moments.mean) * moments.factor;
        const float of_normed =
            load_element(arguments.output_gradient, gradients + c) * load_global(arguments.weights + weights + c);
        store_element(arguments.input_gradient, to + c, (of_normed - mean - normed * along) * moments.factor);
    }
    if (threads.lane != 0) return;
    store_global(arguments.means + threads.row, moments.mean);
    store_global(arguments.factors + threads.row, moments.factor);
}

// Adds up the gradients of a weight and a bias over every parts-th row.
KERNEL(norm_parameter_gradients, ROW_NORM_COLUMNS, 1, NormArguments) {
    const GridPlace place = grid_place((arguments.width + ROW_NORM_COLUMNS - 1) / ROW_NORM_COLUMNS, arguments.parts);
    const int column = place.x * ROW_NORM_COLUMNS + thread_index(), part = place.y, head = place.z;
    if (column >= arguments.width) return;
    const bool has_weights_of_heads = arguments.weight_head_stride != 0;
    const int tokens = arguments.entries * arguments.tokens;
    const int rows = has_weights_of_heads ? tokens : tokens * arguments.heads;
    float of_weight = 0, of_bias = 0;
    for (int index = part; index < rows; index += arguments.parts) {
        const int row = has_weights_of_heads ? index * arguments.heads + head : index;
        const i64 at = row_start(arguments.input_strides, arguments.tokens, arguments.heads, row) + column;
        const i64 gradient_at =
            row_start(arguments.output_gradient_strides, arguments.tokens, arguments.heads, row) + column;
        const float gradient = load_element(arguments.output_gradient, gradient_at);
        const float x = load_element(arguments.inputs, at) - load_global(arguments.means + row);
        of_weight += gradient * x * load_global(arguments.factors + row);
        of_bias += gradient;
    }
    const int heads = has_weights_of_heads ? arguments.heads : 1;
    const i64 to = ((i64)part * heads + head) * arguments.width + column;
    store_global(arguments.weight_gradient_parts + to, of_weight);
    if (arguments.bias_gradient_parts) store_global(arguments.bias_gradient_parts + to, of_bias);
}

// Adds up the gradients of all parts, always in the same order.
KERNEL(norm_sum_parameters, ROW_NORM_COLUMNS, 1, NormArguments) {
    const int index = block_index() * ROW_NORM_COLUMNS + thread_index();
    const int count = arguments.weight_head_stride ? arguments.heads * arguments.width : arguments.width;
    if (index >= count) return;
    float of_weight = 0, of_bias = 0;
    for (int part = 0; part < arguments.parts; part++) {
        const i64 at = (i64)part * count + index;
        of_weight += load_global(arguments.weight_gradient_parts + at);
        if (arguments.bias_gradient_parts) of_bias += load_global(arguments.bias_gradient_parts + at);
    }
    store_global(arguments.weight_gradient + index, of_weight);
    if (arguments.bias_gradient) store_global(arguments.bias_gradient + index, of_bias);
}

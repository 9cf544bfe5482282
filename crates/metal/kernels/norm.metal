// Norms over rows: (x - mean) / sqrt(variance + epsilon) * weight + bias. Without subtracts_mean the mean is 0.
//
// A row is computed by one simdgroup, or by all of a threadgroup. It is read once for each statistic and once for the
// result, all but the first time from a cache, so that rows have any width. Rows are counted over (B, T, H).
#pragma once
#include "norm_arguments.cuh"
#include "norm_buffers.metal"
#include "row_elements.cuh"
#include "row_places.cuh"

// The threads of a row.
struct RowThreads {
    int index; // in the threadgroup
    int row;   // past the last row in threads that have none
    int lane;  // the first column of the thread
    int count; // the columns between two of the thread
};

// The sum over the threads of a row, in every thread.
DEVICE float row_sum(const LOCAL NormArguments& arguments, const LOCAL RowThreads& threads, SHARED(float) sums,
                     float x) {
    x = warp_sum(x);
    if (arguments.row_warps == 1) return x;
    if (threads.index % 32 == 0) store_shared(sums + threads.index / 32, x);
    block_barrier();
    float sum = 0;
    UNROLL for (int warp = 0; warp < ROW_NORM_WARPS; warp++) sum += load_shared(sums + warp);
    block_barrier();
    return sum;
}

KERNEL_WITH(NormArguments, NORM, norm_forward, ROW_NORM_WARPS * 32) {
    SHARED_MEMORY(ROW_NORM_SHARED);
    NormArguments arguments;
    READ_NORM_ARGUMENTS(arguments)
    SHARED(float) sums = SHARED_AT(float, 0);
    RowThreads threads;
    threads.index = (int)thread_index, threads.count = arguments.row_warps * 32;
    threads.lane = threads.index % threads.count;
    threads.row = (int)group_index * (ROW_NORM_WARPS / arguments.row_warps) + threads.index / threads.count;
    // All threads of a barrier have the same answer.
    if (threads.row >= arguments.entries * arguments.tokens * arguments.heads) return;
    const i64 from = row_start(arguments.input_strides, arguments.tokens, arguments.heads, threads.row);
    float mean = 0;
    if (arguments.subtracts_mean) {
        float sum = 0;
        for (int c = threads.lane; c < arguments.width; c += threads.count)
            sum += load_element(arguments.inputs, from + c);
        mean = row_sum(arguments, threads, sums, sum) / arguments.width;
    }
    float squares = 0;
    for (int c = threads.lane; c < arguments.width; c += threads.count) {
        const float x = load_element(arguments.inputs, from + c) - mean;
        squares += x * x;
    }
    const float variance = row_sum(arguments, threads, sums, squares) / arguments.width;
    const float factor = 1.0f / square_root(variance + arguments.epsilon);
    const i64 to = (i64)threads.row * arguments.width;
    const i64 weights = threads.row % arguments.heads * arguments.weight_head_stride;
    for (int c = threads.lane; c < arguments.width; c += threads.count) {
        const float normed = (load_element(arguments.inputs, from + c) - mean) * factor;
        const float bias = arguments.biases ? load_global(arguments.biases + weights + c) : 0.0f;
        store_element(arguments.output, to + c, normed * load_global(arguments.weights + weights + c) + bias);
    }
}

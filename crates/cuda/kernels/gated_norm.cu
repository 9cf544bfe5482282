// The root mean square norm of the rows of heads, times an activated gate: x / sqrt(mean(x * x) + eps) * weight *
// f(gate).
//
// A warp has a row. Grid of gated_norm_forward: (ceil(B * T / NORM_WARPS), H), of gated_norm_backward: (parts, H), of
// gated_norm_sum_weights: (ceil(number of weights / NORM_SUM_THREADS)). Threads: NORM_WARPS * 32, in the last one
// NORM_SUM_THREADS. Shared memory of gated_norm_backward: NORM_WARPS rows of NORM_LANES * 32 floats.
#pragma once

#include "activations.cuh"
#include "gated_norm_arguments.cuh"

#ifndef NORM_WIDTH // D, the size of a row
#define NORM_WIDTH 128
#endif
#define NORM_LANES ((NORM_WIDTH + 31) / 32) // columns of a lane

DEVICE i64 norm_row(const GatedNormArguments& arguments, const RowStrides& strides, int row, int head) {
    return row / arguments.tokens * strides.sequence + head * strides.head + row % arguments.tokens * strides.row;
}

// Reads a row: columns lane, lane + 32 ..
DEVICE void read_norm_row(float (&xs)[NORM_LANES], const void* base, i64 at, int lane) {
    UNROLL for (int n = 0; n < NORM_LANES; n++) {
        const int column = lane + 32 * n;
        xs[n] = column < NORM_WIDTH ? load_element(base, at + column) : 0.0f;
    }
}

DEVICE void read_weights(float (&weights)[NORM_LANES], const GatedNormArguments& arguments, int head, int lane) {
    UNROLL for (int n = 0; n < NORM_LANES; n++) {
        const int column = lane + 32 * n;
        const float* from = arguments.weights + head * arguments.weight_head_stride + column;
        weights[n] = column < NORM_WIDTH ? load_global(from) : 0.0f;
    }
}

// The factor that gives a row a mean square of 1.
DEVICE float norm_factor(const GatedNormArguments& arguments, const float (&xs)[NORM_LANES]) {
    float square = 0;
    UNROLL for (int n = 0; n < NORM_LANES; n++) square += xs[n] * xs[n];
    return 1.0f / square_root(warp_sum(square) / NORM_WIDTH + arguments.epsilon);
}

DEVICE i64 contiguous_norm_row(const GatedNormArguments& arguments, int row, int head) {
    return ((i64)row * arguments.heads + head) * NORM_WIDTH;
}

KERNEL(gated_norm_forward, NORM_WARPS * 32, 1, GatedNormArguments) {
    const int rows = arguments.entries * arguments.tokens;
    const GridPlace place = grid_place((rows + NORM_WARPS - 1) / NORM_WARPS, arguments.heads);
    const int lane = thread_index() % 32, head = place.y;
    const int row = place.x * NORM_WARPS + thread_index() / 32;
    if (row >= rows) return;
    float xs[NORM_LANES], gates[NORM_LANES], weights[NORM_LANES];
    read_norm_row(xs, arguments.inputs, norm_row(arguments, arguments.input_strides, row, head), lane);
    read_norm_row(gates, arguments.gates, norm_row(arguments, arguments.gate_strides, row, head), lane);
    read_weights(weights, arguments, head, lane);
    const float factor = norm_factor(arguments, xs);
    const i64 to = contiguous_norm_row(arguments, row, head);
    UNROLL for (int n = 0; n < NORM_LANES; n++) {
        const int column = lane + 32 * n;
        if (column >= NORM_WIDTH) continue;
        const float gate = activate(arguments.activation, gates[n]).value;
        store_element(arguments.output, to + column, xs[n] * factor * weights[n] * gate);
    }
}

// Writes the gradients of a row, and adds what it adds to the gradient of the weights.
DEVICE void differentiate_norm_row(const GatedNormArguments& arguments, int row, int head, int lane,
                                   const float (&weights)[NORM_LANES], float (&weight_gradients)[NORM_LANES]) {
    float xs[NORM_LANES], gates[NORM_LANES], gradients[NORM_LANES], along = 0;
    read_norm_row(xs, arguments.inputs, norm_row(arguments, arguments.input_strides, row, head), lane);
    read_norm_row(gates, arguments.gates, norm_row(arguments, arguments.gate_strides, row, head), lane);
    const i64 gradient_row = norm_row(arguments, arguments.output_gradient_strides, row, head);
    read_norm_row(gradients, arguments.output_gradient, gradient_row, lane);
    const float factor = norm_factor(arguments, xs);
    const i64 to = contiguous_norm_row(arguments, row, head);
    UNROLL for (int n = 0; n < NORM_LANES; n++) {
        const int column = lane + 32 * n;
        const ValueAndSlope gate = activate(arguments.activation, gates[n]);
        const float normed = xs[n] * factor;
        if (arguments.gate_gradient && column < NORM_WIDTH) {
            store_element(arguments.gate_gradient, to + column, gradients[n] * normed * weights[n] * gate.slope);
        }
        // Rounded, as the normed rows of separate operations would be.
        const float of_normed = rounded_to_element(gradients[n] * gate.value);
        weight_gradients[n] += of_normed * normed;
        gradients[n] = of_normed * weights[n];
        along += gradients[n] * normed;
    }
    along = warp_sum(along) / NORM_WIDTH;
    UNROLL for (int n = 0; n < NORM_LANES; n++) {
        const int column = lane + 32 * n;
        if (column >= NORM_WIDTH) continue;
        store_element(arguments.input_gradient, to + column, (gradients[n] - xs[n] * factor * along) * factor);
    }
}

KERNEL(gated_norm_backward, NORM_WARPS * 32, 1, GatedNormArguments) {
    const GridPlace place = grid_place(arguments.parts, arguments.heads);
    const int warp = thread_index() / 32, lane = thread_index() % 32, head = place.y, part = place.x;
    float weights[NORM_LANES], weight_gradients[NORM_LANES];
    read_weights(weights, arguments, head, lane);
    UNROLL for (int n = 0; n < NORM_LANES; n++) weight_gradients[n] = 0;
    const int rows = arguments.entries * arguments.tokens;
    for (int row = part * NORM_WARPS + warp; row < rows; row += arguments.parts * NORM_WARPS) {
        differentiate_norm_row(arguments, row, head, lane, weights, weight_gradients);
    }
    if (!arguments.weight_gradient) return;
    UNROLL for (int n = 0; n < NORM_LANES; n++) {
        store_shared(((warp * NORM_LANES + n) * 32 + lane) * 4, weight_gradients[n]);
    }
    block_barrier();
    for (int column = thread_index(); column < NORM_WIDTH; column += NORM_WARPS * 32) {
        float sum = 0;
        for (int from = 0; from < NORM_WARPS; from++) sum += load_shared<float>((from * NORM_LANES * 32 + column) * 4);
        store_global(arguments.weight_gradient_parts + ((i64)part * arguments.heads + head) * NORM_WIDTH + column, sum);
    }
}

// Adds up the gradients of the weights of all blocks, always in the same order.
KERNEL(gated_norm_sum_weights, NORM_SUM_THREADS, 1, GatedNormArguments) {
    const int index = block_index() * NORM_SUM_THREADS + thread_index();
    const int count = arguments.weight_head_stride ? arguments.heads * NORM_WIDTH : NORM_WIDTH;
    if (index >= count) return;
    float sum = 0;
    for (i64 at = index; at < (i64)arguments.parts * arguments.heads * NORM_WIDTH; at += count) {
        sum += load_global(arguments.weight_gradient_parts + at);
    }
    store_global(arguments.weight_gradient + index, sum);
}

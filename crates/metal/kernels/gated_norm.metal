// The root mean square norm of the rows of heads, times an activated gate: x / sqrt(mean(x * x) + epsilon) * weight *
// f(gate). A simdgroup has a row.
#pragma once
#include "activations.cuh"
#include "gated_norm_arguments.cuh"
#include "gated_norm_buffers.metal"
#include "row_elements.cuh"
#include "row_places.cuh"

// NORM_WIDTH is D, the size of a row.
KERNEL_WITH(GatedNormArguments, GATED_NORM, gated_norm_forward, NORM_WARPS * 32) {
    GatedNormArguments arguments;
    READ_GATED_NORM_ARGUMENTS(arguments)
    const int tokens = arguments.entries * arguments.tokens, lane = (int)thread_index % 32;
    const GridPlace place = grid_place(group_index, (tokens + NORM_WARPS - 1) / NORM_WARPS, arguments.heads);
    const int token = place.x * NORM_WARPS + (int)thread_index / 32;
    if (token >= tokens) return;
    const int row = token * arguments.heads + place.y;
    const i64 from = row_start(arguments.input_strides, arguments.tokens, arguments.heads, row);
    float squares = 0;
    for (int c = lane; c < NORM_WIDTH; c += 32) {
        const float x = load_element(arguments.inputs, from + c);
        squares += x * x;
    }
    const float factor = 1.0f / square_root(warp_sum(squares) / NORM_WIDTH + arguments.epsilon);
    const i64 gates = row_start(arguments.gate_strides, arguments.tokens, arguments.heads, row);
    const i64 weights = place.y * arguments.weight_head_stride, to = (i64)row * NORM_WIDTH;
    for (int c = lane; c < NORM_WIDTH; c += 32) {
        const float normed =
            load_element(arguments.inputs, from + c) * factor * load_global(arguments.weights + weights + c);
        const float gate = activate(arguments.activation, load_element(arguments.gates, gates + c)).value;
        store_element(arguments.output, to + c, normed * gate);
    }
}

// Values times an activated gate: f(gate) * value, computed in f32 and rounded once.
//
// A warp has some columns of a row, counted over (B, T, H). Grid: (ceil(B * T * H / GATE_WARPS), ceil(D / columns)).
// Threads: GATE_WARPS * 32.
#pragma once

#include "activations.cuh"
#include "gate_arguments.cuh"
#include "row_places.cuh"

// The columns that a warp computes.
struct GateColumns {
    int row;
    int begin; // this lane, which has every 32nd one from here
    int end;
};

DEVICE GateColumns gate_columns(const GateArguments& arguments) {
    GateColumns own;
    const int rows = arguments.entries * arguments.tokens * arguments.heads;
    const int column_blocks = (arguments.width + arguments.columns - 1) / arguments.columns;
    const GridPlace place = grid_place((rows + GATE_WARPS - 1) / GATE_WARPS, column_blocks);
    own.row = place.x * GATE_WARPS + thread_index() / 32;
    own.begin = place.y * arguments.columns + thread_index() % 32;
    own.end = smaller((place.y + 1) * arguments.columns, arguments.width);
    return own;
}

KERNEL(gate_forward, GATE_WARPS * 32, 1, GateArguments) {
    const GateColumns own = gate_columns(arguments);
    if (own.row >= arguments.entries * arguments.tokens * arguments.heads) return;
    const i64 gates = row_start(arguments.gate_strides, arguments.tokens, arguments.heads, own.row);
    const i64 values = row_start(arguments.value_strides, arguments.tokens, arguments.heads, own.row);
    for (int c = own.begin; c < own.end; c += 32) {
        const float gate = load_element(arguments.gates, gates + c * arguments.gate_column_stride);
        const float value = load_element(arguments.values, values + c);
        store_element(arguments.output, (i64)own.row * arguments.width + c,
                      activate(arguments.activation, gate).value * value);
    }
}

KERNEL(gate_backward, GATE_WARPS * 32, 1, GateArguments) {
    const GateColumns own = gate_columns(arguments);
    if (own.row >= arguments.entries * arguments.tokens * arguments.heads) return;
    const i64 gates = row_start(arguments.gate_strides, arguments.tokens, arguments.heads, own.row);
    const i64 values = row_start(arguments.value_strides, arguments.tokens, arguments.heads, own.row);
    const i64 gradients = row_start(arguments.output_gradient_strides, arguments.tokens, arguments.heads, own.row);
    const i64 to = (i64)own.row * arguments.width;
    const bool is_shared = arguments.gate_column_stride == 0;
    float sum = 0;
    for (int c = own.begin; c < own.end; c += 32) {
        const float before = load_element(arguments.gates, gates + c * arguments.gate_column_stride);
        const ValueAndSlope gate = activate(arguments.activation, before);
        const float gradient = load_element(arguments.output_gradient, gradients + c);
        const float of_gate = gradient * load_element(arguments.values, values + c) * gate.slope;
        store_element(arguments.value_gradient, to + c, gradient * gate.value);
        if (is_shared) sum += of_gate;
        else store_element(arguments.gate_gradient, to + c, of_gate);
    }
    if (!is_shared) return;
    sum = warp_sum(sum);
    if (thread_index() % 32 == 0) store_element(arguments.gate_gradient, own.row, sum);
}

// Values times an activated gate: f(gate) * value, computed in f32 and rounded once. A simdgroup has some columns of a
// row, counted over (B, T, H); the threadgroups of a block of columns follow each other.
#pragma once
#include "activations.cuh"
#include "gate_arguments.cuh"
#include "gate_buffers.metal"
#include "row_places.cuh"

KERNEL_WITH(GateArguments, GATE, gate_forward, GATE_WARPS * 32) {
    GateArguments arguments;
    READ_GATE_ARGUMENTS(arguments)
    const int rows = arguments.entries * arguments.tokens * arguments.heads;
    const int row_blocks = (rows + GATE_WARPS - 1) / GATE_WARPS, column_block = (int)group_index / row_blocks;
    const int row = (int)group_index % row_blocks * GATE_WARPS + (int)thread_index / 32;
    if (row >= rows) return;
    const int begin = column_block * arguments.columns + (int)thread_index % 32;
    const int end = smaller((column_block + 1) * arguments.columns, arguments.width);
    const i64 gates = row_start(arguments.gate_strides, arguments.tokens, arguments.heads, row);
    const i64 values = row_start(arguments.value_strides, arguments.tokens, arguments.heads, row);
    for (int c = begin; c < end; c += 32) {
        const float gate = load_element(arguments.gates, gates + c * arguments.gate_column_stride);
        const float value = load_element(arguments.values, values + c);
        store_element(arguments.output, (i64)row * arguments.width + c,
                      activate(arguments.activation, gate).value * value);
    }
}

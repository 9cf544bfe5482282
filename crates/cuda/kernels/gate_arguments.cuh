// The one argument of the kernels of gates.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, T is `tokens`, H is `heads` and D is `width`. G is D, or 1 if one number of the gate multiplies a row.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

struct GateArguments {
    // ---- tensors ----
    const void* gates;            // (B, T, H, G), elements, before the activation
    const void* values;           // (B, T, H, D), elements
    void* output;                 // (B, T, H, D), elements, contiguous

    // ---- tensors of the backward pass ----
    const void* output_gradient;  // (B, T, H, D), elements
    void* gate_gradient;          // (B, T, H, G), elements, contiguous
    void* value_gradient;         // (B, T, H, D), elements, contiguous

    // ---- strides, in elements ----
    RowStrides gate_strides;
    RowStrides value_strides;
    RowStrides output_gradient_strides;
    i64 gate_column_stride;       // 1, or 0 if G is 1

    // ---- sizes ----
    int entries;
    int tokens;
    int heads;
    int width;
    int columns;                  // the columns of a warp; all of a row if G is 1

    // ---- options ----
    int activation;               // one of the constants in activations.cuh
};

// The one argument of the kernels of the root mean square norm times an activated gate.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, T is `tokens`, H is `heads` and D is NORM_WIDTH. A pointer that a call does not need is null.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

struct GatedNormArguments {
    // ---- tensors ----
    const void* inputs;           // (B, T, H, D), elements
    const void* gates;            // (B, T, H, D), elements, before the activation
    const float* weights;         // (D), or (H, D)
    void* output;                 // (B, T, H, D), elements, contiguous

    // ---- tensors of the backward pass ----
    const void* output_gradient;  // (B, T, H, D), elements
    void* input_gradient;         // (B, T, H, D), elements, contiguous
    void* gate_gradient;          // (B, T, H, D), elements, contiguous. May be null
    float* weight_gradient_parts; // (parts, H, D)
    float* weight_gradient;       // as weights. May be null

    // ---- strides, in elements ----
    RowStrides input_strides;
    RowStrides gate_strides;
    RowStrides output_gradient_strides;
    i64 weight_head_stride;       // D, or 0 if all heads have the same weights

    // ---- sizes ----
    int entries;
    int tokens;
    int heads;
    int parts;                    // blocks of a head in the backward pass

    // ---- options and numbers ----
    int activation;               // one of ACTIVATION_SIGMOID, ACTIVATION_SOFTPLUS and ACTIVATION_SILU
    float epsilon;                // the number that is added to the mean square
};

// The one argument of the kernels of norms over rows.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, T is `tokens`, H is `heads` and D is `width`. A pointer that a call does not need is null.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

struct NormArguments {
    // ---- tensors ----
    const void* inputs;           // (B, T, H, D), elements
    const float* weights;         // (D), or (H, D)
    const float* biases;          // as weights. May be null
    void* output;                 // (B, T, H, D), elements, contiguous

    // ---- tensors of the backward pass ----
    const void* output_gradient;  // (B, T, H, D), elements
    void* input_gradient;         // (B, T, H, D), elements, contiguous
    float* means;                 // (B, T, H): the mean of each row, 0 without subtracts_mean
    float* factors;               // (B, T, H): 1 / sqrt(variance + epsilon)
    float* weight_gradient_parts; // (parts, number of weights)
    float* bias_gradient_parts;   // as weight_gradient_parts. May be null
    float* weight_gradient;       // as weights
    float* bias_gradient;         // as weights. May be null

    // ---- strides, in elements ----
    RowStrides input_strides;
    RowStrides output_gradient_strides;
    i64 weight_head_stride;       // D, or 0 if all heads have the same weights

    // ---- sizes ----
    int entries;
    int tokens;
    int heads;
    int width;
    int parts;                    // groups of rows whose gradients of weights are added up separately

    // ---- options and numbers ----
    int row_warps;                // the warps that compute a row: 1, or ROW_NORM_WARPS
    int subtracts_mean;
    float epsilon;                // the number that is added to the variance
};

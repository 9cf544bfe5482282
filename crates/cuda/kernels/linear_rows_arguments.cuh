// The one argument of the kernel of linear layers with few rows.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. M is
// `rows`, K is `width` and N is `outputs`. All tensors are contiguous. A pointer that a call does not need is null.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

#define LINEAR_NO_ACTIVATION -1

struct LinearRowsArguments {
    // ---- tensors, all of elements ----
    const void* inputs;      // (M, K)
    const void* weights;     // (N, K)
    const void* biases;      // (N). May be null
    const void* up_weights;  // (N, K): the factors of the activated outputs are another product. May be null
    const void* up_biases;   // (N). May be null
    const void* residuals;   // (M, N), added to the outputs. May be null
    void* output;            // (M, N)

    // ---- sizes ----
    int rows;                // from 1 to LINEAR_ROWS
    int width;
    int outputs;
    int product_warps;       // the warps that share the columns of a product: 1, 2, 4 or 8

    // ---- options ----
    int is_aligned;          // whether rows of inputs and weights begin and end at multiples of 16 bytes
    int activation;          // one of the constants in activations.cuh, or LINEAR_NO_ACTIVATION
};

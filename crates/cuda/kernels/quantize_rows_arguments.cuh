// The one argument of the kernel that quantises rows to 8 bits.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, H is `heads`, T is `tokens` and D is `width`.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

struct QuantizeRowsArguments {
    // ---- tensors ----
    const void* inputs;       // (B, H, T, D), elements
    u8* codes;                // (B, H, T, D), contiguous
    float* scales;            // (B, H, T), contiguous

    // ---- strides, in elements ----
    RowStrides input_strides;

    // ---- sizes ----
    int entries;
    int heads;
    int tokens;
    int width;
};

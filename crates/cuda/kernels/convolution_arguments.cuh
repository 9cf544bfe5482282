// The one argument of the kernels of the short causal convolution.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, T is `tokens`, C is `channels` and K is CONVOLUTION_WIDTH. Packed sequences are successive rows of one
// entry. A pointer that a call does not need is null.
#pragma once

#include "device.cuh"

struct ConvolutionArguments {
    // ---- tensors ----
    const void* inputs;            // (B, T, C), elements
    const float* taps;             // (K, C): the last one is of a token's own input
    const void* state;             // (B, K - 1, C), elements: the inputs before the first token; null: zeros
    void* output;                  // (B, T, C), elements, contiguous
    void* next_state;              // (B, K - 1, C), elements: the last inputs; null: not stored

    // ---- sequences ----
    const int* cumulative_tokens;  // (sequences + 1): the first token of each packed sequence, and T. May be null

    // ---- tensors of the backward pass ----
    const void* output_gradient;   // (B, T, C), elements
    void* input_gradient;          // (B, T, C), elements, contiguous
    float* tap_gradient_parts;     // (B * ceil(T / CONVOLUTION_TOKENS), K, C)
    float* tap_gradient;           // (K, C), contiguous

    // ---- strides, in elements; the last dimension of all tensors is contiguous ----
    i64 input_entry_stride;
    i64 input_token_stride;
    i64 tap_stride;                // from one tap of a channel to the next
    i64 state_entry_stride;
    i64 state_token_stride;
    i64 next_state_entry_stride;
    i64 next_state_token_stride;
    i64 output_gradient_entry_stride;
    i64 output_gradient_token_stride;

    // ---- sizes ----
    int entries;
    int tokens;
    int channels;
    int sequences;                 // packed sequences, or B
};

// The one argument of the kernel of the decays and betas of a gated delta net.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, T is `tokens`, H is `heads` and W is `decay_width`: 1, or D_k for a decay of each channel.
#pragma once

#include "device.cuh"

struct DeltaGatesArguments {
    // ---- tensors ----
    const void* beta_inputs;   // (B, T, H), elements: projected inputs
    const void* decay_inputs;  // (B, T, H * W), elements: projected inputs
    const float* biases;       // (H * W), which are added to decay_inputs
    const float* log_rates;    // (H): `A_log`
    float* betas;              // (B, T, H), contiguous
    float* decays;             // (B, T, H, W), contiguous: logarithms of the factors of a state

    // ---- strides, in elements; the last dimension of all tensors is contiguous ----
    i64 beta_entry_stride;
    i64 beta_token_stride;
    i64 decay_entry_stride;
    i64 decay_token_stride;

    // ---- sizes ----
    int entries;
    int tokens;
    int heads;
    int decay_width;

    // ---- options and numbers ----
    int has_lower_bound;       // 1: decays are lower_bound * sigmoid(rate * x), 0: -rate * softplus(x)
    float lower_bound;
    float beta_factor;         // betas are beta_factor * sigmoid(x)
    int reserved;              // 0
};

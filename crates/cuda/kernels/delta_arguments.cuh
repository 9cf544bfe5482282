// The one argument of every kernel of the gated delta rule.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. N is
// `sequences`, H is `heads`, T is `tokens`, D_k and D_v are KEY_WIDTH and VALUE_WIDTH. B is N, or 1 for packed
// sequences: successive rows of one entry, of which T is the total. A pointer that a call does not need is null.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

struct DeltaArguments {
    // ---- tensors of the forward pass ----
    const void* queries;           // (B, H_q, T, D_k), elements
    const void* keys;              // (B, H_k, T, D_k), elements
    const void* values;            // (B, H_v, T, D_v), elements
    const float* decays;           // (B, H, T), or (B, H, T, D_k) with decay_per_channel: logarithms of the factors of
                                   // a state before a token; null: all factors are 1
    const float* betas;            // (B, H, T); null: a token adds its value, and does not subtract the stored value
    const float* initial_states;   // (N, H, D_k, D_v), contiguous; null: zeros
    void* output;                  // (B, H, T, D_v), elements; null: not computed
    float* final_states;           // (N, H, D_k, D_v), contiguous; null: not stored

    // ---- sequences ----
    const int* cumulative_tokens;  // (N + 1): the first token of each packed sequence, and T; null: each entry is one
    const int* cumulative_chunks;  // (N + 1): the first chunk of each packed sequence, and `chunks`

    // ---- scratch ----
    float* tiles;                  // (chunks, H, TILE_WORDS): see delta_tile.cuh
    int* recurrent_heads;          // (N, H), zeros before: 1 for heads that are computed token by token

    // ---- tensors of the backward pass ----
    const void* output_gradient;         // (B, H, T, D_v), elements
    const float* final_state_gradient;   // (N, H, D_k, D_v), contiguous; null: zeros
    float* query_gradient;               // (B, H, T, D_k), contiguous
    float* key_gradient;                 // (B, H, T, D_k), contiguous
    float* value_gradient;               // (B, H, T, D_v), contiguous
    float* decay_gradient;               // (B, H, T), or (B, H, T, D_k) with decay_per_channel, contiguous
    float* beta_gradient;                // (B, H, T), contiguous; null without betas
    float* initial_state_gradient;       // (N, H, D_k, D_v), contiguous

    // ---- scratch of the backward pass ----
    float* chunk_states;           // (chunks, H, VALUE_COLUMNS, KEY_COLUMNS): transposed states before each chunk
    float* chunk_state_gradients;  // as chunk_states: the gradients of the transposed states after each chunk
    float* errors;                 // (chunks, H, CHUNK, VALUE_COLUMNS)
    float* error_gradients;        // as errors

    // ---- strides, in elements ----
    RowStrides query_strides;
    RowStrides key_strides;
    RowStrides value_strides;
    RowStrides decay_strides;
    RowStrides beta_strides;
    RowStrides output_strides;
    RowStrides output_gradient_strides;

    // ---- sizes ----
    int sequences;
    int heads;
    int query_heads;               // divides `heads`, as key_heads and value_heads do: head h reads h / (heads / count)
    int key_heads;
    int value_heads;
    int tokens;
    int chunks;                    // chunks of all sequences

    // ---- options ----
    int decay_per_channel;         // 1: a factor for each row of a state
    int has_norm;                  // 1: rows of queries and keys are divided by their lengths
    int only_recurrent_heads;      // 1: the kernels that compute token by token leave all other heads alone

    // ---- numbers ----
    float scale;                   // the factor of queries
    float norm_epsilon;            // the number that is added to the square of a length
};

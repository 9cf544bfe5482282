// The one argument of every attention kernel.
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. There is
// no padding: pointers, then strides of 64 bits, then 32-bit fields, whose number is even.
//
// B is `sequences`, H is `heads`, H_kv is `key_heads`, T_q is `query_count` and T_kv is `key_count`. Packed sequences
// are successive rows of one tensor: then T_q and T_kv are totals, and all tensors but those of lengths have a batch of
// one. Tensors (B, H, T_q) are contiguous. The others have strides, in elements, and a last dimension that is
// contiguous unless a stride for it is named. A pointer that a call does not need is null.
#pragma once

// Strides of a tensor (B, H, T, D) whose last dimension is contiguous.
struct RowStrides {
    i64 sequence;
    i64 head;
    i64 row;
};

// Strides of a tensor that is broadcast to the scores (B, H, T_q, T_kv). A broadcast dimension has the stride 0.
struct ScoreStrides {
    i64 sequence;
    i64 head;
    i64 query;
    i64 key;
};

struct AttentionArguments {
    // ---- tensors of the forward pass ----
    const void* queries;        // (B, H, T_q, D), elements
    const void* keys;           // (B, H_kv, T_kv, D), elements, or codes with KEY_CODES
    const void* values;         // (B, H_kv, T_kv, D_v), as the keys
    const float* key_scales;    // (B, H_kv, T_kv), with KEY_CODES: a number is (code - 128) times the scale of its row
    const float* value_scales;  // (B, H_kv, T_kv), with KEY_CODES
    void* output;               // (B, H, T_q, D_v), elements
    float* log_sum_exp;         // (B, H, T_q), natural; -inf for a fully masked row. May be null
    float* row_statistics;      // (2, B, H, T_q): what the backward pass computes weights from, as softmax.cuh says.
                                // May be null in the forward pass

    // ---- score modifiers ----
    const void* bias;                   // broadcast to (B, H, T_q, T_kv), with HAS_BIAS: elements, or f32
    const u8* boolean_mask;             // broadcast to (B, H, T_q, T_kv), with HAS_BOOLEAN_MASK: 0 masks a key
    const float* alibi_slopes;          // (H), with HAS_ALIBI: -slope * |position of the query - key| is added
    const float* relative_bias;         // (B or 1, H, relative_bias_length), with HAS_RELATIVE_BIAS
    const int* relative_bias_origins;   // (B): replaces relative_bias_origin. May be null
    const float* sinks;                 // (H): a logit that takes weight and has no value. May be null
    const u32* dropout_seed;            // (2): low and high half; replaces dropout_seed_low and _high. May be null

    // ---- which keys a query attends to ----
    const int* cumulative_queries;      // (B + 1): the first query of each packed sequence, and the total; else null
    const int* cumulative_keys;         // (B + 1): the same of keys; null exactly if cumulative_queries is
    const int* offsets;                 // (B): the position of query 0 among the keys; replaces `offset`. May be null
    const int* key_lengths;             // (B): keys at and past the length are masked. May be null
    const int* key_starts;              // (B): keys before the start are masked. May be null
    const int* prefix_lengths;          // (B): with `causal`, keys before the prefix's end are not masked. May be null
    const int* first_keys;              // (B, T_q): the first key that a query may attend to. May be null
    const int* end_keys;                // (B, T_q): the key after the last one. May be null

    // ---- scratch of the decode kernels ----
    float* partial_outputs;             // (splits, B, H, T_q, D_v), if `splits` is above 1
    float2* partial_statistics;         // (splits, B, H, T_q): the maximum of the scores, and the sum of the weights

    // ---- tensors of the backward pass ----
    const void* output_gradient;        // (B, H, T_q, D_v), elements
    const float* log_sum_exp_gradient;  // (B, H, T_q). May be null
    void* query_gradient;               // (B, H, T_q, D), elements
    void* key_gradient;                 // (B, H_kv, T_kv, D), elements
    void* value_gradient;               // (B, H_kv, T_kv, D_v), elements
    float* score_gradient;              // (B, H, T_q, T_kv), contiguous, zeros before: with BIAS_GRADIENT
    float* bias_gradient;               // the sum of score_gradient over the dimensions that the bias broadcasts
    float* sink_gradient;               // (H)
    float* slope_gradient;              // (H), with SLOPE_GRADIENT
    float* relative_bias_gradient;      // (B or 1, H, relative_bias_length), zeros before: with RELATIVE_BIAS_GRADIENT

    // ---- scratch of the backward pass ----
    float* delta;                       // (B, H, T_q): sum of output * output_gradient, less log_sum_exp_gradient
    int2* query_intervals;              // (B, T_q): the first key that a query attends to, and the one after the last
    int4* tile_intervals;               // (B, query_tiles): keys that any query of the tile attends to, and that all do
    float* query_gradient_sums;         // (B, H, query_tiles, BACKWARD_QUERIES * HEAD_COLUMNS), with FUSED_BACKWARD
    int* query_gradient_turns;          // (B, H, query_tiles), with FUSED_BACKWARD: blocks of keys that were added
    float* slope_gradient_parts;        // (B, H, key blocks, KEY_WARPS), zeros before: with SLOPE_GRADIENT
    float* relative_bias_parts;         // (pairs, H / H_kv, key blocks, relative_bias_length), zeros before and after:
                                        // with RELATIVE_BIAS_GRADIENT

    // ---- strides, in elements ----
    RowStrides query_strides;
    RowStrides key_strides;
    RowStrides value_strides;
    RowStrides key_scale_strides;
    RowStrides value_scale_strides;
    RowStrides output_strides;
    RowStrides output_gradient_strides;
    RowStrides query_gradient_strides;
    RowStrides key_gradient_strides;
    RowStrides value_gradient_strides;
    ScoreStrides bias_strides;
    ScoreStrides boolean_mask_strides;
    i64 relative_bias_sequence_stride;  // 0 if the sequences share the biases
    i64 relative_bias_head_stride;

    // ---- sizes ----
    int sequences;
    int heads;
    int key_heads;
    int query_count;
    int key_count;

    // ---- masks ----
    int has_offset;                     // 0: the last query is at the last key of its sequence
    int offset;                         // the position of query 0 among the keys, if has_offset; may be negative
    int causal;                         // 1: keys after the position of a query are masked
    int window_left;                    // keys more than this before the position are masked; -1 for no bound
    int window_right;                   // keys more than this after the position are masked; -1 for no bound
    int chunk;                          // keys in another chunk of this many positions are masked; 0 for no chunks

    // ---- relative bias ----
    int relative_bias_origin;           // entry (origin + key - query) is added to a score, 0 where there is none; key
                                        // and query count in their sequence
    int relative_bias_length;           // entries of a head

    // ---- the launch ----
    int splits;                         // decode: parts of the keys that blocks work on side by side
    int blocks;                         // blocks of a head of a sequence, in a grid over blocks * heads * sequences;
                                        // decode: blocks of rows of a key head
    int section_heads;                  // heads whose blocks start side by side, the longest blocks first; at least 1
    int query_tiles;                    // backward: tiles of BACKWARD_QUERIES queries of the longest sequence
    int key_blocks;                     // backward: blocks of keys of the longest sequence
    int first_pair;                     // backward of keys: a launch has `pairs` pairs of a sequence and a key head from
    int pairs;                          // this one on, which are counted through the key heads, then the sequences

    // ---- numbers ----
    float scale;                        // the factor of products; above 0 unless MODIFIES_SCORES
    float softcap;                      // with HAS_SOFTCAP: softcap * tanh(score / softcap)
    float kept_weight_factor;           // with HAS_DROPOUT: 1 / (1 - p), or 0 if p is 1
    u32 dropout_threshold;              // weights whose random word is below are dropped: p * 2^32, rounded
    u32 dropout_seed_low;
    u32 dropout_seed_high;

    // ---- the sum of bias gradients ----
    int bias_sequences;                 // sizes of bias_gradient: B or 1, H or 1, T_q or 1, T_kv or 1
    int bias_heads;
    int bias_queries;
    int bias_keys;
};

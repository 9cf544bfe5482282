// From the product of a query and a key to a score: scale, softcap, ALiBi, relative bias, bias, in this order.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "elements.cuh"
#include "masks.cuh"

// The unit of modified scores.
#define SCORE_UNIT (NATURAL_SCORES ? 1.0f : LOG2_E)

// The score modifiers of a head of a sequence.
struct ScoreModifiers {
    float scale;                 // of products
    float cap;                   // the softcap
    float slope;                 // ALiBi
    int first_position;          // of query 0, from which ALiBi counts
    GLOBAL const float* relative_bias;  // of the head
    int relative_origin;         // entry (relative_origin + key - query) is added
    int relative_length;
    GLOBAL const char* bias;            // of the head
    GLOBAL const u8* boolean_mask;      // of the head
};

// The entry of the relative bias that query 0 of a sequence has for its key 0.
DEVICE int relative_bias_origin(const LOCAL AttentionArguments& arguments, int index) {
    return arguments.relative_bias_origins ? load_global(arguments.relative_bias_origins + index)
                                           : arguments.relative_bias_origin;
}

DEVICE ScoreModifiers load_modifiers(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence,
                                     int index, int head) {
    ScoreModifiers modifiers;
    modifiers.scale = HAS_SOFTCAP ? arguments.scale / arguments.softcap : arguments.scale * SCORE_UNIT;
    modifiers.cap = arguments.softcap * SCORE_UNIT;
    modifiers.first_position = sequence.first_position;
    if (HAS_ALIBI) modifiers.slope = load_global(arguments.alibi_slopes + head) * SCORE_UNIT;
    if (HAS_RELATIVE_BIAS) {
        modifiers.relative_bias = arguments.relative_bias + index * arguments.relative_bias_sequence_stride +
                                  head * arguments.relative_bias_head_stride;
        modifiers.relative_origin = relative_bias_origin(arguments, index);
        modifiers.relative_length = arguments.relative_bias_length;
    }
    if (HAS_BIAS) {
        const LOCAL ScoreStrides& strides = arguments.bias_strides;
        modifiers.bias =
            (GLOBAL const char*)arguments.bias + (sequence.batch * strides.sequence + head * strides.head) * BIAS_BYTES;
    }
    if (HAS_BOOLEAN_MASK) {
        const LOCAL ScoreStrides& strides = arguments.boolean_mask_strides;
        modifiers.boolean_mask = arguments.boolean_mask + sequence.batch * strides.sequence + head * strides.head;
    }
    return modifiers;
}

// The relative bias of a pair; 0 outside of the vector, where a key is masked.
DEVICE float relative_bias_of(const LOCAL ScoreModifiers& modifiers, int query, int key) {
    const int entry = modifiers.relative_origin + key - query;
    return (u32)entry < (u32)modifiers.relative_length ? load_global(modifiers.relative_bias + entry) : 0.0f;
}

// The score of a product without the bias. With HAS_PRODUCT_DERIVATIVE, `derivative` becomes that of the score with
// respect to the product times the scale; otherwise that is 1.
DEVICE float modify_score(const LOCAL ScoreModifiers& modifiers, float product, int query, int key,
                          LOCAL float& derivative) {
    float score = product * modifiers.scale;
    if (HAS_SOFTCAP) {
        const float tanh = tanh_of(score);
        derivative = 1.0f - tanh * tanh;
        score = tanh * modifiers.cap;
    }
    if (HAS_ALIBI)
        score = fused_multiply_add(-modifiers.slope, absolute((float)(modifiers.first_position + query - key)), score);
    if (HAS_RELATIVE_BIAS) score = fused_multiply_add(relative_bias_of(modifiers, query, key), SCORE_UNIT, score);
    return score;
}

// The bias of a pair, and whether the boolean mask lets the query attend to the key, from global memory.
DEVICE float load_bias(const LOCAL AttentionArguments& arguments, const LOCAL ScoreModifiers& modifiers, int query,
                      int key) {
    const i64 at = query * arguments.bias_strides.query + key * arguments.bias_strides.key;
    return HAS_BIAS == 2 ? load_global((GLOBAL const float*)modifiers.bias + at) : load_element(modifiers.bias, at);
}
DEVICE bool load_boolean_mask(const LOCAL AttentionArguments& arguments, const LOCAL ScoreModifiers& modifiers,
                              int query, int key) {
    const LOCAL ScoreStrides& strides = arguments.boolean_mask_strides;
    return load_global(modifiers.boolean_mask + query * strides.query + key * strides.key) != 0;
}

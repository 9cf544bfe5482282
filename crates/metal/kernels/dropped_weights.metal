// Dropout of the weights that a thread has in a fragment.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "masks.cuh"
#include "dropout.cuh"

// The dropout of a head of a sequence, by queries and keys of the sequence.
struct SequenceDropout {
    Dropout dropout;
    int first_query;
    int first_key;
    u32 threshold;
    float kept; // the factor of weights that are not dropped
};

DEVICE SequenceDropout load_sequence_dropout(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence,
                                             int head) {
    SequenceDropout own;
    own.dropout = load_dropout(arguments, sequence.batch, head);
    own.first_query = sequence.first_query, own.first_key = sequence.first_key;
    own.threshold = arguments.dropout_threshold, own.kept = arguments.kept_weight_factor;
    return own;
}

// The factor of the weight of a query and a key: 0 if it is dropped.
DEVICE float kept_factor(const LOCAL SequenceDropout& own, int query, int key) {
    if (!HAS_DROPOUT) return 1.0f;
    const u32 word = dropout_word(own.dropout, own.first_query + query, own.first_key + key);
    return word < own.threshold ? 0.0f : own.kept;
}

// The factors of the weights of a query and two successive keys, which are mostly words of one draw.
DEVICE float2 kept_factors(const LOCAL SequenceDropout& own, int query, int key) {
    float2 factors;
    factors.x = factors.y = 1.0f;
    if (!HAS_DROPOUT) return factors;
    const int first = own.first_key + key, word = first & 3;
    if (word == 3) {
        factors.x = kept_factor(own, query, key), factors.y = kept_factor(own, query, key + 1);
        return factors;
    }
    u32 words[4] = {(u32)first / 4, (u32)(own.first_query + query), (u32)own.dropout.head, (u32)own.dropout.batch};
    philox(words, own.dropout.seed_low, own.dropout.seed_high);
    const u32 left = word == 0 ? words[0] : word == 1 ? words[1] : words[2];
    const u32 right = word == 0 ? words[1] : word == 1 ? words[2] : words[3];
    factors.x = left < own.threshold ? 0.0f : own.kept, factors.y = right < own.threshold ? 0.0f : own.kept;
    return factors;
}

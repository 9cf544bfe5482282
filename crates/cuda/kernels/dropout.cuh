// Dropout of weights by Philox 4x32-7, as the CPU's kernels drop them: the key is the seed, the counter is
// (key / 4, query, head, sequence), and word key % 4 of the result belongs to the weight. Keys and queries of packed
// sequences count through all sequences, and the sequence is 0. A weight is dropped if its word is below the threshold.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"

DEVICE void philox(LOCAL u32 (&counter)[4], u32 key0, u32 key1) {
    UNROLL for (int round = 0; round < 7; round++) {
        const u32 high0 = multiply_high(0xd2511f53u, counter[0]), low0 = 0xd2511f53u * counter[0];
        const u32 high1 = multiply_high(0xcd9e8d57u, counter[2]), low1 = 0xcd9e8d57u * counter[2];
        counter[0] = high1 ^ counter[1] ^ key0, counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ key1, counter[3] = low0;
        key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
    }
}

// The seed, and the sequence and the head of weights.
struct Dropout {
    u32 seed_low;
    u32 seed_high;
    int batch;
    int head;
};

DEVICE Dropout load_dropout(const LOCAL AttentionArguments& arguments, int batch, int head) {
    Dropout dropout;
    dropout.seed_low = dropout.seed_high = 0, dropout.batch = batch, dropout.head = head;
    if (!HAS_DROPOUT) return dropout;
    const bool is_on_device = arguments.dropout_seed != nullptr;
    dropout.seed_low = is_on_device ? load_global(arguments.dropout_seed) : arguments.dropout_seed_low;
    dropout.seed_high = is_on_device ? load_global(arguments.dropout_seed + 1) : arguments.dropout_seed_high;
    return dropout;
}

DEVICE u32 dropout_word(const LOCAL Dropout& dropout, int query, int key) {
    u32 words[4] = {(u32)key / 4, (u32)query, (u32)dropout.head, (u32)dropout.batch};
    philox(words, dropout.seed_low, dropout.seed_high);
    return (key & 3) == 0 ? words[0] : (key & 3) == 1 ? words[1] : (key & 3) == 2 ? words[2] : words[3];
}

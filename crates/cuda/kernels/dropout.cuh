// Dropout of weights by Philox 4x32-7, as the CPU's kernels drop them: the key is the seed, the counter is
// (key / 4, query, head, sequence), and word key % 4 of the result belongs to the weight. Keys and queries of packed
// sequences count through all sequences, and the sequence is 0. A weight is dropped if its word is below the threshold.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"

DEVICE void philox(u32 (&counter)[4], u32 key0, u32 key1) {
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

DEVICE Dropout load_dropout(const AttentionArguments& arguments, int batch, int head) {
    Dropout dropout;
    dropout.seed_low = dropout.seed_high = 0, dropout.batch = batch, dropout.head = head;
    if (!HAS_DROPOUT) return dropout;
    const bool is_on_device = arguments.dropout_seed != nullptr;
    dropout.seed_low = is_on_device ? load_global(arguments.dropout_seed) : arguments.dropout_seed_low;
    dropout.seed_high = is_on_device ? load_global(arguments.dropout_seed + 1) : arguments.dropout_seed_high;
    return dropout;
}

DEVICE u32 dropout_word(const Dropout& dropout, int query, int key) {
    u32 words[4] = {(u32)key / 4, (u32)query, (u32)dropout.head, (u32)dropout.batch};
    philox(words, dropout.seed_low, dropout.seed_high);
    return (key & 3) == 0 ? words[0] : (key & 3) == 1 ? words[1] : (key & 3) == 2 ? words[2] : words[3];
}

// The words of an accumulator whose rows are the queries `query` and `query` + 8, and whose columns are the keys `key`
// and `key` + 1, where `key` is even if the sequence is aligned: its first key is a multiple of four. Then lanes side
// by side need the same four words of each row: one draws for the upper row, the other for the lower one.
DEVICE void dropout_words(const Dropout& dropout, int query, int key, bool is_aligned, int lane, u32 (&words)[4]) {
    if (!is_aligned) {
        UNROLL for (int e = 0; e < 4; e++) words[e] = dropout_word(dropout, query + 8 * (e >> 1), key + (e & 1));
        return;
    }
    const bool is_odd = lane & 1;
    u32 own[4] = {(u32)key / 4, (u32)(is_odd ? query + 8 : query), (u32)dropout.head, (u32)dropout.batch};
    philox(own, dropout.seed_low, dropout.seed_high);
    const u32 other0 = shuffle_bits_xor(is_odd ? own[0] : own[2], 1);
    const u32 other1 = shuffle_bits_xor(is_odd ? own[1] : own[3], 1);
    words[0] = is_odd ? other0 : own[0], words[1] = is_odd ? other1 : own[1];
    words[2] = is_odd ? own[2] : other0, words[3] = is_odd ? own[3] : other1;
}

// The words of a transposed accumulator, whose rows are the keys `key` and `key` + 8, and whose columns are the queries
// `query` and `query` + 1. The four lanes of four successive keys draw one of their four counters each, and exchange
// words in two steps.
DEVICE void dropout_words_transposed(const Dropout& dropout, int query, int key, bool is_aligned, int lane,
                                     u32 (&words)[4]) {
    if (!is_aligned) {
        UNROLL for (int e = 0; e < 4; e++) words[e] = dropout_word(dropout, query + (e & 1), key + 8 * (e >> 1));
        return;
    }
    const int of_four = (lane >> 2) & 3; // key % 4
    u32 own[4] = {(u32)(key + 8 * (of_four >> 1)) / 4, (u32)(query + (of_four & 1)), (u32)dropout.head,
                  (u32)dropout.batch};
    philox(own, dropout.seed_low, dropout.seed_high);
    const bool first_bit = of_four & 1, second_bit = of_four & 2;
    u32 other0 = shuffle_bits_xor(first_bit ? own[0] : own[1], 4);
    u32 other1 = shuffle_bits_xor(first_bit ? own[2] : own[3], 4);
    const u32 half[4] = {first_bit ? other0 : own[0], first_bit ? own[1] : other0, first_bit ? other1 : own[2],
                         first_bit ? own[3] : other1};
    other0 = shuffle_bits_xor(second_bit ? half[0] : half[2], 8);
    other1 = shuffle_bits_xor(second_bit ? half[1] : half[3], 8);
    words[0] = second_bit ? other0 : half[0], words[1] = second_bit ? other1 : half[1];
    words[2] = second_bit ? half[2] : other0, words[3] = second_bit ? half[3] : other1;
}

// The random words of the weights in accumulators: lanes exchange the words that each of them draws.
#pragma once
#include "device.cuh"
#include "dropout.cuh"

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

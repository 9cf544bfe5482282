// Which keys a query attends to: an interval, from whatever the call describes it by; and the order of blocks.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"

// One of the sequences of a call.
struct Sequence {
    int batch;        // its index in tensors; 0 for packed sequences
    int query_count;  // its sizes
    int key_count;
    int first_query;  // its first rows in tensors of packed sequences; otherwise 0
    int first_key;
    int first_position; // of its query 0 among its keys
};

DEVICE Sequence load_sequence(const LOCAL AttentionArguments& arguments, int index) {
    Sequence sequence;
    if (arguments.cumulative_queries) {
        sequence.batch = 0;
        sequence.first_query = load_global(arguments.cumulative_queries + index);
        sequence.first_key = load_global(arguments.cumulative_keys + index);
        sequence.query_count = load_global(arguments.cumulative_queries + index + 1) - sequence.first_query;
        sequence.key_count = load_global(arguments.cumulative_keys + index + 1) - sequence.first_key;
    } else {
        sequence.batch = index;
        sequence.first_query = sequence.first_key = 0;
        sequence.query_count = arguments.query_count, sequence.key_count = arguments.key_count;
    }
    sequence.first_position = arguments.first_positions      ? load_global(arguments.first_positions + index)
                              : arguments.has_first_position ? arguments.first_position
                                                             : sequence.key_count - sequence.query_count;
    return sequence;
}

// The index of the first row of a sequence in tensors (B, H, T_q).
DEVICE i64 statistics_row(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence, int head) {
    return ((i64)sequence.batch * arguments.heads + head) * arguments.query_count + sequence.first_query;
}

// The address of a row of a tensor with elements of `bytes` bytes.
DEVICE GLOBAL const char* row_address(GLOBAL const void* tensor, const LOCAL RowStrides& strides, int batch, int head,
                                      i64 row, int bytes) {
    return (GLOBAL const char*)tensor + (batch * strides.sequence + head * strides.head + row * strides.row) * bytes;
}
DEVICE GLOBAL char* row_address(GLOBAL void* tensor, const LOCAL RowStrides& strides, int batch, int head, i64 row,
                                int bytes) {
    return (GLOBAL char*)tensor + (batch * strides.sequence + head * strides.head + row * strides.row) * bytes;
}

// The first position of the chunk of a position, which may be negative.
DEVICE int chunk_start(int position, int chunk) {
    const int rest = position % chunk;
    return position - (rest < 0 ? rest + chunk : rest);
}

// The keys [first, end) of its sequence that query `query` of a sequence attends to; 0 and 0 if there are none.
DEVICE void attended_keys(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence, int index,
                          int query, LOCAL int& first, LOCAL int& end) {
    first = 0, end = sequence.key_count;
    if (arguments.key_lengths) end = smaller(end, load_global(arguments.key_lengths + index));
    if (arguments.key_starts) first = larger(first, load_global(arguments.key_starts + index));
    const int position = query + sequence.first_position;
    if (arguments.causal) {
        const int prefix = arguments.prefix_lengths ? load_global(arguments.prefix_lengths + index) : 0;
        end = smaller(end, larger(position + 1, prefix));
    }
    if (arguments.window_left >= 0) first = larger(first, position - arguments.window_left);
    if (arguments.window_right >= 0 && position < 0x7fffffff - arguments.window_right)
        end = smaller(end, position + arguments.window_right + 1);
    if (arguments.chunk > 0) {
        const int start = chunk_start(position, arguments.chunk);
        first = larger(first, start);
        if (start <= 0x7fffffff - arguments.chunk) end = smaller(end, start + arguments.chunk);
    }
    const i64 row = (i64)sequence.batch * arguments.query_count + sequence.first_query + query;
    if (arguments.first_keys) first = larger(first, load_global(arguments.first_keys + row));
    if (arguments.end_keys) end = smaller(end, load_global(arguments.end_keys + row));
    if (first >= end) first = end = 0;
}

// The keys that the queries of a tile attend to.
struct TileInterval {
    int first;         // the keys [first, end) that any of the queries attends to; 0 and 0 if there are none
    int end;
    int common_first;  // the keys [common_first, common_end) that all of the queries attend to
    int common_end;
    // Whether a query does not attend to all of `keys` keys from `key` on.
    DEVICE_METHOD bool masks(int key, int keys) const { return key < common_first || key + keys > common_end; }
};

// Combines the intervals of two sets of queries.
DEVICE void join(LOCAL TileInterval& interval, int first, int end, int common_first, int common_end) {
    interval.first = smaller(interval.first, first), interval.end = larger(interval.end, end);
    interval.common_first = larger(interval.common_first, common_first);
    interval.common_end = smaller(interval.common_end, common_end);
}

// Combines the intervals of the lanes of a warp, in every lane.
DEVICE void join_in_warp(LOCAL TileInterval& interval) {
    UNROLL for (int d = 16; d > 0; d >>= 1)
        join(interval, (int)shuffle_bits_xor(interval.first, d), (int)shuffle_bits_xor(interval.end, d),
             (int)shuffle_bits_xor(interval.common_first, d), (int)shuffle_bits_xor(interval.common_end, d));
}

// The part of a call that a block computes, in a grid over blocks, heads and sequences.
struct BlockPlace {
    int block;
    int head;
    int sequence;
};

// The blocks in the order in which they start: those of `section_heads` heads side by side, so that these find their
// keys in the cache; of each head the last block first, which is the longest one of a causal call.
//
// A launch has `count` heads from number `first` on, which are counted through the `heads` of each sequence.
DEVICE BlockPlace block_place(const LOCAL AttentionArguments& arguments, int index, int heads, int first, int count) {
    const int section_blocks = arguments.section_heads * arguments.blocks;
    const int section = index / section_blocks, rest = index - section * section_blocks;
    const int section_heads = smaller(arguments.section_heads, count - section * arguments.section_heads);
    const int head_of_all = first + section * arguments.section_heads + rest % section_heads;
    BlockPlace place;
    place.block = arguments.blocks - 1 - rest / section_heads;
    place.sequence = head_of_all / heads, place.head = head_of_all % heads;
    return place;
}

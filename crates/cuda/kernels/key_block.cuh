// A block of the backward kernel of keys: its keys, and the tiles of queries that attend to any of them.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "loads.cuh"
#include "masks.cuh"
#include "modifiers.cuh"
#include "dropout.cuh"
#include "row_weights.cuh"
#include "backward_prepare.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
#define WARP_QUERIES (BACKWARD_QUERIES / WARPS_PER_KEYS)       // whose scores a warp computes
#define WARP_HEAD_COLUMNS (HEAD_COLUMNS / WARPS_PER_KEYS)      // of the gradient of the keys, of a warp
#define WARP_VALUE_COLUMNS (VALUE_COLUMNS / WARPS_PER_KEYS)

// Scores of the warp: rows are its keys, columns its part of the queries.
typedef float KeyScores[KEY_ROW_TILES][WARP_QUERIES / 8][4];

// The part of a call that a thread of a block computes.
struct KeyBlock {
    int thread;
    int lane;
    int warp;
    int warp_row;          // the first key of the warp in the block
    int warp_part;         // of the queries and of the columns
    int lane_row;          // of an accumulator
    int lane_column;
    int sequence_index;
    Sequence sequence;
    int key_head;
    int group;             // heads that share the key head
    int index;             // of the block in its key head and sequence
    int first_key;
    int tiles;             // of the sequence's queries
    const int4* tile_intervals;
    float scale;           // from a difference of scores to an exponent of 2
    Dropout dropout;       // of the first head of the group
};

// A tile of BACKWARD_QUERIES queries of a head.
struct QueryTile {
    int index;
    int head; // in the group
};

// A tile of queries in shared memory.
struct LoadedTile {
    QueryTile tile;
    u32 queries_at;
    u32 output_gradients_at;
    u32 statistics_at;
    TileInterval keys;
    bool is_masked;   // whether a query does not attend to a key of the block
};

// Whether the boolean mask, if there is one, lets a query of a head attend to a key.
DEVICE bool attends(const AttentionArguments& arguments, const KeyBlock& block, int head, int query, int key) {
    if (!HAS_BOOLEAN_MASK) return true;
    const ScoreModifiers modifiers = load_modifiers(arguments, block.sequence, block.sequence_index, head);
    return load_boolean_mask(arguments, modifiers, query, key);
}

// Whether a query of a tile does not attend to a key of the block.
DEVICE bool is_masked_tile(const KeyBlock& block, const QueryTile& tile) {
    return HAS_BOOLEAN_MASK || load_tile_interval(block.tile_intervals + tile.index).masks(block.first_key, KEY_BLOCK);
}

// The tile that load_query_tile loaded.
DEVICE LoadedTile loaded_tile(const KeyBlock& block, const QueryTile& tile, int stage) {
    LoadedTile loaded;
    loaded.tile = tile;
    loaded.queries_at = KEY_QUERIES_AT + stage * BACKWARD_QUERIES * HEAD_PITCH;
    loaded.output_gradients_at = KEY_GRADIENTS_AT + stage * BACKWARD_QUERIES * VALUE_PITCH;
    loaded.statistics_at = KEY_STATISTICS_AT + stage * KEY_STATISTICS_BYTES;
    loaded.keys = load_tile_interval(block.tile_intervals + tile.index);
    loaded.is_masked = HAS_BOOLEAN_MASK || loaded.keys.masks(block.first_key, KEY_BLOCK);
    return loaded;
}

// Loads the keys of the block that are not finite, which were replaced by zeros in shared memory.
DEVICE void restore_special_keys(const AttentionArguments& arguments, const KeyBlock& block) {
    const Sequence& sequence = block.sequence;
    const char* rows = row_address(arguments.keys, arguments.key_strides, sequence.batch, block.key_head,
                                   sequence.first_key + block.first_key, ELEMENT_BYTES);
    const int PAIRS = (HEAD_DIM + 1) / 2; // two elements of 16 bits are a word, which one thread writes
    const int end = smaller(KEY_BLOCK, sequence.key_count - block.first_key) * PAIRS;
#pragma unroll 1
    for (int at = block.thread; at < end; at += KEY_THREADS) {
        const int row = at / PAIRS, first_column = at % PAIRS * 2;
#pragma unroll 1
        for (int column = first_column; column < smaller(first_column + 2, HEAD_DIM); column++) {
            const i64 from = row * arguments.key_strides.row + column;
            if (!is_finite(load_element(rows, from)))
                copy_element_to_shared(KEY_KEYS_AT + row * HEAD_PITCH + column * ELEMENT_BYTES, rows, from);
        }
    }
}

// Starts the loads of keys and values. Returns false if there are no such keys.
DEVICE bool start_key_block(const AttentionArguments& arguments, KeyBlock& block) {
    const BlockPlace place =
        block_place(arguments, block_index(), arguments.key_heads, arguments.first_pair, arguments.pairs);
    block.thread = thread_index(), block.lane = block.thread & 31, block.warp = block.thread >> 5;
    block.warp_row = block.warp % KEY_GROUPS * KEY_ROW_TILES * 16, block.warp_part = block.warp / KEY_GROUPS;
    block.lane_row = block.lane >> 2, block.lane_column = 2 * (block.lane & 3);
    block.sequence_index = place.sequence;
    block.sequence = load_sequence(arguments, place.sequence);
    block.key_head = place.head, block.group = arguments.heads / arguments.key_heads;
    // The first keys of a causal call have the most queries and start first. With FUSED_BACKWARD a block waits for
    // those of later keys, which therefore start first.
    block.index = FUSED_BACKWARD ? place.block : arguments.blocks - 1 - place.block;
    block.first_key = block.index * KEY_BLOCK;
    const Sequence& sequence = block.sequence;
    if (block.first_key >= sequence.key_count) return false;
    const i64 first_row = sequence.first_key + block.first_key;
    const int rows = sequence.key_count - block.first_key;
    load_head_tile<KEY_BLOCK, KEY_THREADS>(
        KEY_KEYS_AT,
        row_address(arguments.keys, arguments.key_strides, sequence.batch, block.key_head, first_row, ELEMENT_BYTES),
        arguments.key_strides.row * ELEMENT_BYTES, 0, rows, block.thread);
    load_value_tile<KEY_BLOCK, KEY_THREADS>(
        KEY_VALUES_AT,
        row_address(arguments.values, arguments.value_strides, sequence.batch, block.key_head, first_row,
                    ELEMENT_BYTES),
        arguments.value_strides.row * ELEMENT_BYTES, 0, rows, block.thread);
    block.tiles = (sequence.query_count + BACKWARD_QUERIES - 1) / BACKWARD_QUERIES;
    block.tile_intervals = arguments.tile_intervals + (i64)place.sequence * arguments.query_tiles;
    block.scale = exponent_scale(arguments);
    block.dropout = load_dropout(arguments, sequence.batch, block.key_head * block.group);
    return true;
}

// Finds the first tile, from number `number` on, with a query that attends to a key of the block. Tiles are numbered
// through the heads of the group.
DEVICE bool find_query_tile(const KeyBlock& block, int number, QueryTile& tile) {
    if (block.tiles <= 0) return false;
    tile.head = number / block.tiles, tile.index = number - tile.head * block.tiles;
    while (tile.head < block.group) {
        if (tile.index >= block.tiles) {
            tile.index = 0, tile.head++;
            continue;
        }
        const int4 keys = load_global(block.tile_intervals + tile.index);
        if (keys.x < block.first_key + KEY_BLOCK && keys.y > block.first_key) break;
        tile.index++;
    }
    return tile.head < block.group;
}

// Loads queries, gradients of the output, and the numbers of the queries.
DEVICE void load_query_tile(const AttentionArguments& arguments, const KeyBlock& block, const QueryTile& tile,
                            int stage) {
    const Sequence& sequence = block.sequence;
    const int first_query = tile.index * BACKWARD_QUERIES, head = block.key_head * block.group + tile.head;
    const int rows = sequence.query_count - first_query;
    const i64 first_row = sequence.first_query + first_query;
    load_head_tile<BACKWARD_QUERIES, KEY_THREADS>(
        KEY_QUERIES_AT + stage * BACKWARD_QUERIES * HEAD_PITCH,
        row_address(arguments.queries, arguments.query_strides, sequence.batch, head, first_row, ELEMENT_BYTES),
        arguments.query_strides.row * ELEMENT_BYTES, 0, rows, block.thread);
    load_value_tile<BACKWARD_QUERIES, KEY_THREADS>(
        KEY_GRADIENTS_AT + stage * BACKWARD_QUERIES * VALUE_PITCH,
        row_address(arguments.output_gradient, arguments.output_gradient_strides, sequence.batch, head, first_row,
                    ELEMENT_BYTES),
        arguments.output_gradient_strides.row * ELEMENT_BYTES, 0, rows, block.thread);
    const u32 to = KEY_STATISTICS_AT + stage * KEY_STATISTICS_BYTES;
    const i64 statistics = statistics_row(arguments, sequence, head) + first_query;
    const int2* intervals = arguments.query_intervals + (i64)sequence.batch * arguments.query_count + first_row;
    for (int row = block.thread; row < BACKWARD_QUERIES; row += KEY_THREADS) {
        const bool is_read = row < rows;
        copy_async_4(to + row * 4, is_read ? arguments.row_statistics + statistics + row : arguments.row_statistics,
                     is_read ? 4 : 0);
        if (NATURAL_SCORES)
            copy_async_4(to + BACKWARD_QUERIES * 16 + row * 4,
                         is_read ? row_maxima(arguments) + statistics + row : arguments.row_statistics,
                         is_read ? 4 : 0);
        copy_async_4(to + BACKWARD_QUERIES * 4 + row * 4,
                     is_read ? arguments.delta + statistics + row : arguments.delta, is_read ? 4 : 0);
        copy_async_8(to + BACKWARD_QUERIES * 8 + row * 8, is_read ? intervals + row : arguments.query_intervals,
                     is_read ? 8 : 0);
    }
}
#endif

// The gradients of keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v).
//
// A threadgroup has KEY_BLOCK keys of a key head and goes through the tiles of queries that attend to any of them, of
// all heads that share the key head. Scores are transposed: rows are keys, columns are queries.
#pragma once
#include "backward.metal"

#if KERNEL_SET & BACKWARD_KERNELS
#define KEY_FRAGMENTS (BACKWARD_QUERIES / 8)
// Gradients of scores from row to row, where they are in threadgroup memory.
#define BIAS_GRADIENT_PITCH (BACKWARD_QUERIES + 1)

// The part of a call that a thread computes.
struct KeyThread {
    FragmentPlace place;
    int sequence_index;
    Sequence sequence;
    int key_head;
    int group;      // heads that share the key head
    int block;      // the index of the threadgroup in its key head and sequence
    int first_key;  // of the threadgroup
    int key;        // of its row, which may be behind the last one
    OwnRow keys;
    OwnRow values;
    float scale;    // from a difference of scores to an exponent of 2
};

// A head of the group, for which the thread sums.
struct HeadOfGroup {
    int number; // in the group
    int head;
    ScoreModifiers modifiers;
    SequenceDropout dropout;
    TileRows query_rows;
    TileRows gradient_rows; // of outputs
};

// The threadgroup memory of a tile of queries.
struct QueryTileMemory {
    SHARED(Element) queries;
    SHARED(Element) gradients;   // of outputs
    SHARED(float) statistics;    // of each query: log2_sum, then all maxima, then all deltas
    SHARED(int) intervals;       // of each query: the first key, then all keys after the last one
    SHARED(float) bias_gradients; // of scores (keys, queries)
};

DEVICE KeyThread start_key_thread(const LOCAL AttentionArguments& arguments, const LOCAL BlockPlace& place,
                                  const LOCAL Sequence& sequence, int thread_index) {
    KeyThread own;
    own.place = fragment_place(thread_index);
    own.sequence_index = place.sequence, own.sequence = sequence;
    own.key_head = place.head, own.group = arguments.heads / arguments.key_heads;
    // The first keys of a causal call have the most queries and start first.
    own.block = arguments.blocks - 1 - place.block, own.first_key = own.block * KEY_BLOCK;
    own.key = own.first_key + thread_index / 32 * 8 + own.place.row;
    own.keys.is_row = own.values.is_row = own.key < sequence.key_count;
    const int row = sequence.first_key + (own.keys.is_row ? own.key : 0);
    own.keys.first =
        row_address(arguments.keys, arguments.key_strides, sequence.batch, own.key_head, row, ELEMENT_BYTES);
    own.values.first =
        row_address(arguments.values, arguments.value_strides, sequence.batch, own.key_head, row, ELEMENT_BYTES);
    own.keys.width = HEAD_DIM, own.keys.columns = HEAD_COLUMNS;
    own.values.width = VALUE_DIM, own.values.columns = VALUE_COLUMNS;
    own.scale = exponent_scale(arguments);
    return own;
}

DEVICE HeadOfGroup load_head_of_group(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                                      int number) {
    const LOCAL Sequence& sequence = own.sequence;
    HeadOfGroup head;
    head.number = number, head.head = own.key_head * own.group + number;
    head.modifiers = load_modifiers(arguments, sequence, own.sequence_index, head.head);
    head.dropout = load_sequence_dropout(arguments, sequence, head.head);
    head.query_rows.first = row_address(arguments.queries, arguments.query_strides, sequence.batch, head.head,
                                        sequence.first_query, ELEMENT_BYTES);
    head.query_rows.row_bytes = arguments.query_strides.row * ELEMENT_BYTES;
    head.query_rows.width = HEAD_DIM, head.query_rows.columns = HEAD_COLUMNS;
    head.query_rows.pitch = FORWARD_KEY_PITCH;
    head.gradient_rows.first = row_address(arguments.output_gradient, arguments.output_gradient_strides, sequence.batch,
                                           head.head, sequence.first_query, ELEMENT_BYTES);
    head.gradient_rows.row_bytes = arguments.output_gradient_strides.row * ELEMENT_BYTES;
    head.gradient_rows.width = VALUE_DIM, head.gradient_rows.columns = VALUE_COLUMNS;
    head.gradient_rows.pitch = FORWARD_VALUE_PITCH;
    return head;
}

// The keys that a query attends to; none behind the last query.
DEVICE int2 keys_of_query(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own, int query) {
    int first = 0, end = 0;
    if (query < own.sequence.query_count)
        attended_keys(arguments, own.sequence, own.sequence_index, query, first, end);
    int2 keys;
    keys.x = first, keys.y = end;
    return keys;
}

// The keys of the queries of a tile, in every lane; lane n has found the keys of query n.
DEVICE TileInterval tile_interval(int2 keys, int lane) {
    TileInterval tile;
    tile.first = 0x7fffffff, tile.end = 0, tile.common_first = 0, tile.common_end = 0x7fffffff;
    if (lane < BACKWARD_QUERIES) {
        if (keys.x < keys.y) tile.first = keys.x, tile.end = keys.y;
        tile.common_first = keys.x, tile.common_end = keys.y;
    }
    join_in_warp(tile);
    return tile;
}

// Loads queries, gradients of outputs, and the numbers of the queries.
DEVICE void load_query_tile(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                            const LOCAL HeadOfGroup& head, int first_query, int2 keys,
                            const LOCAL QueryTileMemory& tile) {
    const int count = own.sequence.query_count;
    load_tile_rows(tile.queries, head.query_rows, BACKWARD_QUERIES, first_query, 0, count, own.place.index);
    load_tile_rows(tile.gradients, head.gradient_rows, BACKWARD_QUERIES, first_query, 0, count, own.place.index);
    const int row = own.place.index; // of the first simdgroup
    if (row >= BACKWARD_QUERIES) return;
    RowStatistics statistics;
    statistics.log2_sum = -NEGATIVE_INFINITY, statistics.maximum = 0; // no weight
    float delta = 0;
    if (first_query + row < count) {
        const i64 at = statistics_row(arguments, own.sequence, head.head) + first_query + row;
        statistics = load_row_statistics(arguments, at);
        delta = load_global(arguments.delta + at);
    }
    store_shared(tile.statistics + row, statistics.log2_sum);
    store_shared(tile.statistics + (BACKWARD_QUERIES + row), statistics.maximum);
    store_shared(tile.statistics + (2 * BACKWARD_QUERIES + row), delta);
    store_shared(tile.intervals + row, keys.x);
    store_shared(tile.intervals + (BACKWARD_QUERIES + row), keys.y);
}

// The gradients of the pair of the thread's key and a query of a tile.
DEVICE PairGradient key_pair_gradient(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                                      const LOCAL HeadOfGroup& head, const LOCAL QueryTileMemory& tile, int first_query,
                                      int column, float product, float weight_gradient) {
    const int first = load_shared(tile.intervals + column);
    const int end = load_shared(tile.intervals + (BACKWARD_QUERIES + column)), query = first_query + column;
    if (own.key < first || own.key >= end) return no_pair_gradient();
    if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, head.modifiers, query, own.key)) return no_pair_gradient();
    QueryNumbers numbers;
    numbers.statistics.log2_sum = load_shared(tile.statistics + column);
    numbers.statistics.maximum = load_shared(tile.statistics + (BACKWARD_QUERIES + column));
    numbers.delta = load_shared(tile.statistics + (2 * BACKWARD_QUERIES + column));
    return differentiate_pair(arguments, head.modifiers, numbers, own.scale, kept_factor(head.dropout, query, own.key),
                              product, weight_gradient, query, own.key);
}

// Adds the sums of the diagonals of a tile of gradients of scores to the vector of the threadgroup. An entry of the
// vector belongs to one thread for all tiles, so that no other thread writes what it adds to.
DEVICE void add_diagonals(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                          const LOCAL HeadOfGroup& head, const LOCAL QueryTileMemory& tile, int first_query) {
    const i64 pair = own.sequence_index * arguments.key_heads + own.key_head - arguments.first_pair;
    GLOBAL float* to = arguments.relative_bias_parts +
                       ((pair * own.group + head.number) * arguments.key_blocks + own.block) *
                           arguments.relative_bias_length;
    const int first_entry = relative_bias_origin(arguments, own.sequence_index) + own.first_key - first_query;
    // The first entry of the tile may be negative.
    const int first_of_tile = first_entry - (BACKWARD_QUERIES - 1);
    const int n = (int)((u32)(own.place.index - first_of_tile) % (u32)KEY_THREADS);
    const int distance = n - (BACKWARD_QUERIES - 1); // key - query, in the tile
    const int entry = first_entry + distance;
    if (distance >= KEY_BLOCK || (u32)entry >= (u32)arguments.relative_bias_length) return;
    const int end = smaller(BACKWARD_QUERIES, KEY_BLOCK - distance);
    float sum = 0;
    for (int query = larger(0, -distance); query < end; query++)
        sum += load_shared(tile.bias_gradients + ((query + distance) * BIAS_GRADIENT_PITCH + query));
    store_global(to + entry, load_global(to + entry) + sum);
}

// The sums of a thread.
struct KeySums {
    LOCAL float2* keys;
    LOCAL float2* values;
};

// Adds the gradients of a tile of queries. `slope` is the gradient of the head's slope.
DEVICE void add_query_tile(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                           const LOCAL HeadOfGroup& head, const LOCAL float2* keys, const LOCAL float2* values,
                           const LOCAL QueryTileMemory& tile, int first_query, bool is_careful,
                           const LOCAL KeySums& sums, LOCAL float& slope) {
    float2 products[KEY_FRAGMENTS], gradients[KEY_FRAGMENTS];
    multiply_tile_rows(own.place, own.keys, keys, tile.queries, FORWARD_KEY_PITCH, KEY_FRAGMENTS, products);
    multiply_tile_rows(own.place, own.values, values, tile.gradients, FORWARD_VALUE_PITCH, KEY_FRAGMENTS, gradients);
    UNROLL for (int c = 0; c < KEY_FRAGMENTS; c++) {
        const int column = 8 * c + own.place.column;
        const PairGradient left = key_pair_gradient(arguments, own, head, tile, first_query, column, products[c].x,
                                                    gradients[c].x);
        const PairGradient right = key_pair_gradient(arguments, own, head, tile, first_query, column + 1, products[c].y,
                                                     gradients[c].y);
        if (SLOPE_GRADIENT) {
            const int position = own.sequence.first_position + first_query + column;
            slope -= left.score * absolute((float)(position - own.key));
            slope -= right.score * absolute((float)(position + 1 - own.key));
        }
        if (RELATIVE_BIAS_GRADIENT) {
            const int row = own.place.index / 32 * 8 + own.place.row;
            store_shared(tile.bias_gradients + (row * BIAS_GRADIENT_PITCH + column), left.score);
            store_shared(tile.bias_gradients + (row * BIAS_GRADIENT_PITCH + column + 1), right.score);
        }
        products[c].x = left.weight, products[c].y = right.weight;
        gradients[c].x = left.product, gradients[c].y = right.product;
    }
    add_tile_rows(own.place, products, tile.gradients, FORWARD_VALUE_PITCH, VALUE_COLUMNS, KEY_FRAGMENTS, is_careful,
                  sums.values);
    add_tile_rows(own.place, gradients, tile.queries, FORWARD_KEY_PITCH, HEAD_COLUMNS, KEY_FRAGMENTS, is_careful,
                  sums.keys);
}

// Goes through all queries that attend to a key of the threadgroup. If `is_careful`, the sums of modifiers are there
// already.
DEVICE void sum_key_gradients(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                              const LOCAL float2* keys, const LOCAL float2* values, const LOCAL QueryTileMemory& tile,
                              bool is_careful, const LOCAL KeySums& sums) {
    const int lane = own.place.index % 32, simdgroup = own.place.index / 32;
    UNROLL for (int d = 0; d < HEAD_COLUMNS / 8; d++) sums.keys[d].x = sums.keys[d].y = 0;
    UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) sums.values[d].x = sums.values[d].y = 0;
    for (int number = 0; number < own.group; number++) {
        const HeadOfGroup head = load_head_of_group(arguments, own, number);
        float slope = 0;
        for (int query = 0; query < own.sequence.query_count; query += BACKWARD_QUERIES) {
            const int2 keys_of_lane = keys_of_query(arguments, own, query + lane);
            const TileInterval attended = tile_interval(keys_of_lane, lane);
            // All simdgroups find the same.
            if (attended.first >= own.first_key + KEY_BLOCK || attended.end <= own.first_key) continue;
            block_barrier();
            load_query_tile(arguments, own, head, query, keys_of_lane, tile);
            block_barrier();
            add_query_tile(arguments, own, head, keys, values, tile, query, is_careful, sums, slope);
            if (RELATIVE_BIAS_GRADIENT && !is_careful) {
                block_barrier();
                add_diagonals(arguments, own, head, tile, query);
            }
        }
        if (SLOPE_GRADIENT && !is_careful) {
            const float sum = warp_sum(slope);
            const i64 of_head = (i64)own.sequence_index * arguments.heads + head.head;
            const i64 part = (of_head * arguments.key_blocks + own.block) * KEY_WARPS + simdgroup;
            if (lane == 0) store_global(arguments.slope_gradient_parts + part, sum);
        }
    }
}

// Adds queries, and gradients of outputs, that are not finite to the keys and the values that their queries attend to.
DEVICE void add_special_queries(const LOCAL AttentionArguments& arguments, const LOCAL KeyThread& own,
                                const LOCAL KeySums& sums) {
    for (int number = 0; number < own.group; number++) {
        const HeadOfGroup head = load_head_of_group(arguments, own, number);
        for (int query = 0; query < own.sequence.query_count; query++) {
            const int2 keys = keys_of_query(arguments, own, query);
            if (own.key < keys.x || own.key >= keys.y) continue;
            if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, head.modifiers, query, own.key)) continue;
            OwnRow row = own.keys;
            row.first = head.query_rows.first + query * head.query_rows.row_bytes;
            add_special_row(own.place, row, sums.keys);
            row = own.values;
            row.first = head.gradient_rows.first + query * head.gradient_rows.row_bytes;
            add_special_row(own.place, row, sums.values);
        }
    }
}

KERNEL_OF(BACKWARD, attention_backward_keys, KEY_THREADS) {
    SHARED_MEMORY(KEY_SHARED_BYTES);
    AttentionArguments arguments;
    READ_BACKWARD_ARGUMENTS(arguments)
    arguments.blocks = arguments.key_blocks;
    const BlockPlace place =
        block_place(arguments, (int)group_index, arguments.key_heads, arguments.first_pair, arguments.pairs);
    const Sequence sequence = load_sequence(arguments, place.sequence);
    const KeyThread own = start_key_thread(arguments, place, sequence, (int)thread_index);
    if (own.first_key >= sequence.key_count) return;
    QueryTileMemory tile = {SHARED_AT(Element, KEY_QUERIES_AT), SHARED_AT(Element, KEY_GRADIENTS_AT),
                            SHARED_AT(float, KEY_STATISTICS_AT),
                            SHARED_AT(int, KEY_STATISTICS_AT + 12 * BACKWARD_QUERIES),
                            SHARED_AT(float, KEY_BIAS_GRADIENTS_AT)};
    float2 keys[BACKWARD_ROWS_IN_REGISTERS ? HEAD_COLUMNS / 8 : 1];
    float2 values[BACKWARD_ROWS_IN_REGISTERS ? VALUE_COLUMNS / 8 : 1];
    keep_row(own.place, own.keys, keys);
    keep_row(own.place, own.values, values);
    float2 key_sums[HEAD_COLUMNS / 8], value_sums[VALUE_COLUMNS / 8];
    KeySums sums;
    sums.keys = key_sums, sums.values = value_sums;
    // As in the forward pass, all is computed once more if a sum has a number that is not finite.
    bool is_careful = false;
    while (true) {
        sum_key_gradients(arguments, own, keys, values, tile, is_careful, sums);
        if (is_careful) break;
        const bool is_special = own.keys.is_row && (has_special_number(key_sums, HEAD_COLUMNS) ||
                                                    has_special_number(value_sums, VALUE_COLUMNS));
        if (!any_in_block(SHARED_AT(u32, KEY_ANSWERS_AT), own.place.index, is_special)) break;
        is_careful = true;
    }
    if (is_careful && own.keys.is_row) add_special_queries(arguments, own, sums);
    if (!own.keys.is_row) return;
    const int row = sequence.first_key + own.key;
    store_row(own.place,
              row_address(arguments.key_gradient, arguments.key_gradient_strides, sequence.batch, own.key_head, row,
                          ELEMENT_BYTES),
              HEAD_DIM, HEAD_COLUMNS, key_sums, arguments.scale);
    store_row(own.place,
              row_address(arguments.value_gradient, arguments.value_gradient_strides, sequence.batch, own.key_head, row,
                          ELEMENT_BYTES),
              VALUE_DIM, VALUE_COLUMNS, value_sums, 1.0f);
}
#endif

// The gradient of the queries (B, H, T_q, D), and of each score (B, H, T_q, T_kv) where a bias needs it.
//
// As in the forward pass, a threadgroup has QUERY_BLOCK queries of a head, and goes through the keys that any of them
// attends to in tiles of QUERY_KEYS keys and their values.
#pragma once
#include "backward.metal"

#if KERNEL_SET & BACKWARD_KERNELS
#define QUERY_FRAGMENTS (QUERY_KEYS / 8)

// The part of a call that a thread computes.
struct QueryThread {
    FragmentPlace place;
    int head;
    int query;          // of its row, which may be behind the last one
    bool is_query;      // whether it is not
    int first;          // the keys [first, end) that its query attends to
    int end;
    TileInterval keys;  // of the simdgroup
    int first_key;      // the keys [first_key, end_key) of the threadgroup
    int end_key;
    OwnRow queries;
    OwnRow gradients;   // of outputs
    TileRows key_rows;
    TileRows value_rows;
    ScoreModifiers modifiers;
    SequenceDropout dropout;
    QueryNumbers numbers;
    i64 score_row;      // of the gradients of scores
    float scale;        // from a difference of scores to an exponent of 2
};

// Finds the keys of the simdgroup and of the threadgroup.
DEVICE void join_query_intervals(LOCAL QueryThread& own, SHARED(int) intervals) {
    own.keys.first = 0x7fffffff, own.keys.end = own.keys.common_first = own.keys.common_end = 0;
    if (own.first < own.end) own.keys.first = own.first, own.keys.end = own.end;
    join_in_warp(own.keys);
    join_simdgroup_intervals(own.keys, intervals, own.place.index, own.first_key, own.end_key);
}

DEVICE QueryThread start_query_thread(const LOCAL AttentionArguments& arguments, const LOCAL BlockPlace& place,
                                      const LOCAL Sequence& sequence, int thread_index) {
    QueryThread own;
    own.place = fragment_place(thread_index), own.head = place.head;
    own.query = place.block * QUERY_BLOCK + thread_index / 32 * 8 + own.place.row;
    own.is_query = own.query < sequence.query_count;
    const int query = own.is_query ? own.query : 0, key_head = place.head / (arguments.heads / arguments.key_heads);
    own.first = own.end = 0;
    if (own.is_query) attended_keys(arguments, sequence, place.sequence, query, own.first, own.end);
    own.queries.first = row_address(arguments.queries, arguments.query_strides, sequence.batch, own.head,
                                    sequence.first_query + query, ELEMENT_BYTES);
    own.gradients.first = row_address(arguments.output_gradient, arguments.output_gradient_strides, sequence.batch,
                                      own.head, sequence.first_query + query, ELEMENT_BYTES);
    own.queries.is_row = own.gradients.is_row = own.is_query;
    own.queries.width = HEAD_DIM, own.queries.columns = HEAD_COLUMNS;
    own.gradients.width = VALUE_DIM, own.gradients.columns = VALUE_COLUMNS;
    own.key_rows = key_rows_of_head(arguments, sequence, place.sequence, key_head);
    own.value_rows = value_rows_of_head(arguments, sequence, place.sequence, key_head);
    own.modifiers = load_modifiers(arguments, sequence, place.sequence, own.head);
    own.dropout = load_sequence_dropout(arguments, sequence, own.head);
    const i64 row = statistics_row(arguments, sequence, own.head) + query;
    own.numbers.statistics = load_row_statistics(arguments, row);
    own.numbers.delta = load_global(arguments.delta + row);
    own.score_row = row * arguments.key_count;
    own.scale = exponent_scale(arguments);
    return own;
}

// The gradients of a pair of the thread's query; `kept` is the factor of dropout.
DEVICE float query_pair_gradient(const LOCAL AttentionArguments& arguments, const LOCAL QueryThread& own, float kept,
                                 float product, float weight_gradient, int key) {
    if (key < own.first || key >= own.end) return 0.0f;
    if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, own.modifiers, own.query, key)) return 0.0f;
    const PairGradient pair = differentiate_pair(arguments, own.modifiers, own.numbers, own.scale, kept, product,
                                                 weight_gradient, own.query, key);
    if (BIAS_GRADIENT) store_global(arguments.score_gradient + own.score_row + key, pair.score);
    return pair.product;
}

// Goes through all keys of the threadgroup.
DEVICE void sum_query_gradient(const LOCAL AttentionArguments& arguments, const LOCAL QueryThread& own,
                               const LOCAL float2* queries, const LOCAL float2* gradients, SHARED(Element) key_tile,
                               SHARED(Element) value_tile, bool is_careful, LOCAL float2* sums) {
    UNROLL for (int d = 0; d < HEAD_COLUMNS / 8; d++) sums[d].x = sums[d].y = 0;
    float2 products[QUERY_FRAGMENTS], weight_gradients[QUERY_FRAGMENTS];
    for (int key = own.first_key / QUERY_KEYS * QUERY_KEYS; key < own.end_key; key += QUERY_KEYS) {
        block_barrier();
        load_tile_rows(key_tile, own.key_rows, QUERY_KEYS, key, own.first_key, own.end_key, own.place.index);
        load_tile_rows(value_tile, own.value_rows, QUERY_KEYS, key, own.first_key, own.end_key, own.place.index);
        block_barrier();
        if (key >= own.keys.end || key + QUERY_KEYS <= own.keys.first) continue;
        multiply_tile_rows(own.place, own.queries, queries, key_tile, FORWARD_KEY_PITCH, QUERY_FRAGMENTS, products);
        multiply_tile_rows(own.place, own.gradients, gradients, value_tile, FORWARD_VALUE_PITCH, QUERY_FRAGMENTS,
                           weight_gradients);
        UNROLL for (int c = 0; c < QUERY_FRAGMENTS; c++) {
            const int column = key + 8 * c + own.place.column;
            const float2 kept = kept_factors(own.dropout, own.query, column);
            products[c].x =
                query_pair_gradient(arguments, own, kept.x, products[c].x, weight_gradients[c].x, column);
            products[c].y =
                query_pair_gradient(arguments, own, kept.y, products[c].y, weight_gradients[c].y, column + 1);
        }
        add_tile_rows(own.place, products, key_tile, FORWARD_KEY_PITCH, HEAD_COLUMNS, QUERY_FRAGMENTS, is_careful, sums);
    }
}

// Adds the keys that are not finite to the queries that attend to them.
DEVICE void add_special_keys(const LOCAL AttentionArguments& arguments, const LOCAL QueryThread& own,
                             LOCAL float2* sums) {
    for (int key = own.first; key < own.end; key++) {
        if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, own.modifiers, own.query, key)) continue;
        OwnRow row;
        row.first = row_of_key(own.key_rows, key);
        row.is_row = true, row.width = HEAD_DIM, row.columns = HEAD_COLUMNS;
        add_special_row(own.place, row, sums);
    }
}

KERNEL_OF(BACKWARD, attention_backward_queries, QUERY_THREADS) {
    SHARED_MEMORY(QUERY_SHARED_BYTES);
    AttentionArguments arguments;
    READ_BACKWARD_ARGUMENTS(arguments)
    const BlockPlace place =
        block_place(arguments, (int)group_index, arguments.heads, 0, arguments.heads * arguments.sequences);
    const Sequence sequence = load_sequence(arguments, place.sequence);
    if (place.block * QUERY_BLOCK >= sequence.query_count) return;
    QueryThread own = start_query_thread(arguments, place, sequence, (int)thread_index);
    join_query_intervals(own, SHARED_AT(int, QUERY_INTERVALS_AT));
    float2 queries[BACKWARD_ROWS_IN_REGISTERS ? HEAD_COLUMNS / 8 : 1];
    float2 gradients[BACKWARD_ROWS_IN_REGISTERS ? VALUE_COLUMNS / 8 : 1];
    keep_row(own.place, own.queries, queries);
    keep_row(own.place, own.gradients, gradients);
    float2 sums[HEAD_COLUMNS / 8];
    // As in the forward pass, all is computed once more if a sum has a number that is not finite.
    bool is_careful = false;
    while (true) {
        sum_query_gradient(arguments, own, queries, gradients, SHARED_AT(Element, QUERY_KEYS_AT),
                           SHARED_AT(Element, QUERY_VALUES_AT), is_careful, sums);
        if (is_careful) break;
        const bool is_special = own.is_query && has_special_number(sums, HEAD_COLUMNS);
        if (!any_in_block(SHARED_AT(u32, QUERY_ANSWERS_AT), own.place.index, is_special)) break;
        is_careful = true;
    }
    if (is_careful) add_special_keys(arguments, own, sums);
    if (!own.is_query) return;
    GLOBAL char* to = row_address(arguments.query_gradient, arguments.query_gradient_strides, sequence.batch, own.head,
                                  sequence.first_query + own.query, ELEMENT_BYTES);
    store_row(own.place, to, HEAD_DIM, HEAD_COLUMNS, sums, arguments.scale);
}
#endif

// The forward pass: output (B, H, T_q, D_v) and log-sum-exp (B, H, T_q) from queries, keys and values.
//
// A threadgroup has FORWARD_QUERIES queries of a head, 8 for each simdgroup, and goes through the keys that any of them
// attends to in tiles of FORWARD_KEYS. Keys and values of a tile take turns in the same threadgroup memory. Products,
// weights and the output stay in registers (FlashAttention-2). All products are of f32.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "attention_buffers.metal"
#include "elements.cuh"
#include "masks.cuh"
#include "modifiers.cuh"
#include "row_results.cuh"
#include "dropped_weights.metal"
#include "tiles.metal"

// Fragments of the keys of a tile.
#define FORWARD_KEY_FRAGMENTS (FORWARD_KEYS / 8)
// Values are divided by this where their sum may exceed f32.
#define VALUE_GROWTH 4294967296.0f

// The part of a call that a thread computes: two neighbours of a row in each fragment.
struct ForwardThread {
    int index;        // in the threadgroup
    int row;          // of a fragment
    int column;       // of a fragment
    int first_fragment; // of a tile of keys that the simdgroup computes
    int head;
    int query;        // of its row, which may be behind the last one
    bool is_query;    // whether it is not
    int first;        // the keys [first, end) that its query attends to
    int end;
    TileInterval keys; // of the simdgroup
    int first_key;     // the keys [first_key, end_key) of the threadgroup
    int end_key;
    GLOBAL const char* queries; // the row of its query
    TileRows key_rows;
    TileRows value_rows;
    TileRows key_scales;   // with KEY_CODES
    TileRows value_scales;
    ScoreModifiers modifiers;
    SequenceDropout dropout;
};

// The two elements of a fragment of the queries; zeros behind the last column and the last query.
DEVICE float2 load_query_pair(const LOCAL ForwardThread& own, int column) {
    float2 pair;
    pair.x = pair.y = 0;
    if (own.is_query && column < HEAD_DIM) pair.x = load_element(own.queries, column);
    if (own.is_query && column + 1 < HEAD_DIM) pair.y = load_element(own.queries, column + 1);
    return pair;
}

// The scales of a key and of the next one, with KEY_CODES; 0 for keys that the threadgroup does not attend to.
DEVICE float load_scale(const LOCAL ForwardThread& own, const LOCAL TileRows& scales, int key, int group) {
    if (key < own.first_key || key >= own.end_key) return 0.0f;
    return load_global((GLOBAL const float*)row_of_key(scales, key) + group);
}
DEVICE float2 load_scale_pair(const LOCAL ForwardThread& own, const LOCAL TileRows& scales, int key, int group) {
    float2 pair;
    pair.x = load_scale(own, scales, key, group), pair.y = load_scale(own, scales, key + 1, group);
    return pair;
}

// Multiplies some columns, [8 * first, 8 * end), of the queries of the simdgroup and of a tile of keys.
DEVICE void multiply_key_columns(const LOCAL ForwardThread& own, const LOCAL float2* queries, SHARED(Element) tile,
                                 int fragments, int first, int end, LOCAL float2* scores) {
    UNROLL for (int c = 0; c < fragments; c++) scores[c].x = scores[c].y = 0;
    UNROLL for (int d = first; d < end; d++) {
        float2 query;
        if (FORWARD_QUERIES_IN_REGISTERS) query = queries[d];
        else query = load_query_pair(own, 8 * d + own.column);
        UNROLL for (int c = 0; c < fragments; c++) {
            const int key = 8 * (own.first_fragment + c) + own.column;
            const float2 keys = load_column_pair(tile + (key * FORWARD_KEY_PITCH + 8 * d + own.row), FORWARD_KEY_PITCH);
            multiply_add(scores[c], query, keys);
        }
    }
}

// Multiplies the queries of the simdgroup and the tile of the keys from `key` on.
DEVICE void multiply_keys(const LOCAL ForwardThread& own, const LOCAL float2* queries, SHARED(Element) tile, int key,
                          int fragments, LOCAL float2* scores) {
    if (!KEY_CODES) {
        multiply_key_columns(own, queries, tile, fragments, 0, HEAD_COLUMNS / 8, scores);
        return;
    }
    UNROLL for (int c = 0; c < fragments; c++) scores[c].x = scores[c].y = 0;
    float2 products[FORWARD_KEY_FRAGMENTS];
    UNROLL for (int group = 0; group < HEAD_COLUMNS / KEY_SCALE_COLUMNS; group++) {
        const int first = group * (KEY_SCALE_COLUMNS / 8);
        multiply_key_columns(own, queries, tile, fragments, first, first + KEY_SCALE_COLUMNS / 8, products);
        UNROLL for (int c = 0; c < fragments; c++) {
            const int column = key + 8 * (own.first_fragment + c) + own.column;
            const float2 scales = load_scale_pair(own, own.key_scales, column, group);
            scores[c].x += products[c].x * scales.x, scores[c].y += products[c].y * scales.y;
        }
    }
}

// The score of a product, or -inf for a key that the query does not attend to.
DEVICE float masked_score(const LOCAL AttentionArguments& arguments, const LOCAL ForwardThread& own, float product,
                          int key) {
    if (key < own.first || key >= own.end) return NEGATIVE_INFINITY;
    if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, own.modifiers, own.query, key)) return NEGATIVE_INFINITY;
    if (!MODIFIES_SCORES) return product;
    float derivative;
    const float score = modify_score(own.modifiers, product, own.query, key, derivative);
    if (!HAS_BIAS) return score;
    return fused_multiply_add(load_bias(arguments, own.modifiers, own.query, key), SCORE_UNIT, score);
}

// The maximum of a row's scores so far, and this thread's part of the sum of exp(score - maximum).
struct RowState {
    float maximum;
    float sum;
};

// Raises the maximum by the scores of a tile of keys, and replaces the scores by weights.
DEVICE void update_softmax(LOCAL RowState& state, int fragments, LOCAL float2* scores, LOCAL float2* output,
                           float scale) {
    float top = state.maximum;
    UNROLL for (int c = 0; c < fragments; c++) top = larger(top, larger(scores[c].x, scores[c].y));
    top = row_max(top);
    const float reference = top == NEGATIVE_INFINITY ? 0.0f : top, scaled = reference * scale;
    const float shrink = exp2_approximate((state.maximum - reference) * scale);
    state.maximum = top;
    state.sum *= shrink;
    UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) output[d].x *= shrink, output[d].y *= shrink;
    UNROLL for (int c = 0; c < fragments; c++) {
        scores[c].x = weight_of(scores[c].x, reference, scaled, scale);
        scores[c].y = weight_of(scores[c].y, reference, scaled, scale);
        state.sum += scores[c].x + scores[c].y;
    }
}

// Multiplies the weights of keys from `first` on by the factors of dropout.
DEVICE void drop_weights(const LOCAL ForwardThread& own, int fragments, int first, LOCAL float2* weights) {
    UNROLL for (int c = 0; c < fragments; c++) {
        const float2 kept = kept_factors(own.dropout, own.query, first + 8 * c + own.column);
        weights[c].x *= kept.x, weights[c].y *= kept.y;
    }
}

// A value that is added later if it is not finite, and is smaller until then, where sums may exceed f32.
DEVICE float careful_value(float value) { return is_finite(value) ? value * (1.0f / VALUE_GROWTH) : 0.0f; }

// The weights of `key` and of the next one times the scales of the values, with KEY_CODES. A scale that is not finite
// reaches the queries that attend to its key later.
DEVICE float2 scaled_weights(const LOCAL ForwardThread& own, float2 weights, int key, int group, bool is_careful) {
    float2 scales = load_scale_pair(own, own.value_scales, key, group);
    if (is_careful && !is_finite(scales.x)) scales.x = 0;
    if (is_careful && !is_finite(scales.y)) scales.y = 0;
    weights.x *= scales.x, weights.y *= scales.y;
    return weights;
}

// Adds the products of weights and the tile of the values from `key` on to the output.
DEVICE void multiply_values(const LOCAL ForwardThread& own, int fragments, const LOCAL float2* weights,
                            SHARED(Element) tile, int key, bool is_careful, LOCAL float2* output) {
    UNROLL for (int c = 0; c < fragments; c++) {
        const int first_row = 8 * (own.first_fragment + c), row = first_row + own.row;
        float2 factors = weights[c];
        UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
            if (KEY_CODES && 8 * d % VALUE_SCALE_COLUMNS == 0)
                factors = scaled_weights(own, weights[c], key + first_row + own.column, 8 * d / VALUE_SCALE_COLUMNS,
                                         is_careful);
            float2 values = load_pair(tile + (row * FORWARD_VALUE_PITCH + 8 * d + own.column));
            if (is_careful) values.x = careful_value(values.x), values.y = careful_value(values.y);
            multiply_add(output[d], factors, values);
        }
    }
}

// Attends to all keys of the threadgroup: the simdgroup computes some fragments of each tile.
DEVICE void attend_to_keys(const LOCAL AttentionArguments& arguments, const LOCAL ForwardThread& own, int fragments,
                           const LOCAL float2* queries, SHARED(Element) tile, float scale, bool is_careful,
                           LOCAL RowState& state, LOCAL float2* output) {
    state.maximum = NEGATIVE_INFINITY, state.sum = 0;
    UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) output[d].x = output[d].y = 0;
    float2 scores[FORWARD_KEY_FRAGMENTS];
    for (int key = own.first_key / FORWARD_KEYS * FORWARD_KEYS; key < own.end_key; key += FORWARD_KEYS) {
        const int first = key + 8 * own.first_fragment;
        const bool is_attended = own.first_fragment < FORWARD_KEY_FRAGMENTS && first < own.keys.end &&
                                 first + 8 * fragments > own.keys.first;
        block_barrier();
        load_tile(tile, own.key_rows, key, own.first_key, own.end_key, own.index);
        block_barrier();
        if (is_attended) {
            multiply_keys(own, queries, tile, key, fragments, scores);
            if (MODIFIES_SCORES || HAS_BOOLEAN_MASK || own.keys.masks(first, 8 * fragments)) {
                UNROLL for (int c = 0; c < fragments; c++) {
                    const int column = first + 8 * c + own.column;
                    scores[c].x = masked_score(arguments, own, scores[c].x, column);
                    scores[c].y = masked_score(arguments, own, scores[c].y, column + 1);
                }
            }
            update_softmax(state, fragments, scores, output, scale);
            if (HAS_DROPOUT) drop_weights(own, fragments, first, scores);
        }
        block_barrier();
        load_tile(tile, own.value_rows, key, own.first_key, own.end_key, own.index);
        block_barrier();
        if (is_attended) multiply_values(own, fragments, scores, tile, key, is_careful, output);
    }
}

// A value in global memory; `row` is the row of its key.
DEVICE float load_value(const LOCAL ForwardThread& own, GLOBAL const char* row, int key, int column) {
    if (!KEY_CODES) return load_element(row, column);
    return number_of_code(load_code(row, column)) *
           load_scale(own, own.value_scales, key, column / VALUE_SCALE_COLUMNS);
}

// Adds values that are not finite to the queries that attend to them.
DEVICE void add_special_values(const LOCAL AttentionArguments& arguments, const LOCAL ForwardThread& own,
                               LOCAL float2* output) {
    const int end = smaller(own.end, own.end_key);
    for (int key = larger(own.first, own.first_key); key < end; key++) {
        if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, own.modifiers, own.query, key)) continue;
        GLOBAL const char* row = row_of_key(own.value_rows, key);
        UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
            const int column = 8 * d + own.column;
            const float x = column < VALUE_DIM ? load_value(own, row, key, column) : 0.0f;
            const float y = column + 1 < VALUE_DIM ? load_value(own, row, key, column + 1) : 0.0f;
            if (!is_finite(x)) output[d].x += x;
            if (!is_finite(y)) output[d].y += y;
        }
    }
}

// Whether one of a thread's sums of `columns` columns is not finite.
DEVICE bool has_special_number(const LOCAL float2* sums, int columns) {
    bool is_special = false;
    UNROLL for (int d = 0; d < columns / 8; d++) is_special |= !(is_finite(sums[d].x) && is_finite(sums[d].y));
    return is_special;
}

// Whether a thread of the threadgroup has the answer true, in every thread.
DEVICE bool any_in_block(SHARED(u32) answers, int thread_index, bool answer) {
    const bool in_simdgroup = any_in_warp(answer);
    block_barrier();
    if (thread_index % 32 == 0) store_shared(answers + thread_index / 32, (u32)in_simdgroup);
    block_barrier();
    u32 any = 0;
    UNROLL for (int n = 0; n < FORWARD_WARPS; n++) any |= load_shared(answers + n);
    return any != 0;
}

// Attends to all keys of the threadgroup. Returns whether the output lacks the values that are not finite and is divided
// by VALUE_GROWTH: then the caller adds and multiplies.
//
// Values that are not finite must reach only queries that attend to them, but zero times NaN is NaN, and sums of large
// values may exceed f32. If the output has a number that is not finite, all is computed once more without such values,
// and with the others made smaller.
DEVICE bool attend(const LOCAL AttentionArguments& arguments, const LOCAL ForwardThread& own, int fragments,
                   SHARED(Element) tile, SHARED(u32) answers, float scale, LOCAL RowState& state,
                   LOCAL float2* output) {
    float2 queries[FORWARD_QUERIES_IN_REGISTERS ? HEAD_COLUMNS / 8 : 1];
    if (FORWARD_QUERIES_IN_REGISTERS) {
        UNROLL for (int d = 0; d < HEAD_COLUMNS / 8; d++) queries[d] = load_query_pair(own, 8 * d + own.column);
    }
    bool is_careful = false;
    while (true) {
        attend_to_keys(arguments, own, fragments, queries, tile, scale, is_careful, state, output);
        if (is_careful) return true;
        const bool is_special = own.is_query && has_special_number(output, VALUE_COLUMNS);
        if (!any_in_block(answers, own.index, is_special)) return false;
        is_careful = true;
    }
}

// Finds the keys [first, end) of the threadgroup from the keys of its simdgroups.
DEVICE void join_simdgroup_intervals(const LOCAL TileInterval& keys, SHARED(int) intervals, int thread_index,
                                     LOCAL int& first, LOCAL int& end) {
    if (thread_index % 32 == 0) {
        store_shared(intervals + thread_index / 16, keys.first);
        store_shared(intervals + (thread_index / 16 + 1), keys.end);
    }
    block_barrier();
    first = 0x7fffffff, end = 0;
    UNROLL for (int n = 0; n < FORWARD_WARPS; n++) {
        first = smaller(first, load_shared(intervals + 2 * n));
        end = larger(end, load_shared(intervals + (2 * n + 1)));
    }
    if (first >= end) first = end = 0;
}

// Finds the keys of the simdgroup and of the threadgroup.
DEVICE void join_intervals(LOCAL ForwardThread& own, SHARED(int) intervals) {
    own.keys.first = 0x7fffffff, own.keys.end = 0, own.keys.common_first = 0, own.keys.common_end = 0x7fffffff;
    if (own.is_query) {
        if (own.first < own.end) own.keys.first = own.first, own.keys.end = own.end;
        own.keys.common_first = own.first, own.keys.common_end = own.end;
    }
    join_in_warp(own.keys);
    join_simdgroup_intervals(own.keys, intervals, own.index, own.first_key, own.end_key);
}

// Finds the keys and the rows of a thread whose head and query are known.
DEVICE void find_rows(LOCAL ForwardThread& own, const LOCAL AttentionArguments& arguments,
                      const LOCAL Sequence& sequence, int sequence_index, int key_head) {
    own.first = own.end = 0;
    if (own.is_query) attended_keys(arguments, sequence, sequence_index, own.query, own.first, own.end);
    own.queries = row_address(arguments.queries, arguments.query_strides, sequence.batch, own.head,
                              sequence.first_query + own.query, ELEMENT_BYTES);
    own.key_rows = key_rows_of_head(arguments, sequence, sequence_index, key_head);
    own.value_rows = value_rows_of_head(arguments, sequence, sequence_index, key_head);
    if (KEY_CODES) {
        own.key_scales = rows_of_head(arguments, arguments.key_scales, arguments.key_scale_strides, sequence,
                                      sequence_index, key_head, 4);
        own.value_scales = rows_of_head(arguments, arguments.value_scales, arguments.value_scale_strides, sequence,
                                        sequence_index, key_head, 4);
    }
    own.modifiers = load_modifiers(arguments, sequence, sequence_index, own.head);
    own.dropout = load_sequence_dropout(arguments, sequence, own.head);
}

DEVICE ForwardThread start_thread(const LOCAL AttentionArguments& arguments, const LOCAL BlockPlace& place,
                                  const LOCAL Sequence& sequence, int thread_index) {
    ForwardThread own;
    own.index = thread_index, own.head = place.head, own.first_fragment = 0;
    own.row = fragment_row(thread_index % 32), own.column = fragment_column(thread_index % 32);
    own.query = place.block * FORWARD_QUERIES + thread_index / 32 * 8 + own.row;
    own.is_query = own.query < sequence.query_count;
    find_rows(own, arguments, sequence, place.sequence, place.head / (arguments.heads / arguments.key_heads));
    return own;
}

// Stores the row of the output, which is multiplied by `growth` last, and the other results.
DEVICE void store_results(const LOCAL AttentionArguments& arguments, const LOCAL ForwardThread& own,
                          const LOCAL Sequence& sequence, const LOCAL RowState& state, const LOCAL float2* output,
                          float scale, float growth) {
    const float sum = row_sum(state.sum);
    if (!own.is_query) return;
    const RowResult result = finish_row(arguments, own.head, state.maximum, sum, scale, arguments.sinks != nullptr);
    GLOBAL char* to = row_address(arguments.output, arguments.output_strides, sequence.batch, own.head,
                                  sequence.first_query + own.query, ELEMENT_BYTES);
    UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
        const int column = 8 * d + own.column;
        if (column < VALUE_DIM) store_element(to, column, output[d].x * result.factor * growth);
        if (column + 1 < VALUE_DIM) store_element(to, column + 1, output[d].y * result.factor * growth);
    }
    if (own.column == 0) store_row_result(arguments, statistics_row(arguments, sequence, own.head) + own.query, result);
}

KERNEL(attention_forward, FORWARD_THREADS) {
    SHARED_MEMORY(FORWARD_SHARED_BYTES);
    AttentionArguments arguments;
    READ_ATTENTION_ARGUMENTS(arguments)
    const BlockPlace place =
        block_place(arguments, (int)group_index, arguments.heads, 0, arguments.heads * arguments.sequences);
    const Sequence sequence = load_sequence(arguments, place.sequence);
    if (place.block * FORWARD_QUERIES >= sequence.query_count) return;
    ForwardThread own = start_thread(arguments, place, sequence, (int)thread_index);
    join_intervals(own, SHARED_AT(int, FORWARD_INTERVALS_AT));
    const float scale = exponent_scale(arguments);
    float2 output[VALUE_COLUMNS / 8];
    RowState state;
    const bool is_careful =
        attend(arguments, own, FORWARD_KEY_FRAGMENTS, SHARED_AT(Element, FORWARD_TILE_AT),
               SHARED_AT(u32, FORWARD_ANSWERS_AT), scale, state, output);
    if (is_careful) add_special_values(arguments, own, output);
    store_results(arguments, own, sequence, state, output, scale, is_careful ? VALUE_GROWTH : 1.0f);
}

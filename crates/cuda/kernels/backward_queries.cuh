// The gradient of the queries (B, H, T_q, D), and of each score (B, H, T_q, T_kv) where a bias needs it.
//
// As in the forward pass, a block has QUERY_BLOCK queries of a head and goes through the keys that they attend to, in
// tiles of QUERY_KEYS of which the next one arrives while one is worked on. With FUSED_BACKWARD, the kernel of keys
// does this instead.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "products.cuh"
#include "loads.cuh"
#include "masks.cuh"
#include "tile_intervals.cuh"
#include "dropout_words.cuh"
#include "modifiers.cuh"
#include "query_block.cuh"
#include "row_weights.cuh"

#if (KERNEL_SET & BACKWARD_KERNELS) && !FUSED_BACKWARD
#define QUERY_KEY_TILES (QUERY_KEYS / 8)
typedef float QueryScores[QUERY_ROW_TILES][QUERY_KEY_TILES][4];

// The part of a call that a thread of a block computes, with the statistics of its rows.
struct QueryGradientBlock : QueryBlock {
    const char* key_rows;
    const char* value_rows;
    float scale;       // from a difference of scores to an exponent of 2
    RowStatistics statistics[QUERY_ROW_TILES][2];
    float delta[QUERY_ROW_TILES][2];
};

DEVICE void load_query_block_tile(const AttentionArguments& arguments, const QueryGradientBlock& block, int key,
                                  int stage) {
    if (key < block.keys.end) {
        const i64 key_row_bytes = arguments.key_strides.row * ELEMENT_BYTES;
        const i64 value_row_bytes = arguments.value_strides.row * ELEMENT_BYTES;
        const int first = block.keys.first - key, end = block.keys.end - key;
        load_head_tile<QUERY_KEYS, QUERY_THREADS>(QUERY_KEYS_AT + stage * QUERY_KEYS * HEAD_PITCH,
                                                  block.key_rows + key * key_row_bytes, key_row_bytes, first, end,
                                                  block.thread);
        load_value_tile<QUERY_KEYS, QUERY_THREADS>(QUERY_VALUES_AT + stage * QUERY_KEYS * VALUE_PITCH,
                                                   block.value_rows + key * value_row_bytes, value_row_bytes, first,
                                                   end, block.thread);
    }
    commit_copies();
}

DEVICE void drop_weight_gradients(const AttentionArguments& arguments, const QueryGradientBlock& block, int key,
                                  QueryScores& gradients) {
    const Sequence& sequence = block.sequence;
    UNROLL for (int tile = 0; tile < QUERY_ROW_TILES; tile++)
        UNROLL for (int c = 0; c < QUERY_KEY_TILES; c++) {
            const int row = block.warp_row + 16 * tile + block.lane_row;
            u32 words[4];
            dropout_words(block.dropout, sequence.first_query + block.first_query + row,
                          sequence.first_key + key + 8 * c + block.lane_column, sequence.first_key % 4 == 0, block.lane,
                          words);
            UNROLL for (int e = 0; e < 4; e++) {
                const bool is_dropped = words[e] < arguments.dropout_threshold;
                gradients[tile][c][e] *= is_dropped ? 0.0f : arguments.kept_weight_factor;
            }
        }
}

// Stores the gradients of a row's scores for the bias.
DEVICE void store_score_gradients(const AttentionArguments& arguments, const QueryGradientBlock& block, int row,
                                  int key, const float (&gradients)[QUERY_KEY_TILES][4], int r) {
    const int query = block.first_query + row;
    if (query >= block.sequence.query_count) return;
    float* to = arguments.score_gradient +
                (statistics_row(arguments, block.sequence, block.head) + query) * arguments.key_count;
    UNROLL for (int c = 0; c < QUERY_KEY_TILES; c++)
        UNROLL for (int e = 0; e < 2; e++) {
            const int own_key = key + 8 * c + block.lane_column + e;
            if (own_key < block.sequence.key_count) store_global(to + own_key, gradients[c][2 * r + e]);
        }
}

// Turns the gradients of weights into gradients of products. `products` are replaced by the derivatives
// of scores.
DEVICE void differentiate_scores(const AttentionArguments& arguments, const QueryGradientBlock& block, int key,
                                 bool is_masked, QueryScores& products, QueryScores& gradients) {
    UNROLL for (int tile = 0; tile < QUERY_ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = block.warp_row + 16 * tile + 8 * r + block.lane_row;
            const int query = smaller(block.first_query + row, block.sequence.query_count - 1);
            UNROLL for (int c = 0; c < QUERY_KEY_TILES; c++)
                UNROLL for (int e = 0; e < 2; e++) {
                    float derivative = 1, score = products[tile][c][2 * r + e];
                    const int own_key = smaller(key + 8 * c + block.lane_column + e, block.sequence.key_count - 1);
                    if (MODIFIES_SCORES) score = modify_score(block.modifiers, score, query, own_key, derivative);
                    if (HAS_BIAS)
                        score = fused_multiply_add(load_bias(arguments, block.modifiers, query, own_key), SCORE_UNIT,
                                                   score);
                    float gradient = normalized_weight(score, block.statistics[tile][r], block.scale) *
                                     (gradients[tile][c][2 * r + e] - block.delta[tile][r]);
                    if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, block.modifiers, query, own_key))
                        gradient = 0.0f;
                    gradients[tile][c][2 * r + e] = gradient;
                    products[tile][c][2 * r + e] = derivative;
                }
            if (is_masked) {
                const int2 keys = load_shared<int2>(QUERY_INTERVALS_AT + 8 * row);
                const int first = keys.x - key, end = keys.y - key;
                UNROLL for (int c = 0; c < QUERY_KEY_TILES; c++)
                    UNROLL for (int e = 0; e < 2; e++) {
                        const int column = 8 * c + block.lane_column + e;
                        if (column < first || column >= end)
                            gradients[tile][c][2 * r + e] = 0, products[tile][c][2 * r + e] = 0;
                    }
            }
            if (BIAS_GRADIENT) store_score_gradients(arguments, block, row, key, gradients[tile], r);
            if (HAS_PRODUCT_DERIVATIVE)
                UNROLL for (int c = 0; c < QUERY_KEY_TILES; c++)
                    UNROLL for (int e = 0; e < 2; e++)
                        gradients[tile][c][2 * r + e] *= products[tile][c][2 * r + e];
        }
}

DEVICE void load_block_statistics(const AttentionArguments& arguments, QueryGradientBlock& block) {
    const i64 first = statistics_row(arguments, block.sequence, block.head);
    UNROLL for (int tile = 0; tile < QUERY_ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int query = block.first_query + block.warp_row + 16 * tile + 8 * r + block.lane_row;
            const bool is_query = query < block.sequence.query_count;
            // Rows behind the last query have no weight.
            RowStatistics& statistics = block.statistics[tile][r];
            statistics.maximum = 0, statistics.log2_sum = -NEGATIVE_INFINITY;
            if (is_query) statistics = load_row_statistics(arguments, first + query);
            block.delta[tile][r] = is_query ? load_global(arguments.delta + first + query) : 0.0f;
        }
}

KERNEL(attention_backward_queries, QUERY_THREADS, 1, AttentionArguments) {
    const BlockPlace place =
        block_place(arguments, block_index(), arguments.heads, 0, arguments.heads * arguments.sequences);
    const Sequence sequence = load_sequence(arguments, place.sequence);
    if (place.block * QUERY_BLOCK >= sequence.query_count) return;
    QueryGradientBlock block;
    start_query_block<QUERY_ROW_TILES, QUERY_BLOCK>(block, place, sequence);
    const int key_head = place.head / (arguments.heads / arguments.key_heads);
    block.key_rows = row_address(arguments.keys, arguments.key_strides, sequence.batch, key_head, sequence.first_key,
                                 ELEMENT_BYTES);
    block.value_rows = row_address(arguments.values, arguments.value_strides, sequence.batch, key_head,
                                   sequence.first_key, ELEMENT_BYTES);
    const i64 first_row = sequence.first_query + block.first_query;
    load_head_tile<QUERY_BLOCK, QUERY_THREADS>(
        QUERY_QUERIES_AT,
        row_address(arguments.queries, arguments.query_strides, sequence.batch, block.head, first_row, ELEMENT_BYTES),
        arguments.query_strides.row * ELEMENT_BYTES, 0, sequence.query_count - block.first_query, block.thread);
    load_value_tile<QUERY_BLOCK, QUERY_THREADS>(
        QUERY_GRADIENTS_AT,
        row_address(arguments.output_gradient, arguments.output_gradient_strides, sequence.batch, block.head, first_row,
                    ELEMENT_BYTES),
        arguments.output_gradient_strides.row * ELEMENT_BYTES, 0, sequence.query_count - block.first_query,
        block.thread);
    block.keys = store_intervals<QUERY_BLOCK, QUERY_THREADS>(arguments, sequence, place.sequence, block.first_query,
                                                             QUERY_INTERVALS_AT, QUERY_WARP_INTERVALS_AT, block.thread);
    block.modifiers = load_modifiers(arguments, sequence, place.sequence, block.head);
    block.dropout = load_dropout(arguments, sequence.batch, block.head);
    block.scale = exponent_scale(arguments);
    load_block_statistics(arguments, block);

    float gradient[QUERY_ROW_TILES][HEAD_COLUMNS / 8][4];
    clear(gradient);
    const int first = block.keys.first / QUERY_KEYS * QUERY_KEYS;
    load_query_block_tile(arguments, block, first, 0);
    int stage = 0;
    bool has_special_keys = false;
    for (int key = first; key < block.keys.end; key += QUERY_KEYS) {
        const bool is_masked = HAS_BOOLEAN_MASK || block.keys.masks(key, QUERY_KEYS);
        const u32 keys_at = QUERY_KEYS_AT + stage * QUERY_KEYS * HEAD_PITCH;
        const u32 values_at = QUERY_VALUES_AT + stage * QUERY_KEYS * VALUE_PITCH;
        wait_for_copies<0>();
        bool is_special = false;
        if (is_masked)
            is_special =
                any_in_block(find_special_in_heads<QUERY_KEYS, QUERY_THREADS, false>(keys_at, block.thread));
        else block_barrier();
        load_query_block_tile(arguments, block, key + QUERY_KEYS, stage ^ 1);
        QueryScores products, weight_gradients;
        // The warp's queries, and all keys of the tile.
        multiply_tile_rows<HEAD_PITCH, HEAD_COLUMNS>(QUERY_QUERIES_AT, block.warp_row, keys_at, 0, block.lane,
                                                     products);
        repair_products<HEAD_PITCH, HEAD_COLUMNS>(QUERY_QUERIES_AT, block.warp_row, keys_at, 0, block.lane, products);
        multiply_tile_rows<VALUE_PITCH, VALUE_COLUMNS>(QUERY_GRADIENTS_AT, block.warp_row, values_at, 0, block.lane,
                                                       weight_gradients);
        if (HAS_DROPOUT) drop_weight_gradients(arguments, block, key, weight_gradients);
        differentiate_scores(arguments, block, key, is_masked, products, weight_gradients);
        if (is_special) {
            // Keys that are not finite must not meet the gradients of queries that do not attend to them, which are 0.
            block_barrier();
            find_special_in_heads<QUERY_KEYS, QUERY_THREADS, true>(keys_at, block.thread);
            block_barrier();
            has_special_keys = true;
        }
        UNROLL for (int c = 0; c < QUERY_KEYS / 16; c++) {
            LeftFragment left[QUERY_ROW_TILES];
            UNROLL for (int tile = 0; tile < QUERY_ROW_TILES; tile++)
                accumulators_to_left(left[tile], weight_gradients[tile][2 * c], weight_gradients[tile][2 * c + 1]);
            UNROLL for (int d = 0; d < HEAD_COLUMNS / 16; d++) {
                RightFragment right;
                load_right_transposed<HEAD_PITCH>(right, keys_at, 16 * c, 16 * d, block.lane);
                UNROLL for (int tile = 0; tile < QUERY_ROW_TILES; tile++)
                    multiply_fragments(gradient[tile][2 * d], gradient[tile][2 * d + 1], left[tile], right);
            }
        }
        stage ^= 1;
    }
    wait_for_copies<0>();
    if (has_special_keys) {
        const int own_row = block.warp_row + block.lane_row;
        add_special_numbers(gradient, block.key_rows, arguments.key_strides.row, block.keys.first, block.keys.end,
                            block.lane_column, HEAD_DIM, [&](int row, int key) {
                                const int2 keys = load_shared<int2>(QUERY_INTERVALS_AT + 8 * (own_row + row));
                                return key >= keys.x && key < keys.y &&
                                       (!HAS_BOOLEAN_MASK || load_boolean_mask(arguments, block.modifiers,
                                                                               block.first_query + own_row + row, key));
                            });
    }

    char* to = row_address(arguments.query_gradient, arguments.query_gradient_strides, sequence.batch, block.head,
                           first_row, ELEMENT_BYTES);
    UNROLL for (int tile = 0; tile < QUERY_ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = block.warp_row + 16 * tile + 8 * r + block.lane_row;
            if (block.first_query + row >= sequence.query_count) continue;
            UNROLL for (int d = 0; d < HEAD_COLUMNS / 8; d++) {
                const int column = 8 * d + block.lane_column;
                store_pair(to, row * arguments.query_gradient_strides.row + column,
                           gradient[tile][d][2 * r] * arguments.scale, gradient[tile][d][2 * r + 1] * arguments.scale,
                           column, HEAD_DIM);
            }
        }
}
#endif

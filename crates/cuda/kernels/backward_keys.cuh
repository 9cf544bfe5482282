// The gradients of keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v).
//
// A block has KEY_BLOCK keys of a key head and goes through the tiles of queries that attend to any of them, of all
// heads that share the key head; the next tile arrives while one is worked on. Scores are transposed: rows are keys,
// columns are queries. WARPS_PER_KEYS warps share their keys: each computes the scores of a part of the queries, which
// the others read from shared memory, and a part of the columns of the gradients.
//
// With FUSED_BACKWARD, a block also adds its part to the gradient of each tile of queries (query_gradients.cuh).
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "products.cuh"
#include "loads.cuh"
#include "masks.cuh"
#include "dropout_words.cuh"
#include "modifiers.cuh"
#include "row_weights.cuh"
#include "backward_prepare.cuh"
#include "key_block.cuh"
#include "modifier_gradients.cuh"
#include "query_gradients.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
// The numbers of two neighbouring queries.
struct QueryPair {
    RowStatistics statistics[2];
    float delta[2];
    int first[2];  // the keys [first, end) that they attend to
    int end[2];
};

DEVICE QueryPair load_query_pair(u32 statistics_at, int column, bool is_masked) {
    const float2 log2_sum = load_shared<float2>(statistics_at + column * 4);
    const float2 delta = load_shared<float2>(statistics_at + BACKWARD_QUERIES * 4 + column * 4);
    QueryPair pair;
    pair.statistics[0].log2_sum = log2_sum.x, pair.statistics[1].log2_sum = log2_sum.y;
    pair.statistics[0].maximum = pair.statistics[1].maximum = 0;
    if (NATURAL_SCORES) {
        const float2 maximum = load_shared<float2>(statistics_at + BACKWARD_QUERIES * 16 + column * 4);
        pair.statistics[0].maximum = maximum.x, pair.statistics[1].maximum = maximum.y;
    }
    pair.delta[0] = delta.x, pair.delta[1] = delta.y;
    pair.first[0] = pair.first[1] = 0, pair.end[0] = pair.end[1] = 0x7fffffff;
    if (is_masked) {
        const int2 left = load_shared<int2>(statistics_at + BACKWARD_QUERIES * 8 + column * 8);
        const int2 right = load_shared<int2>(statistics_at + BACKWARD_QUERIES * 8 + column * 8 + 8);
        pair.first[0] = left.x, pair.end[0] = left.y, pair.first[1] = right.x, pair.end[1] = right.y;
    }
    return pair;
}

// Replaces products by weights, and the gradients of weights by those of products.
DEVICE void differentiate_key_scores(const AttentionArguments& arguments, const KeyBlock& block,
                                     const LoadedTile& loaded, KeyScores& products, KeyScores& gradients,
                                     ModifierGradients& modifier_gradients) {
    const Sequence& sequence = block.sequence;
    const int first_query = loaded.tile.index * BACKWARD_QUERIES;
    const int head = block.key_head * block.group + loaded.tile.head;
    Dropout dropout = block.dropout;
    dropout.head = head;
#if MODIFIES_SCORES || HAS_BOOLEAN_MASK
    const ScoreModifiers modifiers = load_modifiers(arguments, sequence, block.sequence_index, head);
#endif
    UNROLL for (int c = 0; c < WARP_QUERIES / 8; c++) {
        const int column = block.warp_part * WARP_QUERIES + 8 * c + block.lane_column;
        const QueryPair pair = load_query_pair(loaded.statistics_at, column, loaded.is_masked);
        UNROLL for (int n = 0; n < KEY_ROW_TILES; n++) {
            const int first_key = block.first_key + block.warp_row + 16 * n + block.lane_row;
            u32 words[4];
            if (HAS_DROPOUT)
                dropout_words_transposed(dropout, sequence.first_query + first_query + column,
                                         sequence.first_key + first_key, sequence.first_key % 4 == 0, block.lane,
                                         words);
            float score_gradients[4];
            UNROLL for (int e = 0; e < 4; e++) {
                const int key = first_key + 8 * (e >> 1), query = first_query + column + (e & 1);
                float derivative, weight = products[n][c][e], gradient = gradients[n][c][e];
#if MODIFIES_SCORES || HAS_BOOLEAN_MASK
                const int own_query = smaller(query, sequence.query_count - 1);
                const int own_key = smaller(key, sequence.key_count - 1);
                if (MODIFIES_SCORES) weight = modify_score(modifiers, weight, own_query, own_key, derivative);
                if (HAS_BIAS)
                    weight = fused_multiply_add(load_bias(arguments, modifiers, own_query, own_key), SCORE_UNIT,
                                                weight);
#endif
                weight = normalized_weight(weight, pair.statistics[e & 1], block.scale);
                float kept = 1; // the factor of dropout; a weight that is NaN stays NaN
                if (HAS_DROPOUT) {
                    kept = words[e] < arguments.dropout_threshold ? 0.0f : arguments.kept_weight_factor;
                    gradient *= kept;
                }
                gradient = weight * (gradient - pair.delta[e & 1]);
                bool is_hidden = loaded.is_masked && (key < pair.first[e & 1] || key >= pair.end[e & 1]);
#if HAS_BOOLEAN_MASK
                is_hidden |= !load_boolean_mask(arguments, modifiers, own_query, own_key);
#endif
                score_gradients[e] = is_hidden ? 0.0f : gradient;
                if (BIAS_GRADIENT && FUSED_BACKWARD && query < sequence.query_count && key < sequence.key_count)
                    store_global(arguments.score_gradient +
                                     (statistics_row(arguments, sequence, head) + query) * arguments.key_count + key,
                                 score_gradients[e]);
                if (SLOPE_GRADIENT)
                    modifier_gradients.slope -=
                        score_gradients[e] * absolute((float)(sequence.first_position + query - key));
                if (HAS_PRODUCT_DERIVATIVE) gradient *= derivative;
                if (HAS_DROPOUT) weight *= kept;
                products[n][c][e] = is_hidden ? 0.0f : weight;
                gradients[n][c][e] = is_hidden ? 0.0f : gradient;
            }
            if (SHARES_BIAS_GRADIENTS) {
                const u32 at = KEY_BIAS_GRADIENTS_AT + (block.warp_row + 16 * n + block.lane_row) * SCORE_PITCH +
                               column * ELEMENT_BYTES;
                store_pair_shared(at, score_gradients[0], score_gradients[1]);
                store_pair_shared(at + 8 * SCORE_PITCH, score_gradients[2], score_gradients[3]);
            }
        }
    }
}

// Returns whether there are numbers that are not finite among the queries and the gradients of their outputs that this
// thread loaded. With CLEANS, replaces them by zeros.
template <bool CLEANS> DEVICE bool find_special_rows(const KeyBlock& block, int stage) {
    const bool in_queries =
        find_special_in_heads<BACKWARD_QUERIES, KEY_THREADS, CLEANS>(KEY_QUERIES_AT + stage * BACKWARD_QUERIES * HEAD_PITCH,
                                                                     block.thread);
    return find_special_in_values<BACKWARD_QUERIES, KEY_THREADS, CLEANS>(
               KEY_GRADIENTS_AT + stage * BACKWARD_QUERIES * VALUE_PITCH, block.thread) ||
           in_queries;
}

// Adds rows of queries, or of gradients of outputs, that are not finite to the stored gradients of the block's keys, or
// of its values, that their queries attend to. `tensor` is that of the rows. Each thread has columns of its own.
DEVICE void add_special_rows(const AttentionArguments& arguments, const KeyBlock& block, const void* tensor,
                             const RowStrides& strides, int width, char* gradient, i64 gradient_stride) {
    const Sequence& sequence = block.sequence;
    const int2* intervals =
        arguments.query_intervals + (i64)sequence.batch * arguments.query_count + sequence.first_query;
#pragma unroll 1
    for (int n = 0; n < block.group * sequence.query_count; n++) {
        const int head = block.key_head * block.group + n / sequence.query_count, query = n % sequence.query_count;
        const int2 keys = load_global(intervals + query);
        const int first = larger(keys.x, block.first_key), end = smaller(keys.y, block.first_key + KEY_BLOCK);
        const char* row =
            row_address(tensor, strides, sequence.batch, head, sequence.first_query + query, ELEMENT_BYTES);
#pragma unroll 1
        for (int column = block.thread; column < width; column += KEY_THREADS) {
            const float number = load_element(row, column);
            if (is_finite(number)) continue;
#pragma unroll 1
            for (int key = first; key < end; key++) {
                if (!attends(arguments, block, head, query, key)) continue;
                const i64 at = (key - block.first_key) * gradient_stride + column;
                store_element(gradient, at, load_element(gradient, at) + number);
            }
        }
    }
}

// Stores gradients of products, and weights where other warps need them, as matrices (keys, queries) of elements.
DEVICE void share_key_scores(const KeyBlock& block, const KeyScores& weights, const KeyScores& gradients) {
    UNROLL for (int n = 0; n < KEY_ROW_TILES; n++)
        UNROLL for (int c = 0; c < WARP_QUERIES / 8; c++)
            UNROLL for (int r = 0; r < 2; r++) {
                const int row = block.warp_row + 16 * n + 8 * r + block.lane_row;
                const int column = block.warp_part * WARP_QUERIES + 8 * c + block.lane_column;
                const u32 at = row * SCORE_PITCH + column * ELEMENT_BYTES;
                store_pair_shared(KEY_SCORE_GRADIENTS_AT + at, gradients[n][c][2 * r], gradients[n][c][2 * r + 1]);
                if (WARPS_PER_KEYS > 1)
                    store_pair_shared(KEY_WEIGHTS_AT + at, weights[n][c][2 * r], weights[n][c][2 * r + 1]);
            }
}

// Adds the products of a matrix of scores (keys, queries) and a tile of queries to a gradient. The scores are the
// warp's own, or those in shared memory at `shared_at`.
template <int PITCH, int COLUMNS>
DEVICE void add_to_gradient(const KeyBlock& block, const KeyScores& scores, u32 shared_at, int c, u32 tile_at,
                            float (&gradient)[KEY_ROW_TILES][COLUMNS / 8][4]) {
    LeftFragment left[KEY_ROW_TILES];
    UNROLL for (int n = 0; n < KEY_ROW_TILES; n++) {
        if (WARPS_PER_KEYS > 1)
            load_left<SCORE_PITCH>(left[n], shared_at, block.warp_row + 16 * n, 16 * c, block.lane);
        else
            accumulators_to_left(left[n], scores[n][2 * c % (WARP_QUERIES / 8)],
                                 scores[n][(2 * c + 1) % (WARP_QUERIES / 8)]);
    }
    UNROLL for (int d = 0; d < COLUMNS / 16; d++) {
        RightFragment right;
        load_right_transposed<PITCH>(right, tile_at, 16 * c, block.warp_part * COLUMNS + 16 * d, block.lane);
        UNROLL for (int n = 0; n < KEY_ROW_TILES; n++)
            multiply_fragments(gradient[n][2 * d], gradient[n][2 * d + 1], left[n], right);
    }
}

// Stores the warp's columns of a gradient, times a factor, as rows of `width` elements.
template <int COLUMNS>
DEVICE void store_key_gradient(const KeyBlock& block, char* to, i64 row_stride,
                               const float (&gradient)[KEY_ROW_TILES][COLUMNS / 8][4], float factor, int width) {
    UNROLL for (int n = 0; n < KEY_ROW_TILES; n++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = block.warp_row + 16 * n + 8 * r + block.lane_row;
            if (block.first_key + row >= block.sequence.key_count) continue;
            UNROLL for (int d = 0; d < COLUMNS / 8; d++) {
                const int column = block.warp_part * COLUMNS + 8 * d + block.lane_column;
                store_pair(to, row * row_stride + column, gradient[n][d][2 * r] * factor,
                           gradient[n][d][2 * r + 1] * factor, column, width);
            }
        }
}

KERNEL(attention_backward_keys, KEY_THREADS, 1, AttentionArguments) {
    KeyBlock block;
    if (!start_key_block(arguments, block)) return;
    float key_gradient[KEY_ROW_TILES][WARP_HEAD_COLUMNS / 8][4];
    float value_gradient[KEY_ROW_TILES][WARP_VALUE_COLUMNS / 8][4];
    clear(key_gradient), clear(value_gradient);
    ModifierGradients modifier_gradients;
    modifier_gradients.slope = 0;

    QueryTile tile, next;
    QueryGradientTurn turn;
    turn.at = nullptr, turn.next = 0;
    int stage = 0;
    bool is_first = true, has_special_key = false, has_special_rows = false, has_tile = find_query_tile(block, 0, tile);
    if (has_tile) load_query_tile(arguments, block, tile, 0);
    commit_copies();
    while (has_tile) {
        const bool is_masked = is_masked_tile(block, tile);
        wait_for_copies<0>();
        if (FUSED_BACKWARD && is_first)
            has_special_key = find_special_in_heads<KEY_BLOCK, KEY_THREADS, false>(KEY_KEYS_AT, block.thread);
        is_first = false;
        bool is_special = false;
        if (is_masked)
            is_special = any_in_block(find_special_rows<false>(block, stage) || has_special_key);
        else block_barrier();
        if (FUSED_BACKWARD) pass_turn(block, turn);
        const bool has_next = find_query_tile(block, tile.head * block.tiles + tile.index + 1, next);
        if (has_next) load_query_tile(arguments, block, next, stage ^ 1);
        commit_copies();
        const LoadedTile loaded = loaded_tile(block, tile, stage);
        KeyScores scores, gradients;
        // The warp's keys, and its part of the queries.
        const int first_query = block.warp_part * WARP_QUERIES;
        multiply_tile_rows<HEAD_PITCH, HEAD_COLUMNS>(KEY_KEYS_AT, block.warp_row, loaded.queries_at, first_query,
                                                     block.lane, scores);
        repair_products<HEAD_PITCH, HEAD_COLUMNS>(KEY_KEYS_AT, block.warp_row, loaded.queries_at, first_query,
                                                  block.lane, scores);
        multiply_tile_rows<VALUE_PITCH, VALUE_COLUMNS>(KEY_VALUES_AT, block.warp_row, loaded.output_gradients_at,
                                                       first_query, block.lane, gradients);
        differentiate_key_scores(arguments, block, loaded, scores, gradients, modifier_gradients);
        if (is_special) {
            // Rows that are not finite must not meet the weights and gradients of keys or queries that are masked for
            // them, which are 0. Those of keys come back for the next products.
            block_barrier();
            find_special_rows<true>(block, stage);
            if (FUSED_BACKWARD) find_special_in_heads<KEY_BLOCK, KEY_THREADS, true>(KEY_KEYS_AT, block.thread);
            block_barrier();
            has_special_rows = true;
        }
        if (SHARES_SCORE_GRADIENTS) share_key_scores(block, scores, gradients);
        if (WARPS_PER_KEYS > 1 || RELATIVE_BIAS_GRADIENT) block_barrier();
        if (RELATIVE_BIAS_GRADIENT) add_relative_bias_gradients(arguments, block, tile);
        UNROLL for (int c = 0; c < BACKWARD_QUERIES / 16; c++) {
            add_to_gradient<VALUE_PITCH, WARP_VALUE_COLUMNS>(block, scores, KEY_WEIGHTS_AT, c,
                                                             loaded.output_gradients_at, value_gradient);
            add_to_gradient<HEAD_PITCH, WARP_HEAD_COLUMNS>(block, gradients, KEY_SCORE_GRADIENTS_AT, c,
                                                           loaded.queries_at, key_gradient);
        }
        if (FUSED_BACKWARD) {
            if (WARPS_PER_KEYS == 1) block_barrier();
            turn = add_query_gradients(arguments, block, loaded, is_special);
            if (is_special) {
                block_barrier();
                restore_special_keys(arguments, block);
            }
        }
        if (SLOPE_GRADIENT && (!has_next || next.head != tile.head))
            store_slope_gradient(arguments, block, tile.head, modifier_gradients);
        has_tile = has_next, tile = next, stage ^= 1;
    }
    wait_for_copies<0>();
    if (FUSED_BACKWARD && turn.at) { // of all threads, or of none
        block_barrier();
        pass_turn(block, turn);
    }
    const Sequence& sequence = block.sequence;
    const i64 first_row = sequence.first_key + block.first_key;
    char* keys_to = row_address(arguments.key_gradient, arguments.key_gradient_strides, sequence.batch, block.key_head,
                                first_row, ELEMENT_BYTES);
    char* values_to = row_address(arguments.value_gradient, arguments.value_gradient_strides, sequence.batch,
                                  block.key_head, first_row, ELEMENT_BYTES);
    store_key_gradient<WARP_HEAD_COLUMNS>(block, keys_to, arguments.key_gradient_strides.row, key_gradient,
                                          arguments.scale, HEAD_DIM);
    store_key_gradient<WARP_VALUE_COLUMNS>(block, values_to, arguments.value_gradient_strides.row, value_gradient, 1.0f,
                                           VALUE_DIM);
    if (has_special_rows) {
        block_barrier();
        add_special_rows(arguments, block, arguments.queries, arguments.query_strides, HEAD_DIM, keys_to,
                         arguments.key_gradient_strides.row);
        add_special_rows(arguments, block, arguments.output_gradient, arguments.output_gradient_strides, VALUE_DIM,
                         values_to, arguments.value_gradient_strides.row);
    }
}
#if FUSED_BACKWARD
WAITS_FOR_EARLIER_BLOCKS(attention_backward_keys)
#endif
#endif

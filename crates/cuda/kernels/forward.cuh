// The forward pass: output (B, H, T_q, D_v) and log-sum-exp (B, H, T_q) from queries, keys and values.
//
// A block has FORWARD_QUERIES queries of a head, of which each warp has FORWARD_ROW_TILES * 16, and goes through the
// keys that any of them attends to in tiles of FORWARD_KEYS. The products of a tile, its weights and the output stay in
// registers (FlashAttention-2). With one stage the values of a tile arrive while its products are computed, and the
// keys of the next tile while the output is; with two stages the whole next tile arrives.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "products.cuh"
#include "loads.cuh"
#include "codes.cuh"
#include "masks.cuh"
#include "tile_intervals.cuh"
#include "key_rows.cuh"
#include "dropout_words.cuh"
#include "modifiers.cuh"
#include "query_block.cuh"
#include "softmax.cuh"

#if KERNEL_SET & FORWARD_KERNELS
// Weights of f16 codes must not exceed 1: they are multiplied by scales.
#define FORWARD_IS_LAZY (!(KEY_CODES && ELEMENT == 0))
#define FORWARD_KEY_TILES (FORWARD_KEYS / 8)
#define KEY_ELEMENT_BYTES (KEY_CODES ? 1 : ELEMENT_BYTES)

typedef SoftmaxState<FORWARD_ROW_TILES, VALUE_COLUMNS / 8> ForwardState;
typedef float ForwardScores[FORWARD_ROW_TILES][FORWARD_KEY_TILES][4];

// Fragments of the queries: all of them, or those that are multiplied.
struct ForwardQueries {
    LeftFragment fragments[FORWARD_ROW_TILES][FORWARD_QUERIES_IN_REGISTERS ? HEAD_COLUMNS / 16 : 1];
};

// The part of a call that a thread of a block computes, with its keys and values and the scales of codes.
struct ForwardBlock : QueryBlock {
    int sequence_index;
    KeyRows key_rows;
    KeyRows value_rows;
#if KEY_CODES
    KeyRows key_scales;
    KeyRows value_scales;
#endif
};

#if KEY_CODES
// The address of the n-th scales of a tile of keys or values, whose first key is `key`. Two tiles have places.
DEVICE u32 forward_key_scales_at(int key, int n) {
    return FORWARD_KEY_SCALES_AT + (key / FORWARD_KEYS % 2 * KEY_SCALES + n) * FORWARD_KEYS * 4;
}
DEVICE u32 forward_value_scales_at(int key, int n) {
    return FORWARD_VALUE_SCALES_AT + (key / FORWARD_KEYS % 2 * VALUE_SCALES + n) * FORWARD_KEYS * 4;
}
#endif

DEVICE void load_forward_keys(const ForwardBlock& block, int key, int stage) {
    const int first = block.keys.first - key, end = block.keys.end - key;
#if KEY_CODES
    load_code_tile<FORWARD_KEYS, HEAD_COLUMNS, CODE_BYTES(HEAD_COLUMNS), FORWARD_THREADS>(
        FORWARD_KEY_CODES_AT, block.key_rows, key, first, end, HEAD_DIM, block.thread);
    load_scales<FORWARD_KEYS, KEY_SCALES, FORWARD_THREADS>(forward_key_scales_at(key, 0), block.key_scales, key, first, end,
                                                           block.thread);
#else
    load_key_tile<FORWARD_KEYS, FORWARD_THREADS>(FORWARD_KEYS_AT + stage * FORWARD_KEYS * HEAD_PITCH, block.key_rows,
                                                 key, first, end, block.thread);
#endif
}

DEVICE void load_forward_values(const ForwardBlock& block, int key, int stage) {
    const int first = block.keys.first - key, end = block.keys.end - key;
#if KEY_CODES
    load_code_tile<FORWARD_KEYS, VALUE_COLUMNS, CODE_BYTES(VALUE_COLUMNS), FORWARD_THREADS>(
        FORWARD_VALUE_CODES_AT, block.value_rows, key, first, end, VALUE_DIM, block.thread);
    load_scales<FORWARD_KEYS, VALUE_SCALES, FORWARD_THREADS>(forward_value_scales_at(key, 0), block.value_scales, key, first,
                                                             end, block.thread);
#else
    load_key_values<FORWARD_KEYS, FORWARD_THREADS>(FORWARD_VALUES_AT + stage * FORWARD_KEYS * VALUE_PITCH,
                                                   block.value_rows, key, first, end, block.thread);
#endif
}

// Loads the bias and the boolean mask of the block's queries and a tile of keys.
DEVICE void load_forward_terms(const AttentionArguments& arguments, const ForwardBlock& block, int key) {
    const int queries = block.sequence.query_count - block.first_query, keys = block.sequence.key_count - key;
    if (HAS_BIAS) {
        const ScoreStrides& strides = arguments.bias_strides;
        const char* from = block.modifiers.bias + (block.first_query * strides.query + key * strides.key) * BIAS_BYTES;
        const TileSource source = {from, strides.query * BIAS_BYTES, strides.key * BIAS_BYTES, 0, queries,
                                   keys * BIAS_BYTES};
        load_tile<FORWARD_QUERIES, FORWARD_KEYS * BIAS_BYTES / 16, FORWARD_BIAS_PITCH, FORWARD_THREADS, ALIGNED_BIAS,
                  BIAS_BYTES>(FORWARD_BIAS_AT, source, block.thread);
    }
    if (HAS_BOOLEAN_MASK) {
        const ScoreStrides& strides = arguments.boolean_mask_strides;
        const u8* from = block.modifiers.boolean_mask + block.first_query * strides.query + key * strides.key;
        const TileSource source = {(const char*)from, strides.query, strides.key, 0, queries, keys};
        load_tile<FORWARD_QUERIES, FORWARD_KEYS / 16, FORWARD_MASK_PITCH, FORWARD_THREADS, ALIGNED_BOOLEAN_MASK, 1>(
            FORWARD_MASK_AT, source, block.thread);
    }
}

// Multiplies the warp's queries and a tile of keys, by the columns from `first` to `end` of them, in matrices of 16.
DEVICE void multiply_forward_columns(const ForwardBlock& block, ForwardQueries& queries, u32 keys_at, int first,
                                     int end, ForwardScores& products) {
    clear(products);
    UNROLL for (int k = first; k < end; k++) {
        if (!FORWARD_QUERIES_IN_REGISTERS)
            UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
                load_left<HEAD_PITCH>(queries.fragments[tile][0], FORWARD_QUERIES_AT, block.warp_row + 16 * tile,
                                      16 * k, block.lane);
        UNROLL for (int c = 0; c < FORWARD_KEYS / 16; c++) {
            RightFragment keys;
            load_right<HEAD_PITCH>(keys, keys_at, 16 * c, 16 * k, block.lane);
            UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
                multiply_fragments(products[tile][2 * c], products[tile][2 * c + 1],
                                   queries.fragments[tile][FORWARD_QUERIES_IN_REGISTERS ? k : 0], keys);
        }
    }
}

// Multiplies the warp's queries and the tile of keys from `key` on. Several scales of a key are multiplied here, one
// scale in products_to_weights, which takes fewer registers.
DEVICE void multiply_forward_keys(const ForwardBlock& block, ForwardQueries& queries, u32 keys_at, int key,
                                  ForwardScores& scores) {
#if KEY_CODES && KEY_SCALES > 1
    UNROLL for (int n = 0; n < KEY_SCALES; n++) {
        ForwardScores products;
        multiply_forward_columns(block, queries, keys_at, n * (KEY_SCALE_COLUMNS / 16),
                                 (n + 1) * (KEY_SCALE_COLUMNS / 16), products);
        add_scaled_products(scores, products, forward_key_scales_at(key, n), block.lane_column, n == 0);
    }
#else
    multiply_forward_columns(block, queries, keys_at, 0, HEAD_COLUMNS / 16, scores);
#endif
}

// Turns products into scores.
DEVICE void modify_forward_scores(const ForwardBlock& block, int key, ForwardScores& scores) {
    UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = block.warp_row + 16 * tile + 8 * r + block.lane_row;
            UNROLL for (int c = 0; c < FORWARD_KEY_TILES; c++) {
                const int column = 8 * c + block.lane_column;
                float bias[2] = {0, 0};
                if (HAS_BIAS && BIAS_BYTES == 4) {
                    const float2 two = load_shared<float2>(FORWARD_BIAS_AT + row * FORWARD_BIAS_PITCH + column * 4);
                    bias[0] = two.x, bias[1] = two.y;
                } else if (HAS_BIAS) {
                    const u32 two = load_shared<u32>(FORWARD_BIAS_AT + row * FORWARD_BIAS_PITCH + column * 2);
                    bias[0] = unpack_half((u16)two), bias[1] = unpack_half((u16)(two >> 16));
                }
                UNROLL for (int e = 0; e < 2; e++) {
                    float derivative, &score = scores[tile][c][2 * r + e];
                    score = modify_score(block.modifiers, score, block.first_query + row, key + column + e,
                                         derivative);
                    if (HAS_BIAS) score = fused_multiply_add(bias[e], SCORE_UNIT, score);
                }
            }
        }
}

// Masks scores by the boolean mask, and by the intervals of the queries.
DEVICE void mask_forward_scores(const ForwardBlock& block, int key, ForwardScores& scores) {
    if (HAS_BOOLEAN_MASK)
        UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
            UNROLL for (int r = 0; r < 2; r++)
                UNROLL for (int c = 0; c < FORWARD_KEY_TILES; c++) {
                    const int row = block.warp_row + 16 * tile + 8 * r + block.lane_row;
                    const u32 kept =
                        load_shared<u16>(FORWARD_MASK_AT + row * FORWARD_MASK_PITCH + 8 * c + block.lane_column);
                    if (!(kept & 0xff)) scores[tile][c][2 * r] = NEGATIVE_INFINITY;
                    if (!(kept >> 8)) scores[tile][c][2 * r + 1] = NEGATIVE_INFINITY;
                }
    if (!block.keys.masks(key, FORWARD_KEYS)) return;
    UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = block.warp_row + 16 * tile + 8 * r + block.lane_row;
            const int2 keys = load_shared<int2>(FORWARD_INTERVALS_AT + 8 * row);
            const int first = keys.x - key - block.lane_column, end = keys.y - key - block.lane_column;
            UNROLL for (int c = 0; c < FORWARD_KEY_TILES; c++)
                UNROLL for (int e = 0; e < 2; e++)
                    if (8 * c + e < first || 8 * c + e >= end) scores[tile][c][2 * r + e] = NEGATIVE_INFINITY;
        }
}

DEVICE void drop_forward_weights(const AttentionArguments& arguments, const ForwardBlock& block, int key,
                                 ForwardScores& weights) {
    const Sequence& sequence = block.sequence;
    UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
        UNROLL for (int c = 0; c < FORWARD_KEY_TILES; c++) {
            const int row = block.warp_row + 16 * tile + block.lane_row;
            u32 words[4];
            dropout_words(block.dropout, sequence.first_query + block.first_query + row,
                          sequence.first_key + key + 8 * c + block.lane_column, sequence.first_key % 4 == 0, block.lane,
                          words);
            UNROLL for (int e = 0; e < 4; e++)
                if (words[e] < arguments.dropout_threshold) weights[tile][c][e] = 0;
        }
}

// Adds the products of weights and the tile of values from `key` on to the output.
DEVICE void multiply_forward_values(const ForwardBlock& block, const ForwardScores& weights, u32 values_at, int key,
                                    ForwardState& state) {
    UNROLL for (int c = 0; c < FORWARD_KEYS / 16; c++) {
        LeftFragment left[FORWARD_ROW_TILES];
        UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
            accumulators_to_left(left[tile], weights[tile][2 * c], weights[tile][2 * c + 1]);
        UNROLL for (int d = 0; d < VALUE_COLUMNS / 16; d++) {
#if KEY_CODES && VALUE_SCALES > 1
            if (16 * d % VALUE_SCALE_COLUMNS == 0)
                UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
                    scaled_weights_to_left(left[tile], weights[tile][2 * c], weights[tile][2 * c + 1],
                                           forward_value_scales_at(key, 16 * d / VALUE_SCALE_COLUMNS) + 16 * c * 4,
                                           block.lane_column);
#endif
            RightFragment values;
            load_right_transposed<VALUE_PITCH>(values, values_at, 16 * c, 16 * d, block.lane);
            UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
                multiply_fragments(state.output[tile][2 * d], state.output[tile][2 * d + 1], left[tile], values);
        }
    }
}

// Adds values that are not finite to the queries that attend to them.
DEVICE void add_special_values(const AttentionArguments& arguments, const ForwardBlock& block, ForwardState& state) {
    const int first_row = block.warp_row + block.lane_row;
    const auto is_reached = [&](int row, int key) {
        const int2 keys = load_shared<int2>(FORWARD_INTERVALS_AT + 8 * (first_row + row));
        return key >= keys.x && key < keys.y &&
               (!HAS_BOOLEAN_MASK ||
                load_boolean_mask(arguments, block.modifiers, block.first_query + first_row + row, key));
    };
#if KEY_PAGES
#pragma unroll 1
    for (int key = block.keys.first; key < block.keys.end; key++)
        add_special_numbers(state.output, block.value_rows.row(key), 0, key, key + 1, block.lane_column, VALUE_DIM,
                            is_reached);
#else
    add_special_numbers(state.output, block.value_rows.first, arguments.value_strides.row, block.keys.first,
                        block.keys.end, block.lane_column, VALUE_DIM, is_reached);
#endif
}

// Stores the output, which is multiplied by `growth` last, and the other results.
DEVICE void store_forward_output(const AttentionArguments& arguments, const ForwardBlock& block, ForwardState& state,
                                 float scale, float growth) {
    const Sequence& sequence = block.sequence;
    char* output = row_address(arguments.output, arguments.output_strides, sequence.batch, block.head,
                               sequence.first_query + block.first_query, ELEMENT_BYTES);
    const i64 statistics = statistics_row(arguments, sequence, block.head) + block.first_query;
    UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const int row = block.warp_row + 16 * tile + 8 * r + block.lane_row;
            const float sum = quad_sum(state.sum[tile][r]);
            const RowResult result =
                finish_row(arguments, block.head, state.maximum[tile][r], sum, scale, arguments.sinks != nullptr);
            float factor = result.factor;
            if (HAS_DROPOUT) factor *= arguments.kept_weight_factor;
#if KEY_CODES
            factor *= CODE_OUTPUT_FACTOR;
#endif
            if (block.first_query + row >= sequence.query_count) continue;
            UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
                const int column = 8 * d + block.lane_column;
                const float (&numbers)[4] = state.output[tile][d];
                store_pair(output, row * arguments.output_strides.row + column, numbers[2 * r] * factor * growth,
                           numbers[2 * r + 1] * factor * growth, column, VALUE_DIM);
            }
            if (block.lane_column == 0) store_row_result(arguments, statistics + row, result);
        }
}

DEVICE ForwardBlock start_forward_block(const AttentionArguments& arguments, const BlockPlace& place,
                                        const Sequence& sequence) {
    ForwardBlock block;
    start_query_block<FORWARD_ROW_TILES, FORWARD_QUERIES>(block, place, sequence);
    const int index = place.sequence, key_head = place.head / (arguments.heads / arguments.key_heads);
    block.sequence_index = index;
    block.key_rows =
        rows_of_keys(arguments, arguments.keys, arguments.key_strides, sequence, index, key_head, KEY_ELEMENT_BYTES);
    block.value_rows =
        rows_of_keys(arguments, arguments.values, arguments.value_strides, sequence, index, key_head, KEY_ELEMENT_BYTES);
#if KEY_CODES
    block.key_scales =
        rows_of_keys(arguments, arguments.key_scales, arguments.key_scale_strides, sequence, index, key_head, 4);
    block.value_scales =
        rows_of_keys(arguments, arguments.value_scales, arguments.value_scale_strides, sequence, index, key_head, 4);
#endif
    return block;
}

// From products to weights that are multiplied with values.
DEVICE void products_to_weights(const AttentionArguments& arguments, const ForwardBlock& block, int key,
                                ForwardScores& scores, ForwardState& state, float scale) {
#if KEY_CODES && KEY_SCALES == 1
    multiply_by_scales<false>(scores, forward_key_scales_at(key, 0), block.lane_column);
#endif
    if (MODIFIES_SCORES) modify_forward_scores(block, key, scores);
    mask_forward_scores(block, key, scores);
    update_softmax<FORWARD_IS_LAZY>(state, scores, scale);
    if (HAS_DROPOUT) drop_forward_weights(arguments, block, key, scores);
#if KEY_CODES && VALUE_SCALES == 1
    multiply_by_scales<true>(scores, forward_value_scales_at(key, 0), block.lane_column);
#endif
}

// Attends to all keys of the block. Returns whether values that are not finite were left out, which is_careful asks
// for.
DEVICE bool attend_to_keys(const AttentionArguments& arguments, const ForwardBlock& block, ForwardState& state,
                           float scale, bool is_careful) {
    const int first = block.keys.first / FORWARD_KEYS, last = (block.keys.end + FORWARD_KEYS - 1) / FORWARD_KEYS;
    bool found = false;
    clear(state);
    if (first < last) load_forward_keys(block, first * FORWARD_KEYS, 0);
    if (FORWARD_STAGES == 2 && first < last) load_forward_values(block, first * FORWARD_KEYS, 0);
    commit_copies();
    ForwardQueries queries;
    if (FORWARD_QUERIES_IN_REGISTERS) {
        wait_for_copies<0>();
        block_barrier();
        UNROLL for (int tile = 0; tile < FORWARD_ROW_TILES; tile++)
            UNROLL for (int k = 0; k < HEAD_COLUMNS / 16; k++)
                load_left<HEAD_PITCH>(queries.fragments[tile][FORWARD_QUERIES_IN_REGISTERS ? k : 0], FORWARD_QUERIES_AT,
                                      block.warp_row + 16 * tile, 16 * k, block.lane);
    }
    int stage = 0;
    for (int n = first; n < last; n++) {
        const int key = n * FORWARD_KEYS, next_key = key + FORWARD_KEYS;
        const u32 keys_at = FORWARD_KEYS_AT + (FORWARD_STAGES == 2 ? stage * FORWARD_KEYS * HEAD_PITCH : 0);
        const u32 values_at = FORWARD_VALUES_AT + (FORWARD_STAGES == 2 ? stage * FORWARD_KEYS * VALUE_PITCH : 0);
        wait_for_copies<0>();
#if KEY_CODES
        convert_codes<FORWARD_KEYS, HEAD_COLUMNS, HEAD_PITCH, FORWARD_THREADS>(keys_at, FORWARD_KEY_CODES_AT,
                                                                               block.thread);
#endif
        if (FORWARD_STAGES == 2 && is_careful)
            found |= prepare_careful_values<FORWARD_KEYS, FORWARD_THREADS>(values_at, block.thread);
        block_barrier();
        load_forward_terms(arguments, block, key);
        if (FORWARD_STAGES == 1) {
            load_forward_values(block, key, 0);
            commit_copies();
        } else {
            if (HAS_BIAS || HAS_BOOLEAN_MASK) commit_copies();
            if (n + 1 < last) {
                load_forward_keys(block, next_key, stage ^ 1);
                load_forward_values(block, next_key, stage ^ 1);
            }
            commit_copies();
        }
        ForwardScores scores;
        multiply_forward_keys(block, queries, keys_at, key, scores);
        if (ELEMENT == 2 && is_careful)
            repair_products<HEAD_PITCH, HEAD_COLUMNS>(FORWARD_QUERIES_AT, block.warp_row, keys_at, 0, block.lane, scores);
        if (FORWARD_STAGES == 1) {
            wait_for_copies<0>();
#if KEY_CODES
            convert_codes<FORWARD_KEYS, VALUE_COLUMNS, VALUE_PITCH, FORWARD_THREADS>(values_at, FORWARD_VALUE_CODES_AT,
                                                                                     block.thread);
#endif
            if (is_careful) found |= prepare_careful_values<FORWARD_KEYS, FORWARD_THREADS>(values_at, block.thread);
            block_barrier();
            if (n + 1 < last) load_forward_keys(block, next_key, 0);
            commit_copies();
        } else if (HAS_BIAS || HAS_BOOLEAN_MASK) {
            wait_for_copies<1>();
            block_barrier();
        }
        products_to_weights(arguments, block, key, scores, state, scale);
        multiply_forward_values(block, scores, values_at, key, state);
        stage ^= 1;
    }
    wait_for_copies<0>();
    return found;
}

KERNEL(attention_forward, FORWARD_THREADS, 1, AttentionArguments) {
    const BlockPlace place =
        block_place(arguments, block_index(), arguments.heads, 0, arguments.heads * arguments.sequences);
    const Sequence sequence = load_sequence(arguments, place.sequence);
    if (place.block * FORWARD_QUERIES >= sequence.query_count) return;
    ForwardBlock block = start_forward_block(arguments, place, sequence);
    const char* queries = row_address(arguments.queries, arguments.query_strides, sequence.batch, block.head,
                                      sequence.first_query + block.first_query, ELEMENT_BYTES);
    load_head_tile<FORWARD_QUERIES, FORWARD_THREADS>(FORWARD_QUERIES_AT, queries,
                                                     arguments.query_strides.row * ELEMENT_BYTES, 0,
                                                     sequence.query_count - block.first_query, block.thread);
    block.keys = store_intervals<FORWARD_QUERIES, FORWARD_THREADS>(arguments, sequence, place.sequence,
                                                                   block.first_query, FORWARD_INTERVALS_AT,
                                                                   FORWARD_WARP_INTERVALS_AT, block.thread);
    block.modifiers = load_modifiers(arguments, sequence, place.sequence, block.head);
    block.dropout = load_dropout(arguments, sequence.batch, block.head);
    const float scale = exponent_scale(arguments);

    // Values that are not finite must reach only queries that attend to them, but zero times NaN is NaN. Sums of large
    // values may exceed f32, and infinite keys have no TF32 remainder. If the output has a number that is not finite,
    // all is computed once more, without such values, which are then added, with the others made smaller, and with the
    // products of such keys by plain f32.
    ForwardState state;
    bool is_careful = false;
    while (true) {
        const bool found = attend_to_keys(arguments, block, state, scale, is_careful);
        if (KEY_CODES) break;
        if (is_careful) {
            if (any_in_block(found)) add_special_values(arguments, block, state);
            break;
        }
        if (!any_in_block(has_special_number(state.output))) break;
        is_careful = true;
    }
    store_forward_output(arguments, block, state, scale, is_careful ? VALUE_GROWTH : 1.0f);
}
#endif

// Attention of a few queries to many keys: output (B, H, T_q, D_v) and log-sum-exp (B, H, T_q).
//
// The heads that share a key head are rows of one block, with all their queries, so that keys and values are read once.
// Blocks divide the keys into `splits` parts, and the warps of a block divide its part: each warp loads tiles of
// DECODE_KEYS keys of its own, DECODE_STAGES in flight, without a block barrier. At the end the warps' results are
// combined in shared memory, and those of the splits by the kernel attention_combine.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "products.cuh"
#include "loads.cuh"
#include "codes.cuh"
#include "masks.cuh"
#include "key_rows.cuh"
#include "modifiers.cuh"
#include "softmax.cuh"

#if KERNEL_SET & DECODE_KERNELS
#define DECODE_KEY_TILES (DECODE_KEYS / 8)
#define DECODE_KEY_BYTES (KEY_CODES ? 1 : ELEMENT_BYTES)

typedef SoftmaxState<1, DECODE_OUTPUT_COLUMNS / 8> DecodeState;
typedef float DecodeScores[1][DECODE_KEY_TILES][4];

struct DecodeQueries {
    LeftFragment fragments[DECODE_QUERIES_IN_REGISTERS ? HEAD_COLUMNS / 16 : 1];
};

// The part of a call that a thread computes. Row r of the block is head (first_row + r) % group of the group, and query
// (first_row + r) / group.
struct DecodeBlock {
    int thread;
    int lane;
    int warp;
    int lane_row;          // of an accumulator
    int lane_column;
    int sequence_index;
    Sequence sequence;
    int key_head;
    int group;             // heads that share the key head
    int first_row;
    int rows;              // of the block, at most 16
    TileInterval keys;
    int row_first[2];      // the keys [row_first, row_end) of the lane's two rows
    int row_end[2];
    int first_tile;        // of the block's part of the keys
    int end_tile;
    const char* key_rows;
    const char* value_rows;
    const char* key_scales;
    const char* value_scales;
    u32 ring_at;           // of the warp
};

DEVICE int query_of_row(const DecodeBlock& block, int row) { return (block.first_row + row) / block.group; }
DEVICE int head_of_row(const DecodeBlock& block, int row) {
    return block.key_head * block.group + (block.first_row + row) % block.group;
}

// The column of the output of number e of matrix d of the accumulators: those of codes are permuted.
DEVICE int output_column(const DecodeBlock& block, int d, int e) {
#if KEY_CODES
    return column_of_codes(d, block.lane_column + e);
#else
    return 8 * d + block.lane_column + e;
#endif
}

#if KEY_CODES
// The address of the scales of a tile: the n-th ones of keys, or of values.
DEVICE u32 decode_key_scales_at(u32 tile_at, int n) { return tile_at + DECODE_TILE_SCALES_AT + n * DECODE_KEYS * 4; }
DEVICE u32 decode_value_scales_at(u32 tile_at, int n) { return decode_key_scales_at(tile_at, KEY_SCALES + n); }
#endif

DEVICE void load_decode_queries(const AttentionArguments& arguments, const DecodeBlock& block) {
    for (int row = block.warp; row < DECODE_ROWS; row += DECODE_WARPS) {
        const bool is_read = row < block.rows;
        const char* from = is_read ? row_address(arguments.queries, arguments.query_strides, block.sequence.batch,
                                                 head_of_row(block, row),
                                                 block.sequence.first_query + query_of_row(block, row), ELEMENT_BYTES)
                                   : (const char*)arguments.queries;
        load_head_tile<1, 32>(DECODE_QUERIES_AT + row * HEAD_PITCH, from, 0, 0, is_read ? 1 : 0, block.lane);
    }
    commit_copies();
}

// Finds the keys of the rows, and the block's part of them: warps take every DECODE_WARPS-th tile of it.
DEVICE void divide_keys(const AttentionArguments& arguments, DecodeBlock& block, int split) {
    int first = 0, end = 0;
    const bool is_row = block.lane < block.rows;
    if (is_row)
        attended_keys(arguments, block.sequence, block.sequence_index, query_of_row(block, block.lane), first, end);
    block.keys.first = first < end ? first : 0x7fffffff, block.keys.end = end;
    block.keys.common_first = is_row ? first : 0, block.keys.common_end = is_row ? end : 0x7fffffff;
    join_in_warp(block.keys);
    if (block.keys.first >= block.keys.end) block.keys.first = block.keys.end = 0;
    UNROLL for (int r = 0; r < 2; r++) {
        block.row_first[r] = shuffle_bits(first, block.lane_row + 8 * r);
        block.row_end[r] = shuffle_bits(end, block.lane_row + 8 * r);
    }
    const int begin = block.keys.first / DECODE_KEYS;
    const int tiles = (block.keys.end + DECODE_KEYS - 1) / DECODE_KEYS - begin;
    const int split_tiles = (tiles + arguments.splits - 1) / arguments.splits;
    const int share = (split_tiles + DECODE_WARPS - 1) / DECODE_WARPS * DECODE_WARPS;
    block.first_tile = begin + split * share;
    block.end_tile = begin + smaller(tiles, (split + 1) * share);
}

// Loads a tile of keys and values of the warp, if there is such a tile. Strides are read from the arguments each time,
// which takes fewer registers.
DEVICE void load_decode_tile(const AttentionArguments& arguments, const DecodeBlock& block, int tile, int slot) {
    if (tile < block.end_tile) {
        const int key = tile * DECODE_KEYS, first = block.keys.first - key, end = block.keys.end - key;
        const u32 to = block.ring_at + slot * DECODE_TILE_BYTES;
        const int index = block.sequence_index;
        const KeyRows keys = rows_from(arguments, block.key_rows, arguments.key_strides, index, DECODE_KEY_BYTES);
        const KeyRows values = rows_from(arguments, block.value_rows, arguments.value_strides, index, DECODE_KEY_BYTES);
#if KEY_CODES
        load_code_tile<DECODE_KEYS, HEAD_COLUMNS, DECODE_KEY_PITCH, 32>(to, keys, key, first, end, HEAD_DIM,
                                                                        block.lane);
        load_code_tile<DECODE_KEYS, DECODE_OUTPUT_COLUMNS, DECODE_VALUE_PITCH, 32>(
            to + DECODE_TILE_VALUES_AT, values, key, first, end, VALUE_DIM, block.lane);
#if KEY_PAGES
        const KeyRows key_scales = rows_from(arguments, block.key_scales, arguments.key_scale_strides, index, 4);
        const KeyRows value_scales = rows_from(arguments, block.value_scales, arguments.value_scale_strides, index, 4);
        load_scales<DECODE_KEYS, KEY_SCALES, 32>(decode_key_scales_at(to, 0), key_scales, key, first, end, block.lane);
        load_scales<DECODE_KEYS, VALUE_SCALES, 32>(decode_value_scales_at(to, 0), value_scales, key, first, end, block.lane);
#else
        const i64 key_scale = arguments.key_scale_strides.row, value_scale = arguments.value_scale_strides.row;
        load_scales<DECODE_KEYS, KEY_SCALES, 32>(decode_key_scales_at(to, 0), (const float*)block.key_scales + key * key_scale,
                                                 key_scale, first, end, block.lane);
        load_scales<DECODE_KEYS, VALUE_SCALES, 32>(decode_value_scales_at(to, 0),
                                                   (const float*)block.value_scales + key * value_scale, value_scale,
                                                   first, end, block.lane);
#endif
#else
        load_key_tile<DECODE_KEYS, 32>(to, keys, key, first, end, block.lane);
        load_key_values<DECODE_KEYS, 32>(to + DECODE_TILE_VALUES_AT, values, key, first, end, block.lane);
#endif
    }
    commit_copies();
}

DEVICE void load_query_fragment(LeftFragment& fragment, int k, int lane) {
#if KEY_CODES
    load_left_permuted<HEAD_PITCH>(fragment, DECODE_QUERIES_AT, 0, 16 * k, lane);
#else
    load_left<HEAD_PITCH>(fragment, DECODE_QUERIES_AT, 0, 16 * k, lane);
#endif
}

// Multiplies the queries and a tile of keys, by the columns from `first` to `end` of them, in matrices of 16.
DEVICE void multiply_decode_columns(const DecodeBlock& block, DecodeQueries& queries, u32 tile_at, int first, int end,
                                    DecodeScores& products) {
    clear(products);
    UNROLL for (int k = first; k < end; k++) {
        LeftFragment& left = queries.fragments[DECODE_QUERIES_IN_REGISTERS ? k : 0];
        if (!DECODE_QUERIES_IN_REGISTERS) load_query_fragment(left, k, block.lane);
        UNROLL for (int c = 0; c < DECODE_KEYS / 16; c++) {
            RightFragment keys;
#if KEY_CODES
            load_right_codes<DECODE_KEY_PITCH>(keys, tile_at, 16 * c, 16 * k, block.lane);
#else
            load_right<DECODE_KEY_PITCH>(keys, tile_at, 16 * c, 16 * k, block.lane);
#endif
            multiply_fragments(products[0][2 * c], products[0][2 * c + 1], left, keys);
        }
    }
}

DEVICE void multiply_decode_keys(const DecodeBlock& block, DecodeQueries& queries, u32 tile_at, DecodeScores& scores) {
#if KEY_CODES
    UNROLL for (int n = 0; n < KEY_SCALES; n++) {
        DecodeScores products;
        multiply_decode_columns(block, queries, tile_at, n * (KEY_SCALE_COLUMNS / 16),
                                (n + 1) * (KEY_SCALE_COLUMNS / 16), products);
        add_scaled_products(scores, products, decode_key_scales_at(tile_at, n), block.lane_column, n == 0);
    }
#else
    multiply_decode_columns(block, queries, tile_at, 0, HEAD_COLUMNS / 16, scores);
#endif
}

DEVICE void multiply_decode_values(const DecodeBlock& block, const DecodeScores& weights, u32 tile_at,
                                   DecodeState& state) {
    const u32 values_at = tile_at + DECODE_TILE_VALUES_AT;
    UNROLL for (int c = 0; c < DECODE_KEYS / 16; c++) {
        LeftFragment left;
#if KEY_CODES
        UNROLL for (int d = 0; d < DECODE_OUTPUT_COLUMNS / CODE_COLUMNS; d++) {
            if (d == 0 || VALUE_SCALES > 1)
                scaled_weights_to_left(left, weights[0][2 * c], weights[0][2 * c + 1],
                                       decode_value_scales_at(tile_at, d) + 16 * c * 4, block.lane_column);
            RightFragment values[CODE_COLUMNS / 16];
            load_right_codes_transposed<DECODE_VALUE_PITCH>(values, values_at, 16 * c, CODE_COLUMNS * d, block.lane);
            UNROLL for (int m = 0; m < CODE_COLUMNS / 16; m++) {
                const int matrix = CODE_COLUMNS / 8 * d + 2 * m;
                multiply_fragments(state.output[0][matrix], state.output[0][matrix + 1], left, values[m]);
            }
        }
#else
        accumulators_to_left(left, weights[0][2 * c], weights[0][2 * c + 1]);
        UNROLL for (int d = 0; d < VALUE_COLUMNS / 16; d++) {
            RightFragment values;
            load_right_transposed<DECODE_VALUE_PITCH>(values, values_at, 16 * c, 16 * d, block.lane);
            multiply_fragments(state.output[0][2 * d], state.output[0][2 * d + 1], left, values);
        }
#endif
    }
}

DEVICE void modify_decode_scores(const AttentionArguments& arguments, const DecodeBlock& block,
                                 const ScoreModifiers (&modifiers)[2], int key, DecodeScores& scores) {
    UNROLL for (int r = 0; r < 2; r++) {
        const int row = smaller(block.lane_row + 8 * r, block.rows - 1), query = query_of_row(block, row);
        UNROLL for (int c = 0; c < DECODE_KEY_TILES; c++)
            UNROLL for (int e = 0; e < 2; e++) {
                const int own_key = smaller(key + 8 * c + block.lane_column + e, block.sequence.key_count - 1);
                float derivative, &score = scores[0][c][2 * r + e];
                if (MODIFIES_SCORES) score = modify_score(modifiers[r], score, query, own_key, derivative);
                if (HAS_BIAS)
                    score = fused_multiply_add(load_bias(arguments, modifiers[r], query, own_key), SCORE_UNIT, score);
                if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, modifiers[r], query, own_key))
                    score = NEGATIVE_INFINITY;
            }
    }
}

DEVICE void mask_decode_scores(const DecodeBlock& block, int key, DecodeScores& scores) {
    UNROLL for (int r = 0; r < 2; r++)
        UNROLL for (int c = 0; c < DECODE_KEY_TILES; c++)
            UNROLL for (int e = 0; e < 2; e++) {
                const int own_key = key + 8 * c + block.lane_column + e;
                if (own_key < block.row_first[r] || own_key >= block.row_end[r])
                    scores[0][c][2 * r + e] = NEGATIVE_INFINITY;
            }
}

// Attends to the warp's tiles. Returns whether values that are not finite were left out.
DEVICE bool attend_to_tiles(const AttentionArguments& arguments, const DecodeBlock& block, DecodeQueries& queries,
                            DecodeState& state, float scale) {
#if MODIFIES_SCORES || HAS_BOOLEAN_MASK
    ScoreModifiers modifiers[2];
    UNROLL for (int r = 0; r < 2; r++)
        modifiers[r] = load_modifiers(arguments, block.sequence, block.sequence_index,
                                      head_of_row(block, smaller(block.lane_row + 8 * r, block.rows - 1)));
#endif
    const int first = block.first_tile + block.warp;
    UNROLL for (int n = 0; n < DECODE_STAGES - 1; n++) load_decode_tile(arguments, block, first + n * DECODE_WARPS, n);
    bool found = false;
    int slot = 0;
    for (int tile = first; tile < block.end_tile; tile += DECODE_WARPS) {
        const int key = tile * DECODE_KEYS;
        const u32 tile_at = block.ring_at + slot * DECODE_TILE_BYTES;
        const bool is_masked = block.keys.masks(key, DECODE_KEYS);
        wait_for_copies<DECODE_STAGES - 2>();
        if (!KEY_CODES && (HAS_BOOLEAN_MASK || ELEMENT == 2 || is_masked))
            found |= find_special_in_values<DECODE_KEYS, 32, true>(tile_at + DECODE_TILE_VALUES_AT, block.lane);
        warp_barrier();
        load_decode_tile(arguments, block, tile + (DECODE_STAGES - 1) * DECODE_WARPS,
                         slot == 0 ? DECODE_STAGES - 1 : slot - 1);
        DecodeScores scores;
        multiply_decode_keys(block, queries, tile_at, scores);
        if (!KEY_CODES)
            repair_products<HEAD_PITCH, HEAD_COLUMNS>(DECODE_QUERIES_AT, 0, tile_at, 0, block.lane, scores);
#if MODIFIES_SCORES || HAS_BOOLEAN_MASK
        modify_decode_scores(arguments, block, modifiers, key, scores);
#endif
        if (is_masked) mask_decode_scores(block, key, scores);
        update_softmax<false>(state, scores, scale);
        multiply_decode_values(block, scores, tile_at, state);
        slot = slot == DECODE_STAGES - 1 ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    return found;
}

// Stores the warp's outputs, and the maximum and the sum of its rows, in shared memory.
DEVICE void share_results(const DecodeBlock& block, const DecodeState& state) {
    UNROLL for (int r = 0; r < 2; r++) {
        const int row = block.warp * DECODE_ROWS + block.lane_row + 8 * r;
        const float sum = quad_sum(state.sum[0][r]);
        if (block.lane_column == 0) {
            float2 statistics;
            statistics.x = state.maximum[0][r], statistics.y = sum;
            store_shared<float2>(DECODE_STATISTICS_AT + row * 8, statistics);
        }
        const u32 row_at = DECODE_OUTPUTS_AT + row * DECODE_OUTPUT_COLUMNS * 4;
        UNROLL for (int d = 0; d < DECODE_OUTPUT_COLUMNS / 8; d++) {
#if KEY_CODES
            UNROLL for (int e = 0; e < 2; e++)
                store_shared<float>(row_at + output_column(block, d, e) * 4,
                                    state.output[0][d][2 * r + e] * CODE_OUTPUT_FACTOR);
#else
            float2 two;
            two.x = state.output[0][d][2 * r], two.y = state.output[0][d][2 * r + 1];
            store_shared<float2>(row_at + output_column(block, d, 0) * 4, two);
#endif
        }
    }
}

// The sum of the values in a column that are not finite, of the block's part of the keys that a row attends to.
DEVICE float special_values(const AttentionArguments& arguments, const DecodeBlock& block, int row, int column) {
    const int query = query_of_row(block, row);
    int first, end;
    attended_keys(arguments, block.sequence, block.sequence_index, query, first, end);
    first = larger(first, block.first_tile * DECODE_KEYS), end = smaller(end, block.end_tile * DECODE_KEYS);
    float sum = 0;
    for (int key = first; key < end; key++) {
#if KEY_PAGES
        const KeyRows values =
            rows_from(arguments, block.value_rows, arguments.value_strides, block.sequence_index, ELEMENT_BYTES);
        const float value = load_element(values.row(key), column);
#else
        const float value = load_element(block.value_rows, key * arguments.value_strides.row + column);
#endif
        if (is_finite(value)) continue;
        if (HAS_BOOLEAN_MASK) {
            const ScoreModifiers modifiers =
                load_modifiers(arguments, block.sequence, block.sequence_index, head_of_row(block, row));
            if (!load_boolean_mask(arguments, modifiers, query, key)) continue;
        }
        sum += value;
    }
    return sum;
}

// Combines the warps' results of a row, and stores them as output, or as a part that attention_combine reads.
DEVICE void store_decode_row(const AttentionArguments& arguments, const DecodeBlock& block, int row, int split,
                             float scale, bool has_special_values) {
    const int query = query_of_row(block, row), head = head_of_row(block, row);
    float factors[DECODE_WARPS], maximum = NEGATIVE_INFINITY, sum = 0;
    UNROLL for (int warp = 0; warp < DECODE_WARPS; warp++)
        maximum = larger(maximum, load_shared<float2>(DECODE_STATISTICS_AT + (warp * DECODE_ROWS + row) * 8).x);
    const float reference = maximum == NEGATIVE_INFINITY ? 0.0f : maximum;
    UNROLL for (int warp = 0; warp < DECODE_WARPS; warp++) {
        const float2 own = load_shared<float2>(DECODE_STATISTICS_AT + (warp * DECODE_ROWS + row) * 8);
        factors[warp] = exp2_approximate((own.x - reference) * scale);
        sum += own.y * factors[warp];
    }
    const bool is_whole = arguments.splits == 1;
    const RowResult result =
        finish_row(arguments, head, maximum, sum, scale, is_whole && arguments.sinks != nullptr);
    const i64 statistics = statistics_row(arguments, block.sequence, head) + query;
    const i64 part = split * result_rows(arguments) + statistics;
    char* output = row_address(arguments.output, arguments.output_strides, block.sequence.batch, head,
                               block.sequence.first_query + query, ELEMENT_BYTES);
    for (int column = block.lane; column < VALUE_DIM; column += 32) {
        float number = 0;
        UNROLL for (int warp = 0; warp < DECODE_WARPS; warp++) {
            const u32 at = DECODE_OUTPUTS_AT + ((warp * DECODE_ROWS + row) * DECODE_OUTPUT_COLUMNS + column) * 4;
            number += load_shared<float>(at) * factors[warp];
        }
        if (has_special_values) number += special_values(arguments, block, row, column);
        number *= result.factor;
        if (is_whole) store_element(output, column, number);
        else store_global(arguments.partial_outputs + part * VALUE_DIM + column, number);
    }
    if (block.lane != 0) return;
    if (is_whole) {
        store_row_result(arguments, statistics, result);
    } else {
        float2 own;
        own.x = maximum, own.y = sum;
        store_global(arguments.partial_statistics + part, own);
    }
}

KERNEL(attention_decode, DECODE_THREADS, 1, AttentionArguments) {
    DecodeBlock block;
    const GridPlace place = grid_place(arguments.splits, arguments.blocks * arguments.key_heads);
    const int split = place.x;
    block.thread = thread_index(), block.lane = block.thread & 31, block.warp = block.thread >> 5;
    block.lane_row = block.lane >> 2, block.lane_column = 2 * (block.lane & 3);
    block.sequence_index = place.z;
    block.sequence = load_sequence(arguments, block.sequence_index);
    block.key_head = place.y % arguments.key_heads;
    block.group = arguments.heads / arguments.key_heads;
    block.first_row = place.y / arguments.key_heads * DECODE_ROWS;
    block.rows = smaller(DECODE_ROWS, block.sequence.query_count * block.group - block.first_row);
    if (block.rows <= 0) return;
    const Sequence& sequence = block.sequence;
    block.key_rows = first_key_row(arguments.keys, arguments.key_strides, sequence, block.key_head, DECODE_KEY_BYTES);
    block.value_rows =
        first_key_row(arguments.values, arguments.value_strides, sequence, block.key_head, DECODE_KEY_BYTES);
#if KEY_CODES
    block.key_scales = first_key_row(arguments.key_scales, arguments.key_scale_strides, sequence, block.key_head, 4);
    block.value_scales =
        first_key_row(arguments.value_scales, arguments.value_scale_strides, sequence, block.key_head, 4);
#endif
    block.ring_at = DECODE_RING_AT + block.warp * DECODE_STAGES * DECODE_TILE_BYTES;
    load_decode_queries(arguments, block);
    divide_keys(arguments, block, split);
    wait_for_copies<0>();
    block_barrier();
    DecodeQueries queries;
    if (DECODE_QUERIES_IN_REGISTERS)
        UNROLL for (int k = 0; k < HEAD_COLUMNS / 16; k++)
            load_query_fragment(queries.fragments[DECODE_QUERIES_IN_REGISTERS ? k : 0], k, block.lane);

    const float scale = exponent_scale(arguments);
    DecodeState state;
    clear(state);
    const bool found = any_in_block(attend_to_tiles(arguments, block, queries, state, scale));
    share_results(block, state);
    block_barrier();
    for (int row = block.warp; row < block.rows; row += DECODE_WARPS)
        store_decode_row(arguments, block, row, split, scale, found);
}
#endif

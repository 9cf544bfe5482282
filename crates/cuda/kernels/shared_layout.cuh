// The layout of the shared memory of each kernel, in bytes from its beginning, and the bytes of a launch.
#pragma once
#include "specialization.cuh"

// ---- forward: queries, keys, values, bias, boolean mask, intervals ----

#define FORWARD_BIAS_PITCH (FORWARD_KEYS * BIAS_BYTES + 16)
#define FORWARD_MASK_PITCH (FORWARD_KEYS + 16)
#define FORWARD_QUERIES_AT 0
#define FORWARD_KEYS_AT (FORWARD_QUERIES_AT + FORWARD_QUERIES * HEAD_PITCH)
#define FORWARD_VALUES_AT (FORWARD_KEYS_AT + FORWARD_STAGES * FORWARD_KEYS * HEAD_PITCH)
#define FORWARD_BIAS_AT (FORWARD_VALUES_AT + FORWARD_STAGES * FORWARD_KEYS * VALUE_PITCH)
#define FORWARD_MASK_AT (FORWARD_BIAS_AT + (HAS_BIAS ? FORWARD_QUERIES * FORWARD_BIAS_PITCH : 0))
#define FORWARD_INTERVALS_AT (FORWARD_MASK_AT + (HAS_BOOLEAN_MASK ? FORWARD_QUERIES * FORWARD_MASK_PITCH : 0))
#define FORWARD_WARP_INTERVALS_AT (FORWARD_INTERVALS_AT + FORWARD_QUERIES * 8)
// With KEY_CODES: codes of keys and of values as they arrive, and two tiles of scales of each.
#define FORWARD_KEY_CODES_AT (FORWARD_WARP_INTERVALS_AT + FORWARD_WARPS * 16)
#define FORWARD_VALUE_CODES_AT (FORWARD_KEY_CODES_AT + FORWARD_KEYS * HEAD_COLUMNS)
#define FORWARD_KEY_SCALES_AT (FORWARD_VALUE_CODES_AT + FORWARD_KEYS * VALUE_COLUMNS)
#define FORWARD_VALUE_SCALES_AT (FORWARD_KEY_SCALES_AT + 2 * FORWARD_KEYS * 4)
#define FORWARD_CODE_BYTES (FORWARD_KEYS * (HEAD_COLUMNS + VALUE_COLUMNS + 16))
#define FORWARD_SHARED_BYTES (FORWARD_KEY_CODES_AT + (KEY_CODES ? FORWARD_CODE_BYTES : 0))

// ---- decode: queries, then a ring of tiles for each warp, and in its place the warps' results ----

// Columns of the output in registers. Codes are read four columns at a time, for four matrices of 8 columns.
#define DECODE_OUTPUT_COLUMNS (KEY_CODES ? (VALUE_COLUMNS + 31) / 32 * 32 : VALUE_COLUMNS)
#define DECODE_KEY_PITCH (KEY_CODES ? HEAD_COLUMNS + 16 : HEAD_PITCH)
#define DECODE_VALUE_PITCH (KEY_CODES ? DECODE_OUTPUT_COLUMNS + 16 : VALUE_PITCH)
// In a tile: keys, values, and with KEY_CODES the scales of keys and of values.
#define DECODE_TILE_VALUES_AT (DECODE_KEYS * DECODE_KEY_PITCH)
#define DECODE_TILE_SCALES_AT (DECODE_TILE_VALUES_AT + DECODE_KEYS * DECODE_VALUE_PITCH)
#define DECODE_TILE_BYTES (DECODE_TILE_SCALES_AT + (KEY_CODES ? DECODE_KEYS * 8 : 0))
#define DECODE_QUERIES_AT 0
#define DECODE_RING_AT (DECODE_ROWS * HEAD_PITCH)
#define DECODE_RING_BYTES (DECODE_WARPS * DECODE_STAGES * DECODE_TILE_BYTES)
// Results of the warps: rows of the output, and of each row its maximum and its sum.
#define DECODE_OUTPUTS_AT DECODE_RING_AT
#define DECODE_STATISTICS_AT (DECODE_OUTPUTS_AT + DECODE_WARPS * DECODE_ROWS * DECODE_OUTPUT_COLUMNS * 4)
#define DECODE_RESULT_BYTES (DECODE_WARPS * DECODE_ROWS * (DECODE_OUTPUT_COLUMNS + 2) * 4)
#define DECODE_SHARED_BYTES \
    (DECODE_RING_AT + (DECODE_RING_BYTES > DECODE_RESULT_BYTES ? DECODE_RING_BYTES : DECODE_RESULT_BYTES))

// ---- backward, intervals of tiles: intervals of the queries, then of the warps ----

#define TILES_SHARED_BYTES (BACKWARD_QUERIES * 8 + SMALL_BLOCK_THREADS / 2)

// ---- backward of queries: queries, gradients of the output, two tiles of keys and of values, intervals ----

#define QUERY_QUERIES_AT 0
#define QUERY_GRADIENTS_AT (QUERY_QUERIES_AT + QUERY_BLOCK * HEAD_PITCH)
#define QUERY_KEYS_AT (QUERY_GRADIENTS_AT + QUERY_BLOCK * VALUE_PITCH)
#define QUERY_VALUES_AT (QUERY_KEYS_AT + 2 * QUERY_KEYS * HEAD_PITCH)
#define QUERY_INTERVALS_AT (QUERY_VALUES_AT + 2 * QUERY_KEYS * VALUE_PITCH)
#define QUERY_WARP_INTERVALS_AT (QUERY_INTERVALS_AT + QUERY_BLOCK * 8)
#define QUERY_SHARED_BYTES (QUERY_WARP_INTERVALS_AT + QUERY_WARPS * 16)

// ---- backward of keys: keys, values, two tiles of queries and of gradients of the output, scores ----

#define KEY_KEYS_AT 0
#define KEY_VALUES_AT (KEY_KEYS_AT + KEY_BLOCK * HEAD_PITCH)
#define KEY_QUERIES_AT (KEY_VALUES_AT + KEY_BLOCK * VALUE_PITCH)
#define KEY_GRADIENTS_AT (KEY_QUERIES_AT + 2 * BACKWARD_QUERIES * HEAD_PITCH)
// The statistics, the delta and the interval of each query of the two tiles. A tile has log2_sum of all queries, then
// all deltas, then all intervals, then with NATURAL_SCORES all maxima.
#define KEY_STATISTICS_AT (KEY_GRADIENTS_AT + 2 * BACKWARD_QUERIES * VALUE_PITCH)
#define KEY_STATISTICS_BYTES (BACKWARD_QUERIES * (NATURAL_SCORES ? 20 : 16))
#define SCORE_PITCH (BACKWARD_QUERIES * ELEMENT_BYTES + ROW_PADDING)
#define SHARES_SCORE_GRADIENTS (FUSED_BACKWARD || WARPS_PER_KEYS > 1 || RELATIVE_BIAS_GRADIENT)
#define KEY_SCORE_GRADIENTS_AT (KEY_STATISTICS_AT + 2 * KEY_STATISTICS_BYTES)
#define KEY_WEIGHTS_AT (KEY_SCORE_GRADIENTS_AT + (SHARES_SCORE_GRADIENTS ? KEY_BLOCK * SCORE_PITCH : 0))
// The gradient of a relative bias is taken behind the softcap, that of a product before it.
#define SHARES_BIAS_GRADIENTS (RELATIVE_BIAS_GRADIENT && HAS_SOFTCAP)
#define KEY_BIAS_GRADIENTS_AT (KEY_WEIGHTS_AT + (WARPS_PER_KEYS > 1 ? KEY_BLOCK * SCORE_PITCH : 0))
#define KEY_SHARED_BYTES (KEY_BIAS_GRADIENTS_AT + (SHARES_BIAS_GRADIENTS ? KEY_BLOCK * SCORE_PITCH : 0))

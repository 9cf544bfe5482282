// The forward pass of few queries: as attention_forward, but the simdgroups of a threadgroup divide the keys of a tile,
// and all have the same 8 rows, which are the queries of all heads that share a key head. The keys are divided over
// threadgroups too: with `splits` above 1, each stores a part, which attention_combine combines.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "attention_buffers.metal"
#include "elements.cuh"
#include "masks.cuh"
#include "modifiers.cuh"
#include "row_results.cuh"
#include "combine_rows.cuh"
#include "tiles.metal"
#include "forward.metal"

#define DECODE_FRAGMENT_ROWS 8
// Fragments of the keys of a tile that a simdgroup computes.
#define DECODE_FRAGMENTS (FORWARD_KEY_FRAGMENTS < FORWARD_WARPS ? 1 : FORWARD_KEY_FRAGMENTS / FORWARD_WARPS)

DEVICE ForwardThread start_decode_thread(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence,
                                         int sequence_index, int key_head, int first_row, int thread_index) {
    ForwardThread own;
    own.index = thread_index, own.first_fragment = thread_index / 32 * DECODE_FRAGMENTS;
    own.row = fragment_row(thread_index % 32), own.column = fragment_column(thread_index % 32);
    const int group = arguments.heads / arguments.key_heads, row = first_row + own.row;
    own.is_query = row < sequence.query_count * group;
    own.query = own.is_query ? row / group : 0, own.head = key_head * group + (own.is_query ? row % group : 0);
    find_rows(own, arguments, sequence, sequence_index, key_head);
    return own;
}

// Leaves the threadgroup its part of the keys: successive tiles.
DEVICE void divide_keys(LOCAL ForwardThread& own, int split, int splits) {
    const int begin = own.first_key / FORWARD_KEYS, end = (own.end_key + FORWARD_KEYS - 1) / FORWARD_KEYS;
    const int share = (end - begin + splits - 1) / splits;
    own.first_key = larger(own.first_key, (begin + split * share) * FORWARD_KEYS);
    own.end_key = smaller(own.end_key, (begin + (split + 1) * share) * FORWARD_KEYS);
    if (own.first_key >= own.end_key) own.first_key = own.end_key = 0;
}

// Adds the outputs of the simdgroups, relative to the maximum of all, in the threads of the first one. `sums` has a
// pair of numbers for each row of each simdgroup, `outputs` a number for each column of the output of each row.
DEVICE void join_simdgroups(const LOCAL ForwardThread& own, SHARED(float) sums, SHARED(float) outputs, float scale,
                            LOCAL RowState& state, LOCAL float2* output) {
    const int simdgroup = own.index / 32;
    const float own_sum = row_sum(state.sum);
    block_barrier();
    if (own.column == 0) {
        SHARED(float) to = sums + (simdgroup * DECODE_FRAGMENT_ROWS + own.row) * 2;
        store_shared(to, state.maximum);
        store_shared(to + 1, own_sum);
    }
    block_barrier();
    float maximum = NEGATIVE_INFINITY, sum = 0;
    UNROLL for (int n = 0; n < FORWARD_WARPS; n++)
        maximum = larger(maximum, load_shared(sums + (n * DECODE_FRAGMENT_ROWS + own.row) * 2));
    const float reference = maximum == NEGATIVE_INFINITY ? 0.0f : maximum;
    UNROLL for (int n = 0; n < FORWARD_WARPS; n++) {
        SHARED(float) from = sums + (n * DECODE_FRAGMENT_ROWS + own.row) * 2;
        sum += load_shared(from + 1) * exp2_approximate((load_shared(from) - reference) * scale);
    }
    const float factor = exp2_approximate((state.maximum - reference) * scale);
    state.maximum = maximum, state.sum = own.column == 0 ? sum : 0.0f;
    UNROLL for (int n = 0; n < FORWARD_WARPS; n++) {
        if (simdgroup == n) {
            UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
                SHARED(float) at = outputs + (own.row * VALUE_COLUMNS + 8 * d + own.column);
                const float x = n == 0 ? 0.0f : load_shared(at), y = n == 0 ? 0.0f : load_shared(at + 1);
                store_shared(at, x + output[d].x * factor);
                store_shared(at + 1, y + output[d].y * factor);
            }
        }
        block_barrier();
    }
    if (simdgroup != 0) return;
    UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
        SHARED(float) at = outputs + (own.row * VALUE_COLUMNS + 8 * d + own.column);
        output[d].x = load_shared(at), output[d].y = load_shared(at + 1);
    }
}

// Stores a row of a part of the keys: its output, and the maximum of its scores and the sum of its weights.
DEVICE void store_part(const LOCAL AttentionArguments& arguments, const LOCAL ForwardThread& own,
                       const LOCAL Sequence& sequence, int split, const LOCAL RowState& state,
                       const LOCAL float2* output, float growth) {
    const float sum = row_sum(state.sum);
    if (!own.is_query) return;
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    const i64 row = split * result_rows(arguments) + statistics_row(arguments, sequence, own.head) + own.query;
    UNROLL for (int d = 0; d < VALUE_COLUMNS / 8; d++) {
        const int column = 8 * d + own.column;
        GLOBAL float* to = arguments.partial_outputs + row * VALUE_DIM + column;
        if (column < VALUE_DIM) store_global(to, output[d].x * factor * growth);
        if (column + 1 < VALUE_DIM) store_global(to + 1, output[d].y * factor * growth);
    }
    if (own.column != 0) return;
    float2 statistics;
    statistics.x = state.maximum, statistics.y = sum;
    store_global(arguments.partial_statistics + row, statistics);
}

KERNEL(attention_decode, FORWARD_THREADS) {
    SHARED_MEMORY(DECODE_SHARED_BYTES);
    AttentionArguments arguments;
    READ_ATTENTION_ARGUMENTS(arguments)
    const int split = (int)group_index % arguments.splits, rest = (int)group_index / arguments.splits;
    const int pairs = arguments.blocks * arguments.key_heads, sequence_index = rest / pairs;
    const int key_head = rest % pairs % arguments.key_heads;
    const int first_row = rest % pairs / arguments.key_heads * DECODE_FRAGMENT_ROWS;
    const Sequence sequence = load_sequence(arguments, sequence_index);
    if (first_row >= sequence.query_count * (arguments.heads / arguments.key_heads)) return;
    ForwardThread own =
        start_decode_thread(arguments, sequence, sequence_index, key_head, first_row, (int)thread_index);
    join_intervals(own, SHARED_AT(int, FORWARD_INTERVALS_AT));
    divide_keys(own, split, arguments.splits);
    const float scale = exponent_scale(arguments);
    float2 output[VALUE_COLUMNS / 8];
    RowState state;
    const bool is_careful =
        attend(arguments, own, DECODE_FRAGMENTS, SHARED_AT(Element, FORWARD_TILE_AT),
               SHARED_AT(u32, FORWARD_ANSWERS_AT), scale, state, output);
    join_simdgroups(own, SHARED_AT(float, DECODE_SUMS_AT), SHARED_AT(float, FORWARD_TILE_AT), scale, state, output);
    if (own.index >= 32) return;
    if (is_careful) add_special_values(arguments, own, output);
    const float growth = is_careful ? VALUE_GROWTH : 1.0f;
    if (arguments.splits == 1) store_results(arguments, own, sequence, state, output, scale, growth);
    else store_part(arguments, own, sequence, split, state, output, growth);
}

KERNEL(attention_combine, SMALL_BLOCK_THREADS) {
    AttentionArguments arguments;
    READ_ATTENTION_ARGUMENTS(arguments)
    const i64 rows = result_rows(arguments);
    const i64 row = (i64)group_index * (SMALL_BLOCK_THREADS / 32) + thread_index / 32;
    if (row < rows) combine_parts(arguments, rows, row, (int)thread_index % 32);
}

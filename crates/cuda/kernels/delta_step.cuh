// The gated delta rule token by token: for one token, for a few, and for heads that the kernels over chunks do not
// take.
//
// A block has 32 columns of a state, a lane for each, and a warp has some of the rows, in registers for all tokens.
//
// Grid: (ceil(VALUE_WIDTH / 32), H, N). Threads: STEP_WARPS * 32. Shared memory: STEP_SHARED bytes.
#pragma once

#include "delta_rows.cuh"

#define STEP_ROWS ((KEY_WIDTH + STEP_WARPS - 1) / STEP_WARPS)

// Reads the row of a token, and 32 of its values, by one warp.
DEVICE void read_step(const DeltaArguments& arguments, const DeltaTokens& tokens, int i, int warp, int lane,
                      int column) {
    float query[KEY_LANES], key[KEY_LANES], product = 0;
    read_row(arguments, tokens, i, lane, query, key);
    UNROLL for (int n = 0; n < KEY_LANES; n++) {
        const int row = lane + 32 * n;
        if (row < KEY_COLUMNS) {
            const u32 at = (warp * KEY_COLUMNS + row) * 4;
            store_shared(STEP_QUERIES + at, query[n]);
            store_shared(STEP_KEYS + at, key[n]);
            store_shared(STEP_FACTORS + at, decay_factor(arguments, tokens, i, row));
        }
        product += query[n] * key[n];
    }
    product = warp_sum(product);
    const bool is_read = i < tokens.count && column < VALUE_WIDTH;
    const float value = is_read ? load_element(arguments.values, value_row(arguments, tokens, i) + column) : 0.0f;
    store_shared(STEP_VALUES + (warp * 32 + lane) * 4, value);
    if (lane == 0) {
        store_shared(STEP_BETAS + warp * 4, beta_of(arguments, tokens, i));
        store_shared(STEP_PRODUCTS + warp * 4, product);
    }
}

// The sum over the warps of their sums for a column.
DEVICE float sum_over_warps(u32 sums, int lane) {
    float sum = 0;
    UNROLL for (int warp = 0; warp < STEP_WARPS; warp++) sum += load_shared<float>(sums + (warp * 32 + lane) * 4);
    return sum;
}

// Updates the rows of a warp by the token in slot `slot` and returns the token's error; writes its output.
DEVICE float step_token(const DeltaArguments& arguments, const DeltaTokens& tokens, int i, float (&state)[STEP_ROWS],
                        int warp, int lane, int column) {
    const int slot = i % STEP_WARPS, first_row = warp * STEP_ROWS;
    const u32 own_sums = STEP_SUMS + i % 2 * (2 * STEP_WARPS * 32 * 4);
    float key_sum = 0, query_sum = 0;
    UNROLL for (int n = 0; n < STEP_ROWS; n++) {
        if (first_row + n < KEY_WIDTH) {
            const u32 at = (slot * KEY_COLUMNS + first_row + n) * 4;
            state[n] *= load_shared<float>(STEP_FACTORS + at);
            key_sum += state[n] * load_shared<float>(STEP_KEYS + at);
            query_sum += state[n] * load_shared<float>(STEP_QUERIES + at);
        }
    }
    store_shared(own_sums + (warp * 32 + lane) * 4, key_sum);
    store_shared(own_sums + ((STEP_WARPS + warp) * 32 + lane) * 4, query_sum);
    block_barrier();
    float error = load_shared<float>(STEP_VALUES + (slot * 32 + lane) * 4);
    if (arguments.betas) error -= sum_over_warps(own_sums, lane);
    const float update = error * load_shared<float>(STEP_BETAS + slot * 4);
    UNROLL for (int n = 0; n < STEP_ROWS; n++) {
        if (first_row + n < KEY_WIDTH) {
            state[n] += update * load_shared<float>(STEP_KEYS + (slot * KEY_COLUMNS + first_row + n) * 4);
        }
    }
    // Warps write outputs by turns.
    if (arguments.output && warp == slot && column < VALUE_WIDTH) {
        const float stored = sum_over_warps(own_sums + STEP_WARPS * 32 * 4, lane);
        const i64 row = row_at(arguments.output_strides, tokens.entry, tokens.head, tokens.first + i);
        store_element(arguments.output, row + column, stored + update * load_shared<float>(STEP_PRODUCTS + slot * 4));
    }
    return error;
}

KERNEL(delta_step, STEP_WARPS * 32, 1, DeltaArguments) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const GridPlace place = grid_place((VALUE_WIDTH + 31) / 32, arguments.heads);
    const int head = place.y, column = place.x * 32 + lane, first_row = warp * STEP_ROWS;
    const DeltaSequence sequence = sequence_at(arguments, place.z);
    if (arguments.only_recurrent_heads && !load_global(recurrent_flag(arguments, sequence.index, head))) return;
    const DeltaTokens tokens = tokens_of(arguments, sequence, head, 0, sequence.tokens);
    const i64 state_from = state_at(arguments, sequence.index, head);
    float state[STEP_ROWS];
    UNROLL for (int n = 0; n < STEP_ROWS; n++) {
        const bool is_read = arguments.initial_states && first_row + n < KEY_WIDTH && column < VALUE_WIDTH;
        const i64 at = state_from + (first_row + n) * VALUE_WIDTH + column;
        state[n] = is_read ? load_global(arguments.initial_states + at) : 0.0f;
    }
    for (int i = 0; i < tokens.count; i++) {
        if (i % STEP_WARPS == 0) {
            block_barrier();
            if (i + warp < tokens.count) read_step(arguments, tokens, i + warp, warp, lane, column);
            block_barrier();
        }
        const i64 chunk_and_head = (i64)(sequence.first_chunk + i / CHUNK) * arguments.heads + head;
        if (arguments.chunk_states && i % CHUNK == 0 && column < VALUE_WIDTH) {
            float* to = arguments.chunk_states + (chunk_and_head * VALUE_COLUMNS + column) * KEY_COLUMNS;
            UNROLL for (int n = 0; n < STEP_ROWS; n++) {
                if (first_row + n < KEY_WIDTH) store_global(to + first_row + n, state[n]);
            }
        }
        const float error = step_token(arguments, tokens, i, state, warp, lane, column);
        if (arguments.errors && warp == 0 && column < VALUE_WIDTH) {
            store_global(arguments.errors + (chunk_and_head * CHUNK + i % CHUNK) * VALUE_COLUMNS + column, error);
        }
    }
    UNROLL for (int n = 0; n < STEP_ROWS; n++) {
        if (arguments.final_states && first_row + n < KEY_WIDTH && column < VALUE_WIDTH) {
            store_global(arguments.final_states + state_from + (first_row + n) * VALUE_WIDTH + column, state[n]);
        }
    }
}

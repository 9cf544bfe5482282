// The backward pass token by token, for the heads that the kernels over chunks do not take. It is slow: for each token
// the state before it is computed from the state before its chunk.
//
// Grid: (H, N). Threads: BACKWARD_STEP_WARPS * 32. Shared memory: BACKWARD_STEP_SHARED bytes.
#pragma once

#include "delta_row_gradients.cuh"

#define BACKWARD_STEP_THREADS (BACKWARD_STEP_WARPS * 32)

// A token of a chunk whose rows are in shared memory, and the states of its head in memory, both (D_k, D_v).
struct BackwardStep {
    ChunkRows rows;
    DeltaTokens tokens;
    int i;
    const float* errors;   // (CHUNK, VALUE_COLUMNS)
    float* state;          // transposed, (VALUE_COLUMNS, KEY_COLUMNS): the decayed state before the token
    float* state_gradient; // of the state after the token
    bool has_betas;
};

DEVICE float chunk_number(u32 rows, int i, int column) { return load_shared<float>(rows + i * KEY_PITCH + column * 4); }

// Computes the state before the token, times the factors of the token, and adds what the output of the token adds to
// the gradient of the state. A thread has the same numbers of both for all tokens of a chunk.
DEVICE void replay_tokens(const BackwardStep& step, const float* chunk_state) {
    for (int at = thread_index(); at < KEY_WIDTH * VALUE_WIDTH; at += BACKWARD_STEP_THREADS) {
        const int row = at / VALUE_WIDTH, column = at % VALUE_WIDTH;
        float x = load_global(chunk_state + column * KEY_COLUMNS + row);
        for (int m = 0; m < step.i; m++) {
            const float update =
                load_shared<float>(step.rows.betas + m * 4) * load_global(step.errors + m * VALUE_COLUMNS + column);
            x = x * chunk_number(step.rows.factors, m, row) + chunk_number(step.rows.keys, m, row) * update;
        }
        store_global(step.state + column * KEY_COLUMNS + row, x * chunk_number(step.rows.factors, step.i, row));
        const float output_gradient = load_shared<float>(BACKWARD_STEP_OUTPUTS + column * 4);
        const float before = load_global(step.state_gradient + at);
        store_global(step.state_gradient + at, before + chunk_number(step.rows.queries, step.i, row) * output_gradient);
    }
}

// Computes the gradients of the token's error and value, a column for each thread.
DEVICE void differentiate_values(const DeltaArguments& arguments, const BackwardStep& step) {
    const float beta = load_shared<float>(step.rows.betas + step.i * 4);
    for (int column = thread_index(); column < VALUE_WIDTH; column += BACKWARD_STEP_THREADS) {
        float gradient = 0;
        for (int row = 0; row < KEY_WIDTH; row++) {
            gradient += chunk_number(step.rows.keys, step.i, row) *
                        load_global(step.state_gradient + row * VALUE_WIDTH + column);
        }
        store_shared(BACKWARD_STEP_ERROR_GRADIENTS + column * 4, gradient);
        store_global(arguments.value_gradient + (step.tokens.first_row + step.i) * VALUE_WIDTH + column,
                     beta * gradient);
    }
}

// Computes the gradients of the token's query, key and logarithms, a row of the state for each thread.
DEVICE void differentiate_step(const BackwardStep& step) {
    const float beta = load_shared<float>(step.rows.betas + step.i * 4);
    for (int row = thread_index(); row < KEY_WIDTH; row += BACKWARD_STEP_THREADS) {
        const float key = chunk_number(step.rows.keys, step.i, row);
        float of_query = 0, of_key = 0, of_decay = 0;
        for (int column = 0; column < VALUE_WIDTH; column++) {
            const float state = load_global(step.state + column * KEY_COLUMNS + row);
            const float of_state = load_global(step.state_gradient + row * VALUE_WIDTH + column);
            const float update = beta * load_shared<float>(BACKWARD_STEP_ERRORS + column * 4);
            // Keys read nothing without a beta.
            const float y =
                step.has_betas ? beta * load_shared<float>(BACKWARD_STEP_ERROR_GRADIENTS + column * 4) : 0.0f;
            of_query += (state + key * update) * load_shared<float>(BACKWARD_STEP_OUTPUTS + column * 4);
            of_key += of_state * update - state * y;
            of_decay += (of_state - key * y) * state;
        }
        store_shared(BACKWARD_STEP_OF_QUERY + row * 4, of_query);
        store_shared(BACKWARD_STEP_OF_KEY + row * 4, of_key);
        const bool is_zero = chunk_number(step.rows.factors, step.i, row) == 0;
        store_shared(BACKWARD_STEP_OF_DECAY + row * 4, is_zero ? 0.0f : of_decay);
    }
}

// Replaces the gradient of the state after the token by that of the state before it.
DEVICE void differentiate_state(const BackwardStep& step) {
    const float beta = step.has_betas ? load_shared<float>(step.rows.betas + step.i * 4) : 0.0f;
    for (int at = thread_index(); at < KEY_WIDTH * VALUE_WIDTH; at += BACKWARD_STEP_THREADS) {
        const int row = at / VALUE_WIDTH, column = at % VALUE_WIDTH;
        const float y = beta * load_shared<float>(BACKWARD_STEP_ERROR_GRADIENTS + column * 4);
        const float decayed = load_global(step.state_gradient + at) - chunk_number(step.rows.keys, step.i, row) * y;
        store_global(step.state_gradient + at, decayed * chunk_number(step.rows.factors, step.i, row));
    }
}

DEVICE void step_backward(const DeltaArguments& arguments, const BackwardStep& step, const float* chunk_state) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const i64 output =
        row_at(arguments.output_gradient_strides, step.tokens.entry, step.tokens.head, step.tokens.first + step.i);
    for (int column = thread_index(); column < VALUE_WIDTH; column += BACKWARD_STEP_THREADS) {
        store_shared(BACKWARD_STEP_OUTPUTS + column * 4, load_element(arguments.output_gradient, output + column));
        store_shared(BACKWARD_STEP_ERRORS + column * 4, load_global(step.errors + step.i * VALUE_COLUMNS + column));
    }
    block_barrier();
    replay_tokens(step, chunk_state);
    block_barrier();
    differentiate_values(arguments, step);
    block_barrier();
    differentiate_step(step);
    block_barrier();
    differentiate_state(step);
    const i64 index = step.tokens.first_row + step.i;
    if (warp == 0) {
        RowGradients row;
        row.query = step.rows.queries + step.i * KEY_PITCH;
        row.key = step.rows.keys + step.i * KEY_PITCH;
        row.query_gradient = BACKWARD_STEP_OF_QUERY;
        row.key_gradient = BACKWARD_STEP_OF_KEY;
        row.decay_gradient = BACKWARD_STEP_OF_DECAY;
        row.row_factors = step.rows.row_factors + step.i * 8;
        write_row_gradients(arguments, row, index, lane);
    }
    if (warp == 1 && step.has_betas) {
        float sum = 0;
        for (int column = lane; column < VALUE_WIDTH; column += 32) {
            sum += load_shared<float>(BACKWARD_STEP_ERRORS + column * 4) *
                   load_shared<float>(BACKWARD_STEP_ERROR_GRADIENTS + column * 4);
        }
        sum = warp_sum(sum);
        if (lane == 0) store_global(arguments.beta_gradient + index, sum);
    }
    block_barrier();
}

KERNEL(delta_step_backward, BACKWARD_STEP_THREADS, 1, DeltaArguments) {
    const GridPlace place = grid_place(arguments.heads, arguments.sequences);
    const int head = place.x;
    const DeltaSequence sequence = sequence_at(arguments, place.y);
    if (!load_global(recurrent_flag(arguments, sequence.index, head))) return;
    const i64 state_from = state_at(arguments, sequence.index, head);
    BackwardStep step;
    step.rows = chunk_rows(BACKWARD_STEP_ROWS, BACKWARD_STEP_BETAS);
    step.has_betas = arguments.betas != nullptr;
    step.state_gradient = arguments.initial_state_gradient + state_from;
    // The scan stores no gradients of such a head: their place is free.
    const i64 first_chunk = (i64)sequence.first_chunk * arguments.heads + head;
    step.state = arguments.chunk_state_gradients + first_chunk * (VALUE_COLUMNS * KEY_COLUMNS);
    for (int at = thread_index(); at < KEY_WIDTH * VALUE_WIDTH; at += BACKWARD_STEP_THREADS) {
        const float* from = arguments.final_state_gradient;
        store_global(step.state_gradient + at, from ? load_global(from + state_from + at) : 0.0f);
    }
    for (int chunk = sequence.chunks - 1; chunk >= 0; chunk--) {
        const i64 chunk_and_head = (i64)(sequence.first_chunk + chunk) * arguments.heads + head;
        step.tokens = tokens_of(arguments, sequence, head, chunk * CHUNK, CHUNK);
        step.errors = arguments.errors + chunk_and_head * (CHUNK * VALUE_COLUMNS);
        read_chunk_rows<BACKWARD_STEP_WARPS>(arguments, step.tokens, step.rows);
        block_barrier();
        for (step.i = step.tokens.count - 1; step.i >= 0; step.i--) {
            step_backward(arguments, step, arguments.chunk_states + chunk_and_head * (VALUE_COLUMNS * KEY_COLUMNS));
        }
        block_barrier();
    }
}

// The scans over the chunks of each head: forward for states and outputs, and backward for the gradients of states.
//
// The columns of a state are independent of each other. A warp has 16 of them, as the rows of the transposed state in
// its sums, for all chunks one after the other. The warps of a block share the matrices of a chunk.
//
// Grid: (ceil(VALUE_COLUMNS / 16 / SCAN_WARPS), H, N). Threads: SCAN_WARPS * 32. Shared memory: SCAN_SHARED bytes,
// SCAN_STAGE for each of SCAN_STAGES chunks: 1, or 2 to copy the matrices of one while another is in use.
#pragma once

#include "delta_rows.cuh"

// The transposed state of 16 columns: sums of 16 rows and KEY_COLUMNS columns.
struct StateRows {
    Sums columns[KEY_COLUMNS / 8];
};

// Copies rows of WIDTH numbers to rows of PITCH bytes in shared memory.
template <int ROWS, int WIDTH, int PITCH> DEVICE void copy_rows(u32 to, const float* from) {
    for (int at = thread_index(); at < ROWS * (WIDTH / 4); at += SCAN_WARPS * 32) {
        copy_async_16(to + at / (WIDTH / 4) * PITCH + at % (WIDTH / 4) * 16, from + at * 4, 16);
    }
}

template <bool IS_BACKWARD> DEVICE void copy_tile(u32 stage, const float* tile) {
    copy_rows<3 * CHUNK, KEY_COLUMNS, KEY_PITCH>(stage + SCAN_READING, tile + TILE_READING);
    copy_rows<1, KEY_COLUMNS, KEY_PITCH>(stage + SCAN_KEPT, tile + TILE_KEPT);
    copy_rows<CHUNK, CHUNK, CHUNK_PITCH>(stage + SCAN_MIXING, tile + TILE_MIXING);
    if (!IS_BACKWARD) copy_rows<CHUNK, CHUNK, CHUNK_PITCH>(stage + SCAN_LOCAL, tile + TILE_LOCAL);
}

// Reads 16 columns of a state (D_k, D_v), or zeros.
DEVICE void read_state(StateRows& state, const float* from, int first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n++) {
        UNROLL for (int e = 0; e < 4; e++) {
            const int row = 8 * n + 2 * t + (e & 1), column = first_column + g + 8 * (e / 2);
            const bool is_read = from && row < KEY_WIDTH && column < VALUE_WIDTH;
            state.columns[n][e] = is_read ? load_global(from + row * VALUE_WIDTH + column) : 0.0f;
        }
    }
}

DEVICE void write_state(const StateRows& state, float* to, int first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n++) {
        UNROLL for (int e = 0; e < 4; e++) {
            const int row = 8 * n + 2 * t + (e & 1), column = first_column + g + 8 * (e / 2);
            if (row < KEY_WIDTH && column < VALUE_WIDTH)
                store_global(to + row * VALUE_WIDTH + column, state.columns[n][e]);
        }
    }
}

// Stores the rows of the transposed state in a matrix (VALUE_COLUMNS, KEY_COLUMNS).
DEVICE void write_transposed_state(const StateRows& state, float* to, int first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n++) {
        UNROLL for (int half = 0; half < 2; half++) {
            float2 two;
            two.x = state.columns[n][2 * half];
            two.y = state.columns[n][2 * half + 1];
            store_global((float2*)(to + (first_column + g + 8 * half) * KEY_COLUMNS + 8 * n + 2 * t), two);
        }
    }
}

// Reads 16 columns of the values, or of the gradients of outputs, of 16 tokens, in the order of a left operand whose
// rows are the columns.
template <bool IS_BACKWARD>
DEVICE void read_values(float (&values)[8], const DeltaArguments& arguments, const DeltaTokens& tokens, int first_token,
                        int first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int s = 0; s < 2; s++) {
        UNROLL for (int e = 0; e < 2; e++) {
            const int i = first_token + 8 * s + 2 * t + e;
            i64 row = 0;
            if (i < tokens.count) {
                row = IS_BACKWARD
                          ? row_at(arguments.output_gradient_strides, tokens.entry, tokens.head, tokens.first + i)
                          : value_row(arguments, tokens, i);
            }
            UNROLL for (int half = 0; half < 2; half++) {
                const int column = first_column + g + 8 * half;
                const void* from = IS_BACKWARD ? arguments.output_gradient : arguments.values;
                const bool is_read = i < tokens.count && column < VALUE_WIDTH;
                values[4 * s + 2 * e + half] = is_read ? load_element(from, row + column) : 0.0f;
            }
        }
    }
}

DEVICE void values_to_left(LeftOperand& operand, const float (&values)[8]) {
    UNROLL for (int e = 0; e < 8; e++) set_operand(operand, e, values[e]);
}

// Stores the transpose of sums over tokens as rows of VALUE_COLUMNS numbers.
DEVICE void write_errors(const Sums (&errors)[CHUNK / 8], float* to, int first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int n = 0; n < CHUNK / 8; n++) {
        UNROLL for (int e = 0; e < 4; e++) {
            store_global(to + (8 * n + 2 * t + (e & 1)) * VALUE_COLUMNS + first_column + g + 8 * (e / 2), errors[n][e]);
        }
    }
}

DEVICE void write_output(const DeltaArguments& arguments, const DeltaTokens& tokens, const Sums (&outputs)[CHUNK / 8],
                         int first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int n = 0; n < CHUNK / 8; n++) {
        UNROLL for (int e = 0; e < 2; e++) {
            const int i = 8 * n + 2 * t + e;
            if (i >= tokens.count) continue;
            const i64 row = row_at(arguments.output_strides, tokens.entry, tokens.head, tokens.first + i);
            UNROLL for (int half = 0; half < 2; half++) {
                const int column = first_column + g + 8 * half;
                if (column < VALUE_WIDTH) store_element(arguments.output, row + column, outputs[n][2 * half + e]);
            }
        }
    }
}

// Adds the product of a left operand and CHUNK rows of shared memory, transposed, over a depth of 16.
template <int PITCH>
DEVICE void add_over_tokens(Sums (&sums)[CHUNK / 8], const LeftOperand& left, u32 rows, int depth, int lane) {
    UNROLL for (int token = 0; token < CHUNK; token += 16) {
        RightOperand right;
        read_right_transposed<PITCH>(right, rows, depth, token, lane);
        add_product(sums[token / 8], sums[token / 8 + 1], left, right);
    }
}

// Adds the product of a left operand and 16 rows of KEY_COLUMNS numbers to a state.
DEVICE void add_to_state(StateRows& state, const LeftOperand& left, u32 rows, int first_row, int lane) {
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n += 2) {
        RightOperand right;
        read_right<KEY_PITCH>(right, rows, first_row, 8 * n, lane);
        add_product(state.columns[n], state.columns[n + 1], left, right);
    }
}

DEVICE void keep_state(StateRows& state, u32 kept, int lane) {
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n++) {
        const float2 factors = load_shared<float2>(kept + (8 * n + 2 * (lane & 3)) * 4);
        state.columns[n][0] *= factors.x;
        state.columns[n][1] *= factors.y;
        state.columns[n][2] *= factors.x;
        state.columns[n][3] *= factors.y;
    }
}

// Computes a chunk of the forward pass from its matrices in shared memory, and replaces the state.
DEVICE void scan_chunk(const DeltaArguments& arguments, const DeltaTokens& tokens, StateRows& state, u32 stage,
                       i64 chunk_and_head, int first_column, int lane) {
    if (arguments.chunk_states) {
        float* to = arguments.chunk_states + chunk_and_head * (VALUE_COLUMNS * KEY_COLUMNS);
        write_transposed_state(state, to, first_column, lane);
    }
    Sums errors[CHUNK / 8], outputs[CHUNK / 8];
    UNROLL for (int n = 0; n < CHUNK / 8; n++)
        UNROLL for (int e = 0; e < 4; e++) errors[n][e] = outputs[n][e] = 0;
    // Read before they are needed, since memory is slow.
    float values[CHUNK / 16][8];
    UNROLL for (int n = 0; n < CHUNK / 16; n++)
        read_values<false>(values[n], arguments, tokens, 16 * n, first_column, lane);
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n += 2) {
        LeftOperand left;
        sums_to_left(left, state.columns[n], state.columns[n + 1]);
        add_over_tokens<KEY_PITCH>(errors, left, stage + SCAN_READING, 8 * n, lane);
        if (arguments.output) add_over_tokens<KEY_PITCH>(outputs, left, stage + SCAN_QUERIES, 8 * n, lane);
    }
    UNROLL for (int n = 0; n < CHUNK / 16; n++) {
        LeftOperand left;
        values_to_left(left, values[n]);
        add_over_tokens<CHUNK_PITCH>(errors, left, stage + SCAN_LOCAL, 16 * n, lane);
    }
    keep_state(state, stage + SCAN_KEPT, lane);
    UNROLL for (int token = 0; token < CHUNK; token += 16) {
        LeftOperand left;
        sums_to_left(left, errors[token / 8], errors[token / 8 + 1]);
        if (arguments.output) add_over_tokens<CHUNK_PITCH>(outputs, left, stage + SCAN_MIXING, token, lane);
        add_to_state(state, left, stage + SCAN_WRITING, token, lane);
    }
    if (arguments.output) write_output(arguments, tokens, outputs, first_column, lane);
    if (arguments.errors) {
        write_errors(errors, arguments.errors + chunk_and_head * (CHUNK * VALUE_COLUMNS), first_column, lane);
    }
}

// Computes a chunk of the backward pass, and replaces the gradient of the state after the chunk by that of the state
// before it.
DEVICE void scan_chunk_backward(const DeltaArguments& arguments, const DeltaTokens& tokens, StateRows& state, u32 stage,
                                i64 chunk_and_head, int first_column, int lane) {
    float* to = arguments.chunk_state_gradients + chunk_and_head * (VALUE_COLUMNS * KEY_COLUMNS);
    write_transposed_state(state, to, first_column, lane);
    Sums errors[CHUNK / 8];
    UNROLL for (int n = 0; n < CHUNK / 8; n++)
        UNROLL for (int e = 0; e < 4; e++) errors[n][e] = 0;
    // Read before they are needed, since memory is slow.
    float gradients[CHUNK / 16][8];
    UNROLL for (int n = 0; n < CHUNK / 16; n++) {
        read_values<true>(gradients[n], arguments, tokens, 16 * n, first_column, lane);
    }
    UNROLL for (int n = 0; n < KEY_COLUMNS / 8; n += 2) {
        LeftOperand left;
        sums_to_left(left, state.columns[n], state.columns[n + 1]);
        add_over_tokens<KEY_PITCH>(errors, left, stage + SCAN_READING, 8 * n, lane);
    }
    keep_state(state, stage + SCAN_KEPT, lane);
    UNROLL for (int depth = 0; depth < CHUNK; depth += 16) {
        LeftOperand left;
        values_to_left(left, gradients[depth / 16]);
        UNROLL for (int token = 0; token < CHUNK; token += 16) {
            RightOperand right;
            read_right<CHUNK_PITCH>(right, stage + SCAN_MIXING, depth, token, lane);
            add_product(errors[token / 8], errors[token / 8 + 1], left, right);
        }
        add_to_state(state, left, stage + SCAN_QUERIES, depth, lane);
    }
    UNROLL for (int token = 0; token < CHUNK; token += 16) {
        LeftOperand left;
        sums_to_left(left, errors[token / 8], errors[token / 8 + 1]);
        add_to_state(state, left, stage + SCAN_WRITING, token, lane);
    }
    write_errors(errors, arguments.error_gradients + chunk_and_head * (CHUNK * VALUE_COLUMNS), first_column, lane);
}

template <bool IS_BACKWARD> DEVICE void scan_head(const DeltaArguments& arguments) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const GridPlace place = grid_place((VALUE_COLUMNS / 16 + SCAN_WARPS - 1) / SCAN_WARPS, arguments.heads);
    const int head = place.y;
    const int first_column = (place.x * SCAN_WARPS + warp) * 16;
    const bool has_columns = first_column < VALUE_COLUMNS;
    const DeltaSequence sequence = sequence_at(arguments, place.z);
    if (load_global(recurrent_flag(arguments, sequence.index, head))) return;
    const i64 state_from = state_at(arguments, sequence.index, head);
    const float* initial = IS_BACKWARD ? arguments.final_state_gradient : arguments.initial_states;
    float* result = IS_BACKWARD ? arguments.initial_state_gradient : arguments.final_states;
    StateRows state;
    if (has_columns) read_state(state, initial ? initial + state_from : nullptr, first_column, lane);

    const int step = IS_BACKWARD ? -1 : 1, first = IS_BACKWARD ? sequence.chunks - 1 : 0;
    if (SCAN_STAGES == 2) {
        if (sequence.chunks) copy_tile<IS_BACKWARD>(0, tile_of(arguments, sequence.first_chunk + first, head));
        commit_copies();
    }
    for (int n = 0; n < sequence.chunks; n++) {
        const int chunk = first + step * n;
        const u32 stage = n % SCAN_STAGES * SCAN_STAGE;
        if (SCAN_STAGES == 1) copy_tile<IS_BACKWARD>(stage, tile_of(arguments, sequence.first_chunk + chunk, head));
        if (SCAN_STAGES == 1) commit_copies();
        wait_for_copies<0>();
        block_barrier();
        if (SCAN_STAGES == 2 && n + 1 < sequence.chunks) {
            const float* next = tile_of(arguments, sequence.first_chunk + chunk + step, head);
            copy_tile<IS_BACKWARD>((n + 1) % 2 * SCAN_STAGE, next);
            commit_copies();
        }
        if (has_columns) {
            const DeltaTokens tokens = tokens_of(arguments, sequence, head, chunk * CHUNK, CHUNK);
            const i64 chunk_and_head = (i64)(sequence.first_chunk + chunk) * arguments.heads + head;
            if (IS_BACKWARD) scan_chunk_backward(arguments, tokens, state, stage, chunk_and_head, first_column, lane);
            else scan_chunk(arguments, tokens, state, stage, chunk_and_head, first_column, lane);
        }
        if (SCAN_STAGES == 1) block_barrier();
    }
    if (has_columns && result) write_state(state, result + state_from, first_column, lane);
}

KERNEL(delta_scan, SCAN_WARPS * 32, 1, DeltaArguments) { scan_head<false>(arguments); }

#if HAS_BACKWARD
KERNEL(delta_scan_backward, SCAN_WARPS * 32, 1, DeltaArguments) { scan_head<true>(arguments); }
#endif

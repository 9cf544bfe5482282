// The gradients of the rows of each chunk and head, from the states before the chunks, the gradients of the states
// after them, and the errors and their gradients that the scans stored: all chunks side by side.
//
// With U = beta E and Y = beta X, the gradients are of
//
//     values            Y                                  betas              the sums of E * X over the columns
//     query_products    dO transposed U                    key_products       -Y transposed U
//     reading queries   dO transposed S                    reading keys       -Y transposed S
//     writing keys      U transposed dS'
//
// The gradient of the logarithm of a factor is the sum, over all products of what was stored before the token and what
// the token or a later one reads, of the product times its gradient. Each such term has the factor itself, and is as
// small as the gradient. No sums of other terms are subtracted from each other: their rounding errors would exceed the
// gradient where factors are small.
//
// Grid: (chunks, H). Threads: GRADIENT_WARPS * 32. Shared memory: GRADIENT_SHARED bytes.
#pragma once

#include "delta_row_gradients.cuh"

// The gradients of reading queries, of reading keys and of writing keys, in the place of the rows of D_v.
#define GRADIENT_OF_QUERIES GRADIENT_OUTPUTS
#define GRADIENT_OF_KEYS GRADIENT_UPDATES
#define GRADIENT_OF_WRITING GRADIENT_MINUS_Y

// Reads the gradients of outputs, U and -Y, and writes the gradients of values and betas.
DEVICE void read_value_rows(const DeltaArguments& arguments, const DeltaTokens& tokens, i64 chunk_and_head) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    for (int i = warp; i < CHUNK; i += GRADIENT_WARPS) {
        const bool exists = i < tokens.count;
        const float beta = beta_of(arguments, tokens, i);
        const i64 row = (chunk_and_head * CHUNK + i) * VALUE_COLUMNS;
        const i64 output =
            exists ? row_at(arguments.output_gradient_strides, tokens.entry, tokens.head, tokens.first + i) : 0;
        float beta_gradient = 0;
        for (int column = lane; column < VALUE_COLUMNS; column += 32) {
            const bool is_read = exists && column < VALUE_WIDTH;
            const float error = is_read ? load_global(arguments.errors + row + column) : 0.0f;
            const float error_gradient = is_read ? load_global(arguments.error_gradients + row + column) : 0.0f;
            const u32 at = i * GRADIENT_PITCH + column * 4;
            store_shared(GRADIENT_OUTPUTS + at,
                         is_read ? load_element(arguments.output_gradient, output + column) : 0.0f);
            store_shared(GRADIENT_UPDATES + at, beta * error);
            // Keys read nothing without a beta.
            store_shared(GRADIENT_MINUS_Y + at, arguments.betas ? -beta * error_gradient : 0.0f);
            beta_gradient += error * error_gradient;
            if (is_read) {
                const i64 to = (tokens.first_row + i) * VALUE_WIDTH + column;
                store_global(arguments.value_gradient + to, beta * error_gradient);
            }
        }
        beta_gradient = warp_sum(beta_gradient);
        if (lane == 0 && exists && arguments.betas) {
            store_global(arguments.beta_gradient + tokens.first_row + i, beta_gradient);
        }
    }
}

// Computes the gradients of key_products and query_products.
DEVICE void differentiate_products() {
    const int warp = thread_index() / 32, lane = thread_index() % 32, g = lane >> 2, t = lane & 3;
    const int squares = (CHUNK / 16) * (CHUNK / 16);
    for (int task = warp; task < 2 * squares; task += GRADIENT_WARPS) {
        const int row = task % squares / (CHUNK / 16) * 16, column = task % (CHUNK / 16) * 16;
        const u32 left_rows = task < squares ? GRADIENT_MINUS_Y : GRADIENT_OUTPUTS;
        const u32 to = task < squares ? GRADIENT_OF_KEY_PRODUCTS : GRADIENT_OF_QUERY_PRODUCTS;
        Sums sums[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        for (int depth = 0; depth < VALUE_COLUMNS; depth += 16) {
            LeftOperand left;
            RightOperand right;
            read_left<GRADIENT_PITCH>(left, left_rows, row, depth, lane);
            read_right_transposed<GRADIENT_PITCH>(right, GRADIENT_UPDATES, depth, column, lane);
            add_product(sums[0], sums[1], left, right);
        }
        UNROLL for (int j = 0; j < 2; j++)
            UNROLL for (int e = 0; e < 4; e++) {
                const int i = row + g + 8 * (e / 2), at = column + 8 * j + 2 * t + (e & 1);
                store_shared(to + i * CHUNK_PITCH + at * 4, sums[j][e]);
            }
    }
}

// The gradients of 16 columns of reading queries, reading keys and writing keys, and for each column the sum of the
// products of the state before the chunk with the gradient of the state after it.
struct ColumnGradients {
    Sums queries[CHUNK / 16][2];
    Sums keys[CHUNK / 16][2];
    Sums writing[CHUNK / 16][2];
    float ends[2];
};

DEVICE void differentiate_columns(const DeltaArguments& arguments, i64 chunk_and_head, int column, int lane,
                                  ColumnGradients& gradients) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int m = 0; m < CHUNK / 16; m++)
        UNROLL for (int j = 0; j < 2; j++)
            UNROLL for (int e = 0; e < 4; e++) {
                gradients.queries[m][j][e] = gradients.keys[m][j][e] = gradients.writing[m][j][e] = 0;
            }
    gradients.ends[0] = gradients.ends[1] = 0;
    const i64 from = chunk_and_head * (VALUE_COLUMNS * KEY_COLUMNS);
    for (int depth = 0; depth < VALUE_COLUMNS; depth += 16) {
        RightOperand state, state_gradient;
        UNROLL for (int j = 0; j < 2; j++)
            UNROLL for (int s = 0; s < 2; s++)
                UNROLL for (int e = 0; e < 2; e++) {
                    const i64 at = from + (depth + 8 * s + 2 * t + e) * KEY_COLUMNS + column + 8 * j + g;
                    const float x = load_global(arguments.chunk_states + at);
                    const float dx = load_global(arguments.chunk_state_gradients + at);
                    gradients.ends[j] += x * dx;
                    set_operand(state, 4 * j + 2 * s + e, x);
                    set_operand(state_gradient, 4 * j + 2 * s + e, dx);
                }
        UNROLL for (int m = 0; m < CHUNK / 16; m++) {
            LeftOperand left;
            read_left<GRADIENT_PITCH>(left, GRADIENT_OUTPUTS, 16 * m, depth, lane);
            add_product(gradients.queries[m][0], gradients.queries[m][1], left, state);
            read_left<GRADIENT_PITCH>(left, GRADIENT_MINUS_Y, 16 * m, depth, lane);
            add_product(gradients.keys[m][0], gradients.keys[m][1], left, state);
            read_left<GRADIENT_PITCH>(left, GRADIENT_UPDATES, 16 * m, depth, lane);
            add_product(gradients.writing[m][0], gradients.writing[m][1], left, state_gradient);
        }
    }
    UNROLL for (int j = 0; j < 2; j++) gradients.ends[j] = quad_sum(gradients.ends[j]);
}

DEVICE void store_columns(const Sums (&sums)[CHUNK / 16][2], u32 to, int column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int m = 0; m < CHUNK / 16; m++)
        UNROLL for (int j = 0; j < 2; j++)
            UNROLL for (int half = 0; half < 2; half++) {
                float2 two;
                two.x = sums[m][j][2 * half];
                two.y = sums[m][j][2 * half + 1];
                store_shared(to + (16 * m + g + 8 * half) * GRADIENT_PITCH + (column + 8 * j + 2 * t) * 4, two);
            }
}

DEVICE float product_gradient(u32 products, int i, int j) {
    return load_shared<float>(products + i * CHUNK_PITCH + j * 4);
}

// Returns the product of the factors of all tokens, at a column.
DEVICE float product_of_factors(u32 factors) {
    float product = 1;
    for (int i = 0; i < CHUNK; i++) product *= load_shared<float>(factors + i * KEY_PITCH);
    return product;
}

// Computes a column of the gradients of queries, keys and logarithms of factors, from the last token to the first. The
// gradients of queries and keys replace the gradients of reading rows, and the gradients of the logarithms replace
// the factors. The gradients of writing rows become the gradients of the keys that write, by what token i and all
// tokens after it read.
DEVICE void differentiate_rows(int column) {
    const u32 queries = GRADIENT_QUERIES + column * 4, keys = GRADIENT_KEYS + column * 4;
    const u32 factors = GRADIENT_FACTORS + column * 4, writing = GRADIENT_OF_WRITING + column * 4;
    // The terms of the state before the chunk in the gradient of the logarithm of token i.
    float of_state = product_of_factors(factors) * load_shared<float>(GRADIENT_ENDS + column * 4);
    for (int i = CHUNK - 1; i >= 0; i--) {
        const u32 row = i * KEY_PITCH, at = i * GRADIENT_PITCH + column * 4;
        const float query = load_shared<float>(queries + row), key = load_shared<float>(keys + row);
        const float factor = load_shared<float>(factors + row);
        float query_gradient = 0, reading_gradient = 0, decay_gradient = 0;
        float between = 1; // the product of the factors of the tokens after j and before i
        for (int j = i - 1; j >= 0; j--) {
            const float earlier_key = between * load_shared<float>(keys + j * KEY_PITCH);
            const float by_query = product_gradient(GRADIENT_OF_QUERY_PRODUCTS, i, j);
            const float by_key = product_gradient(GRADIENT_OF_KEY_PRODUCTS, i, j);
            query_gradient += earlier_key * by_query;
            reading_gradient += earlier_key * by_key;
            const float later_reads = load_shared<float>(writing + j * GRADIENT_PITCH);
            const float written = factor * (later_reads + key * by_key + query * by_query);
            store_shared(writing + j * GRADIENT_PITCH, written);
            decay_gradient += earlier_key * written;
            between *= load_shared<float>(factors + j * KEY_PITCH);
        }
        const float of_reading_query = between * load_shared<float>(GRADIENT_OF_QUERIES + at);
        const float of_reading_key = between * load_shared<float>(GRADIENT_OF_KEYS + at);
        of_state += factor * (query * of_reading_query + key * of_reading_key);
        decay_gradient += of_state;
        const float own = product_gradient(GRADIENT_OF_QUERY_PRODUCTS, i, i);
        const float writing_gradient = load_shared<float>(writing + i * GRADIENT_PITCH) + own * query;
        store_shared(GRADIENT_OF_QUERIES + at, factor * (query_gradient + of_reading_query) + own * key);
        store_shared(GRADIENT_OF_KEYS + at, factor * (reading_gradient + of_reading_key) + writing_gradient);
        // The logarithm of a factor of 0 has no gradient.
        store_shared(factors + row, factor > 0 ? decay_gradient : 0.0f);
    }
}

KERNEL(delta_gradients, GRADIENT_WARPS * 32, 1, DeltaArguments) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const GridPlace place = grid_place(arguments.chunks, arguments.heads);
    const int chunk = place.x, head = place.y;
    const DeltaSequence sequence = sequence_of_chunk(arguments, chunk);
    if (load_global(recurrent_flag(arguments, sequence.index, head))) return;
    const DeltaTokens tokens =
        tokens_of(arguments, sequence, head, (chunk - sequence.first_chunk) * CHUNK, CHUNK);
    const i64 chunk_and_head = (i64)chunk * arguments.heads + head;
    const ChunkRows rows = chunk_rows(GRADIENT_QUERIES, GRADIENT_BETAS);
    read_chunk_rows<GRADIENT_WARPS>(arguments, tokens, rows);
    read_value_rows(arguments, tokens, chunk_and_head);
    block_barrier();
    differentiate_products();
    const int column = 16 * warp;
    ColumnGradients gradients;
    if (column < KEY_COLUMNS) differentiate_columns(arguments, chunk_and_head, column, lane, gradients);
    block_barrier();
    if (column < KEY_COLUMNS) {
        store_columns(gradients.queries, GRADIENT_OF_QUERIES, column, lane);
        store_columns(gradients.keys, GRADIENT_OF_KEYS, column, lane);
        store_columns(gradients.writing, GRADIENT_OF_WRITING, column, lane);
        if (lane % 4 == 0) {
            UNROLL for (int j = 0; j < 2; j++)
                store_shared(GRADIENT_ENDS + (column + 8 * j + lane / 4) * 4, gradients.ends[j]);
        }
    }
    block_barrier();
    for (int n = thread_index(); n < KEY_COLUMNS; n += GRADIENT_WARPS * 32) differentiate_rows(n);
    block_barrier();
    for (int i = warp; i < tokens.count; i += GRADIENT_WARPS) {
        RowGradients row;
        row.query = GRADIENT_QUERIES + i * KEY_PITCH;
        row.key = GRADIENT_KEYS + i * KEY_PITCH;
        row.query_gradient = GRADIENT_OF_QUERIES + i * GRADIENT_PITCH;
        row.key_gradient = GRADIENT_OF_KEYS + i * GRADIENT_PITCH;
        row.decay_gradient = GRADIENT_FACTORS + i * KEY_PITCH;
        row.row_factors = rows.row_factors + i * 8;
        write_row_gradients(arguments, row, tokens.first_row + i, lane);
    }
}

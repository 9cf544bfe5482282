// The matrices of each chunk and head that the scans over chunks read: all chunks side by side.
//
// Grid: (chunks, H). Threads: PREPARE_WARPS * 32. Shared memory: PREPARE_SHARED bytes.
#pragma once

#include "delta_rows.cuh"

// Computes key_products below the diagonal and query_products up to the diagonal, and the writing rows: a warp takes
// the key of a token along the tokens after it.
DEVICE void multiply_rows(int warp, int lane) {
    for (int j = warp; j < CHUNK; j += PREPARE_WARPS) {
        float decayed[KEY_LANES];
        UNROLL for (int n = 0; n < KEY_LANES; n++) {
            const int column = lane + 32 * n;
            decayed[n] = column < KEY_COLUMNS ? load_shared<float>(PREPARE_KEYS + j * KEY_PITCH + column * 4) : 0.0f;
        }
        for (int i = 0; i < CHUNK; i++) {
            float key_sum = 0, query_sum = 0;
            if (i >= j) {
                UNROLL for (int n = 0; n < KEY_LANES; n++) {
                    const int column = lane + 32 * n;
                    if (column < KEY_COLUMNS) {
                        const u32 at = i * KEY_PITCH + column * 4;
                        if (i > j) decayed[n] *= load_shared<float>(PREPARE_FACTORS + at);
                        key_sum += decayed[n] * load_shared<float>(PREPARE_KEYS + at);
                        query_sum += decayed[n] * load_shared<float>(PREPARE_QUERIES + at);
                    }
                }
                key_sum = warp_sum(key_sum);
                query_sum = warp_sum(query_sum);
            }
            if (lane == 0) {
                store_shared(PREPARE_KEY_PRODUCTS + i * CHUNK_PITCH + j * 4, i > j ? key_sum : 0.0f);
                store_shared(PREPARE_QUERY_PRODUCTS + i * CHUNK_PITCH + j * 4, query_sum);
            }
        }
        UNROLL for (int n = 0; n < KEY_LANES; n++) {
            const int column = lane + 32 * n;
            if (column < KEY_COLUMNS) store_shared(PREPARE_WRITING + j * KEY_PITCH + column * 4, decayed[n]);
        }
    }
}

// Computes a column of the inverse of the unit triangular matrix 1 + A, where A is key_products beta, or beta
// key_products with ROWS_HAVE_BETA. Without betas A is 0: the values of other tokens are not subtracted.
template <bool ROWS_HAVE_BETA> DEVICE void invert_column(const DeltaArguments& arguments, int column) {
    for (int i = 0; i < CHUNK; i++) {
        float sum = i == column ? 1.0f : 0.0f;
        if (i > column && arguments.betas) {
            float products = 0;
            for (int m = column; m < i; m++) {
                const float beta = ROWS_HAVE_BETA ? 1.0f : load_shared<float>(PREPARE_BETAS + m * 4);
                products += beta * load_shared<float>(PREPARE_KEY_PRODUCTS + i * CHUNK_PITCH + m * 4) *
                            load_shared<float>(PREPARE_INVERSE + m * CHUNK_PITCH + column * 4);
            }
            sum = ROWS_HAVE_BETA ? -products * load_shared<float>(PREPARE_BETAS + i * 4) : -products;
        }
        store_shared(PREPARE_INVERSE + i * CHUNK_PITCH + column * 4, sum);
    }
}

// Turns the rows of queries and keys into reading rows, a column for each thread, and stores the factors of the state
// over the chunk. Marks the head if a product of factors in the chunk is too large for the kernels over chunks.
DEVICE void decay_reading_rows(const DeltaArguments& arguments, const DeltaSequence& sequence, int head, float* tile) {
    for (int column = thread_index(); column < KEY_COLUMNS; column += PREPARE_WARPS * 32) {
        float decayed = 1, largest = 1;
        bool is_too_large = false;
        for (int i = 0; i < CHUNK; i++) {
            const u32 at = i * KEY_PITCH + column * 4;
            const float factor = load_shared<float>(PREPARE_FACTORS + at);
            decayed *= factor;
            largest = larger(largest, 1.0f) * factor;
            is_too_large |= largest > MAX_FACTOR_PRODUCT;
            store_shared(PREPARE_QUERIES + at, load_shared<float>(PREPARE_QUERIES + at) * decayed);
            store_shared(PREPARE_KEYS + at, load_shared<float>(PREPARE_KEYS + at) * decayed);
        }
        store_global(tile + TILE_KEPT + column, decayed);
        if (is_too_large) store_global(recurrent_flag(arguments, sequence.index, head), 1);
    }
}

// Stores rows of KEY_COLUMNS numbers, times a sign and the beta of each. A sign of 0 stores zeros.
DEVICE void store_rows(u32 from, float* to, float sign, bool has_betas) {
    for (int at = thread_index(); at < CHUNK * KEY_COLUMNS; at += PREPARE_WARPS * 32) {
        const int row = at / KEY_COLUMNS, column = at % KEY_COLUMNS;
        const float factor = has_betas ? sign * load_shared<float>(PREPARE_BETAS + row * 4) : sign;
        store_global(to + at, sign == 0 ? 0 : factor * load_shared<float>(from + row * KEY_PITCH + column * 4));
    }
}

// Stores the product of the inverse, or of its transpose, and rows of keys, times a sign. A sign of 0 stores zeros.
template <bool IS_TRANSPOSED>
DEVICE void store_product_with_inverse(u32 rows, float* to, float sign, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    for (int task = warp; task < CHUNK / 16 * (KEY_COLUMNS / 16); task += PREPARE_WARPS) {
        const int row = task % (CHUNK / 16) * 16, column = task / (CHUNK / 16) * 16;
        Sums sums[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        UNROLL for (int depth = 0; depth < CHUNK; depth += 16) {
            LeftOperand left;
            RightOperand right;
            if (IS_TRANSPOSED) read_left_transposed<CHUNK_PITCH>(left, PREPARE_INVERSE, row, depth, lane);
            else read_left<CHUNK_PITCH>(left, PREPARE_INVERSE, row, depth, lane);
            read_right<KEY_PITCH>(right, rows, depth, column, lane);
            add_product(sums[0], sums[1], left, right);
        }
        UNROLL for (int j = 0; j < 2; j++) {
            UNROLL for (int half = 0; half < 2; half++) {
                float2 two;
                two.x = sign == 0 ? 0 : sign * sums[j][2 * half];
                two.y = sign == 0 ? 0 : sign * sums[j][2 * half + 1];
                store_global((float2*)(to + (row + g + 8 * half) * KEY_COLUMNS + column + 8 * j + 2 * t), two);
            }
        }
    }
}

// The number at (i, j) of the matrix `mixing` of the backward pass: query_products times the inverse.
DEVICE float mixing_of_gradients(int i, int j) {
    float sum = 0;
    for (int m = j; m <= i; m++) {
        sum += load_shared<float>(PREPARE_QUERY_PRODUCTS + i * CHUNK_PITCH + m * 4) *
               load_shared<float>(PREPARE_INVERSE + m * CHUNK_PITCH + j * 4);
    }
    return sum;
}

template <bool IS_BACKWARD> DEVICE void prepare_chunk(const DeltaArguments& arguments) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    const GridPlace place = grid_place(arguments.chunks, arguments.heads);
    const int chunk = place.x, head = place.y;
    const DeltaSequence sequence = sequence_of_chunk(arguments, chunk);
    const DeltaTokens tokens =
        tokens_of(arguments, sequence, head, (chunk - sequence.first_chunk) * CHUNK, CHUNK);
    float* tile = tile_of(arguments, chunk, head);
    read_chunk_rows<PREPARE_WARPS>(arguments, tokens, chunk_rows(PREPARE_QUERIES, PREPARE_BETAS));
    block_barrier();
    multiply_rows(warp, lane);
    block_barrier();
    if (thread_index() < CHUNK) invert_column<IS_BACKWARD>(arguments, thread_index());
    decay_reading_rows(arguments, sequence, head, tile);
    block_barrier();

    const bool has_betas = arguments.betas != nullptr;
    store_rows(PREPARE_QUERIES, tile + TILE_QUERIES, 1.0f, false);
    if (IS_BACKWARD) {
        store_product_with_inverse<true>(PREPARE_WRITING, tile + TILE_READING, 1.0f, warp, lane);
        store_rows(PREPARE_KEYS, tile + TILE_WRITING, has_betas ? -1.0f : 0.0f, true);
    } else {
        // Keys read nothing without a beta.
        store_product_with_inverse<false>(PREPARE_KEYS, tile + TILE_READING, has_betas ? -1.0f : 0.0f, warp, lane);
        store_rows(PREPARE_WRITING, tile + TILE_WRITING, 1.0f, true);
    }
    for (int at = thread_index(); at < CHUNK * CHUNK; at += PREPARE_WARPS * 32) {
        const int i = at / CHUNK, j = at % CHUNK;
        if (IS_BACKWARD) {
            store_global(tile + TILE_MIXING + at, mixing_of_gradients(i, j));
        } else {
            const float product = load_shared<float>(PREPARE_QUERY_PRODUCTS + i * CHUNK_PITCH + j * 4);
            store_global(tile + TILE_MIXING + at, product * load_shared<float>(PREPARE_BETAS + j * 4));
            store_global(tile + TILE_LOCAL + at, load_shared<float>(PREPARE_INVERSE + i * CHUNK_PITCH + j * 4));
        }
    }
}

KERNEL(delta_prepare, PREPARE_WARPS * 32, 1, DeltaArguments) { prepare_chunk<false>(arguments); }

#if HAS_BACKWARD
KERNEL(delta_prepare_backward, PREPARE_WARPS * 32, 1, DeltaArguments) { prepare_chunk<true>(arguments); }
#endif

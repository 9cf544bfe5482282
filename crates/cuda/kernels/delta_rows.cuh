// The rows of some tokens of a head, in f32, in shared memory.
#pragma once

#include "delta_tile.cuh"
#include "row_elements.cuh"

// The factors of a row of queries and of keys: the norm and the scale.
struct RowFactors {
    float query;
    float key;
};

// The factor of the state before a token, at a column of keys.
DEVICE float decay_factor(const DeltaArguments& arguments, const DeltaTokens& tokens, int i, int column) {
    if (!arguments.decays || i >= tokens.count || column >= KEY_WIDTH) return 1.0f;
    const i64 row = row_at(arguments.decay_strides, tokens.entry, tokens.head, tokens.first + i);
    return exponential(load_global(arguments.decays + row + (arguments.decay_per_channel ? column : 0)));
}

// The beta of a token, 0 for a missing token.
DEVICE float beta_of(const DeltaArguments& arguments, const DeltaTokens& tokens, int i) {
    if (i >= tokens.count) return 0.0f;
    if (!arguments.betas) return 1.0f;
    return load_global(arguments.betas + row_at(arguments.beta_strides, tokens.entry, tokens.head, tokens.first + i));
}

// Reads the query and the key of a token by one warp: columns lane, lane + 32 .. of them, after the norm and the scale.
DEVICE RowFactors read_row(const DeltaArguments& arguments, const DeltaTokens& tokens, int i, int lane,
                           float (&query)[KEY_LANES], float (&key)[KEY_LANES]) {
    const bool exists = i < tokens.count;
    const i64 query_from = exists ? query_row(arguments, tokens, i) : 0;
    const i64 key_from = exists ? key_row(arguments, tokens, i) : 0;
    float query_square = 0, key_square = 0;
    UNROLL for (int n = 0; n < KEY_LANES; n++) {
        const int column = lane + 32 * n;
        const bool is_read = exists && column < KEY_WIDTH;
        query[n] = is_read ? load_element(arguments.queries, query_from + column) : 0.0f;
        key[n] = is_read ? load_element(arguments.keys, key_from + column) : 0.0f;
        query_square += query[n] * query[n];
        key_square += key[n] * key[n];
    }
    RowFactors factors;
    factors.query = arguments.scale;
    factors.key = 1.0f;
    if (arguments.has_norm && exists) {
        factors.query = arguments.scale / square_root(warp_sum(query_square) + arguments.norm_epsilon);
        factors.key = 1.0f / square_root(warp_sum(key_square) + arguments.norm_epsilon);
    }
    UNROLL for (int n = 0; n < KEY_LANES; n++) {
        query[n] *= factors.query;
        key[n] *= factors.key;
    }
    return factors;
}

// Addresses in shared memory: rows of KEY_PITCH bytes for the tokens of a chunk, and numbers for each token. A missing
// token has zeros for its query and its key, factors of 1 and a beta of 0, so that it changes nothing.
struct ChunkRows {
    u32 queries;
    u32 keys;
    u32 factors;
    u32 betas;
    u32 row_factors;  // two numbers for each token
};

// Reads the rows of a chunk. The caller passes a barrier before it reads them.
template <int WARPS> DEVICE void read_chunk_rows(const DeltaArguments& arguments, const DeltaTokens& tokens,
                                                 const ChunkRows& rows) {
    const int warp = thread_index() / 32, lane = thread_index() % 32;
    for (int i = warp; i < CHUNK; i += WARPS) {
        float query[KEY_LANES], key[KEY_LANES];
        const RowFactors row_factors = read_row(arguments, tokens, i, lane, query, key);
        UNROLL for (int n = 0; n < KEY_LANES; n++) {
            const int column = lane + 32 * n;
            if (column < KEY_COLUMNS) {
                const u32 at = i * KEY_PITCH + column * 4;
                store_shared(rows.queries + at, query[n]);
                store_shared(rows.keys + at, key[n]);
                store_shared(rows.factors + at, decay_factor(arguments, tokens, i, column));
            }
        }
        if (lane == 0) {
            store_shared(rows.betas + i * 4, beta_of(arguments, tokens, i));
            store_shared(rows.row_factors + i * 8, row_factors.query);
            store_shared(rows.row_factors + i * 8 + 4, row_factors.key);
        }
    }
}

// Returns the addresses of rows one after the other, and of the numbers of the tokens.
DEVICE ChunkRows chunk_rows(u32 queries, u32 betas) {
    ChunkRows rows;
    rows.queries = queries;
    rows.keys = queries + CHUNK * KEY_PITCH;
    rows.factors = queries + 2 * CHUNK * KEY_PITCH;
    rows.betas = betas;
    rows.row_factors = betas + CHUNK * 4;
    return rows;
}

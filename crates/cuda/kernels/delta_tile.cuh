// The sizes of a specialisation of the gated delta rule, the sequences of a call, and the matrices of a chunk.
//
// KEY_WIDTH and VALUE_WIDTH are D_k and D_v. CHUNK is the number of tokens of a chunk, 16 or 32. The Rust side defines
// them and what follows from them: KEY_COLUMNS and VALUE_COLUMNS, which are rounded up to whole fragments, the bytes
// KEY_PITCH, VALUE_PITCH and CHUNK_PITCH from row to row in shared memory, and the places of all parts of shared memory
// and of tiles (`DeltaSpecialization`).
//
// With the state S before a chunk, `decayed(i, j)` the product of the factors of the tokens after j up to i, and e_i
// the difference between the value of token i and the value that the state has for its key:
//
//     e_i = v_i - (k_i * decayed(i, start)) S - sum over j < i of key_products(i, j) beta_j e_j
//     o_i =       (q_i * decayed(i, start)) S + sum over j <= i of query_products(i, j) beta_j e_j
//     S'  = decayed(end, start) * S + sum over j of transposed (k_j * decayed(end, j)) beta_j e_j
//
// The rows `k_i * decayed(i, start)` and `q_i * decayed(i, start)` are reading rows, `k_j * decayed(end, j)` writing
// rows. Factors are multiplied along the tokens, and never divided, so that a factor of 0 is allowed.
#pragma once

#include "delta_arguments.cuh"
#include "tf32_products.cuh"

// The products of the factors that the kernels over chunks take: e^40. Larger products may overflow although the state,
// which may be 0, does not. Such heads are computed token by token.
#define MAX_FACTOR_PRODUCT 2.3538527e17f

// Columns of a row of keys that a lane of a warp has.
#define KEY_LANES ((KEY_COLUMNS + 31) / 32)

// The matrices that a scan over chunks reads for each chunk and head, in numbers from the beginning of the chunk's
// tile. The forward pass has with E the errors e and V the values of a chunk, and beta a diagonal matrix
//
//     E  = local V + reading S                       local   = the inverse of (1 + key_products beta)
//     O  = queries S + mixing E                      reading = -local (reading rows of keys)
//     S' = kept * S + transposed writing E           queries = reading rows of queries
//                                                    writing = beta (writing rows)
//                                                    mixing  = query_products beta
//
// and the backward pass, with the gradients dO of outputs, dS' of the state after the chunk, and X of errors,
//
//     X  = transposed mixing dO + reading dS'        mixing  = query_products L, with
//                                                         L  = the inverse of (1 + beta key_products)
//     dS = kept * dS' + transposed queries dO        reading = transposed L (writing rows)
//          + transposed writing X                    writing = -beta (reading rows of keys)

// A sequence of a call.
struct DeltaSequence {
    int index;
    int entry;        // of the batch
    int first_token;  // in the entry
    int tokens;
    int first_chunk;  // among the chunks of all sequences
    int chunks;
};

DEVICE DeltaSequence sequence_at(const DeltaArguments& arguments, int index) {
    DeltaSequence sequence;
    sequence.index = index;
    if (arguments.cumulative_tokens) {
        sequence.entry = 0;
        sequence.first_token = load_global(arguments.cumulative_tokens + index);
        sequence.tokens = load_global(arguments.cumulative_tokens + index + 1) - sequence.first_token;
        sequence.first_chunk = load_global(arguments.cumulative_chunks + index);
    } else {
        sequence.entry = index;
        sequence.first_token = 0;
        sequence.tokens = arguments.tokens;
        sequence.first_chunk = index * ((arguments.tokens + CHUNK - 1) / CHUNK);
    }
    sequence.chunks = (sequence.tokens + CHUNK - 1) / CHUNK;
    return sequence;
}

DEVICE DeltaSequence sequence_of_chunk(const DeltaArguments& arguments, int chunk) {
    if (!arguments.cumulative_tokens) {
        return sequence_at(arguments, chunk / ((arguments.tokens + CHUNK - 1) / CHUNK));
    }
    // The last sequence whose first chunk is not after this one. Sequences without tokens have no chunk.
    int low = 0, high = arguments.sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (load_global(arguments.cumulative_chunks + middle) <= chunk) low = middle;
        else high = middle;
    }
    return sequence_at(arguments, low);
}

// Some tokens of a head, one after the other, with the addresses of their rows.
struct DeltaTokens {
    int head;
    int entry;
    int first;      // token of the entry
    int count;
    i64 first_row;  // of (B, H, T)
};

DEVICE DeltaTokens tokens_of(const DeltaArguments& arguments, const DeltaSequence& sequence, int head, int from,
                             int count) {
    DeltaTokens tokens;
    tokens.head = head;
    tokens.entry = sequence.entry;
    tokens.first = sequence.first_token + from;
    tokens.count = smaller(count, sequence.tokens - from);
    tokens.first_row = ((i64)sequence.entry * arguments.heads + head) * arguments.tokens + tokens.first;
    return tokens;
}

DEVICE i64 row_at(const RowStrides& strides, int entry, int head, int token) {
    return entry * strides.sequence + head * strides.head + token * strides.row;
}

DEVICE i64 query_row(const DeltaArguments& arguments, const DeltaTokens& tokens, int i) {
    const int head = tokens.head / (arguments.heads / arguments.query_heads);
    return row_at(arguments.query_strides, tokens.entry, head, tokens.first + i);
}

DEVICE i64 key_row(const DeltaArguments& arguments, const DeltaTokens& tokens, int i) {
    const int head = tokens.head / (arguments.heads / arguments.key_heads);
    return row_at(arguments.key_strides, tokens.entry, head, tokens.first + i);
}

DEVICE i64 value_row(const DeltaArguments& arguments, const DeltaTokens& tokens, int i) {
    const int head = tokens.head / (arguments.heads / arguments.value_heads);
    return row_at(arguments.value_strides, tokens.entry, head, tokens.first + i);
}

DEVICE float* tile_of(const DeltaArguments& arguments, int chunk, int head) {
    return arguments.tiles + ((i64)chunk * arguments.heads + head) * TILE_WORDS;
}

DEVICE int* recurrent_flag(const DeltaArguments& arguments, int sequence, int head) {
    return arguments.recurrent_heads + (i64)sequence * arguments.heads + head;
}

// The number of the state of a head of a sequence in (N, H, D_k, D_v).
DEVICE i64 state_at(const DeltaArguments& arguments, int sequence, int head) {
    return ((i64)sequence * arguments.heads + head) * (KEY_WIDTH * VALUE_WIDTH);
}

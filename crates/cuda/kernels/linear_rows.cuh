// A linear layer of few rows, whose weights have the element type of the inputs.
//
// Such a call takes the time of reading the weights, so each weight is read once, for all rows, and many loads are
// underway at a time.
#pragma once

#include "linear_pairs.cuh"

#define LINEAR_CHUNK (ELEMENT == 2 ? 4 : 8)     // elements of a load of 16 bytes
#define LINEAR_LOADS (LINEAR_ROWS <= 2 ? 4 : 2) // loads of a row of weights that are underway at a time

// The chunk of a row of `width` elements.
DEVICE uint4 load_chunk(const void* matrix, i64 row, int width, int chunk) {
    const int element_bytes = 16 / LINEAR_CHUNK;
    return load_global((const uint4*)((const char*)matrix + row * width * element_bytes) + chunk);
}

DEVICE void unpack_chunk(float (&numbers)[LINEAR_CHUNK], uint4 chunk) {
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    UNROLL for (int w = 0; w < 4; w++) {
#if ELEMENT == 2
        numbers[w] = as_float(words[w]);
#else
        numbers[2 * w] = unpack_half((u16)words[w]);
        numbers[2 * w + 1] = unpack_half((u16)(words[w] >> 16));
#endif
    }
}

// Adds the products of this lane's chunks.
DEVICE void add_chunks(float (&sums)[2][LINEAR_ROWS], const LinearRowsArguments& arguments, const LinearPair& pair) {
    const int width = arguments.width, count = width / LINEAR_CHUNK;
    for (int first = pair.first; first < count; first += pair.step * LINEAR_LOADS) {
        uint4 chunks[2][LINEAR_LOADS];
        UNROLL for (int n = 0; n < LINEAR_LOADS; n++) {
            // The last chunk is read again in place of those behind it, and not added.
            const int chunk = smaller(first + n * pair.step, count - 1);
            UNROLL for (int p = 0; p < 2; p++) {
                chunks[p][n] = load_chunk(pair.weights[p], pair.rows[p], width, chunk);
            }
        }
        UNROLL for (int n = 0; n < LINEAR_LOADS; n++) {
            const int chunk = first + n * pair.step;
            float weights[2][LINEAR_CHUNK];
            UNROLL for (int p = 0; p < 2; p++) unpack_chunk(weights[p], chunks[p][n]);
            UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
                const uint4 x_chunk = load_chunk(arguments.inputs, linear_input_row(arguments, row), width,
                                                 smaller(chunk, count - 1));
                float xs[LINEAR_CHUNK];
                unpack_chunk(xs, x_chunk);
                UNROLL for (int p = 0; p < 2; p++) {
                    float sum = sums[p][row];
                    UNROLL for (int e = 0; e < LINEAR_CHUNK; e++) sum = fused_multiply_add(xs[e], weights[p][e], sum);
                    sums[p][row] = chunk < count ? sum : sums[p][row];
                }
            }
        }
    }
}

// As add_chunks, for rows of any alignment.
DEVICE void add_columns(float (&sums)[2][LINEAR_ROWS], const LinearRowsArguments& arguments, const LinearPair& pair) {
    const i64 width = arguments.width;
#pragma unroll 4
    for (int column = pair.first; column < arguments.width; column += pair.step) {
        float weights[2];
        UNROLL for (int p = 0; p < 2; p++) weights[p] = load_element(pair.weights[p], pair.rows[p] * width + column);
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const float x = load_element(arguments.inputs, linear_input_row(arguments, row) * width + column);
            UNROLL for (int p = 0; p < 2; p++) sums[p][row] = fused_multiply_add(x, weights[p], sums[p][row]);
        }
    }
}

KERNEL(linear_rows, LINEAR_WARPS * 32, LINEAR_BLOCKS, LinearRowsArguments) {
    const LinearPair pair = linear_pair(arguments);
    float sums[2][LINEAR_ROWS];
    clear_linear_sums(sums);
    if (arguments.is_aligned) add_chunks(sums, arguments, pair);
    else add_columns(sums, arguments, pair);
    finish_linear_pair(arguments, sums);
}

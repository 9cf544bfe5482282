// Tiles of keys and values in threadgroup memory, and fragments of them.
//
// A tile is FORWARD_KEYS rows, whose pitch (elements from row to row) is padded. Its columns are rounded up to a
// multiple of 16, with zeros behind the last element. Rows that must not be read, since they are outside of the tensor
// or since no query attends to them, become zeros.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "elements.cuh"
#include "stored_rows.metal"

// Four elements of a row, which a thread copies at once.
struct Chunk {
    u32 words[ELEMENT_BYTES];
};

// Loads four elements of a row of `width` elements; zeros from `width` on.
DEVICE Chunk load_chunk(GLOBAL const char* row, int column, int width) {
    Chunk chunk;
    if (ALIGNED_ROWS && column + 4 <= width) {
#if ELEMENT == 2
        const uint4 words = load_global((GLOBAL const uint4*)row + column / 4);
        chunk.words[0] = words.x, chunk.words[1] = words.y, chunk.words[2] = words.z, chunk.words[3] = words.w;
#else
        const uint2 words = load_global((GLOBAL const uint2*)row + column / 4);
        chunk.words[0] = words.x, chunk.words[1] = words.y;
#endif
        return chunk;
    }
    UNROLL for (int n = 0; n < ELEMENT_BYTES; n++) chunk.words[n] = 0;
    UNROLL for (int e = 0; e < 4; e++) {
        if (column + e >= width) continue;
#if ELEMENT == 2
        chunk.words[e] = load_global((GLOBAL const u32*)row + column + e);
#else
        chunk.words[e / 2] |= (u32)load_global((GLOBAL const u16*)row + column + e) << 16 * (e % 2);
#endif
    }
    return chunk;
}

// Loads the numbers of four codes of a row of `width` codes as elements, which they are without an error; zeros from
// `width` on.
DEVICE Chunk load_code_chunk(GLOBAL const char* row, int column, int width) {
    const u32 codes = load_codes(row, column, width);
    float numbers[4];
    UNROLL for (int e = 0; e < 4; e++)
        numbers[e] = column + e < width ? number_of_code(codes >> 8 * e & 255) : 0.0f;
    Chunk chunk;
#if ELEMENT == 2
    UNROLL for (int e = 0; e < 4; e++) chunk.words[e] = as_bits(numbers[e]);
#else
    UNROLL for (int n = 0; n < 2; n++) chunk.words[n] = pack_pair(numbers[2 * n], numbers[2 * n + 1]);
#endif
    return chunk;
}

// Copies `count` rows from `key` on to a tile; rows outside of [first, end) become zeros.
DEVICE void load_tile_rows(SHARED(Element) tile, const LOCAL TileRows& rows, int count, int key, int first, int end,
                           int thread_index) {
    const int chunks = rows.columns / 4;
    for (int n = thread_index; n < count * chunks; n += FORWARD_THREADS) {
        const int row = n / chunks, column = n % chunks * 4;
        Chunk chunk;
        if (key + row >= first && key + row < end) {
            GLOBAL const char* from = row_of_key(rows, key + row);
            chunk = KEY_CODES ? load_code_chunk(from, column, rows.width) : load_chunk(from, column, rows.width);
        } else {
            UNROLL for (int w = 0; w < ELEMENT_BYTES; w++) chunk.words[w] = 0;
        }
        SHARED(u32) to = words_of(tile + (row * rows.pitch + column));
        UNROLL for (int w = 0; w < ELEMENT_BYTES; w++) store_shared(to + w, chunk.words[w]);
    }
}

DEVICE void load_tile(SHARED(Element) tile, const LOCAL TileRows& rows, int key, int first, int end, int thread_index) {
    load_tile_rows(tile, rows, FORWARD_KEYS, key, first, end, thread_index);
}

// Two neighbours of a row of a tile.
DEVICE float2 load_pair(SHARED(Element) at) {
    float2 pair;
    pair.x = element_to_f32(load_shared(at)), pair.y = element_to_f32(load_shared(at + 1));
    return pair;
}

// Two neighbours of a column of a tile.
DEVICE float2 load_column_pair(SHARED(Element) at, int pitch) {
    float2 pair;
    pair.x = element_to_f32(load_shared(at)), pair.y = element_to_f32(load_shared(at + pitch));
    return pair;
}

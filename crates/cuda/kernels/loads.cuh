// Elements in global memory, and their way to tiles in shared memory.
//
// A tile is some rows of a tensor, whose pitch (bytes from row to row) is padded. Its columns are rounded up to
// matrices of 16, with zeros behind the last element. Rows that must not be read, since they are outside of the tensor
// or since no query attends to them, become zeros.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "elements.cuh"

// Stores two neighbours in a row of `width` elements; `column` is even.
DEVICE void store_pair(void* tensor, i64 at, float x, float y, int column, int width) {
    if (ALIGNED_ROWS && width % 2 == 0) {
        if (column >= width) return;
#if ELEMENT == 2
        float2 pair;
        pair.x = x, pair.y = y;
        store_global((float2*)((float*)tensor + at), pair);
#else
        store_global((u32*)((u16*)tensor + at), pack_pair(x, y));
#endif
    } else {
        if (column < width) store_element(tensor, at, x);
        if (column + 1 < width) store_element(tensor, at + 1, y);
    }
}

// Copies an element of a tensor to shared memory.
DEVICE void copy_element_to_shared(u32 to, const void* tensor, i64 at) {
#if ELEMENT == 2
    store_shared<float>(to, load_global((const float*)tensor + at));
#else
    store_shared<u16>(to, load_global((const u16*)tensor + at));
#endif
}

// Stores two neighbours of a matrix in shared memory as elements.
DEVICE void store_pair_shared(u32 at, float x, float y) {
#if ELEMENT == 2
    float2 pair;
    pair.x = x, pair.y = y;
    store_shared<float2>(at, pair);
#else
    store_shared<u32>(at, pack_pair(x, y));
#endif
}

// Reads 4 / SIZE numbers of SIZE bytes one by one, the first of them at `column`; zeros from `width` bytes on.
template <int SIZE> DEVICE u32 load_word(const char* row, i64 column_bytes, int column, int width) {
    u32 word = 0;
    UNROLL for (int e = 0; e < 4 / SIZE; e++) {
        u32 number = 0;
        if ((column + e) * SIZE < width) {
            const char* from = row + (column + e) * column_bytes;
            number = SIZE == 1   ? (u32)load_global((const u8*)from)
                     : SIZE == 2 ? (u32)load_global((const u16*)from)
                                 : load_global((const u32*)from);
        }
        word |= number << (8 * SIZE * e & 31);
    }
    return word;
}

// Rows of a tensor that a tile is loaded from.
struct TileSource {
    const char* rows;   // the address of row 0 of the tile
    i64 row_bytes;      // from row to row
    i64 column_bytes;   // from number to number
    int first_row;      // rows outside of [first_row, end_row) are not read and become zeros
    int end_row;
    int width;          // bytes of a row; what is behind them becomes zeros
    DEVICE_METHOD const char* row(int row, bool) const { return rows + row * row_bytes; }
};

// Loads ROWS rows of 16 * CHUNKS bytes, of numbers of SIZE bytes, with the THREADS threads of a group. IS_FULL: no
// bytes are behind the width. With IS_ALIGNED the tile is there after a wait for copies and a barrier, otherwise after
// a barrier.
template <int ROWS, int CHUNKS, int PITCH, int THREADS, bool IS_ALIGNED, int SIZE, bool IS_FULL = false, class Source>
DEVICE void load_tile(u32 to, const Source& source, int thread) {
    UNROLL for (int n = 0; n < (ROWS * CHUNKS + THREADS - 1) / THREADS; n++) {
        const int at = thread + n * THREADS;
        if (ROWS * CHUNKS % THREADS != 0 && at >= ROWS * CHUNKS) break;
        const int row = THREADS % CHUNKS == 0 ? thread / CHUNKS + n * (THREADS / CHUNKS) : at / CHUNKS;
        const int chunk = THREADS % CHUNKS == 0 ? thread % CHUNKS : at % CHUNKS;
        const bool is_read = row >= source.first_row && row < source.end_row;
#if KEY_PAGES
        const char* from = source.row(row, is_read);
#else
        const char* from = source.rows + row * source.row_bytes;
#endif
        const u32 chunk_to = to + row * PITCH + chunk * 16;
        if (IS_ALIGNED) {
            int bytes = is_read ? 16 : 0;
            if (!IS_FULL) bytes = is_read ? larger(0, smaller(16, source.width - chunk * 16)) : 0;
            copy_async_16(chunk_to, bytes ? from + chunk * 16 : source.rows, bytes);
        } else {
            u32 words[4];
            UNROLL for (int w = 0; w < 4; w++) {
                const int column = chunk * (16 / SIZE) + w * (4 / SIZE);
                words[w] = is_read ? load_word<SIZE>(from, source.column_bytes, column, source.width) : 0;
            }
            uint4 all;
            all.x = words[0], all.y = words[1], all.z = words[2], all.w = words[3];
            store_shared<uint4>(chunk_to, all);
        }
    }
}

// Loads rows of D elements.
template <int ROWS, int THREADS>
DEVICE void load_head_tile(u32 to, const char* from, i64 row_bytes, int first_row, int end_row, int thread) {
    const TileSource source = {from, row_bytes, ELEMENT_BYTES, first_row, end_row, HEAD_DIM * ELEMENT_BYTES};
    load_tile<ROWS, HEAD_COLUMNS * ELEMENT_BYTES / 16, HEAD_PITCH, THREADS, ALIGNED_ROWS, ELEMENT_BYTES,
              HEAD_COLUMNS == HEAD_DIM>(to, source, thread);
}

// Loads rows of D_v elements.
template <int ROWS, int THREADS>
DEVICE void load_value_tile(u32 to, const char* from, i64 row_bytes, int first_row, int end_row, int thread) {
    const TileSource source = {from, row_bytes, ELEMENT_BYTES, first_row, end_row, VALUE_DIM * ELEMENT_BYTES};
    load_tile<ROWS, VALUE_COLUMNS * ELEMENT_BYTES / 16, VALUE_PITCH, THREADS, ALIGNED_ROWS, ELEMENT_BYTES,
              VALUE_COLUMNS == VALUE_DIM>(to, source, thread);
}

// The factors of values, and of what is computed from them, where a sum of weighted values could exceed f32. Numbers of
// f16 are too small for that.
#define VALUE_SHRINK (ELEMENT == 0 ? 1.0f : 1.0f / 4294967296.0f)
#define VALUE_GROWTH (ELEMENT == 0 ? 1.0f : 4294967296.0f)

// A word of values times VALUE_SHRINK.
DEVICE u32 shrink_word(u32 word) {
#if ELEMENT == 2
    return as_bits(as_float(word) * VALUE_SHRINK);
#elif ELEMENT == 1
    return multiply_bf16_pairs(word, 0x2f802f80u); // 2^-32 twice
#else
    return word;
#endif
}

// Returns whether there are numbers that are not finite in the chunks that this thread loaded. With CLEANS, replaces
// them by zeros, and with SHRINKS multiplies the others by VALUE_SHRINK, where no other thread may read the tile
// meanwhile.
//
// A weight of zero times NaN is NaN: in a tile to which some queries attend and others do not, such numbers must not
// meet the weights of the others. In f32 values must not meet any weight: the TF32 remainder of infinity is NaN.
template <int ROWS, int CHUNKS, int PITCH, int THREADS, bool CLEANS, bool SHRINKS = false>
DEVICE bool find_special(u32 at, int thread) {
    const u32 EXPONENT = ELEMENT == 2 ? 0x7f800000u : ELEMENT == 1 ? 0x7f807f80u : 0x7c007c00u;
    // Added to an exponent of ones, it carries into the highest bit of the number.
    const u32 CARRY = ELEMENT == 2 ? 0x00800000u : ELEMENT == 1 ? 0x00800080u : 0x04000400u;
    const u32 HIGHEST = ELEMENT == 2 ? 0x80000000u : 0x80008000u;
    bool found = false;
#pragma unroll 1
    for (int chunk = thread; chunk < ROWS * CHUNKS; chunk += THREADS) {
        const u32 chunk_at = at + chunk / CHUNKS * PITCH + chunk % CHUNKS * 16;
        uint4 all = load_shared<uint4>(chunk_at);
        u32 words[4] = {all.x, all.y, all.z, all.w}, any = 0;
        UNROLL for (int w = 0; w < 4; w++) any |= ((words[w] & EXPONENT) + CARRY) & HIGHEST;
        found |= any != 0;
        if (CLEANS && any) {
            UNROLL for (int w = 0; w < 4; w++) {
                const u32 bad = ((words[w] & EXPONENT) + CARRY) & HIGHEST;
                if (ELEMENT == 2) words[w] = bad ? 0u : words[w];
                else words[w] &= (bad & 0x8000u ? 0u : 0xffffu) | (bad & 0x80000000u ? 0u : 0xffff0000u);
            }
        }
        if (SHRINKS)
            UNROLL for (int w = 0; w < 4; w++) words[w] = shrink_word(words[w]);
        if (SHRINKS || (CLEANS && any)) {
            all.x = words[0], all.y = words[1], all.z = words[2], all.w = words[3];
            store_shared<uint4>(chunk_at, all);
        }
    }
    return found;
}
template <int ROWS, int THREADS, bool CLEANS> DEVICE bool find_special_in_heads(u32 at, int thread) {
    return find_special<ROWS, HEAD_COLUMNS * ELEMENT_BYTES / 16, HEAD_PITCH, THREADS, CLEANS>(at, thread);
}
template <int ROWS, int THREADS, bool CLEANS> DEVICE bool find_special_in_values(u32 at, int thread) {
    return find_special<ROWS, VALUE_COLUMNS * ELEMENT_BYTES / 16, VALUE_PITCH, THREADS, CLEANS>(at, thread);
}

// Replaces values that are not finite by zeros and shrinks the others, in the chunks that this thread loaded, which no
// other thread may have read yet. Returns whether there were any that are not finite.
template <int ROWS, int THREADS> DEVICE bool prepare_careful_values(u32 at, int thread) {
    return find_special<ROWS, VALUE_COLUMNS * ELEMENT_BYTES / 16, VALUE_PITCH, THREADS, true, true>(at, thread);
}

// Adds the numbers of rows [first, end) of a tensor that are not finite to the sums of a warp, whose columns begin at
// `first_column` of `width`. Row 16 * tile + 8 * r + lane / 4 of the sums takes every row for which
// is_reached(16 * tile + 8 * r, row).
template <int ROW_TILES, int COLUMN_TILES, class IsReached>
DEVICE void add_special_numbers(float (&sums)[ROW_TILES][COLUMN_TILES][4], const char* rows, i64 row_stride, int first,
                                int end, int first_column, int width, IsReached is_reached) {
#pragma unroll 1
    for (int row = first; row < end; row++)
        UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
            UNROLL for (int r = 0; r < 2; r++) {
                if (!is_reached(16 * tile + 8 * r, row)) continue;
                UNROLL for (int d = 0; d < COLUMN_TILES; d++)
                    UNROLL for (int e = 0; e < 2; e++) {
                        const int column = first_column + 8 * d + e;
                        if (column >= width) continue;
                        const float number = load_element(rows, row * row_stride + column);
                        if (!is_finite(number)) sums[tile][d][2 * r + e] += number;
                        keep_order(); // one number at a time, which takes few registers
                    }
            }
}

// Keys and values that a cache stores as 8-bit codes: a number is (code - 128) times the scale of its row.
//
// The products are of integers, code - 128, which every element type represents exactly. The scale of a key multiplies
// its scores, and the scale of a value multiplies its weights before these are rounded to elements: no digit of a
// number is lost that the code has.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "loads.cuh"
#include "key_rows.cuh"
#include "products.cuh"

#if KEY_CODES
// A factor of weights besides the scales, so that few weights are below the least normal f16; the output is divided by
// it. The largest weight is 1 and the largest scale of f16 numbers is 516, so that none overflows.
#define WEIGHT_FACTOR (ELEMENT == 0 ? 64.0f : 1.0f)

// The weight of a value row times the row's scale. The scale of a row with numbers that are not finite is NaN: it must
// not reach queries for which the row is masked.
DEVICE float scaled_weight(float weight, float scale) { return weight == 0.0f ? 0.0f : weight * scale * WEIGHT_FACTOR; }

#if ELEMENT != 2
// Four codes as two pairs of elements, code - 128: the codes become the low bytes of elements.
DEVICE void unpack_codes(u32 codes, u32& first, u32& second) {
#if ELEMENT == 1
    // bf16 has 7 bits behind the first one: 128 + (code & 127) is exact, from which 256 is taken, or 128 for a code
    // from 128 on.
    const u32 high_bytes = 0x43434343u, sum = codes & 0x7f7f7f7fu, excess = ~codes & 0x80808080u;
    first = subtract_pairs(select_bytes(sum, high_bytes, 0x4140), select_bytes(excess, high_bytes, 0x4140));
    second = subtract_pairs(select_bytes(sum, high_bytes, 0x4342), select_bytes(excess, high_bytes, 0x4342));
#else
    // 1024 + code is exact in f16, from which 1152 is taken.
    const u32 high_bytes = 0x64646464u, excess = 0x64806480u;
    first = subtract_pairs(select_bytes(codes, high_bytes, 0x4140), excess);
    second = subtract_pairs(select_bytes(codes, high_bytes, 0x4342), excess);
#endif
}
#endif

// Loads rows of `width` codes to rows of COLUMNS codes; 0 outside of [first_row, end_row) and behind the width.
template <int ROWS, int COLUMNS, int PITCH, int THREADS>
DEVICE void load_code_tile(u32 to, const KeyRows& codes, int key, int first_row, int end_row, int width, int thread) {
    const KeyTileSource source = key_tile(codes, key, 1, first_row, end_row, width);
    load_tile<ROWS, COLUMNS / 16, PITCH, THREADS, ALIGNED_ROWS, 1>(to, source, thread);
}

// Loads the scales of rows from the one of `key` on; 0 outside of [first_row, end_row).
template <int ROWS, int THREADS>
DEVICE void load_scales(u32 to, const KeyRows& scales, int key, int first_row, int end_row, int thread) {
    const KeyTileSource source = key_tile(scales, key, 4, first_row, end_row, 4);
    for (int row = thread; row < ROWS; row += THREADS) {
        const bool is_read = row >= first_row && row < end_row;
        copy_async_4(to + row * 4, is_read ? source.row(row, true) : source.rows, is_read ? 4 : 0);
    }
}

// Loads the scales of rows, which are a stride apart; 0 outside of [first_row, end_row). `from` is the scale of row 0.
template <int ROWS, int THREADS>
DEVICE void load_scales(u32 to, const float* from, i64 stride, int first_row, int end_row, int thread) {
    for (int row = thread; row < ROWS; row += THREADS) {
        const bool is_read = row >= first_row && row < end_row;
        copy_async_4(to + row * 4, is_read ? from + row * stride : from, is_read ? 4 : 0);
    }
}

// Converts the chunks that this thread loaded by load_code_tile, with a pitch of COLUMNS, to a tile of elements.
template <int ROWS, int COLUMNS, int PITCH, int THREADS> DEVICE void convert_codes(u32 to, u32 from, int thread) {
    for (int chunk = thread; chunk < ROWS * COLUMNS / 16; chunk += THREADS) {
        const uint4 codes = load_shared<uint4>(from + chunk * 16);
        const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
        const u32 row_to = to + chunk / (COLUMNS / 16) * PITCH + chunk % (COLUMNS / 16) * 16 * ELEMENT_BYTES;
        UNROLL for (int w = 0; w < 4; w++) {
#if ELEMENT == 2
            float4 numbers;
            numbers.x = (float)(int)(words[w] & 0xff) - 128, numbers.y = (float)(int)(words[w] >> 8 & 0xff) - 128;
            numbers.z = (float)(int)(words[w] >> 16 & 0xff) - 128, numbers.w = (float)(int)(words[w] >> 24) - 128;
            store_shared<float4>(row_to + w * 16, numbers);
#else
            uint2 pairs;
            unpack_codes(words[w], pairs.x, pairs.y);
            store_shared<uint2>(row_to + w * 8, pairs);
#endif
        }
    }
}

// Fragments of codes take four successive codes in a word, so that the columns of a fragment are permuted: lane pairs
// t have the columns 4t to 4t + 3 of 16, in the order in which a plain fragment has 2t, 2t + 1, 2t + 8 and 2t + 9.

// Rows of m, columns of k, which are permuted as those of load_right_codes.
template <int PITCH> DEVICE void load_left_permuted(LeftFragment& fragment, u32 at, int row, int k, int lane) {
    const u32 from = at + (row + (lane >> 2)) * PITCH + (k + 4 * (lane & 3)) * ELEMENT_BYTES;
#if ELEMENT == 2
    const float4 upper = load_shared<float4>(from), lower = load_shared<float4>(from + 8 * PITCH);
    fragment.x[0] = upper.x, fragment.x[1] = lower.x, fragment.x[2] = upper.y, fragment.x[3] = lower.y;
    fragment.x[4] = upper.z, fragment.x[5] = lower.z, fragment.x[6] = upper.w, fragment.x[7] = lower.w;
#else
    const uint2 upper = load_shared<uint2>(from), lower = load_shared<uint2>(from + 8 * PITCH);
    fragment.x[0] = upper.x, fragment.x[1] = lower.x, fragment.x[2] = upper.y, fragment.x[3] = lower.y;
#endif
}

// Rows of n, columns of k, from codes.
template <int PITCH> DEVICE void load_right_codes(RightFragment& fragment, u32 at, int n, int k, int lane) {
    UNROLL for (int tile = 0; tile < 2; tile++) {
        const u32 word = load_shared<u32>(at + (n + 8 * tile + (lane >> 2)) * PITCH + k + 4 * (lane & 3));
#if ELEMENT == 2
        UNROLL for (int e = 0; e < 4; e++) fragment.x[4 * tile + e] = (float)(int)(word >> 8 * e & 0xff) - 128;
#else
        unpack_codes(word, fragment.x[2 * tile], fragment.x[2 * tile + 1]);
#endif
    }
}

// Rows of k, 32 columns of n, from codes: two fragments of four matrices of 8 columns. Column n of matrix m is column
// 4n + m of the 32.
template <int PITCH>
DEVICE void load_right_codes_transposed(RightFragment (&fragments)[2], u32 at, int k, int n, int lane) {
    const int group = lane >> 2, pair = lane & 3;
    u32 words[4];
    UNROLL for (int e = 0; e < 4; e++)
        words[e] = load_shared<u32>(at + (k + 2 * pair + (e & 1) + 8 * (e >> 1)) * PITCH + n + 4 * group);
    UNROLL for (int n = 0; n < 2; n++) {
        RightFragment& fragment = fragments[n];
#if ELEMENT == 2
        UNROLL for (int e = 0; e < 8; e++)
            fragment.x[e] = (float)(int)(words[e % 4] >> 8 * (2 * n + e / 4) & 0xff) - 128;
#else
        // Two codes of a row of k and two of the next one, in turn: the pairs of two matrices.
        const u32 selector = n == 0 ? 0x5140 : 0x7362;
        unpack_codes(select_bytes(words[0], words[1], selector), fragment.x[0], fragment.x[2]);
        unpack_codes(select_bytes(words[2], words[3], selector), fragment.x[1], fragment.x[3]);
#endif
    }
}
#endif

// Keys and values that a cache stores as codes with scales.
//
// The products are of the numbers of codes, which every element type represents exactly. The scale of a key multiplies
// its scores, and the scale of a value multiplies its weights before these are rounded to elements: no digit of a
// number is lost that the code has. Where the columns of a row have several scales, so do its products.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "loads.cuh"
#include "key_rows.cuh"
#include "products.cuh"
#include "code_format.cuh"

#if KEY_CODES
// The bytes of the codes of some columns, and the codes of a byte.
#define CODE_BYTES(columns) (CODE_FORMAT == CODES_OF_4_BITS ? (columns) / 2 : (columns))
#define CODES_OF_BYTE (CODE_FORMAT == CODES_OF_4_BITS ? 2 : 1)

// The scales of a row of keys, and of a row of values.
#define KEY_SCALES (HEAD_COLUMNS / KEY_SCALE_COLUMNS)
#define VALUE_SCALES (VALUE_COLUMNS / VALUE_SCALE_COLUMNS)

// The number of a code is the element that stands for it times CODE_UNIT.
#define CODE_UNIT (ELEMENT == 0 && CODE_FORMAT == CODES_OF_E4M3 ? 256.0f : 1.0f)

// A factor of weights besides the scales, so that few weights are below the least normal f16; the output is divided by
// it. The largest weight is 1, and the largest scale is that of 65504, as the largest number of a code: 516 for 8 bits,
// 147 for E4M3 and 8734 for 4 bits. So none overflows.
#define WEIGHT_FACTOR \
    (ELEMENT != 0 ? 1.0f : CODE_FORMAT == CODES_OF_8_BITS ? 64.0f : CODE_FORMAT == CODES_OF_E4M3 ? 256.0f : 4.0f)
#define CODE_OUTPUT_FACTOR (CODE_UNIT / WEIGHT_FACTOR)

// The weight of a value row times the row's scale. The scale of a row with numbers that are not finite is NaN: it must
// not reach queries for which the row is masked.
DEVICE float scaled_weight(float weight, float scale) { return weight == 0.0f ? 0.0f : weight * scale * WEIGHT_FACTOR; }

// The number of the code in a byte of a word: with 4 bits, the lower bits have half 0 and the upper ones half 1.
DEVICE float number_of_byte(u32 codes, int byte, int half) {
    return number_of_code(codes >> (8 * byte + 4 * half) & (CODE_FORMAT == CODES_OF_4_BITS ? 0xfu : 0xffu));
}

#if ELEMENT != 2
// The elements of the codes in four bytes as two pairs.
DEVICE void unpack_codes(u32 codes, int half, u32& first, u32& second) {
#if CODE_FORMAT == CODES_OF_E4M3
    // Sign, exponent and mantissa at their places in elements.
    const u32 one = select_bytes(codes, 0, 0x1404), two = select_bytes(codes, 0, 0x3424);
#if ELEMENT == 1
    // The bias of the exponent is 127 in the place of 7.
    first = multiply_bf16_pairs((one >> 4 & 0x07f007f0u) | (one & 0x80008000u), 0x7b807b80u); // 2^120 twice
    second = multiply_bf16_pairs((two >> 4 & 0x07f007f0u) | (two & 0x80008000u), 0x7b807b80u);
#else
    // The bias is 15, so that CODE_UNIT is 2^8.
    first = (one >> 1 & 0x3f803f80u) | (one & 0x80008000u);
    second = (two >> 1 & 0x3f803f80u) | (two & 0x80008000u);
#endif
#elif CODE_FORMAT == CODES_OF_4_BITS
    const u32 doubled = (half ? codes >> 3 : codes << 1) & 0x1e1e1e1eu;
#if ELEMENT == 1
    // From 64 to 128, bf16 are the multiples of 1/2: 64 + code, from which 71.5 is taken.
    const u32 low_bytes = doubled | 0x80808080u, high_bytes = 0x42424242u, excess = 0x428f428fu;
#else
    // From 512 to 1024, f16 are the multiples of 1/2: 512 + code, from which 519.5 is taken.
    const u32 low_bytes = doubled, high_bytes = 0x60606060u, excess = 0x600f600fu;
#endif
    first = subtract_pairs(select_bytes(low_bytes, high_bytes, 0x4140), excess);
    second = subtract_pairs(select_bytes(low_bytes, high_bytes, 0x4342), excess);
#elif ELEMENT == 1
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

// Loads the codes of rows of `width` columns to rows of COLUMNS columns; 0 outside of [first_row, end_row) and behind
// the width.
template <int ROWS, int COLUMNS, int PITCH, int THREADS>
DEVICE void load_code_tile(u32 to, const KeyRows& codes, int key, int first_row, int end_row, int width, int thread) {
    const KeyTileSource source = key_tile(codes, key, 1, first_row, end_row, CODE_BYTES(width));
    load_tile<ROWS, CODE_BYTES(COLUMNS) / 16, PITCH, THREADS, ALIGNED_ROWS, 1>(to, source, thread);
}

// Loads the SCALES scales of rows from the one of `key` on; 0 outside of [first_row, end_row). In shared memory, the
// first scales of all rows come before the second ones.
template <int ROWS, int SCALES, int THREADS>
DEVICE void load_scales(u32 to, const KeyRows& scales, int key, int first_row, int end_row, int thread) {
    const KeyTileSource source = key_tile(scales, key, 4, first_row, end_row, 4);
    for (int row = thread; row < ROWS; row += THREADS) {
        const bool is_read = row >= first_row && row < end_row;
        const char* from = is_read ? source.row(row, true) : source.rows;
        UNROLL for (int n = 0; n < SCALES; n++)
            copy_async_4(to + (n * ROWS + row) * 4, is_read ? from + 4 * n : from, is_read ? 4 : 0);
    }
}

// Loads the scales of rows, which are a stride apart, in the same order. `from` is the first scale of row 0.
template <int ROWS, int SCALES, int THREADS>
DEVICE void load_scales(u32 to, const float* from, i64 stride, int first_row, int end_row, int thread) {
    for (int row = thread; row < ROWS; row += THREADS) {
        const bool is_read = row >= first_row && row < end_row;
        UNROLL for (int n = 0; n < SCALES; n++)
            copy_async_4(to + (n * ROWS + row) * 4, is_read ? from + row * stride + n : from, is_read ? 4 : 0);
    }
}

// Multiplies products by the scales of keys at `scales_at`, or with IS_WEIGHT weights by the scales of values.
template <bool IS_WEIGHT, int ROW_TILES, int COLUMN_TILES>
DEVICE void multiply_by_scales(float (&scores)[ROW_TILES][COLUMN_TILES][4], u32 scales_at, int lane_column) {
    UNROLL for (int c = 0; c < COLUMN_TILES; c++) {
        const float2 scales = load_shared<float2>(scales_at + (8 * c + lane_column) * 4);
        UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
            UNROLL for (int e = 0; e < 4; e++) {
                float& score = scores[tile][c][e];
                const float scale = e & 1 ? scales.y : scales.x;
                score = IS_WEIGHT ? scaled_weight(score, scale) : score * (scale * CODE_UNIT);
            }
    }
}

// Adds products times the scales of keys at `scales_at` to scores, or sets these if it is the first scale of the keys.
template <int ROW_TILES, int COLUMN_TILES>
DEVICE void add_scaled_products(float (&scores)[ROW_TILES][COLUMN_TILES][4],
                                const float (&products)[ROW_TILES][COLUMN_TILES][4], u32 scales_at, int lane_column,
                                bool is_first) {
    UNROLL for (int c = 0; c < COLUMN_TILES; c++) {
        const float2 scales = load_shared<float2>(scales_at + (8 * c + lane_column) * 4);
        UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
            UNROLL for (int e = 0; e < 4; e++) {
                const float product = products[tile][c][e], scale = (e & 1 ? scales.y : scales.x) * CODE_UNIT;
                float& score = scores[tile][c][e];
                score = is_first ? product * scale : fused_multiply_add(product, scale, score);
            }
    }
}

// The left operand of two matrices of weights times the scales at `scales_at`.
DEVICE void scaled_weights_to_left(LeftFragment& fragment, const float (&c0)[4], const float (&c1)[4], u32 scales_at,
                                   int lane_column) {
    float scaled[1][2][4];
    UNROLL for (int e = 0; e < 4; e++) scaled[0][0][e] = c0[e], scaled[0][1][e] = c1[e];
    multiply_by_scales<true>(scaled, scales_at, lane_column);
    accumulators_to_left(fragment, scaled[0][0], scaled[0][1]);
}

// Stores the elements of the codes in four bytes in shared memory.
DEVICE void store_codes_as_elements(u32 to, u32 codes, int half) {
#if ELEMENT == 2
    float4 numbers;
    numbers.x = number_of_byte(codes, 0, half), numbers.y = number_of_byte(codes, 1, half);
    numbers.z = number_of_byte(codes, 2, half), numbers.w = number_of_byte(codes, 3, half);
    store_shared<float4>(to, numbers);
#else
    uint2 pairs;
    unpack_codes(codes, half, pairs.x, pairs.y);
    store_shared<uint2>(to, pairs);
#endif
}

// Converts the chunks that this thread loaded by load_code_tile, without padding of rows, to a tile of elements.
template <int ROWS, int COLUMNS, int PITCH, int THREADS> DEVICE void convert_codes(u32 to, u32 from, int thread) {
    const int row_chunks = CODE_BYTES(COLUMNS) / 16;
    for (int chunk = thread; chunk < ROWS * row_chunks; chunk += THREADS) {
        const uint4 codes = load_shared<uint4>(from + chunk * 16);
        const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
        const u32 row_to =
            to + chunk / row_chunks * PITCH + chunk % row_chunks * 16 * CODES_OF_BYTE * ELEMENT_BYTES;
        UNROLL for (int half = 0; half < CODES_OF_BYTE; half++)
            UNROLL for (int w = 0; w < 4; w++)
                store_codes_as_elements(row_to + (16 * half + 4 * w) * ELEMENT_BYTES, words[w], half);
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
    const int half = CODES_OF_BYTE == 2 && k % 32 == 16 ? 1 : 0, byte = CODES_OF_BYTE == 2 ? k / 32 * 16 : k;
    UNROLL for (int tile = 0; tile < 2; tile++) {
        const u32 word = load_shared<u32>(at + (n + 8 * tile + (lane >> 2)) * PITCH + byte + 4 * (lane & 3));
#if ELEMENT == 2
        UNROLL for (int e = 0; e < 4; e++) fragment.x[4 * tile + e] = number_of_byte(word, e, half);
#else
        unpack_codes(word, half, fragment.x[2 * tile], fragment.x[2 * tile + 1]);
#endif
    }
}

// The columns whose codes a warp loads together, of a row of values: four bytes of each of 8 lanes.
#define CODE_COLUMNS (32 * CODES_OF_BYTE)

// The column of the values that is column n of matrix m, where matrices of 8 columns are counted through the fragments
// of load_right_codes_transposed.
DEVICE int column_of_codes(int m, int n) {
    const int columns = m / (CODE_COLUMNS / 8) * CODE_COLUMNS, matrix = m % (CODE_COLUMNS / 8);
    // With 4 bits, lanes n to n + 3 have 16 bytes, of which matrices from 4 on are the upper bits.
    if (CODES_OF_BYTE == 2) return columns + n / 4 * 32 + matrix / 4 * 16 + n % 4 * 4 + matrix % 4;
    return columns + 4 * n + matrix;
}

// Rows of k, CODE_COLUMNS columns of n, from codes: fragments of two matrices of 8 columns each.
template <int PITCH>
DEVICE void load_right_codes_transposed(RightFragment (&fragments)[CODE_COLUMNS / 16], u32 at, int k, int n, int lane) {
    const int group = lane >> 2, pair = lane & 3;
    u32 words[4];
    UNROLL for (int e = 0; e < 4; e++)
        words[e] =
            load_shared<u32>(at + (k + 2 * pair + (e & 1) + 8 * (e >> 1)) * PITCH + CODE_BYTES(n) + 4 * group);
    UNROLL for (int m = 0; m < CODE_COLUMNS / 16; m++) {
        RightFragment& fragment = fragments[m];
#if ELEMENT == 2
        UNROLL for (int e = 0; e < 8; e++) fragment.x[e] = number_of_byte(words[e % 4], m % 2 * 2 + e / 4, m / 2);
#else
        // Two codes of a row of k and two of the next one, in turn: the pairs of two matrices.
        const u32 selector = m % 2 == 0 ? 0x5140 : 0x7362;
        unpack_codes(select_bytes(words[0], words[1], selector), m / 2, fragment.x[0], fragment.x[2]);
        unpack_codes(select_bytes(words[2], words[3], selector), m / 2, fragment.x[1], fragment.x[3]);
#endif
    }
}
#endif

// Matrix products on tensor cores: fragments from shared memory, and their products.
//
// A left fragment is a matrix of 16 x 16 (rows m, columns k), a right one of 16 x 16 (rows k, columns n), whose columns
// are two matrices of 8. An accumulator is 16 x 8: lane l has the columns 2 (l % 4) and the next of row l / 4 in its
// first two numbers, and of row l / 4 + 8 in the other two.
#pragma once
#include "specialization.cuh"
#include "device.cuh"

#if ELEMENT == 2
// f32: each operand is the sum of two TF32 numbers, of whose four products the smallest is left out. The index k is
// permuted in both operands, so that accumulators are left operands as they are: of 8 successive columns, column t of
// the instruction is column 2t, and column t + 4 is column 2t + 1.
struct LeftFragment {
    float x[8];
};
struct RightFragment {
    float x[8];
};

// Rows of m, columns of k.
template <int PITCH> DEVICE void load_left(LeftFragment& fragment, u32 at, int row, int k, int lane) {
    const int group = lane >> 2, pair = lane & 3;
    UNROLL for (int half = 0; half < 2; half++) {
        const u32 from = at + (row + group) * PITCH + (k + 8 * half + 2 * pair) * 4;
        const float2 upper = load_shared<float2>(from), lower = load_shared<float2>(from + 8 * PITCH);
        fragment.x[4 * half] = upper.x, fragment.x[4 * half + 1] = lower.x;
        fragment.x[4 * half + 2] = upper.y, fragment.x[4 * half + 3] = lower.y;
    }
}

// Rows of k, columns of m.
template <int PITCH> DEVICE void load_left_transposed(LeftFragment& fragment, u32 at, int row, int k, int lane) {
    const int group = lane >> 2, pair = lane & 3;
    UNROLL for (int half = 0; half < 2; half++)
        UNROLL for (int e = 0; e < 2; e++) {
            const u32 from = at + (k + 8 * half + 2 * pair + e) * PITCH + (row + group) * 4;
            fragment.x[4 * half + 2 * e] = load_shared<float>(from);
            fragment.x[4 * half + 2 * e + 1] = load_shared<float>(from + 32);
        }
}

// Rows of n, columns of k.
template <int PITCH> DEVICE void load_right(RightFragment& fragment, u32 at, int n, int k, int lane) {
    const int group = lane >> 2, pair = lane & 3;
    UNROLL for (int tile = 0; tile < 2; tile++)
        UNROLL for (int half = 0; half < 2; half++) {
            const float2 two = load_shared<float2>(at + (n + 8 * tile + group) * PITCH + (k + 8 * half + 2 * pair) * 4);
            fragment.x[4 * tile + 2 * half] = two.x, fragment.x[4 * tile + 2 * half + 1] = two.y;
        }
}

// Rows of k, columns of n.
template <int PITCH> DEVICE void load_right_transposed(RightFragment& fragment, u32 at, int k, int n, int lane) {
    const int group = lane >> 2, pair = lane & 3;
    UNROLL for (int tile = 0; tile < 2; tile++)
        UNROLL for (int half = 0; half < 2; half++)
            UNROLL for (int e = 0; e < 2; e++)
                fragment.x[4 * tile + 2 * half + e] =
                    load_shared<float>(at + (k + 8 * half + 2 * pair + e) * PITCH + (n + 8 * tile + group) * 4);
}

// The left operand whose columns are those of two accumulators.
DEVICE void accumulators_to_left(LeftFragment& fragment, const float (&c0)[4], const float (&c1)[4]) {
    fragment.x[0] = c0[0], fragment.x[1] = c0[2], fragment.x[2] = c0[1], fragment.x[3] = c0[3];
    fragment.x[4] = c1[0], fragment.x[5] = c1[2], fragment.x[6] = c1[1], fragment.x[7] = c1[3];
}

// Adds the product to two accumulators, which are its columns.
DEVICE void multiply_fragments(float (&c0)[4], float (&c1)[4], const LeftFragment& left, const RightFragment& right) {
    UNROLL for (int half = 0; half < 2; half++) {
        u32 left_high[4], left_low[4];
        UNROLL for (int e = 0; e < 4; e++) {
            const float number = left.x[4 * half + e];
            left_high[e] = round_to_tf32(number);
            left_low[e] = round_to_tf32(number - as_float(left_high[e]));
        }
        UNROLL for (int tile = 0; tile < 2; tile++) {
            float (&c)[4] = tile ? c1 : c0;
            u32 right_high[2], right_low[2];
            UNROLL for (int e = 0; e < 2; e++) {
                const float number = right.x[4 * tile + 2 * half + e];
                right_high[e] = round_to_tf32(number);
                right_low[e] = round_to_tf32(number - as_float(right_high[e]));
            }
            // Tensor cores cut off what they add to a sum, which drifts over many keys: the sum is kept outside.
            float product[4] = {0, 0, 0, 0};
            multiply_add_tf32(product, left_low, right_high[0], right_high[1]);
            multiply_add_tf32(product, left_high, right_low[0], right_low[1]);
            multiply_add_tf32(product, left_high, right_high[0], right_high[1]);
            UNROLL for (int e = 0; e < 4; e++) c[e] += product[e];
        }
    }
}
#else
// f16 and bf16: the operands of m16n8k16.
struct LeftFragment {
    u32 x[4];
};
struct RightFragment {
    u32 x[4];
};

// Rows of m, columns of k.
template <int PITCH> DEVICE void load_left(LeftFragment& fragment, u32 at, int row, int k, int lane) {
    load_matrices(fragment.x, at + (row + (lane & 15)) * PITCH + (k + (lane >> 4) * 8) * 2);
}

// Rows of k, columns of m.
template <int PITCH> DEVICE void load_left_transposed(LeftFragment& fragment, u32 at, int row, int k, int lane) {
    const int from_row = k + (lane & 7) + ((lane >> 4) << 3), from_column = row + ((lane >> 3) & 1) * 8;
    load_matrices_transposed(fragment.x, at + from_row * PITCH + from_column * 2);
}

// Rows of n, columns of k.
template <int PITCH> DEVICE void load_right(RightFragment& fragment, u32 at, int n, int k, int lane) {
    const int from_row = n + (lane & 7) + ((lane >> 4) << 3), from_column = k + ((lane >> 3) & 1) * 8;
    load_matrices(fragment.x, at + from_row * PITCH + from_column * 2);
}

// Rows of k, columns of n.
template <int PITCH> DEVICE void load_right_transposed(RightFragment& fragment, u32 at, int k, int n, int lane) {
    load_matrices_transposed(fragment.x, at + (k + (lane & 15)) * PITCH + (n + (lane >> 4) * 8) * 2);
}

// The left operand whose columns are those of two accumulators.
DEVICE void accumulators_to_left(LeftFragment& fragment, const float (&c0)[4], const float (&c1)[4]) {
    fragment.x[0] = pack_pair(c0[0], c0[1]), fragment.x[1] = pack_pair(c0[2], c0[3]);
    fragment.x[2] = pack_pair(c1[0], c1[1]), fragment.x[3] = pack_pair(c1[2], c1[3]);
}

// Adds the product to two accumulators, which are its columns.
DEVICE void multiply_fragments(float (&c0)[4], float (&c1)[4], const LeftFragment& left, const RightFragment& right) {
    multiply_add_half(c0, left.x, right.x[0], right.x[1]);
    multiply_add_half(c1, left.x, right.x[2], right.x[3]);
}
#endif

// Whether a number of some accumulators is not finite, in the registers of this thread.
template <int ROWS, int COLUMNS> DEVICE bool has_special_number(const float (&matrices)[ROWS][COLUMNS][4]) {
    float sum = 0; // a finite number times 0 is 0
    UNROLL for (int row = 0; row < ROWS; row++)
        UNROLL for (int column = 0; column < COLUMNS; column++)
            UNROLL for (int e = 0; e < 4; e++) sum = fused_multiply_add(matrices[row][column][e], 0.0f, sum);
    return !is_finite(sum);
}

// Sets matrices of accumulators to zeros.
template <int ROWS, int COLUMNS> DEVICE void clear(float (&matrices)[ROWS][COLUMNS][4]) {
    UNROLL for (int row = 0; row < ROWS; row++)
        UNROLL for (int column = 0; column < COLUMNS; column++)
            UNROLL for (int e = 0; e < 4; e++) matrices[row][column][e] = 0;
}

// Multiplies 16 * ROW_TILES rows from `left_row` on of one tile and 8 * COLUMN_TILES rows from `right_row` on of
// another tile, both with PITCH bytes and COLUMNS elements a row.
template <int PITCH, int COLUMNS, int ROW_TILES, int COLUMN_TILES>
DEVICE void multiply_tile_rows(u32 left_at, int left_row, u32 right_at, int right_row, int lane,
                               float (&products)[ROW_TILES][COLUMN_TILES][4]) {
    clear(products);
    UNROLL for (int k = 0; k < COLUMNS / 16; k++) {
        LeftFragment left[ROW_TILES];
        UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
            load_left<PITCH>(left[tile], left_at, left_row + 16 * tile, 16 * k, lane);
        UNROLL for (int c = 0; c < COLUMN_TILES / 2; c++) {
            RightFragment right;
            load_right<PITCH>(right, right_at, right_row + 16 * c, 16 * k, lane);
            UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
                multiply_fragments(products[tile][2 * c], products[tile][2 * c + 1], left[tile], right);
        }
    }
}

// Computes products of multiply_tile_rows that are not finite again, by plain f32: the TF32 remainder of infinity is
// NaN, and so is that of numbers which TF32 rounds to infinity. The other products stay as they are. All lanes of a warp
// take part.
template <int PITCH, int COLUMNS, int ROW_TILES, int COLUMN_TILES>
DEVICE void repair_products(u32 left_at, int left_row, u32 right_at, int right_row, int lane,
                            float (&products)[ROW_TILES][COLUMN_TILES][4]) {
#if ELEMENT == 2
    if (!any_in_warp(has_special_number(products))) return;
    UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
        UNROLL for (int c = 0; c < COLUMN_TILES; c++)
            UNROLL for (int e = 0; e < 4; e++) {
                if (is_finite(products[tile][c][e])) continue;
                const u32 left = left_at + (left_row + 16 * tile + 8 * (e >> 1) + (lane >> 2)) * PITCH;
                const u32 right = right_at + (right_row + 8 * c + 2 * (lane & 3) + (e & 1)) * PITCH;
                float sum = 0;
#pragma unroll 1
                for (int k = 0; k < COLUMNS * 4; k += 4)
                    sum = fused_multiply_add(load_shared<float>(left + k), load_shared<float>(right + k), sum);
                products[tile][c][e] = sum;
            }
#endif
}

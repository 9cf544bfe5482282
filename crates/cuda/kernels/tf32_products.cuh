// Products of matrices of f32 by the tensor cores, for tensors of any element type.
//
// A number of f32 is the sum of two numbers of TF32 up to 2^-22 of it. With elements of f32 a product is the sum of
// three products of TF32. With elements of 16 bits it is one: TF32 represents the elements exactly, and rounds states,
// errors and rows after the norm and the decay to 2^-11 of them, as rounding the output to f16 does.
//
// An operand is a fragment of 16 x 16 numbers. The depth of a product of TF32 is permuted: its column t holds column
// 2t, and its column t + 4 holds column 2t + 1, so that sums are left operands as they are.
#pragma once

#include "device.cuh"

#define TF32_TERMS (ELEMENT == 2 ? 2 : 1)

// Rows of 16, columns of depth: for both halves of the depth the numbers at (row, depth) = (g, 2t), (g + 8, 2t),
// (g, 2t + 1) and (g + 8, 2t + 1), where g is lane / 4 and t is lane % 4.
struct LeftOperand {
    u32 x[TF32_TERMS][8];
};

// Columns of 16, rows of depth: for both halves of the columns and then of the depth the numbers at (depth, column) =
// (2t, g) and (2t + 1, g).
struct RightOperand {
    u32 x[TF32_TERMS][8];
};

// Sums of 16 rows and 8 columns: at (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1).
typedef float Sums[4];

template <class Operand> DEVICE void set_operand(Operand& operand, int at, float x) {
    operand.x[0][at] = round_to_tf32(x);
    if (TF32_TERMS == 2) operand.x[TF32_TERMS - 1][at] = round_to_tf32(x - as_float(operand.x[0][at]));
}

// Reads rows from shared memory that are PITCH bytes apart.
template <int PITCH> DEVICE void read_left(LeftOperand& operand, u32 at, int row, int depth, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int s = 0; s < 2; s++) {
        const u32 from = at + (row + g) * PITCH + (depth + 8 * s + 2 * t) * 4;
        const float2 upper = load_shared<float2>(from), lower = load_shared<float2>(from + 8 * PITCH);
        set_operand(operand, 4 * s, upper.x);
        set_operand(operand, 4 * s + 1, lower.x);
        set_operand(operand, 4 * s + 2, upper.y);
        set_operand(operand, 4 * s + 3, lower.y);
    }
}

// Reads the transpose of a matrix in shared memory: a row of it is a column of the operand.
template <int PITCH> DEVICE void read_left_transposed(LeftOperand& operand, u32 at, int row, int depth, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int s = 0; s < 2; s++) {
        UNROLL for (int e = 0; e < 2; e++) {
            const u32 from = at + (depth + 8 * s + 2 * t + e) * PITCH + (row + g) * 4;
            set_operand(operand, 4 * s + 2 * e, load_shared<float>(from));
            set_operand(operand, 4 * s + 2 * e + 1, load_shared<float>(from + 32));
        }
    }
}

// Reads rows of depth from shared memory.
template <int PITCH> DEVICE void read_right(RightOperand& operand, u32 at, int depth, int column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int j = 0; j < 2; j++) {
        UNROLL for (int s = 0; s < 2; s++) {
            UNROLL for (int e = 0; e < 2; e++) {
                const u32 from = at + (depth + 8 * s + 2 * t + e) * PITCH + (column + 8 * j + g) * 4;
                set_operand(operand, 4 * j + 2 * s + e, load_shared<float>(from));
            }
        }
    }
}

// Reads the transpose of a matrix in shared memory: a row of it is a column of the operand.
template <int PITCH> DEVICE void read_right_transposed(RightOperand& operand, u32 at, int depth, int column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    UNROLL for (int j = 0; j < 2; j++) {
        UNROLL for (int s = 0; s < 2; s++) {
            const float2 two = load_shared<float2>(at + (column + 8 * j + g) * PITCH + (depth + 8 * s + 2 * t) * 4);
            set_operand(operand, 4 * j + 2 * s, two.x);
            set_operand(operand, 4 * j + 2 * s + 1, two.y);
        }
    }
}

// Makes a left operand of the sums of 16 columns, times a factor.
DEVICE void sums_to_left(LeftOperand& operand, const Sums& first, const Sums& second) {
    UNROLL for (int s = 0; s < 2; s++) {
        const Sums& sums = s ? second : first;
        set_operand(operand, 4 * s, sums[0]);
        set_operand(operand, 4 * s + 1, sums[2]);
        set_operand(operand, 4 * s + 2, sums[1]);
        set_operand(operand, 4 * s + 3, sums[3]);
    }
}

// Adds the product of two operands to sums of 16 rows and 16 columns.
DEVICE void add_product(Sums& first, Sums& second, const LeftOperand& left, const RightOperand& right) {
    UNROLL for (int s = 0; s < 2; s++) {
        u32 a[TF32_TERMS][4];
        UNROLL for (int term = 0; term < TF32_TERMS; term++)
            UNROLL for (int e = 0; e < 4; e++) a[term][e] = left.x[term][4 * s + e];
        UNROLL for (int j = 0; j < 2; j++) {
            Sums& sums = j ? second : first;
            const int at = 4 * j + 2 * s;
            // Tensor cores truncate what they add to a sum, which would drift over many products: the sum is kept
            // outside.
            Sums product = {0, 0, 0, 0};
            if (TF32_TERMS == 2) {
                multiply_add_tf32(product, a[TF32_TERMS - 1], right.x[0][at], right.x[0][at + 1]);
                multiply_add_tf32(product, a[0], right.x[TF32_TERMS - 1][at], right.x[TF32_TERMS - 1][at + 1]);
            }
            multiply_add_tf32(product, a[0], right.x[0][at], right.x[0][at + 1]);
            UNROLL for (int e = 0; e < 4; e++) sums[e] += product[e];
        }
    }
}

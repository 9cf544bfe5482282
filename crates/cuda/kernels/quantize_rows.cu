// Rows as codes of 8 bits: the code of x is round(x / scale) + 128, where the scale is 1/127 of the row's largest
// magnitude. A row with a number that is not finite has the scale NaN and codes of 0. A row whose scale would be
// subnormal has the scale 0 and codes of 128, which are zeros.
//
// Every step rounds as it does on a CPU, so that both store the same bits.
//
// A warp has a row, counted over (B, H, T). Grid of quantize_rows: ceil(B * H * T / QUANTIZE_WARPS). Threads:
// QUANTIZE_WARPS * 32.
#pragma once

#include "quantize_rows_arguments.cuh"
#include "elements.cuh"

#define LARGEST_CODE 127.0
#define ZERO_CODE 128
#define LEAST_NORMAL as_float(0x00800000u)
#define NOT_A_NUMBER as_float(0x7fc00000u)

// The first element of a row.
DEVICE i64 input_row_start(const QuantizeRowsArguments& arguments, i64 row) {
    const RowStrides& strides = arguments.input_strides;
    const i64 head = row / arguments.tokens, entry = head / arguments.heads;
    return entry * strides.sequence + head % arguments.heads * strides.head + row % arguments.tokens * strides.row;
}

// The scale of a row, in every lane of its warp.
DEVICE float row_scale(const QuantizeRowsArguments& arguments, i64 from, int lane) {
    float largest = 0;
    bool has_special = false;
    for (int c = lane; c < arguments.width; c += 32) {
        const float x = load_element(arguments.inputs, from + c);
        has_special |= !is_finite(x);
        largest = larger(largest, absolute(x));
    }
    if (any_in_warp(has_special)) return NOT_A_NUMBER;
    // A product, as on a CPU: a division may round differently.
    const float scale = warp_max(largest) * (float)(1.0 / LARGEST_CODE);
    return scale >= LEAST_NORMAL ? scale : 0.0f;
}

// The code of a number in a row with this scale.
DEVICE u8 code_of(float x, float scale) {
    if (!is_finite(scale)) return 0;
    if (scale == 0.0f) return ZERO_CODE;
    // The sum is positive, so that the conversion, which rounds towards zero, rounds to the nearest code.
    return (u8)(x / scale + (ZERO_CODE + 0.5f));
}

KERNEL(quantize_rows, QUANTIZE_WARPS * 32, 1, QuantizeRowsArguments) {
    const i64 row = (i64)block_index() * QUANTIZE_WARPS + thread_index() / 32;
    if (row >= (i64)arguments.entries * arguments.heads * arguments.tokens) return;
    const int lane = thread_index() % 32;
    const i64 from = input_row_start(arguments, row), to = row * arguments.width;
    const float scale = row_scale(arguments, from, lane);
    for (int c = lane; c < arguments.width; c += 32)
        store_global(arguments.codes + to + c, code_of(load_element(arguments.inputs, from + c), scale));
    if (lane == 0) store_global(arguments.scales + row, scale);
}

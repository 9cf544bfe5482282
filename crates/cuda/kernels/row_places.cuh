// The places of rows in tensors (B, T, H, D).
#pragma once
#include "device.cuh"
#include "row_strides.cuh"

// The first element of a row, of which there are B * T * H.
DEVICE i64 row_start(const LOCAL RowStrides& strides, int tokens, int heads, int row) {
    const int token = row / heads;
    return token / tokens * strides.sequence + token % tokens * strides.row + row % heads * strides.head;
}

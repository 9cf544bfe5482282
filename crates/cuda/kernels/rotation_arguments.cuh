// The one argument of the kernel that rotates heads (rotary position embeddings).
//
// The Rust side has the same struct, with the same field names in the same order; a test compares all offsets. B is
// `entries`, T is `tokens`, H is `heads` and D is `width`. A pointer that a call does not need is null.
#pragma once

#include "device.cuh"

#include "arguments.cuh"

struct RotationArguments {
    // ---- tensors ----
    const void* inputs;       // (B, T, H, D), elements
    void* output;             // (B, T, H, D), elements, contiguous
    const float* cosines;     // (angle_row_count, pairs)
    const float* sines;       // (angle_row_count, pairs)
    const int* angle_rows;    // (T), or (B, T): the row of the angles of a token. Null: first_angle_row and those after it

    // ---- strides, in elements ----
    RowStrides input_strides;
    i64 angle_rows_stride;    // from sequence to sequence: T, or 0 if all have the same rows

    // ---- sizes ----
    int entries;
    int tokens;
    int heads;
    int width;
    int pairs;                // the columns that are rotated, divided by 2
    int angle_row_count;

    // ---- options ----
    int first_angle_row;
    int interleaved;          // 1: a pair are two neighbouring columns; 0: column n and column n + pairs
    int inverse;              // 1: rotates by the opposite angles
    int reserved;
};

// The rotation of heads by the angles of their tokens (rotary position embeddings), in f32. A thread has a pair of
// columns, or one of the columns after all pairs, which are copied.
#pragma once
#include "rotation_arguments.cuh"
#include "row_elements.cuh"

// The row of the angles of a token, which is a row of the tables whatever the list says.
DEVICE int angle_row(const LOCAL RotationArguments& arguments, i64 entry, int place) {
    int row = arguments.first_angle_row + place;
    if (arguments.angle_rows) row = load_global(arguments.angle_rows + entry * arguments.angle_rows_stride + place);
    return row < 0 ? 0 : row < arguments.angle_row_count ? row : arguments.angle_row_count - 1;
}

// Computes the columns of the thread with an index in the grid.
DEVICE void rotate(const LOCAL RotationArguments& arguments, i64 index) {
    const int slots = arguments.width - arguments.pairs;
    const i64 row = index / slots, token = row / arguments.heads, entry = token / arguments.tokens;
    if (entry >= arguments.entries) return;
    const int slot = (int)(index % slots), head = (int)(row % arguments.heads), place = (int)(token % arguments.tokens);
    const i64 from = entry * arguments.input_strides.sequence + place * arguments.input_strides.row +
                     head * arguments.input_strides.head;
    const i64 to = row * arguments.width;
    if (slot >= arguments.pairs) {
        const int column = arguments.pairs + slot;
        store_element(arguments.output, to + column, load_element(arguments.inputs, from + column));
        return;
    }
    const i64 angle = (i64)angle_row(arguments, entry, place) * arguments.pairs + slot;
    const float cosine = load_global(arguments.cosines + angle), positive = load_global(arguments.sines + angle);
    const float sine = arguments.inverse ? -positive : positive;
    const int first = arguments.interleaved ? 2 * slot : slot;
    const int second = arguments.interleaved ? 2 * slot + 1 : slot + arguments.pairs;
    const float x = load_element(arguments.inputs, from + first), y = load_element(arguments.inputs, from + second);
    store_element(arguments.output, to + first, x * cosine - y * sine);
    store_element(arguments.output, to + second, y * cosine + x * sine);
}

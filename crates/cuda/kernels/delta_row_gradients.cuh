// The gradients of the row of a token before the norm and the scale.
#pragma once

#include "delta_rows.cuh"

// Addresses in shared memory of a token's rows and of their gradients.
struct RowGradients {
    u32 query;           // after the norm and the scale
    u32 key;             // after the norm
    u32 query_gradient;
    u32 key_gradient;
    u32 decay_gradient;  // of the logarithms, KEY_COLUMNS numbers
    u32 row_factors;     // of the query and of the key
};

// Writes the gradient of a row of queries or keys by one warp. The part of the gradient along the row changes only the
// length of the row, which a norm removes. `square` is the square of the length that the norm gives a row.
DEVICE void write_row_gradient(float* to, u32 row, u32 gradient, float factor, bool has_norm, float square, int lane) {
    float along = 0;
    if (has_norm && square > 0) {
        for (int column = lane; column < KEY_WIDTH; column += 32) {
            along += load_shared<float>(row + column * 4) * load_shared<float>(gradient + column * 4);
        }
        along = warp_sum(along) / square;
    }
    for (int column = lane; column < KEY_WIDTH; column += 32) {
        const float across = load_shared<float>(gradient + column * 4) - along * load_shared<float>(row + column * 4);
        store_global(to + column, factor * across);
    }
}

// Writes the gradients of the row at `index` of (B, H, T) by one warp.
DEVICE void write_row_gradients(const DeltaArguments& arguments, const RowGradients& row, i64 index, int lane) {
    const float query_factor = load_shared<float>(row.row_factors),
                key_factor = load_shared<float>(row.row_factors + 4);
    const float square = arguments.scale * arguments.scale;
    const bool has_norm = arguments.has_norm;
    float* query = arguments.query_gradient + index * KEY_WIDTH;
    float* key = arguments.key_gradient + index * KEY_WIDTH;
    write_row_gradient(query, row.query, row.query_gradient, query_factor, has_norm, square, lane);
    write_row_gradient(key, row.key, row.key_gradient, key_factor, has_norm, 1.0f, lane);
    if (!arguments.decays) return;
    float sum = 0;
    for (int column = lane; column < KEY_WIDTH; column += 32) {
        const float gradient = load_shared<float>(row.decay_gradient + column * 4);
        sum += gradient;
        if (arguments.decay_per_channel) store_global(arguments.decay_gradient + index * KEY_WIDTH + column, gradient);
    }
    sum = warp_sum(sum);
    if (lane == 0 && !arguments.decay_per_channel) store_global(arguments.decay_gradient + index, sum);
}

// The parts that the backward kernels of queries and of keys share.
//
// A threadgroup has rows of its own, 8 for each simdgroup, and goes through the rows of the other side in tiles:
// queries with tiles of keys and values, or keys with tiles of queries and gradients of outputs. Two products with a
// tile are the scores and the gradients of the weights; a pair of a query and a key then has a gradient, whose product
// with the tile joins the sums of the own rows. No matrix of scores is stored, and every sum has a fixed order.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "attention_buffers.metal"
#include "elements.cuh"
#include "masks.cuh"
#include "modifiers.cuh"
#include "row_weights.cuh"
#include "dropped_weights.metal"
#include "tiles.metal"
#include "forward.metal"

// The place of a thread in the fragments of its simdgroup.
struct FragmentPlace {
    int index;  // in the threadgroup
    int row;    // of a fragment
    int column; // of a fragment: the first of two
};

DEVICE FragmentPlace fragment_place(int thread_index) {
    FragmentPlace place;
    place.index = thread_index;
    place.row = fragment_row(thread_index % 32), place.column = fragment_column(thread_index % 32);
    return place;
}

// A row of a thread in device memory.
struct OwnRow {
    GLOBAL const char* first;
    bool is_row; // whether it is in the sequence
    int width;
    int columns; // of a tile
};

DEVICE float2 load_row_pair(const LOCAL OwnRow& row, int column) {
    float2 pair;
    pair.x = row.is_row && column < row.width ? load_element(row.first, column) : 0.0f;
    pair.y = row.is_row && column + 1 < row.width ? load_element(row.first, column + 1) : 0.0f;
    return pair;
}

// Loads a row into registers, if the kernels keep rows there.
DEVICE void keep_row(const LOCAL FragmentPlace& place, const LOCAL OwnRow& row, LOCAL float2* kept) {
    if (!BACKWARD_ROWS_IN_REGISTERS) return;
    UNROLL for (int d = 0; d < row.columns / 8; d++) kept[d] = load_row_pair(row, 8 * d + place.column);
}

// Multiplies the own rows and the rows of a tile.
DEVICE void multiply_tile_rows(const LOCAL FragmentPlace& place, const LOCAL OwnRow& row, const LOCAL float2* kept,
                               SHARED(Element) tile, int pitch, int fragments, LOCAL float2* products) {
    UNROLL for (int c = 0; c < fragments; c++) products[c].x = products[c].y = 0;
    UNROLL for (int d = 0; d < row.columns / 8; d++) {
        float2 own;
        if (BACKWARD_ROWS_IN_REGISTERS) own = kept[d];
        else own = load_row_pair(row, 8 * d + place.column);
        UNROLL for (int c = 0; c < fragments; c++)
            multiply_add(products[c], own,
                         load_column_pair(tile + ((8 * c + place.column) * pitch + 8 * d + place.row), pitch));
    }
}

// Adds the products of scores and a tile to the sums of the own rows. If `is_careful`, without the numbers of the tile
// that are not finite: they must not meet the scores of pairs that are masked, which are 0.
DEVICE void add_tile_rows(const LOCAL FragmentPlace& place, const LOCAL float2* scores, SHARED(Element) tile, int pitch,
                          int columns, int fragments, bool is_careful, LOCAL float2* sums) {
    UNROLL for (int c = 0; c < fragments; c++) {
        UNROLL for (int d = 0; d < columns / 8; d++) {
            float2 numbers = load_pair(tile + ((8 * c + place.row) * pitch + 8 * d + place.column));
            if (is_careful && !is_finite(numbers.x)) numbers.x = 0;
            if (is_careful && !is_finite(numbers.y)) numbers.y = 0;
            multiply_add(sums[d], scores[c], numbers);
        }
    }
}

// Adds the numbers of a row that are not finite.
DEVICE void add_special_row(const LOCAL FragmentPlace& place, const LOCAL OwnRow& row, LOCAL float2* sums) {
    UNROLL for (int d = 0; d < row.columns / 8; d++) {
        const float2 numbers = load_row_pair(row, 8 * d + place.column);
        if (!is_finite(numbers.x)) sums[d].x += numbers.x;
        if (!is_finite(numbers.y)) sums[d].y += numbers.y;
    }
}

// Stores a row times a factor.
DEVICE void store_row(const LOCAL FragmentPlace& place, GLOBAL char* to, int width, int columns,
                      const LOCAL float2* sums, float factor) {
    UNROLL for (int d = 0; d < columns / 8; d++) {
        const int column = 8 * d + place.column;
        if (column < width) store_element(to, column, sums[d].x * factor);
        if (column + 1 < width) store_element(to, column + 1, sums[d].y * factor);
    }
}

// What the backward pass computes again for a query and a key that it attends to.
struct PairGradient {
    float weight;  // after dropout
    float score;   // the gradient of the score
    float product; // the gradient of the product times the scale
};

// The numbers of a query.
struct QueryNumbers {
    RowStatistics statistics;
    float delta;
};

// The gradients of a pair, from its product and the gradient of its weight after dropout.
DEVICE PairGradient differentiate_pair(const LOCAL AttentionArguments& arguments, const LOCAL ScoreModifiers& modifiers,
                                       const LOCAL QueryNumbers& numbers, float scale, float kept, float product,
                                       float weight_gradient, int query, int key) {
    float derivative = 1, score = product;
    if (MODIFIES_SCORES) score = modify_score(modifiers, product, query, key, derivative);
    if (HAS_BIAS) score = fused_multiply_add(load_bias(arguments, modifiers, query, key), SCORE_UNIT, score);
    const float weight = normalized_weight(score, numbers.statistics, scale);
    PairGradient pair;
    pair.weight = weight * kept; // a weight that is NaN stays NaN
    pair.score = weight * (weight_gradient * kept - numbers.delta);
    pair.product = HAS_PRODUCT_DERIVATIVE ? pair.score * derivative : pair.score;
    return pair;
}

// The gradients of a pair that is masked.
DEVICE PairGradient no_pair_gradient() {
    PairGradient pair;
    pair.weight = pair.score = pair.product = 0;
    return pair;
}

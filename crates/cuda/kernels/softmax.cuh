// The softmax over keys that arrive tile by tile.
//
// A row has the maximum of its scores and the sum of exp(score - maximum) over the keys so far; its output is relative
// to the same maximum. Each lane sums the scores that it has: the sum of a row is that of four lanes.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "row_results.cuh"

// Rows of 16 queries of a warp: row 16 n + 8 r + lane / 4 is row r of tile n.
template <int ROW_TILES, int OUTPUT_TILES> struct SoftmaxState {
    float output[ROW_TILES][OUTPUT_TILES][4];
    float maximum[ROW_TILES][2];
    float sum[ROW_TILES][2];
};

template <int ROW_TILES, int OUTPUT_TILES> DEVICE void clear(SoftmaxState<ROW_TILES, OUTPUT_TILES>& state) {
    clear(state.output);
    UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) state.maximum[tile][r] = NEGATIVE_INFINITY, state.sum[tile][r] = 0;
}

// Raises the maxima by the scores of a tile of keys, and replaces the scores by weights.
//
// IS_LAZY: the maxima move only if a weight of the warp would exceed 2^8 otherwise, which spares most multiplications
// of the output. Weights are then at most 2^8, otherwise at most 1.
template <bool IS_LAZY, int ROW_TILES, int OUTPUT_TILES, int KEY_TILES>
DEVICE void update_softmax(SoftmaxState<ROW_TILES, OUTPUT_TILES>& state, float (&scores)[ROW_TILES][KEY_TILES][4],
                           float scale) {
    float raised[ROW_TILES][2];
    bool grows = false;
    UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            float top = state.maximum[tile][r];
            UNROLL for (int c = 0; c < KEY_TILES; c++)
                top = larger(top, larger(scores[tile][c][2 * r], scores[tile][c][2 * r + 1]));
            raised[tile][r] = quad_max(top);
            grows |= (raised[tile][r] - state.maximum[tile][r]) * scale > 8.0f;
        }
    if (!IS_LAZY || any_in_warp(grows)) {
        UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
            UNROLL for (int r = 0; r < 2; r++) {
                const float reference = raised[tile][r] == NEGATIVE_INFINITY ? 0.0f : raised[tile][r];
                const float shrink = exp2_approximate((state.maximum[tile][r] - reference) * scale);
                state.maximum[tile][r] = raised[tile][r];
                state.sum[tile][r] *= shrink;
                UNROLL for (int d = 0; d < OUTPUT_TILES; d++)
                    state.output[tile][d][2 * r] *= shrink, state.output[tile][d][2 * r + 1] *= shrink;
            }
    }
    UNROLL for (int tile = 0; tile < ROW_TILES; tile++)
        UNROLL for (int r = 0; r < 2; r++) {
            const float maximum = state.maximum[tile][r];
            const float reference = maximum == NEGATIVE_INFINITY ? 0.0f : maximum, scaled = reference * scale;
            float sum = 0;
            UNROLL for (int c = 0; c < KEY_TILES; c++)
                UNROLL for (int e = 0; e < 2; e++) {
                    float& weight = scores[tile][c][2 * r + e];
                    weight = weight_of(weight, reference, scaled, scale);
                    sum += weight;
                }
            state.sum[tile][r] += sum;
        }
}

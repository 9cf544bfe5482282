// The softmax over keys that arrive tile by tile, and the weights that the backward pass computes again.
//
// A row has the maximum of its scores and the sum of exp(score - maximum) over the keys so far; its output is relative
// to the same maximum. Each lane sums the scores that it has: the sum of a row is that of four lanes.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "arguments.cuh"

// The factor from a difference of scores to an exponent of 2. Scores that are not modified are products.
DEVICE float exponent_scale(const AttentionArguments& arguments) {
    return MODIFIES_SCORES ? (NATURAL_SCORES ? LOG2_E : 1.0f) : arguments.scale * LOG2_E;
}

// exp(score - maximum).
DEVICE float weight_of(float score, float maximum, float scaled_maximum, float scale) {
    if (NATURAL_SCORES) return exp2_approximate((score - maximum) * scale);
    if (MODIFIES_SCORES) return exp2_approximate(score - maximum);
    return exp2_approximate(fused_multiply_add(score, scale, -scaled_maximum));
}

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

// The end of a row's softmax.
struct RowResult {
    float factor;       // of the output; 0 for a fully masked row
    float log_sum_exp;  // natural; -inf for a fully masked row
};

// `sum` is that of all keys. The sink of the head, if there are sinks, joins the softmax.
DEVICE RowResult finish_row(const AttentionArguments& arguments, int head, float maximum, float sum, float scale,
                            bool has_sink) {
    RowResult result;
    float factor = 1, top = maximum == NEGATIVE_INFINITY ? NEGATIVE_INFINITY : maximum * scale;
    if (has_sink) {
        const float sink = load_global(arguments.sinks + head) * LOG2_E;
        const float both = larger(top, sink), reference = both == NEGATIVE_INFINITY ? 0.0f : both;
        factor = exp2_approximate(top - reference);
        sum = sum * factor + exp2_approximate(sink - reference);
        top = both;
    }
    result.factor = sum == 0.0f ? 0.0f : factor / sum;
    result.log_sum_exp = (top + log2_of(sum)) * LN_2;
    // The least f32, which biases have for masked keys, has no multiple in f32.
    if (HAS_BIAS && !has_sink) result.log_sum_exp = maximum + log2_of(sum) * LN_2;
    if (sum == 0.0f) result.log_sum_exp = NEGATIVE_INFINITY;
    return result;
}

// ---- backward ----

// The log-sum-exp in the unit of scores; for a fully masked row one that leaves no weight.
#define LOG_SUM_EXP_UNIT (NATURAL_SCORES ? 1.0f : LOG2_E)
DEVICE float in_score_units(float log_sum_exp) {
    return log_sum_exp == NEGATIVE_INFINITY ? -NEGATIVE_INFINITY : log_sum_exp * LOG_SUM_EXP_UNIT;
}

// The weight of a score, from that; `scale` is the factor of products in the unit of the log-sum-exp.
DEVICE float normalized_weight(float score, float log_sum_exp, float scale) {
    if (NATURAL_SCORES)
        return exp2_approximate((MODIFIES_SCORES ? score - log_sum_exp : score * scale - log_sum_exp) * LOG2_E);
    return exp2_approximate(MODIFIES_SCORES ? score - log_sum_exp : fused_multiply_add(score, scale, -log_sum_exp));
}

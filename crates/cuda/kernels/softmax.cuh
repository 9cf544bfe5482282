// The softmax over keys that arrive tile by tile, and the weights that the backward pass computes again.
//
// A row has the maximum of its scores and the sum of exp(score - maximum) over the keys so far; its output is relative
// to the same maximum. Each lane sums the scores that it has: the sum of a row is that of four lanes.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"

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

// The numbers from which the backward pass computes the weights of a row: the weight of a score is
// 2^((score - maximum) * scale - log2_sum).
//
// Next to a maximum of -1e9, as a padded row has with a bias, one f32 for the log-sum-exp has no digit left for the sum
// of the weights. With NATURAL_SCORES there are therefore two numbers. Without, no bias makes scores large, and
// log2_sum is the whole log-sum-exp to the base 2, which saves a subtraction for each score.
struct RowStatistics {
    float maximum;   // the largest score, in its unit; 0 without NATURAL_SCORES
    float log2_sum;  // of the weights relative to the maximum; inf for a fully masked row, which leaves no weight
};

// The end of a row's softmax.
struct RowResult {
    float factor;       // of the output; 0 for a fully masked row
    float log_sum_exp;  // natural; -inf for a fully masked row
    RowStatistics statistics;
};

// The natural logarithm that a score, in the unit of the maxima, stands for.
DEVICE float natural_score(const AttentionArguments& arguments, float score) {
    if (MODIFIES_SCORES) return NATURAL_SCORES ? score : score * LN_2;
    return score * arguments.scale;
}

// By how many powers of 2 the weight of a sink is above that of a score. The largest f32 stands for more, and the least
// one for less.
DEVICE float power_of_sink(float sink, float natural) {
    const float power = (sink - natural) * LOG2_E;
    return power > LARGEST_FLOAT ? LARGEST_FLOAT : power < -LARGEST_FLOAT ? -LARGEST_FLOAT : power;
}

// `sum` is that of all keys. The sink of the head, if there are sinks, joins the softmax.
DEVICE RowResult finish_row(const AttentionArguments& arguments, int head, float maximum, float sum, float scale,
                            bool has_sink) {
    const bool has_no_score = maximum == NEGATIVE_INFINITY;
    const float top = has_no_score ? NEGATIVE_INFINITY : natural_score(arguments, maximum);
    float largest = top, shrink = 1, whole = sum, power = 0;
    if (has_sink) {
        const float sink = load_global(arguments.sinks + head);
        largest = larger(top, sink);
        const float reference = largest == NEGATIVE_INFINITY ? 0.0f : largest;
        shrink = exp2_approximate((top - reference) * LOG2_E);
        whole = sum * shrink + exp2_approximate((sink - reference) * LOG2_E);
        if (has_no_score || sink > top) power = power_of_sink(sink, has_no_score ? 0.0f : top);
    }
    RowResult result;
    result.factor = whole == 0.0f ? 0.0f : shrink / whole;
    result.log_sum_exp = whole == 0.0f ? NEGATIVE_INFINITY : largest + log2_of(whole) * LN_2;
    result.statistics.maximum = has_no_score ? 0.0f : maximum;
    result.statistics.log2_sum = whole == 0.0f ? -NEGATIVE_INFINITY : power + log2_of(whole);
    if (!NATURAL_SCORES) {
        result.statistics.log2_sum += MODIFIES_SCORES ? result.statistics.maximum : result.statistics.maximum * scale;
        result.statistics.maximum = 0;
    }
    return result;
}

// The plane of row_statistics with the maxima, behind that of log2_sum.
DEVICE float* row_maxima(const AttentionArguments& arguments) {
    const i64 batches = arguments.cumulative_queries ? 1 : arguments.sequences;
    return arguments.row_statistics + batches * arguments.heads * arguments.query_count;
}

// Stores the results of row `row` of (B, H, T_q), where they are wanted.
DEVICE void store_row_result(const AttentionArguments& arguments, i64 row, const RowResult& result) {
    if (arguments.log_sum_exp) store_global(arguments.log_sum_exp + row, result.log_sum_exp);
    if (!arguments.row_statistics) return;
    store_global(arguments.row_statistics + row, result.statistics.log2_sum);
    if (NATURAL_SCORES) store_global(row_maxima(arguments) + row, result.statistics.maximum);
}

// ---- backward ----

DEVICE RowStatistics load_row_statistics(const AttentionArguments& arguments, i64 row) {
    RowStatistics statistics;
    statistics.log2_sum = load_global(arguments.row_statistics + row);
    statistics.maximum = NATURAL_SCORES ? load_global(row_maxima(arguments) + row) : 0.0f;
    return statistics;
}

// The weight of a score, which is a product unless MODIFIES_SCORES; `scale` is exponent_scale.
DEVICE float normalized_weight(float score, const RowStatistics& row, float scale) {
    if (NATURAL_SCORES) return exp2_approximate(fused_multiply_add(score - row.maximum, scale, -row.log2_sum));
    return exp2_approximate(MODIFIES_SCORES ? score - row.log2_sum : fused_multiply_add(score, scale, -row.log2_sum));
}

// The weight of a sink.
DEVICE float weight_of_sink(const AttentionArguments& arguments, float sink, const RowStatistics& row) {
    const float natural = NATURAL_SCORES ? natural_score(arguments, row.maximum) : 0.0f;
    return exp2_approximate(power_of_sink(sink, natural) - row.log2_sum);
}

// The results of a row of the softmax: the weight of a score, and what the maximum and the sum of a row become.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"

// The factor from a difference of scores to an exponent of 2. Scores that are not modified are products.
DEVICE float exponent_scale(const LOCAL AttentionArguments& arguments) {
    return MODIFIES_SCORES ? (NATURAL_SCORES ? LOG2_E : 1.0f) : arguments.scale * LOG2_E;
}

// exp(score - maximum).
DEVICE float weight_of(float score, float maximum, float scaled_maximum, float scale) {
    if (NATURAL_SCORES) return exp2_approximate((score - maximum) * scale);
    if (MODIFIES_SCORES) return exp2_approximate(score - maximum);
    return exp2_approximate(fused_multiply_add(score, scale, -scaled_maximum));
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
DEVICE float natural_score(const LOCAL AttentionArguments& arguments, float score) {
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
DEVICE RowResult finish_row(const LOCAL AttentionArguments& arguments, int head, float maximum, float sum, float scale,
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

// The number of rows of (B, H, T_q).
DEVICE i64 result_rows(const LOCAL AttentionArguments& arguments) {
    const i64 batches = arguments.cumulative_queries ? 1 : arguments.sequences;
    return batches * arguments.heads * arguments.query_count;
}

// The plane of row_statistics with the maxima, behind that of log2_sum.
DEVICE GLOBAL float* row_maxima(const LOCAL AttentionArguments& arguments) {
    return arguments.row_statistics + result_rows(arguments);
}

// Stores the results of row `row` of (B, H, T_q), where they are wanted.
DEVICE void store_row_result(const LOCAL AttentionArguments& arguments, i64 row, const LOCAL RowResult& result) {
    if (arguments.log_sum_exp) store_global(arguments.log_sum_exp + row, result.log_sum_exp);
    if (!arguments.row_statistics) return;
    store_global(arguments.row_statistics + row, result.statistics.log2_sum);
    if (NATURAL_SCORES) store_global(row_maxima(arguments) + row, result.statistics.maximum);
}

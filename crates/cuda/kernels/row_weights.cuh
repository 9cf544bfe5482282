// The weights that the backward pass computes again from the statistics of a row.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "row_results.cuh"

DEVICE RowStatistics load_row_statistics(const LOCAL AttentionArguments& arguments, i64 row) {
    RowStatistics statistics;
    statistics.log2_sum = load_global(arguments.row_statistics + row);
    statistics.maximum = NATURAL_SCORES ? load_global(row_maxima(arguments) + row) : 0.0f;
    return statistics;
}

// The weight of a score, which is a product unless MODIFIES_SCORES; `scale` is exponent_scale.
DEVICE float normalized_weight(float score, const LOCAL RowStatistics& row, float scale) {
    if (NATURAL_SCORES) return exp2_approximate(fused_multiply_add(score - row.maximum, scale, -row.log2_sum));
    return exp2_approximate(MODIFIES_SCORES ? score - row.log2_sum : fused_multiply_add(score, scale, -row.log2_sum));
}

// The weight of a sink.
DEVICE float weight_of_sink(const LOCAL AttentionArguments& arguments, float sink, const LOCAL RowStatistics& row) {
    const float natural = NATURAL_SCORES ? natural_score(arguments, row.maximum) : 0.0f;
    return exp2_approximate(power_of_sink(sink, natural) - row.log2_sum);
}

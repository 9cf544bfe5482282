// The combination of the parts of a row: its output and log-sum-exp from `splits` outputs, each with the maximum of its
// scores and the sum of its weights.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "elements.cuh"
#include "masks.cuh"
#include "row_results.cuh"

// Columns of the output of a lane.
#define COMBINE_COLUMNS ((VALUE_DIM + 31) / 32)

// Factors of the weights of parts, which may be as large as the number of keys, and of the output: the sum of large
// outputs must not exceed f32.
#define PART_SHRINK (1.0f / 4294967296.0f)
#define PART_GROWTH 4294967296.0f

// The maximum of the scores of a part, and the sum of its weights; of no part, those of no keys.
DEVICE float2 part_statistics(const LOCAL AttentionArguments& arguments, int split, i64 rows, i64 row) {
    float2 statistics;
    statistics.x = NEGATIVE_INFINITY, statistics.y = 0;
    if (split < arguments.splits) statistics = load_global(arguments.partial_statistics + split * rows + row);
    return statistics;
}

// Combines the parts of a row of (B, H, T_q); a warp does. `rows` is the number of all rows.
DEVICE void combine_parts(const LOCAL AttentionArguments& arguments, i64 rows, i64 row, int lane) {
    const int query = row % arguments.query_count, head = row / arguments.query_count % arguments.heads;
    const int batch = row / arguments.query_count / arguments.heads;
    const float scale = exponent_scale(arguments);

    float maximum = NEGATIVE_INFINITY;
    for (int split = lane; split < arguments.splits; split += 32)
        maximum = larger(maximum, part_statistics(arguments, split, rows, row).x);
    UNROLL for (int d = 16; d > 0; d >>= 1) maximum = larger(maximum, shuffle_xor(maximum, d));
    const float reference = maximum == NEGATIVE_INFINITY ? 0.0f : maximum;

    float output[COMBINE_COLUMNS], sum = 0;
    UNROLL for (int e = 0; e < COMBINE_COLUMNS; e++) output[e] = 0;
    for (int first = 0; first < arguments.splits; first += 32) {
        // Each lane computes the weight of one part.
        const float2 own = part_statistics(arguments, first + lane, rows, row);
        const float own_weight = own.y * exp2_approximate((own.x - reference) * scale);
        for (int split = first; split < smaller(first + 32, arguments.splits); split++) {
            const float weight = shuffle(own_weight, split - first);
            GLOBAL const float* from = arguments.partial_outputs + (split * rows + row) * VALUE_DIM;
            sum += weight;
            UNROLL for (int e = 0; e < COMBINE_COLUMNS; e++)
                if (lane + 32 * e < VALUE_DIM) output[e] += weight * PART_SHRINK * load_global(from + lane + 32 * e);
        }
    }
    const RowResult result = finish_row(arguments, head, maximum, sum, scale, arguments.sinks != nullptr);
    GLOBAL char* to = row_address(arguments.output, arguments.output_strides, batch, head, query, ELEMENT_BYTES);
    UNROLL for (int e = 0; e < COMBINE_COLUMNS; e++)
        if (lane + 32 * e < VALUE_DIM) store_element(to, lane + 32 * e, output[e] * result.factor * PART_GROWTH);
    if (lane == 0) store_row_result(arguments, row, result);
}

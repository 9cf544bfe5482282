// Combines the parts of attention_decode: output (B, H, T_q, D_v) and log-sum-exp (B, H, T_q) from `splits` outputs and
// log-sum-exps. Each warp combines one row.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "arguments.cuh"
#include "loads.cuh"
#include "masks.cuh"

#if KERNEL_SET & 2
// Columns of the output of a lane.
#define COMBINE_COLUMNS ((VALUE_DIM + 31) / 32)

// The splits' weights in the sum, of 32 splits at a time: one for each lane.
DEVICE float split_weight(const AttentionArguments& arguments, int split, i64 rows, i64 row, float reference) {
    if (split >= arguments.splits) return 0.0f;
    const float log_sum_exp = load_global(arguments.partial_log_sum_exps + split * rows + row);
    return exp2_approximate((log_sum_exp - reference) * LOG2_E);
}

KERNEL(attention_combine, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int lane = thread_index() & 31;
    const i64 batches = arguments.cumulative_queries ? 1 : arguments.sequences;
    const i64 rows = batches * arguments.heads * arguments.query_count;
    const i64 row = (i64)block_index_x() * (SMALL_BLOCK_THREADS / 32) + thread_index() / 32;
    if (row >= rows) return;
    const int query = row % arguments.query_count, head = row / arguments.query_count % arguments.heads;
    const int batch = row / arguments.query_count / arguments.heads;

    const float sink = arguments.sinks ? load_global(arguments.sinks + head) : NEGATIVE_INFINITY;
    float top = sink;
    for (int split = lane; split < arguments.splits; split += 32)
        top = larger(top, load_global(arguments.partial_log_sum_exps + split * rows + row));
    UNROLL for (int d = 16; d > 0; d >>= 1) top = larger(top, shuffle_xor(top, d));
    const float reference = top == NEGATIVE_INFINITY ? 0.0f : top;

    float output[COMBINE_COLUMNS], sum = 0;
    UNROLL for (int e = 0; e < COMBINE_COLUMNS; e++) output[e] = 0;
    for (int first = 0; first < arguments.splits; first += 32) {
        const float own = split_weight(arguments, first + lane, rows, row, reference);
        for (int split = first; split < smaller(first + 32, arguments.splits); split++) {
            const float weight = shuffle(own, split - first);
            sum += weight;
            UNROLL for (int e = 0; e < COMBINE_COLUMNS; e++) {
                const int column = lane + 32 * e;
                if (column < VALUE_DIM)
                    output[e] += weight * load_global(arguments.partial_outputs + (split * rows + row) * VALUE_DIM + column);
            }
        }
    }
    if (arguments.sinks) sum += exp2_approximate((sink - reference) * LOG2_E);
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    char* to = row_address(arguments.output, arguments.output_strides, batch, head, query, ELEMENT_BYTES);
    UNROLL for (int e = 0; e < COMBINE_COLUMNS; e++)
        if (lane + 32 * e < VALUE_DIM) store_element(to, lane + 32 * e, output[e] * factor);
    if (lane == 0 && arguments.log_sum_exp)
        store_global(arguments.log_sum_exp + row, sum == 0.0f ? NEGATIVE_INFINITY : reference + log2_of(sum) * LN_2);
}
#endif

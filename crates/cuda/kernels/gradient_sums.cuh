// The sums of which the gradients of sinks, slopes, relative bias and bias are made, from what the other backward kernels
// stored. Each thread of SMALL_BLOCK_THREADS adds up in a fixed order, so that the result has the same bits every time.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "elements.cuh"
#include "masks.cuh"
#include "row_weights.cuh"

// A lane's part of delta: the sum of output * output_gradient over the row of a query.
DEVICE float delta_of_lane(const LOCAL AttentionArguments& arguments, int batch, int head, int query, int lane) {
    GLOBAL const char* output = row_address((GLOBAL const void*)arguments.output, arguments.output_strides, batch, head,
                                            query, ELEMENT_BYTES);
    GLOBAL const char* gradient = row_address(arguments.output_gradient, arguments.output_gradient_strides, batch, head,
                                              query, ELEMENT_BYTES);
    float sum = 0;
    for (int column = lane; column < VALUE_DIM; column += 32)
        sum += load_element(output, column) * load_element(gradient, column);
    return sum;
}

// Stores the delta of a query: the sum over its row, less the gradient of the log-sum-exp. The gradient of a score is
// its weight times the difference of the weight's gradient and delta.
DEVICE void store_delta(const LOCAL AttentionArguments& arguments, int batch, int head, int query, float sum) {
    const i64 row = ((i64)batch * arguments.heads + head) * arguments.query_count + query;
    if (arguments.log_sum_exp_gradient) sum -= load_global(arguments.log_sum_exp_gradient + row);
    store_global(arguments.delta + row, sum);
}

// The gradient of a head's sink: its weight times -delta, summed over some queries.
DEVICE float sink_gradient_of_thread(const LOCAL AttentionArguments& arguments, int head, int thread_index) {
    const float sink = load_global(arguments.sinks + head);
    const int batches = arguments.cumulative_queries ? 1 : arguments.sequences;
    float sum = 0;
    for (int batch = 0; batch < batches; batch++)
        for (int query = thread_index; query < arguments.query_count; query += SMALL_BLOCK_THREADS) {
            const i64 row = ((i64)batch * arguments.heads + head) * arguments.query_count + query;
            const RowStatistics statistics = load_row_statistics(arguments, row);
            sum -= weight_of_sink(arguments, sink, statistics) * load_global(arguments.delta + row);
        }
    return sum;
}

// The gradient of a head's slope, summed over some of its `parts` parts of each sequence.
DEVICE float slope_gradient_of_thread(const LOCAL AttentionArguments& arguments, int parts, int head,
                                      int thread_index) {
    float sum = 0;
    for (int sequence = 0; sequence < arguments.sequences; sequence++)
        for (int part = thread_index; part < parts; part += SMALL_BLOCK_THREADS)
            sum += load_global(arguments.slope_gradient_parts + ((i64)sequence * arguments.heads + head) * parts + part);
    return sum;
}

// Adds parts (pairs, H / H_kv, key blocks, length), of the pairs of one launch of the kernel of keys, to an entry of the
// gradient of a relative bias (B or 1, H, length). Parts that another launch uses again become zeros.
DEVICE void add_relative_bias_parts(const LOCAL AttentionArguments& arguments, int entry, int head,
                                    int sequence_of_block) {
    const int length = arguments.relative_bias_length, group = arguments.heads / arguments.key_heads;
    const bool is_shared = arguments.relative_bias_sequence_stride == 0;
    const int first = is_shared ? 0 : sequence_of_block, end = is_shared ? arguments.sequences : first + 1;
    const bool are_used_again = arguments.pairs < arguments.sequences * arguments.key_heads;
    GLOBAL float* to = arguments.relative_bias_gradient + ((i64)first * arguments.heads + head) * length + entry;
    float sum = load_global(to);
    for (int sequence = first; sequence < end; sequence++) {
        const int pair = sequence * arguments.key_heads + head / group - arguments.first_pair;
        if (pair < 0 || pair >= arguments.pairs) continue;
        GLOBAL float* parts =
            arguments.relative_bias_parts + ((i64)pair * group + head % group) * arguments.key_blocks * length;
        for (int part = 0; part < arguments.key_blocks; part++) {
            GLOBAL float* from = parts + (i64)part * length + entry;
            sum += load_global(from);
            if (are_used_again) store_global(from, 0.0f);
        }
    }
    store_global(to, sum);
}

// The entry of the gradient of a bias (bias_sequences, bias_heads, bias_queries, bias_keys) that a thread sums. A block
// has SMALL_BLOCK_THREADS keys of a row, or all keys of a sum over them.
struct BiasEntry {
    int sequence;
    int head;
    int query;
    int column;
};

// The sum of some gradients of scores (B, H, T_q, T_kv) for an entry.
DEVICE float bias_gradient_of_thread(const LOCAL AttentionArguments& arguments, const LOCAL BiasEntry& entry,
                                     int thread_index) {
    const bool sums_keys = arguments.bias_keys == 1, sums_queries = arguments.bias_queries == 1;
    const bool sums_heads = arguments.bias_heads == 1, sums_sequences = arguments.bias_sequences == 1;
    const int first_query = sums_queries ? 0 : entry.query;
    const int end_query = sums_queries ? arguments.query_count : entry.query + 1;
    const int first_head = sums_heads ? 0 : entry.head, end_head = sums_heads ? arguments.heads : entry.head + 1;
    const int first_sequence = sums_sequences ? 0 : entry.sequence;
    const int end_sequence = sums_sequences ? arguments.sequences : entry.sequence + 1;
    const int first_key = sums_keys ? thread_index : entry.column;
    const int step = sums_keys ? SMALL_BLOCK_THREADS : arguments.key_count;
    float sum = 0;
    for (int s = first_sequence; s < end_sequence; s++)
        for (int h = first_head; h < end_head; h++)
            for (int i = first_query; i < end_query; i++) {
                const i64 row = ((i64)s * arguments.heads + h) * arguments.query_count + i;
                for (int key = first_key; key < arguments.key_count; key += step)
                    sum += load_global(arguments.score_gradient + row * arguments.key_count + key);
            }
    return sum;
}

// Stores a sum. Of a sum over all keys, thread 0 has the whole one.
DEVICE void store_bias_gradient(const LOCAL AttentionArguments& arguments, const LOCAL BiasEntry& entry,
                                int thread_index, float sum) {
    const bool sums_keys = arguments.bias_keys == 1;
    if (sums_keys ? thread_index != 0 : entry.column >= arguments.bias_keys) return;
    const i64 row =
        ((i64)entry.sequence * arguments.bias_heads + entry.head) * arguments.bias_queries + entry.query;
    store_global(arguments.bias_gradient + row * arguments.bias_keys + (sums_keys ? 0 : entry.column), sum);
}

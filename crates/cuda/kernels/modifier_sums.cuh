// The gradients of sinks, slopes, relative bias and bias, from what the other backward kernels stored. Each kernel adds
// up in a fixed order, so that the result has the same bits every time.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "softmax.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
// The sum over the threads of a small block, in thread 0. Needs 16 bytes of shared memory, and is called once.
DEVICE float small_block_sum(float x, int thread) {
    x = warp_sum(x);
    if (thread % 32 == 0) store_shared<float>(thread / 8, x);
    block_barrier();
    return load_shared<float>(0) + load_shared<float>(4) + load_shared<float>(8) + load_shared<float>(12);
}

// (H) from the statistics and delta (B, H, T_q): the weight of a sink times -delta, summed over all queries.
KERNEL(attention_backward_sinks, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int thread = thread_index(), head = block_index();
    const float sink = load_global(arguments.sinks + head);
    const int batches = arguments.cumulative_queries ? 1 : arguments.sequences;
    float sum = 0;
    for (int batch = 0; batch < batches; batch++)
        for (int query = thread; query < arguments.query_count; query += SMALL_BLOCK_THREADS) {
            const i64 row = ((i64)batch * arguments.heads + head) * arguments.query_count + query;
            const float weight = weight_of_sink(arguments, sink, load_row_statistics(arguments, row));
            sum -= weight * load_global(arguments.delta + row);
        }
    sum = small_block_sum(sum, thread);
    if (thread == 0) store_global(arguments.sink_gradient + head, sum);
}

#if SLOPE_GRADIENT
// (H) from parts (B, H, key blocks, KEY_WARPS).
KERNEL(attention_backward_slopes, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int thread = thread_index(), head = block_index(), parts = arguments.key_blocks * KEY_WARPS;
    float sum = 0;
    for (int sequence = 0; sequence < arguments.sequences; sequence++)
        for (int part = thread; part < parts; part += SMALL_BLOCK_THREADS)
            sum += load_global(arguments.slope_gradient_parts +
                               ((i64)sequence * arguments.heads + head) * parts + part);
    sum = small_block_sum(sum, thread);
    if (thread == 0) store_global(arguments.slope_gradient + head, sum);
}
#endif

#if RELATIVE_BIAS_GRADIENT
// Adds parts (pairs, H / H_kv, key blocks, length), of the pairs of one launch of the kernel of keys, to
// (B or 1, H, length). Parts that another launch uses again become zeros.
KERNEL(attention_backward_relative_bias, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int length = arguments.relative_bias_length, group = arguments.heads / arguments.key_heads;
    const GridPlace place = grid_place((length + SMALL_BLOCK_THREADS - 1) / SMALL_BLOCK_THREADS, arguments.heads);
    const int entry = place.x * SMALL_BLOCK_THREADS + thread_index(), head = place.y;
    if (entry >= length) return;
    const bool is_shared = arguments.relative_bias_sequence_stride == 0;
    const int first = is_shared ? 0 : place.z, end = is_shared ? arguments.sequences : first + 1;
    const bool are_used_again = arguments.pairs < arguments.sequences * arguments.key_heads;
    float* to = arguments.relative_bias_gradient + ((i64)first * arguments.heads + head) * length + entry;
    float sum = load_global(to);
    for (int sequence = first; sequence < end; sequence++) {
        const int pair = sequence * arguments.key_heads + head / group - arguments.first_pair;
        if (pair < 0 || pair >= arguments.pairs) continue;
        float* parts = arguments.relative_bias_parts + ((i64)pair * group + head % group) * arguments.key_blocks * length;
        for (int part = 0; part < arguments.key_blocks; part++) {
            float* from = parts + (i64)part * length + entry;
            sum += load_global(from);
            if (are_used_again) store_global(from, 0.0f);
        }
    }
    store_global(to, sum);
}
#endif

#if BIAS_GRADIENT
// (bias_sequences, bias_heads, bias_queries, bias_keys) from the gradients of scores (B, H, T_q, T_kv). A thread has a
// key, or some of the keys of a sum over all of them.
KERNEL(attention_backward_bias, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int column_blocks = (arguments.bias_keys + SMALL_BLOCK_THREADS - 1) / SMALL_BLOCK_THREADS;
    const GridPlace place = grid_place(column_blocks, arguments.bias_queries);
    const int thread = thread_index(), column = place.x * SMALL_BLOCK_THREADS + thread;
    const bool sums_keys = arguments.bias_keys == 1, sums_queries = arguments.bias_queries == 1;
    const bool sums_heads = arguments.bias_heads == 1, sums_sequences = arguments.bias_sequences == 1;
    const int query = place.y;
    const int head = place.z % arguments.bias_heads, sequence = place.z / arguments.bias_heads;
    const int first_query = sums_queries ? 0 : query, end_query = sums_queries ? arguments.query_count : query + 1;
    const int first_head = sums_heads ? 0 : head, end_head = sums_heads ? arguments.heads : head + 1;
    const int first_sequence = sums_sequences ? 0 : sequence;
    const int end_sequence = sums_sequences ? arguments.sequences : sequence + 1;
    const int first_key = sums_keys ? thread : column, step = sums_keys ? SMALL_BLOCK_THREADS : arguments.key_count;
    float sum = 0;
    for (int s = first_sequence; s < end_sequence; s++)
        for (int h = first_head; h < end_head; h++)
            for (int i = first_query; i < end_query; i++) {
                const i64 row = ((i64)s * arguments.heads + h) * arguments.query_count + i;
                for (int key = first_key; key < arguments.key_count; key += step)
                    sum += load_global(arguments.score_gradient + row * arguments.key_count + key);
            }
    if (sums_keys) sum = small_block_sum(sum, thread);
    if (sums_keys ? thread != 0 : column >= arguments.bias_keys) return;
    const i64 row = ((i64)sequence * arguments.bias_heads + head) * arguments.bias_queries + query;
    store_global(arguments.bias_gradient + row * arguments.bias_keys + (sums_keys ? 0 : column), sum);
}
#endif
#endif

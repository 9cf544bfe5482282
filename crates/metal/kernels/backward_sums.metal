// Before the backward kernels of queries and of keys: delta (B, H, T_q) from output and its gradient. After them: the
// gradients of sinks, slopes, relative bias and bias, a threadgroup for each sum, or for some of the sums.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "attention_buffers.metal"
#include "gradient_sums.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
KERNEL_OF(BACKWARD, attention_backward_delta, SMALL_BLOCK_THREADS) {
    AttentionArguments arguments;
    READ_BACKWARD_ARGUMENTS(arguments)
    const int simdgroups = SMALL_BLOCK_THREADS / 32;
    const GridPlace place =
        grid_place(group_index, (arguments.query_count + simdgroups - 1) / simdgroups, arguments.heads);
    const int lane = (int)thread_index % 32, query = place.x * simdgroups + (int)thread_index / 32;
    if (query >= arguments.query_count) return;
    const float sum = warp_sum(delta_of_lane(arguments, place.z, place.y, query, lane));
    if (lane == 0) store_delta(arguments, place.z, place.y, query, sum);
}

// The sum over the threads of a threadgroup, in thread 0. `sums` has a number for each simdgroup. It is called once.
DEVICE float threadgroup_sum(SHARED(float) sums, float x, int thread_index) {
    x = warp_sum(x);
    if (thread_index % 32 == 0) store_shared(sums + thread_index / 32, x);
    block_barrier();
    float sum = 0;
    UNROLL for (int n = 0; n < SMALL_BLOCK_THREADS / 32; n++) sum += load_shared(sums + n);
    return sum;
}

// (H) from the statistics and delta (B, H, T_q).
KERNEL_OF(SUMS, attention_backward_sinks, SMALL_BLOCK_THREADS) {
    SHARED_MEMORY(16);
    AttentionArguments arguments;
    READ_SUMS_ARGUMENTS(arguments)
    const int index = (int)thread_index, head = (int)group_index;
    const float own = sink_gradient_of_thread(arguments, head, index);
    const float sum = threadgroup_sum(SHARED_AT(float, 0), own, index);
    if (index == 0) store_global(arguments.sink_gradient + head, sum);
}

// (H) from parts (B, H, key blocks, KEY_WARPS).
KERNEL_OF(SUMS, attention_backward_slopes, SMALL_BLOCK_THREADS) {
    SHARED_MEMORY(16);
    AttentionArguments arguments;
    READ_SUMS_ARGUMENTS(arguments)
    const int index = (int)thread_index, head = (int)group_index;
    const float own = slope_gradient_of_thread(arguments, arguments.key_blocks * KEY_WARPS, head, index);
    const float sum = threadgroup_sum(SHARED_AT(float, 0), own, index);
    if (index == 0) store_global(arguments.slope_gradient + head, sum);
}

// (B or 1, H, length) from parts (pairs, H / H_kv, key blocks, length).
KERNEL_OF(SUMS, attention_backward_relative_bias, SMALL_BLOCK_THREADS) {
    AttentionArguments arguments;
    READ_SUMS_ARGUMENTS(arguments)
    const int length = arguments.relative_bias_length;
    const GridPlace place =
        grid_place(group_index, (length + SMALL_BLOCK_THREADS - 1) / SMALL_BLOCK_THREADS, arguments.heads);
    const int entry = place.x * SMALL_BLOCK_THREADS + (int)thread_index;
    if (entry < length) add_relative_bias_parts(arguments, entry, place.y, place.z);
}

// (bias_sequences, bias_heads, bias_queries, bias_keys) from the gradients of scores (B, H, T_q, T_kv).
KERNEL_OF(SUMS, attention_backward_bias, SMALL_BLOCK_THREADS) {
    SHARED_MEMORY(16);
    AttentionArguments arguments;
    READ_SUMS_ARGUMENTS(arguments)
    const int column_blocks = (arguments.bias_keys + SMALL_BLOCK_THREADS - 1) / SMALL_BLOCK_THREADS;
    const GridPlace place = grid_place(group_index, column_blocks, arguments.bias_queries);
    const int index = (int)thread_index;
    BiasEntry entry;
    entry.sequence = place.z / arguments.bias_heads, entry.head = place.z % arguments.bias_heads;
    entry.query = place.y, entry.column = place.x * SMALL_BLOCK_THREADS + index;
    float sum = bias_gradient_of_thread(arguments, entry, index);
    if (arguments.bias_keys == 1) sum = threadgroup_sum(SHARED_AT(float, 0), sum, index);
    store_bias_gradient(arguments, entry, index, sum);
}
#endif

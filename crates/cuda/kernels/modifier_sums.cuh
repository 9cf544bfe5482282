// The gradients of sinks, slopes, relative bias and bias: a block for each sum, or for some of the sums.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "gradient_sums.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
// The sum over the threads of a small block, in thread 0. Needs 16 bytes of shared memory, and is called once.
DEVICE float small_block_sum(float x, int thread) {
    x = warp_sum(x);
    if (thread % 32 == 0) store_shared<float>(thread / 8, x);
    block_barrier();
    return load_shared<float>(0) + load_shared<float>(4) + load_shared<float>(8) + load_shared<float>(12);
}

// (H) from the statistics and delta (B, H, T_q).
KERNEL(attention_backward_sinks, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int thread = thread_index(), head = block_index();
    const float sum = small_block_sum(sink_gradient_of_thread(arguments, head, thread), thread);
    if (thread == 0) store_global(arguments.sink_gradient + head, sum);
}

#if SLOPE_GRADIENT
// (H) from parts (B, H, key blocks, KEY_WARPS).
KERNEL(attention_backward_slopes, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int thread = thread_index(), head = block_index(), parts = arguments.key_blocks * KEY_WARPS;
    const float sum = small_block_sum(slope_gradient_of_thread(arguments, parts, head, thread), thread);
    if (thread == 0) store_global(arguments.slope_gradient + head, sum);
}
#endif

#if RELATIVE_BIAS_GRADIENT
// (B or 1, H, length) from parts (pairs, H / H_kv, key blocks, length).
KERNEL(attention_backward_relative_bias, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int length = arguments.relative_bias_length;
    const GridPlace place = grid_place((length + SMALL_BLOCK_THREADS - 1) / SMALL_BLOCK_THREADS, arguments.heads);
    const int entry = place.x * SMALL_BLOCK_THREADS + thread_index();
    if (entry < length) add_relative_bias_parts(arguments, entry, place.y, place.z);
}
#endif

#if BIAS_GRADIENT
// (bias_sequences, bias_heads, bias_queries, bias_keys) from the gradients of scores (B, H, T_q, T_kv).
KERNEL(attention_backward_bias, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int column_blocks = (arguments.bias_keys + SMALL_BLOCK_THREADS - 1) / SMALL_BLOCK_THREADS;
    const GridPlace place = grid_place(column_blocks, arguments.bias_queries);
    const int thread = thread_index();
    BiasEntry entry;
    entry.sequence = place.z / arguments.bias_heads, entry.head = place.z % arguments.bias_heads;
    entry.query = place.y, entry.column = place.x * SMALL_BLOCK_THREADS + thread;
    float sum = bias_gradient_of_thread(arguments, entry, thread);
    if (arguments.bias_keys == 1) sum = small_block_sum(sum, thread);
    store_bias_gradient(arguments, entry, thread, sum);
}
#endif
#endif

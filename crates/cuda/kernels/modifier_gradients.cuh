// Sums that the backward kernel of keys collects for the gradients of ALiBi slopes and of the relative bias.
//
// Each block writes its sums, which the kernels of modifier_sums.cuh add up in a fixed order. For a slope, a block has
// one number for each warp. For a relative bias, it has a vector of all entries: a tile of scores adds the sum of each
// of its diagonals.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "loads.cuh"
#include "modifiers.cuh"
#include "key_block.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
// Sums of a thread for the head that is worked on.
struct ModifierGradients {
    float slope;
};

// Stores the slope's gradient of a head, of the warp.
DEVICE void store_slope_gradient(const AttentionArguments& arguments, const KeyBlock& block, int head_of_group,
                                 ModifierGradients& gradients) {
    const float sum = warp_sum(gradients.slope);
    const i64 head = (i64)block.sequence_index * arguments.heads + block.key_head * block.group + head_of_group;
    const i64 part = (head * arguments.key_blocks + block.index) * KEY_WARPS + block.warp;
    if (block.lane == 0) store_global(arguments.slope_gradient_parts + part, sum);
    gradients.slope = 0;
}

// An element of a matrix in shared memory.
DEVICE float load_element_shared(u32 at) {
#if ELEMENT == 2
    return load_shared<float>(at);
#else
    return unpack_half(load_shared<u16>(at));
#endif
}

// Adds the sums of the diagonals of a tile of gradients (keys, queries) to the block's vector. Each thread sums whole
// diagonals, from the first query to the last.
DEVICE void add_relative_bias_gradients(const AttentionArguments& arguments, const KeyBlock& block,
                                        const QueryTile& tile) {
    const u32 gradients_at = SHARES_BIAS_GRADIENTS ? KEY_BIAS_GRADIENTS_AT : KEY_SCORE_GRADIENTS_AT;
    const i64 pair = block.sequence_index * arguments.key_heads + block.key_head - arguments.first_pair;
    float* to = arguments.relative_bias_parts +
                ((pair * block.group + tile.head) * arguments.key_blocks + block.index) *
                    arguments.relative_bias_length;
    const int origin = relative_bias_origin(arguments, block.sequence_index);
    const int first_entry = origin + block.first_key - tile.index * BACKWARD_QUERIES;
    for (int n = block.thread; n < KEY_BLOCK + BACKWARD_QUERIES - 1; n += KEY_THREADS) {
        const int distance = n - (BACKWARD_QUERIES - 1); // key - query, in the tile
        const int entry = first_entry + distance;
        if ((u32)entry >= (u32)arguments.relative_bias_length) continue;
        const int end = smaller(BACKWARD_QUERIES, KEY_BLOCK - distance);
        float sum = 0;
        for (int query = larger(0, -distance); query < end; query++)
            sum += load_element_shared(gradients_at + (query + distance) * SCORE_PITCH + query * ELEMENT_BYTES);
        store_global(to + entry, load_global(to + entry) + sum);
    }
}
#endif

// The keys that each query of a tile attends to, in shared memory.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "masks.cuh"

// Stores the intervals of the ROWS queries from `first_query` on at `to`, 8 bytes each, and returns those of the tile.
// `warps_at` has 16 bytes for each warp, which nothing else is written to. All threads pass a barrier.
template <int ROWS, int THREADS>
DEVICE TileInterval store_intervals(const AttentionArguments& arguments, const Sequence& sequence, int index,
                                    int first_query, u32 to, u32 warps_at, int thread) {
    TileInterval tile;
    tile.first = 0x7fffffff, tile.end = 0, tile.common_first = 0, tile.common_end = 0x7fffffff;
    for (int row = thread; row < ROWS; row += THREADS) {
        int2 keys;
        keys.x = keys.y = 0;
        if (first_query + row < sequence.query_count) {
            attended_keys(arguments, sequence, index, first_query + row, keys.x, keys.y);
            if (keys.x < keys.y) tile.first = smaller(tile.first, keys.x), tile.end = larger(tile.end, keys.y);
            tile.common_first = larger(tile.common_first, keys.x), tile.common_end = smaller(tile.common_end, keys.y);
        }
        store_shared<int2>(to + 8 * row, keys);
    }
    join_in_warp(tile);
    if (thread % 32 == 0) {
        int4 own;
        own.x = tile.first, own.y = tile.end, own.z = tile.common_first, own.w = tile.common_end;
        store_shared<int4>(warps_at + thread / 2, own);
    }
    block_barrier();
    UNROLL for (int warp = 0; warp < THREADS / 32; warp++) {
        const int4 own = load_shared<int4>(warps_at + 16 * warp);
        join(tile, own.x, own.y, own.z, own.w);
    }
    if (tile.first >= tile.end) tile.first = tile.end = 0;
    return tile;
}

// The inputs of the products of the backward pass: delta (B, H, T_q) from output and its gradient, and the intervals
// of keys of queries and of tiles of queries.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "loads.cuh"
#include "masks.cuh"
#include "tile_intervals.cuh"
#include "gradient_sums.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
KERNEL(attention_backward_delta, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const int warps = SMALL_BLOCK_THREADS / 32;
    const GridPlace place = grid_place((arguments.query_count + warps - 1) / warps, arguments.heads);
    const int lane = thread_index() & 31, query = place.x * warps + thread_index() / 32;
    const int head = place.y, batch = place.z;
    if (query >= arguments.query_count) return;
    const float sum = warp_sum(delta_of_lane(arguments, batch, head, query, lane));
    if (lane == 0) store_delta(arguments, batch, head, query, sum);
}

// The intervals of a tile of BACKWARD_QUERIES queries, for all heads. With FUSED_BACKWARD, the turns begin with 0.
KERNEL(attention_backward_tiles, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const GridPlace place = grid_place(arguments.query_tiles, arguments.sequences);
    const int thread = thread_index(), tile = place.x, index = place.y;
    const int first_query = tile * BACKWARD_QUERIES;
    const Sequence sequence = load_sequence(arguments, index);
    const TileInterval keys = store_intervals<BACKWARD_QUERIES, SMALL_BLOCK_THREADS>(
        arguments, sequence, index, first_query, TILES_INTERVALS_AT, TILES_WARP_INTERVALS_AT, thread);
    const i64 row = (i64)sequence.batch * arguments.query_count + sequence.first_query + first_query;
    for (int n = thread; n < BACKWARD_QUERIES; n += SMALL_BLOCK_THREADS)
        if (first_query + n < sequence.query_count)
            store_global(arguments.query_intervals + row + n, load_shared<int2>(TILES_INTERVALS_AT + 8 * n));
    if (thread != 0) return;
    int4 of_tile;
    of_tile.x = keys.first, of_tile.y = keys.end, of_tile.z = keys.common_first, of_tile.w = keys.common_end;
    // Rows behind the last query attend to nothing.
    if (first_query + BACKWARD_QUERIES > sequence.query_count) of_tile.z = 0x7fffffff, of_tile.w = 0;
    if (first_query >= sequence.query_count) of_tile.x = of_tile.y = 0;
    store_global(arguments.tile_intervals + (i64)index * arguments.query_tiles + tile, of_tile);
    if (FUSED_BACKWARD)
        for (int head = 0; head < arguments.heads; head++)
            store_global(arguments.query_gradient_turns +
                             ((i64)index * arguments.heads + head) * arguments.query_tiles + tile, 0);
}

// The intervals that attention_backward_tiles stored.
DEVICE TileInterval load_tile_interval(const int4* from) {
    const int4 keys = load_global(from);
    TileInterval interval;
    interval.first = keys.x, interval.end = keys.y, interval.common_first = keys.z, interval.common_end = keys.w;
    return interval;
}
#endif

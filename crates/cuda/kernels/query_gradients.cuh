// With FUSED_BACKWARD: the gradient of the queries (B, H, T_q, D), which blocks of keys add up.
//
// The sums of a tile of queries are f32 in an order of their own: the accumulators of the warps, lane by lane. Blocks
// add to them by turns, the last keys first, so that the result has the same bits every time. A block waits for blocks
// with smaller indices only, which the machine starts first.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "products.cuh"
#include "loads.cuh"
#include "masks.cuh"
#include "backward_prepare.cuh"
#include "key_block.cuh"

#if KERNEL_SET & BACKWARD_KERNELS
// The turn that a block passes on once all its threads have added.
struct QueryGradientTurn {
    int* at;
    int next;
};

#if FUSED_BACKWARD
#define FUSED_ROW_TILES (BACKWARD_QUERIES / 16 / FUSED_ROW_WARPS)                       // of a warp
#define FUSED_COLUMN_TILES (HEAD_COLUMNS / 8 / (KEY_WARPS / FUSED_ROW_WARPS))

// The place of a lane's numbers in the sums of a tile: of matrix n of the warp, `n` * 128 behind.
DEVICE float* query_gradient_sums(const AttentionArguments& arguments, i64 tile, int warp, int lane) {
    return arguments.query_gradient_sums + tile * BACKWARD_QUERIES * HEAD_COLUMNS +
           (warp * FUSED_ROW_TILES * FUSED_COLUMN_TILES * 32 + lane) * 4;
}

// Behind a barrier after all threads have added.
DEVICE void pass_turn(const KeyBlock& block, const QueryGradientTurn& turn) {
    if (turn.at && block.thread == 0) set_turn(turn.at, turn.next);
}

// Adds keys that are not finite to the gradients of the queries that attend to them.
DEVICE void add_special_keys(const AttentionArguments& arguments, const KeyBlock& block, const LoadedTile& loaded,
                             int first_row, int first_column,
                             float (&gradient)[FUSED_ROW_TILES][FUSED_COLUMN_TILES][4]) {
    const Sequence& sequence = block.sequence;
    const char* rows = row_address(arguments.keys, arguments.key_strides, sequence.batch, block.key_head,
                                   sequence.first_key + block.first_key, ELEMENT_BYTES);
    add_special_numbers(gradient, rows, arguments.key_strides.row, 0,
                        smaller(KEY_BLOCK, sequence.key_count - block.first_key), first_column + block.lane_column,
                        HEAD_DIM, [&](int row, int number) {
                            const int key = block.first_key + number, in_tile = first_row + block.lane_row + row;
                            const int2 keys =
                                load_shared<int2>(loaded.statistics_at + BACKWARD_QUERIES * 8 + in_tile * 8);
                            return key >= keys.x && key < keys.y &&
                                   attends(arguments, block, block.key_head * block.group + loaded.tile.head,
                                           loaded.tile.index * BACKWARD_QUERIES + in_tile, key);
                        });
}

// Multiplies the gradients of products (keys, queries) in shared memory, transposed, and the keys, and adds the result
// to the sums of the tile. With has_special_keys, keys that are not finite are zeros in shared memory.
DEVICE QueryGradientTurn add_query_gradients(const AttentionArguments& arguments, const KeyBlock& block,
                                             const LoadedTile& loaded, bool has_special_keys) {
    const QueryTile& tile = loaded.tile;
    const int head = block.key_head * block.group + tile.head;
    const i64 number = ((i64)block.sequence_index * arguments.heads + head) * arguments.query_tiles + tile.index;
    const int turn = (loaded.keys.end + KEY_BLOCK - 1) / KEY_BLOCK - 1 - block.index;
    const int first_row = block.warp % FUSED_ROW_WARPS * FUSED_ROW_TILES * 16;
    const int first_column = block.warp / FUSED_ROW_WARPS * FUSED_COLUMN_TILES * 8;
    float gradient[FUSED_ROW_TILES][FUSED_COLUMN_TILES][4];
    clear(gradient);
    UNROLL for (int k = 0; k < KEY_BLOCK / 16; k++) {
        LeftFragment left[FUSED_ROW_TILES];
        UNROLL for (int n = 0; n < FUSED_ROW_TILES; n++)
            load_left_transposed<SCORE_PITCH>(left[n], KEY_SCORE_GRADIENTS_AT, first_row + 16 * n, 16 * k, block.lane);
        UNROLL for (int d = 0; d < FUSED_COLUMN_TILES / 2; d++) {
            RightFragment right;
            load_right_transposed<HEAD_PITCH>(right, KEY_KEYS_AT, 16 * k, first_column + 16 * d, block.lane);
            UNROLL for (int n = 0; n < FUSED_ROW_TILES; n++)
                multiply_fragments(gradient[n][2 * d], gradient[n][2 * d + 1], left[n], right);
        }
    }
    if (has_special_keys) add_special_keys(arguments, block, loaded, first_row, first_column, gradient);
    if (turn > 0) {
        if (block.lane == 0) wait_for_turn(arguments.query_gradient_turns + number, turn);
        warp_barrier();
    }
    float* to = query_gradient_sums(arguments, number, block.warp, block.lane);
    UNROLL for (int n = 0; n < FUSED_ROW_TILES; n++)
        UNROLL for (int d = 0; d < FUSED_COLUMN_TILES; d++) {
            float4 four;
            four.x = gradient[n][d][0], four.y = gradient[n][d][1];
            four.z = gradient[n][d][2], four.w = gradient[n][d][3];
            float* matrix_to = to + (n * FUSED_COLUMN_TILES + d) * 128;
            if (turn == 0) store_global((float4*)matrix_to, four);
            else add_to_global(matrix_to, four);
        }
    QueryGradientTurn own;
    own.at = arguments.query_gradient_turns + number, own.next = turn + 1;
    return own;
}

// The gradient of a tile of queries from its sums.
KERNEL(attention_backward_finish, KEY_THREADS, 1, AttentionArguments) {
    const int thread = thread_index(), lane = thread & 31, warp = thread >> 5;
    const GridPlace place = grid_place(arguments.query_tiles, arguments.heads);
    const int tile = place.x, head = place.y, index = place.z;
    const int first_query = tile * BACKWARD_QUERIES;
    const Sequence sequence = load_sequence(arguments, index);
    if (first_query >= sequence.query_count) return;
    const TileInterval keys = load_tile_interval(arguments.tile_intervals + (i64)index * arguments.query_tiles + tile);
    // No block has written the sums of queries that attend to nothing.
    const bool has_keys = keys.first < keys.end;
    const float scale = has_keys ? arguments.scale : 0.0f;
    const float* from = query_gradient_sums(
        arguments, ((i64)index * arguments.heads + head) * arguments.query_tiles + tile, warp, lane);
    char* to = row_address(arguments.query_gradient, arguments.query_gradient_strides, sequence.batch, head,
                           sequence.first_query + first_query, ELEMENT_BYTES);
    const int first_row = warp % FUSED_ROW_WARPS * FUSED_ROW_TILES * 16 + (lane >> 2);
    const int first_column = warp / FUSED_ROW_WARPS * FUSED_COLUMN_TILES * 8 + 2 * (lane & 3);
    const i64 row_stride = arguments.query_gradient_strides.row;
    UNROLL for (int n = 0; n < FUSED_ROW_TILES; n++)
        UNROLL for (int d = 0; d < FUSED_COLUMN_TILES; d++) {
            float4 four;
            four.x = four.y = four.z = four.w = 0;
            if (has_keys) four = load_global((const float4*)(from + (n * FUSED_COLUMN_TILES + d) * 128));
            const int row = first_row + 16 * n, column = first_column + 8 * d;
            if (first_query + row < sequence.query_count)
                store_pair(to, row * row_stride + column, four.x * scale, four.y * scale, column, HEAD_DIM);
            if (first_query + row + 8 < sequence.query_count)
                store_pair(to, (row + 8) * row_stride + column, four.z * scale, four.w * scale, column, HEAD_DIM);
        }
}
#else
DEVICE void pass_turn(const KeyBlock&, const QueryGradientTurn&) {}
DEVICE QueryGradientTurn add_query_gradients(const AttentionArguments&, const KeyBlock&, const LoadedTile&, bool) {
    return QueryGradientTurn();
}
#endif
#endif

// A block of queries of a head, of the forward pass and of the gradient of the queries.
#pragma once
#include "device.cuh"
#include "attention_arguments.cuh"
#include "masks.cuh"
#include "dropout.cuh"
#include "modifiers.cuh"

// The part of a call that a thread of a block computes.
struct QueryBlock {
    int thread;
    int lane;
    int warp_row;      // the first row of the warp in the block
    int lane_row;      // of an accumulator
    int lane_column;
    Sequence sequence;
    int head;
    int first_query;   // of the block
    TileInterval keys;
    ScoreModifiers modifiers;
    Dropout dropout;
};

// Sets the rows of a thread, whose warp has ROW_TILES * 16 of the QUERIES of a block.
template <int ROW_TILES, int QUERIES>
DEVICE void start_query_block(QueryBlock& block, const BlockPlace& place, const Sequence& sequence) {
    block.thread = thread_index(), block.lane = block.thread & 31;
    block.warp_row = (block.thread >> 5) * ROW_TILES * 16;
    block.lane_row = block.lane >> 2, block.lane_column = 2 * (block.lane & 3);
    block.sequence = sequence, block.head = place.head, block.first_query = place.block * QUERIES;
}

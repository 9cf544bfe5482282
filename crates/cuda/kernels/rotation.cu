// The rotation of heads. Grid of rotate_heads: (ceil(B * T * H * (D - pairs) / ROTATION_THREADS)). Threads:
// ROTATION_THREADS.
#pragma once

#include "rotation_arguments.cuh"
#include "rotate.cuh"

KERNEL(rotate_heads, ROTATION_THREADS, 1, RotationArguments) {
    rotate(arguments, (i64)block_index() * ROTATION_THREADS + thread_index());
}

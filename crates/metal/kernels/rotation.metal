// The rotation of heads.
#pragma once
#include "rotation_arguments.cuh"
#include "rotation_buffers.metal"
#include "rotate.cuh"

KERNEL_WITH(RotationArguments, ROTATION, rotate_heads, ROTATION_THREADS) {
    RotationArguments arguments;
    READ_ROTATION_ARGUMENTS(arguments)
    rotate(arguments, (i64)group_index * ROTATION_THREADS + thread_index);
}

// Combines the parts of attention_decode: output (B, H, T_q, D_v) and log-sum-exp (B, H, T_q). A warp has one row.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "combine_rows.cuh"

#if KERNEL_SET & DECODE_KERNELS
KERNEL(attention_combine, SMALL_BLOCK_THREADS, 1, AttentionArguments) {
    const i64 rows = result_rows(arguments);
    const i64 row = (i64)block_index() * (SMALL_BLOCK_THREADS / 32) + thread_index() / 32;
    if (row < rows) combine_parts(arguments, rows, row, thread_index() & 31);
}
#endif

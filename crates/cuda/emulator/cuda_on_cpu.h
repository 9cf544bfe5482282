// Runs the kernels on a CPU: blocks one after the other, the threads of a block as coroutines.
//
// The emulator runs block barriers, warp shuffles and votes, ldmatrix (x4, plain and transposed), mma.sync (m16n8k16 of
// f16 and bf16, m16n8k8 of TF32) by the layouts of the PTX manual, and cp.async with its groups. A copy arrives at the
// wait for it, as late as a GPU may bring it. Blocks, and threads between barriers, run in one of three orders: by their
// index, backwards, or shuffled. A block that waits for another one expects it to have ended: blocks of such a kernel
// start in the order of their index.
//
// The emulator reports as a fault: global accesses outside of all buffers or misaligned, and writes to inputs; shared
// accesses outside of the block's memory, misaligned, or of words that were never written or are still being copied; two
// accesses to a shared word, one of them a write, from different warps without a block barrier between them, or from
// different lanes of a warp without a barrier of the warp or the block; lanes of a warp that meet in different
// collective operations; barriers that not all threads reach; copies that no thread waited for.
//
// The machine is global: one launch at a time.
#pragma once
#include "numbers.h"
#include "machine.h"
#include "memory.h"
#include "matrices.h"
#include "registered.h"

// Runs Metal kernels on a CPU, on the machine of the CUDA emulator: threadgroups one after the other, their threads as
// coroutines, a simdgroup as a warp.
//
// The emulator runs threadgroup barriers, shuffles and votes of a simdgroup, and products of its matrices of 8 x 8. It
// reports as a fault, as for CUDA: accesses to device memory outside of all buffers or misaligned, and writes to
// inputs; accesses to threadgroup memory outside of it, misaligned, or to words that were never written; two accesses
// to a word of it, one of them a write, without a barrier between them; threads that meet in different collective
// operations; and barriers that not all threads reach. Threadgroup memory begins full of NaN. Threadgroups, and threads
// between barriers, run in one of three orders. Besides: more threadgroup memory than every device has, and an address
// space where another one is expected, which is an error of the compiler.
#pragma once
#include "numbers.h"
#include "machine.h"
#include "memory.h"
#include "registered.h"

namespace emulator {
// A pointer to threadgroup memory, by bytes from its beginning. It converts to no other pointer.
template <class T> struct SharedPointer {
    u32 at;
    explicit SharedPointer(u32 at) : at(at) {}
    SharedPointer operator+(int elements) const { return SharedPointer(at + u32(elements) * sizeof(T)); }
};

// The threadgroup memory of every device (Metal Feature Set Tables).
const u32 MOST_SHARED_BYTES = 32768;
inline void check_shared_bytes(u32 bytes) {
    if (bytes > MOST_SHARED_BYTES) fail("the kernel has " + std::to_string(bytes) + " bytes of threadgroup memory");
    if (bytes != machine().shared.size()) fail("the launch has other threadgroup memory than the kernel");
}

// The bytes that kernels read from device memory, and their products of matrices.
struct Counts {
    u64 bytes_read = 0;
    u64 products = 0; // multiplications with an addition
};
inline Counts& counts() {
    static Counts all;
    return all;
}

struct MatrixArgument {
    float2* sum;
    float2 left, right;
};
// simdgroup_multiply_accumulate: adds left times right. A lane has two neighbours in a row: the bits 0 and 3 of its
// index say which columns, the others which row.
inline void multiply_add_8x8(float2& sum, float2 left, float2 right) {
    MatrixArgument own{&sum, left, right};
    counts().products += 8 * 8 * 8 / 32; // a lane's share
    collective("simdgroup_multiply_accumulate", &own, [](void** all) {
        static float a[8][8], b[8][8];
        auto row = [](int lane) { return (lane >> 4) << 2 | (lane >> 1 & 3); };
        auto column = [](int lane) { return (lane >> 3 & 1) << 2 | (lane & 1) << 1; };
        for (int l = 0; l < 32; l++) {
            const auto* one = (MatrixArgument*)all[l];
            a[row(l)][column(l)] = one->left.x, a[row(l)][column(l) + 1] = one->left.y;
            b[row(l)][column(l)] = one->right.x, b[row(l)][column(l) + 1] = one->right.y;
        }
        for (int l = 0; l < 32; l++) {
            const auto* one = (MatrixArgument*)all[l];
            for (int k = 0; k < 8; k++) {
                one->sum->x += a[row(l)][k] * b[k][column(l)];
                one->sum->y += a[row(l)][k] * b[k][column(l) + 1];
            }
        }
    });
}
} // namespace emulator

// The machine: types, indices, barriers, memory and instructions, by the same names on a GPU and in the emulator.
//
// With EMULATOR defined, a C++ compiler compiles the kernels for a CPU, and the functions here call the emulator, which
// checks what a GPU does not. Without it, NVRTC compiles them for compute capability 8.0 and later. Kernels reach
// memory, other threads and the tensor cores only through this file.
//
// ELEMENT is the type of the tensors: 0 f16, 1 bf16, 2 f32. Shared memory is addressed by bytes from its beginning.
#pragma once

#ifndef ELEMENT
#error "define ELEMENT before device.cuh is included: 0 f16, 1 bf16, 2 f32"
#endif

#ifdef EMULATOR
#include "cuda_on_cpu.h"
// KERNEL begins the definition of a kernel. WAITS_FOR_EARLIER_BLOCKS after it says that its blocks wait for those that
// start before, so that the emulator starts the first block first.
#define DEVICE static inline
#define DEVICE_METHOD
#define UNROLL
#define KERNEL(name, threads, blocks_per_processor, Arguments)          \
    static void name(const Arguments& arguments);                       \
    static const emulator::Registration name##_registration(#name, name); \
    static void name(const Arguments& arguments)
#define WAITS_FOR_EARLIER_BLOCKS(name) static const emulator::WaitsForBlocks name##_order(#name);
#else
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define KERNEL(name, threads, blocks_per_processor, Arguments)                         \
    extern "C" __global__ void __launch_bounds__(threads, blocks_per_processor) name( \
        const __grid_constant__ Arguments arguments)
#define WAITS_FOR_EARLIER_BLOCKS(name)
extern __shared__ __align__(128) char shared_memory[];
#endif

// The address spaces of the Metal Shading Language, for headers that the Metal kernels share: memory of a thread, and
// global memory. In CUDA and C++, addresses have none.
#define LOCAL
#define GLOBAL

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define NEGATIVE_INFINITY as_float(0xff800000u) // NVRTC has no INFINITY
#define LARGEST_FLOAT as_float(0x7f7fffffu)

#ifdef EMULATOR
DEVICE int thread_index() { return emulator::machine().current; }
DEVICE int block_index() { return emulator::machine().block; }
DEVICE void keep_order() {}
DEVICE void block_barrier() { emulator::block_barrier(); }
DEVICE void warp_barrier() { emulator::warp_barrier(); }
DEVICE u32 shuffle_bits(u32 x, int lane) { return emulator::shuffle(x, lane, "shfl.idx"); }
DEVICE u32 shuffle_bits_xor(u32 x, int mask) { return emulator::shuffle(x, emulator::lane() ^ mask, "shfl.bfly"); }
DEVICE bool any_in_warp(bool x) { return emulator::any_in_warp(x); }
DEVICE bool any_in_block(bool x) { return emulator::any_in_block(x); }
DEVICE float as_float(u32 x) { return emulator::from_bits(x); }
DEVICE u32 as_bits(float x) { return emulator::to_bits(x); }

template <class T> DEVICE T load_shared(u32 at) { return emulator::load_shared<T>(at); }
template <class T> DEVICE void store_shared(u32 at, T x) { emulator::store_shared<T>(at, x); }
template <class T> DEVICE T load_global(const T* from) {
    emulator::check_global(from, sizeof(T), sizeof(T), "ld.global", false);
    return *from;
}
template <class T> DEVICE void store_global(T* to, T x) {
    emulator::check_global(to, sizeof(T), sizeof(T), "st.global", true);
    *to = x;
}
DEVICE void copy_async_16(u32 to, const void* from, int bytes) { emulator::copy_async(to, from, bytes, 16); }
DEVICE void copy_async_8(u32 to, const void* from, int bytes) { emulator::copy_async(to, from, bytes, 8); }
DEVICE void copy_async_4(u32 to, const void* from, int bytes) { emulator::copy_async(to, from, bytes, 4); }
DEVICE void commit_copies() { emulator::commit_copies(); }
template <int PENDING> DEVICE void wait_for_copies() { emulator::wait_for_copies(PENDING); }

DEVICE void load_matrices(u32 (&r)[4], u32 at) { emulator::load_matrices(r, at, false); }
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 at) { emulator::load_matrices(r, at, true); }
DEVICE void multiply_add_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::multiply_add_16816<ELEMENT == 1>(c, a, b0, b1);
}
DEVICE void multiply_add_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::multiply_add_1688_tf32(c, a, b0, b1);
}

DEVICE u32 round_to_tf32(float x) { return emulator::to_bits(emulator::round_to_tf32(x)); }
DEVICE float exp2_approximate(float x) { return std::exp2(x); }
DEVICE float log2_of(float x) { return std::log2(x); }
DEVICE float tanh_of(float x) { return std::tanh(x); }
DEVICE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float larger(float a, float b) { return std::fmax(a, b); }
DEVICE float absolute(float a) { return std::fabs(a); }
DEVICE u32 multiply_high(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
DEVICE u32 pack_pair(float low, float high) {
    return ELEMENT == 1 ? emulator::f32_to_bf16(low) | u32(emulator::f32_to_bf16(high)) << 16
                        : emulator::f32_to_f16(low) | u32(emulator::f32_to_f16(high)) << 16;
}
DEVICE float f16_to_f32(u16 bits) { return emulator::f16_to_f32(bits); }
DEVICE float unpack_half(u16 half) { return ELEMENT == 1 ? emulator::bf16_to_f32(half) : f16_to_f32(half); }
// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes of a, then b.
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
    const u64 bytes = a | u64(b) << 32;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
// The differences of two pairs of elements.
DEVICE u32 subtract_pairs(u32 a, u32 b) {
    return pack_pair(unpack_half((u16)a) - unpack_half((u16)b),
                     unpack_half((u16)(a >> 16)) - unpack_half((u16)(b >> 16)));
}
// The products of two pairs of bf16.
DEVICE u32 multiply_bf16_pairs(u32 a, u32 b) {
    return emulator::f32_to_bf16(emulator::bf16_to_f32((u16)a) * emulator::bf16_to_f32((u16)b)) |
           u32(emulator::f32_to_bf16(emulator::bf16_to_f32((u16)(a >> 16)) * emulator::bf16_to_f32((u16)(b >> 16)))) << 16;
}

DEVICE void wait_for_turn(const int* at, int turn) {
    if (load_global(at) != turn) emulator::fail("waits for a block that starts later");
}
DEVICE void set_turn(int* at, int turn) { store_global(at, turn); }
DEVICE void add_to_global(float* to, float4 x) {
    float4 sum = load_global((const float4*)to);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    store_global((float4*)to, sum);
}
#else
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
// Loads and stores of this thread before and after are not exchanged by the compiler.
DEVICE void keep_order() { asm volatile("" ::: "memory"); }
DEVICE void block_barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE u32 shuffle_bits(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE u32 shuffle_bits_xor(u32 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE bool any_in_warp(bool x) { return __any_sync(~0u, x); }
DEVICE bool any_in_block(bool x) { return __syncthreads_or(x); }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }

DEVICE u32 shared_base() { return (u32)__cvta_generic_to_shared(shared_memory); }
template <class T> DEVICE T load_shared(u32 at) { return *reinterpret_cast<const T*>(shared_memory + at); }
template <class T> DEVICE void store_shared(u32 at, T x) { *reinterpret_cast<T*>(shared_memory + at) = x; }
template <class T> DEVICE T load_global(const T* from) { return *from; }
template <class T> DEVICE void store_global(T* to, T x) { *to = x; }
// Copies `bytes` bytes to shared memory, and zeros to the rest of the 16, 8 or 4.
DEVICE void copy_async_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_base() + to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_async_8(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(shared_base() + to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_async_4(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared_base() + to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Four matrices of 8 x 8 halves, whose rows are at the addresses of the lanes.
DEVICE void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_base() + at));
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_base() + at));
}
// c (16 x 8) += a (16 x 16) b (16 x 8).
DEVICE void multiply_add_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEMENT == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c (16 x 8) += a (16 x 8) b (8 x 8).
DEVICE void multiply_add_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 round_to_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_of(float x) { return log2f(x); }
DEVICE float tanh_of(float x) {
#if ELEMENT == 2
    return tanhf(x);
#else
    // Not tanh.approx: its error of 5e-4 would be 0.025 with a softcap of 50.
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_approximate(x * (2 * LOG2_E)) + 1.0f));
    return fmaf(-2.0f, y, 1.0f);
#endif
}
DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float absolute(float a) { return fabsf(a); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
DEVICE u32 pack_pair(float low, float high) {
    u32 r;
#if ELEMENT == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}
DEVICE float f16_to_f32(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
DEVICE float unpack_half(u16 half) {
#if ELEMENT == 1
    return __uint_as_float((u32)half << 16);
#else
    return f16_to_f32(half);
#endif
}
// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes of a, then b.
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// The differences of two pairs of elements.
DEVICE u32 subtract_pairs(u32 a, u32 b) {
    u32 r;
#if ELEMENT == 1
    // There is a subtraction only from compute capability 9.0 on.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(b), "r"(0xbf80bf80u), "r"(a));
#else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#endif
    return r;
}
// The products of two pairs of bf16. There is a multiplication only from compute capability 9.0 on.
DEVICE u32 multiply_bf16_pairs(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}

DEVICE void wait_for_turn(const int* at, int turn) {
    int now;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    while (now != turn);
}
DEVICE void set_turn(int* at, int turn) {
    __threadfence();
    asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(at), "r"(turn) : "memory");
}
// Additions of four numbers at once are of compute capability 9.0 and of PTX 8.1, which CUDA 12.0 does not compile.
#define HAS_ADDITION_OF_FOUR (__CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)
DEVICE void add_to_global(float* to, float4 x) {
#if HAS_ADDITION_OF_FOUR
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(to), "f"(x.x) : "memory");
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(to + 1), "f"(x.y) : "memory");
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(to + 2), "f"(x.z) : "memory");
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(to + 3), "f"(x.w) : "memory");
#endif
}
#endif

// The place of a block in a grid of up to three dimensions, whose first index runs fastest. Launches have one dimension:
// CUDA allows 65,535 blocks in the others.
struct GridPlace {
    int x;
    int y;
    int z;
};
DEVICE GridPlace grid_place(int count_x, int count_y) {
    const u32 index = block_index(), rest = index / (u32)count_x;
    GridPlace place;
    place.x = index - rest * count_x, place.y = rest % (u32)count_y, place.z = rest / (u32)count_y;
    return place;
}

// Floats in shared memory, and one of them, for headers that the Metal kernels share.
typedef u32 SharedFloats;
DEVICE float load_shared_float(SharedFloats from, int n) { return load_shared<float>(from + 4 * n); }

// A byte of a word as a float, plus 2^23.
DEVICE float byte_above_two_to_23(u32 bytes, int i) { return as_float(select_bytes(bytes, 0x4b000000u, 0x7440u + i)); }

// The number of a float of 8 bits with 4 bits of exponent and without infinities.
DEVICE float e4m3_to_f32(u32 code) {
    const u32 magnitude = code & 0x7f;
    // Exponent and mantissa at their places in f32, with a bias of 127 in the place of 7.
    const float two_to_120 = as_float((127u + 120u) << 23);
    const float unsigned_number = magnitude == 0x7f ? as_float(0x7fc00000u) : as_float(magnitude << 20) * two_to_120;
    return as_float(as_bits(unsigned_number) | (code & 0x80) << 24);
}

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE bool is_finite(float x) { return (as_bits(x) & 0x7f800000u) != 0x7f800000u; }
DEVICE float shuffle(float x, int lane) { return as_float(shuffle_bits(as_bits(x), lane)); }
DEVICE float shuffle_xor(float x, int mask) { return as_float(shuffle_bits_xor(as_bits(x), mask)); }
// The sum and the maximum over the 32 lanes of a warp and over four neighbours, in every lane.
DEVICE float warp_sum(float x) {
    UNROLL for (int d = 16; d > 0; d >>= 1) x += shuffle_xor(x, d);
    return x;
}
DEVICE float warp_max(float x) {
    UNROLL for (int d = 16; d > 0; d >>= 1) x = larger(x, shuffle_xor(x, d));
    return x;
}
DEVICE float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
DEVICE float quad_max(float x) {
    x = larger(x, shuffle_xor(x, 1));
    return larger(x, shuffle_xor(x, 2));
}

// The machine, by the names that the shared headers of the CUDA kernels use for a GPU of NVIDIA's: a warp is a
// simdgroup of 32 threads, shared memory is threadgroup memory.
//
// With EMULATOR defined, a C++ compiler compiles the kernels for a CPU, and the functions here call the emulator.
// Without it, the Metal compiler does. Kernels reach memory and other threads only through this file.
//
// Sections refer to the Metal Shading Language Specification, version 3.1. Address spaces (section 4) are written
// as LOCAL (thread), GLOBAL (device) and SHARED(T), a pointer to T in threadgroup memory. In the emulator, a SHARED
// pointer is a type of its own, so that it is an error to mix it with one of device memory.
//
// ELEMENT is the type of the tensors: 0 f16, 1 bf16, 2 f32. Halves are kept as bits: `bfloat` needs Metal 3.1.
#pragma once

#ifdef EMULATOR
#include "metal_on_cpu.h"
#define LOCAL
#define GLOBAL
#define CONSTANT
#define SHARED(T) emulator::SharedPointer<T>
#define UNROLL
#define BUFFER(index)
// A kernel is a function of the buffers of a list and of its indices, and another one with the struct of arguments, by
// which the emulator launches it.
#define KERNEL_WITH(Arguments, list, name, threads)                                                              \
    static void name##_bound(list##_BUFFERS, u32 thread_index, u32 group_index);                                 \
    static void name(const Arguments& arguments) {                                                               \
        name##_bound(list##_BUFFERS_OF(arguments), emulator::machine().current, emulator::machine().block);      \
    }                                                                                                            \
    static const emulator::Registration name##_registration(#name, name);                                        \
    static void name##_bound(list##_BUFFERS, u32 thread_index, u32 group_index)
#define SHARED_MEMORY(bytes) emulator::check_shared_bytes(bytes)
#define SHARED_AT(T, byte) emulator::SharedPointer<T>(byte)
#else
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
typedef uchar u8;
typedef ushort u16;
typedef uint u32;
typedef ulong u64;
typedef long i64;
#define LOCAL thread
#define GLOBAL device
#define CONSTANT constant
#define SHARED(T) threadgroup T*
#define UNROLL _Pragma("unroll")
#define BUFFER(index) [[buffer(index)]]
#define KERNEL_WITH(Arguments, list, name, threads)                                                               \
    [[kernel, max_total_threads_per_threadgroup(threads)]] void name(                                             \
        list##_BUFFERS, u32 thread_index [[thread_index_in_threadgroup]],                                      \
        u32 group_index [[threadgroup_position_in_grid]])
// Variables of threadgroup memory are declared in a kernel (section 4.4).
#define SHARED_MEMORY(bytes) threadgroup uint4 shared_memory[(bytes) / 16]
#define SHARED_AT(T, byte) ((threadgroup T*)((threadgroup char*)shared_memory + (byte)))
#endif
// A kernel of attention with a list of buffers, and one of the forward pass.
#define KERNEL_OF(list, name, threads) KERNEL_WITH(AttentionArguments, list, name, threads)
#define KERNEL(name, threads) KERNEL_OF(ATTENTION, name, threads)
#define DEVICE static inline
#define DEVICE_METHOD

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define NEGATIVE_INFINITY as_float(0xff800000u)
#define LARGEST_FLOAT as_float(0x7f7fffffu)

#if ELEMENT == 2
typedef float Element;
#else
typedef u16 Element;
#endif

#ifdef EMULATOR
DEVICE void block_barrier() { emulator::block_barrier(); }
DEVICE u32 shuffle_bits(u32 x, int lane) { return emulator::shuffle(x, lane, "simd_shuffle"); }
DEVICE u32 shuffle_bits_xor(u32 x, int mask) {
    return emulator::shuffle(x, emulator::lane() ^ mask, "simd_shuffle_xor");
}
DEVICE bool any_in_warp(bool x) { return emulator::any_in_warp(x); }
DEVICE float as_float(u32 x) { return emulator::from_bits(x); }
DEVICE u32 as_bits(float x) { return emulator::to_bits(x); }

template <class T> DEVICE T load_shared(emulator::SharedPointer<T> from) { return emulator::load_shared<T>(from.at); }
template <class T> DEVICE void store_shared(emulator::SharedPointer<T> to, T x) { emulator::store_shared<T>(to.at, x); }
template <class T> DEVICE T load_global(const T* from) {
    emulator::check_global(from, sizeof(T), sizeof(T), "a load", false);
    emulator::counts().bytes_read += sizeof(T);
    return *from;
}
template <class T> DEVICE void store_global(T* to, T x) {
    emulator::check_global(to, sizeof(T), sizeof(T), "a store", true);
    *to = x;
}
DEVICE emulator::SharedPointer<u32> words_of(emulator::SharedPointer<Element> elements) {
    return emulator::SharedPointer<u32>(elements.at);
}

DEVICE float exp2_approximate(float x) { return std::exp2(x); }
DEVICE float log2_of(float x) { return std::log2(x); }
DEVICE float tanh_of(float x) { return std::tanh(x); }
DEVICE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float larger(float a, float b) { return std::fmax(a, b); }
DEVICE float absolute(float a) { return std::fabs(a); }
DEVICE u32 multiply_high(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
DEVICE float f16_to_f32(u16 bits) { return emulator::f16_to_f32(bits); }
DEVICE u16 f32_to_f16(float x) { return emulator::f32_to_f16(x); }
DEVICE void multiply_add(float2& sum, float2 left, float2 right) { emulator::multiply_add_8x8(sum, left, right); }
#else
// All threads of the threadgroup reach it (section 6.9.1), and see what the others wrote to its memory.
DEVICE void block_barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
DEVICE u32 shuffle_bits(u32 x, int lane) { return simd_shuffle(x, (ushort)lane); }
DEVICE u32 shuffle_bits_xor(u32 x, int mask) { return simd_shuffle_xor(x, (ushort)mask); }
DEVICE bool any_in_warp(bool x) { return simd_any(x); }
DEVICE float as_float(u32 x) { return as_type<float>(x); }
DEVICE u32 as_bits(float x) { return as_type<u32>(x); }

template <typename T> DEVICE T load_shared(threadgroup T* from) { return *from; }
template <typename T> DEVICE void store_shared(threadgroup T* to, T x) { *to = x; }
template <typename T> DEVICE T load_global(device const T* from) { return *from; }
template <typename T> DEVICE void store_global(device T* to, T x) { *to = x; }
DEVICE threadgroup u32* words_of(threadgroup Element* elements) { return (threadgroup u32*)elements; }

// The functions of `precise` keep infinities and NaN also where fast maths are on (section 6.5).
DEVICE float exp2_approximate(float x) { return precise::exp2(x); }
DEVICE float log2_of(float x) { return precise::log2(x); }
DEVICE float tanh_of(float x) { return precise::tanh(x); }
DEVICE float fused_multiply_add(float a, float b, float c) { return fma(a, b, c); }
DEVICE float larger(float a, float b) { return fmax(a, b); }
DEVICE float absolute(float a) { return fabs(a); }
DEVICE u32 multiply_high(u32 a, u32 b) { return mulhi(a, b); }
DEVICE float f16_to_f32(u16 bits) { return (float)as_type<half>(bits); }
DEVICE u16 f32_to_f16(float x) { return as_type<u16>((half)x); }

// Adds the product of two matrices of 8 x 8 to a third one (section 6.7, simdgroup_multiply_accumulate).
//
// The specification does not say which elements of a matrix a thread has. On every GPU of Apple's they are two
// neighbours in a row, as fragment_row and fragment_column say: MLX and Candle rely on it.
DEVICE void multiply_add(thread float2& sum, float2 left, float2 right) {
    simdgroup_matrix<float, 8, 8> left_matrix, right_matrix, sum_matrix;
    reinterpret_cast<thread float2&>(left_matrix.thread_elements()) = left;
    reinterpret_cast<thread float2&>(right_matrix.thread_elements()) = right;
    reinterpret_cast<thread float2&>(sum_matrix.thread_elements()) = sum;
    simdgroup_multiply_accumulate(sum_matrix, left_matrix, right_matrix, sum_matrix);
    sum = reinterpret_cast<thread float2&>(sum_matrix.thread_elements());
}
#endif

// The row of a matrix of 8 x 8 that a thread of a simdgroup has two elements of, and the column of the first of them.
DEVICE int fragment_row(int lane) { return lane / 16 * 4 + lane / 2 % 4; }
DEVICE int fragment_column(int lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE float shuffle(float x, int lane) { return as_float(shuffle_bits(as_bits(x), lane)); }
DEVICE float shuffle_xor(float x, int mask) { return as_float(shuffle_bits_xor(as_bits(x), mask)); }
DEVICE bool is_finite(float x) { return (as_bits(x) & 0x7f800000u) != 0x7f800000u; }

// The largest number, and the sum, of the four threads that share the row of a fragment.
DEVICE float row_max(float x) {
    x = larger(x, as_float(shuffle_bits_xor(as_bits(x), 1)));
    return larger(x, as_float(shuffle_bits_xor(as_bits(x), 8)));
}
DEVICE float row_sum(float x) {
    x += as_float(shuffle_bits_xor(as_bits(x), 1));
    return x + as_float(shuffle_bits_xor(as_bits(x), 8));
}

// The sum over the 32 threads of a simdgroup, in every thread.
DEVICE float warp_sum(float x) {
    UNROLL for (int d = 16; d > 0; d >>= 1) x += shuffle_xor(x, d);
    return x;
}

// The place of a threadgroup in a grid of up to three dimensions, whose first index runs fastest. Launches have one
// dimension.
struct GridPlace {
    int x;
    int y;
    int z;
};
DEVICE GridPlace grid_place(u32 index, int count_x, int count_y) {
    const u32 rest = index / (u32)count_x;
    GridPlace place;
    place.x = (int)(index - rest * (u32)count_x), place.y = (int)(rest % (u32)count_y);
    place.z = (int)(rest / (u32)count_y);
    return place;
}

DEVICE float unpack_half(u16 bits) { return ELEMENT == 1 ? as_float((u32)bits << 16) : f16_to_f32(bits); }
// A float in threadgroup memory, for headers that the CUDA kernels share.
typedef SHARED(float) SharedFloats;
DEVICE float load_shared_float(SharedFloats from, int n) { return load_shared(from + n); }

// A byte of a word as a float, plus 2^23.
DEVICE float byte_above_two_to_23(u32 bytes, int i) { return as_float(0x4b000000u | (bytes >> 8 * i & 0xff)); }

// The number of a float of 8 bits with 4 bits of exponent and without infinities. A GPU may take subnormal numbers in
// f32 for 0 (section 8.1).
DEVICE float e4m3_to_f32(u32 code) {
    const u32 exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return as_float(0x7fc00000u);
    const float magnitude =
        exponent == 0 ? (float)(int)mantissa / 512.0f : as_float((exponent + 120) << 23 | mantissa << 20);
    return (code & 128) != 0 ? -magnitude : magnitude;
}

// A number as an element of 16 bits; ties to even, and NaN remains NaN.
DEVICE u32 pack_half(float x) {
    if (ELEMENT == 0) return f32_to_f16(x);
    const u32 bits = as_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
DEVICE u32 pack_pair(float low, float high) { return pack_half(low) | pack_half(high) << 16; }

DEVICE float element_to_f32(float x) { return x; }
DEVICE float element_to_f32(u16 bits) { return unpack_half(bits); }

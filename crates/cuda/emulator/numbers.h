// CUDA's vector types, and the numbers that kernels compute with: f16, bf16 and TF32 as f32.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

// CUDA's vector types.
struct int2 {
    int x, y;
};
struct int4 {
    int x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

namespace emulator {
inline u32 to_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float from_bits(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float bf16_to_f32(u16 half) { return from_bits(u32(half) << 16); }
inline u16 f32_to_bf16(float x) {
    const u32 bits = to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_f32(u16 half) {
    const u32 sign = u32(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {
        const float x = std::ldexp(float(mantissa), -24);
        return sign ? -x : x;
    }
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline u16 f32_to_f16(float x) {
    const u32 bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return u16(sign | 0x7c00);
    if (magnitude < 0x38800000) // subnormal or zero: a multiple of 2^-24, ties to even
        return u16(sign | u32(std::nearbyint(std::ldexp(from_bits(magnitude), 24))));
    const u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return u16(sign | ((rounded - 0x38000000) >> 13));
}
// cvt.rna.tf32.f32
inline float round_to_tf32(float x) {
    const u32 bits = to_bits(x);
    if ((bits & 0x7f800000) == 0x7f800000) return x;
    return from_bits((bits + 0x1000) & 0xffffe000);
}
// The bits of an operand that the tensor core reads.
inline float read_tf32(u32 bits) { return from_bits(bits & 0xffffe000); }
} // namespace emulator

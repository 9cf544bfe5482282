// Weights of codes with scales: the format in memory, and the numbers of codes.
//
// A row of a weight is divided into chunks of CODE_CHUNK columns: 32, or 16 for codes of 8 bits, so that the codes of a
// chunk, or their lower 4 bits, are one load of 16 bytes, and neighbouring lanes have neighbouring chunks. Codes of 3, 5
// and 6 bits are divided into two planes, lower and upper bits, so that no bit of memory is lost. The last chunk of a
// row is filled with codes of 0.
//
// A chunk consists of octets of 8 columns in a rotated order: position s of chunk c has octet (s + c / r) % octets, with
// r the chunks whose inputs are 128 bytes of 16-bit elements. So the eight lanes that load inputs together read 16 bytes
// each from different banks. An octet is two quartets of 4 columns. A plane has the quartets one after
// the other from the lowest bits of its words on. Where a plane has p bits of a code, a quartet is every p-th byte of
// bits: bits p q to p q + p - 1 of each of the four bytes of a word, so that a shift and a mask extract it.
//
// The numbers have the bits of the formulas below in f32. A code becomes a float by one selection of bytes, which puts
// it below the exponent of 2^23, and a subtraction, both exact.
#pragma once

#include "linear_codes_arguments.cuh"
#include "elements.cuh"

// The kinds of the numbers of groups.
#define NUMBERS_F16 0
#define NUMBERS_BF16 1
#define NUMBERS_F32 2
#define NUMBERS_WHOLE 3  // bytes
#define NUMBERS_BYTES 4  // bytes that are indices of a table of 256 floats
#define NUMBERS_NESTED 5 // (byte - middle) * factor, with a factor in f16 for several groups

// The number of a code.
#define VALUES_SIGNED 0   // (code - 2^(bits - 1)) * scale
#define VALUES_ZEROS 1    // (code - zero) * scale
#define VALUES_MINIMUMS 2 // code * scale + minimum, rounded once
#define VALUES_TABLE 3    // table[code] * scale
#define VALUES_E4M3 4     // a float of 8 bits times the scale
#define VALUES_E5M2 5

#ifndef CODE_BITS // 2, 3, 4, 5, 6 or 8
#define CODE_BITS 4
#endif
#ifndef CODE_VALUES
#define CODE_VALUES VALUES_SIGNED
#endif
#ifndef CODE_GROUP // the columns that share a scale; 0 if all columns of a row do
#define CODE_GROUP 0
#endif
#ifndef SCALE_NUMBERS
#define SCALE_NUMBERS NUMBERS_F16
#endif
#ifndef OFFSET_NUMBERS // of zeros or minimums
#define OFFSET_NUMBERS NUMBERS_F16
#endif
#ifndef SCALE_NEST // the groups that share a factor of nested scales
#define SCALE_NEST 1
#endif
#ifndef OFFSET_NEST
#define OFFSET_NEST 1
#endif

#define HAS_OFFSETS (CODE_VALUES == VALUES_ZEROS || CODE_VALUES == VALUES_MINIMUMS)
#define CODE_CHUNK (CODE_BITS == 8 ? 16 : 32)
#define CODE_OCTETS (CODE_CHUNK / 8)
#define CHUNKS_OF_128_BYTES (64 / CODE_CHUNK)
#define LOW_BITS (CODE_BITS == 8 ? 8 : CODE_BITS >= 4 ? 4 : 2)
#define HIGH_BITS (CODE_BITS - LOW_BITS)
#define LOW_WORDS (CODE_CHUNK * LOW_BITS / 32)
#define HIGH_WORDS (CODE_CHUNK * HIGH_BITS / 32)

// The columns of a chunk that have one group for certain, from a multiple of this number on: the largest power of two
// that divides CODE_GROUP, and at most a chunk.
#define GROUP_POWER_OF_TWO (CODE_GROUP & -CODE_GROUP)
#define CODE_RUN (CODE_GROUP == 0 || GROUP_POWER_OF_TWO >= CODE_CHUNK ? CODE_CHUNK : GROUP_POWER_OF_TWO)
#define CODE_RUNS (CODE_CHUNK / CODE_RUN)

#ifdef EMULATOR
DEVICE float number_of_f16(u16 x) { return emulator::f16_to_f32(x); }
#else
DEVICE float number_of_f16(u16 x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}
#endif

// The number of a group of a row of weights. NEST is the number of groups that share a factor.
template <int KIND, int NEST> DEVICE float group_number(const GroupPointers& from, i64 row, int group, int groups) {
    const i64 at = row * groups + group;
    if (KIND == NUMBERS_F16) return number_of_f16(load_global((const u16*)from.numbers + at));
    if (KIND == NUMBERS_BF16) return as_float((u32)load_global((const u16*)from.numbers + at) << 16);
    if (KIND == NUMBERS_F32) return load_global((const float*)from.numbers + at);
    const u32 byte = load_global((const u8*)from.numbers + at);
    if (KIND == NUMBERS_WHOLE) return (float)byte;
    if (KIND == NUMBERS_BYTES) return load_global((const float*)from.table + byte);
    const u16 factor = load_global((const u16*)from.table + row * (groups / NEST) + group / NEST);
    return number_of_f16(factor) * (float)((int)byte - from.middle);
}

// The group of a column.
DEVICE int group_of_column(int column) {
#if CODE_GROUP == 0
    return 0;
#else
    return column / CODE_GROUP;
#endif
}

DEVICE float scale_of_group(const WeightCodes& weight, i64 row, int group) {
    return group_number<SCALE_NUMBERS, SCALE_NEST>(weight.scales, row, group, weight.groups);
}

// The zero or the minimum of a group.
DEVICE float offset_of_group(const WeightCodes& weight, i64 row, int group) {
#if HAS_OFFSETS
    return group_number<OFFSET_NUMBERS, OFFSET_NEST>(weight.offsets, row, group, weight.groups);
#else
    return 0;
#endif
}

// The octet at a position of a chunk, and the position of an octet.
DEVICE int octet_of_position(int chunk, int position) { return (position + chunk / CHUNKS_OF_128_BYTES) % CODE_OCTETS; }
DEVICE int position_of_octet(int chunk, int octet) {
    return (octet + CODE_OCTETS - chunk / CHUNKS_OF_128_BYTES % CODE_OCTETS) % CODE_OCTETS;
}

// The four bytes of a quartet of a plane of BITS bits, from the words of a chunk.
template <int BITS> DEVICE u32 quartet_word(int quartet) { return quartet * BITS / 8; }
template <int BITS> DEVICE u32 quartet_bits(u32 word, int quartet) {
    const u32 mask = 0x01010101u * ((1u << BITS) - 1);
    return word >> quartet % (8 / BITS) * BITS & mask;
}

// A byte of a word as a float, plus 2^23.
DEVICE float byte_above_two_to_23(u32 bytes, int i) { return as_float(select_bytes(bytes, 0x4b000000u, 0x7440u + i)); }
#define TWO_TO_23 8388608.0f

// The number of code i of a quartet. A table of 16 floats is in shared memory.
DEVICE float code_number(u32 codes, int i, float scale, float offset, u32 table) {
#if CODE_VALUES == VALUES_E4M3
    const u32 code = codes >> 8 * i & 0xff, magnitude = code & 0x7f;
    // Exponent and mantissa at their places in f32, with a bias of 127 in the place of 7.
    const float two_to_120 = as_float((127u + 120u) << 23);
    const float unsigned_number = magnitude == 0x7f ? as_float(0x7fc00000u) : as_float(magnitude << 20) * two_to_120;
    return as_float(as_bits(unsigned_number) | (code & 0x80) << 24) * scale;
#elif CODE_VALUES == VALUES_E5M2
    return number_of_f16((u16)((codes >> 8 * i & 0xff) << 8)) * scale;
#elif CODE_VALUES == VALUES_TABLE
    return load_shared<float>(table + (codes >> 8 * i & 0xff) * 4) * scale;
#elif CODE_VALUES == VALUES_MINIMUMS
    return fused_multiply_add(byte_above_two_to_23(codes, i) - TWO_TO_23, scale, offset);
#elif CODE_VALUES == VALUES_ZEROS && OFFSET_NUMBERS == NUMBERS_WHOLE
    return (byte_above_two_to_23(codes, i) - (TWO_TO_23 + offset)) * scale;
#elif CODE_VALUES == VALUES_ZEROS
    return (byte_above_two_to_23(codes, i) - TWO_TO_23 - offset) * scale;
#else
    return (byte_above_two_to_23(codes, i) - (TWO_TO_23 + (1 << (CODE_BITS - 1)))) * scale;
#endif
}

// The codes of a chunk, and the numbers of its groups.
struct CodeChunk {
    u32 low[LOW_WORDS];
    u32 high[HIGH_WORDS ? HIGH_WORDS : 1];
    float scales[CODE_RUNS];
    float offsets[CODE_RUNS];
};

template <int WORDS> DEVICE void load_words(u32* to, const u32* from) {
    if (WORDS == 4) {
        const uint4 words = load_global((const uint4*)from);
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    } else if (WORDS == 2) {
        const uint2 words = load_global((const uint2*)from);
        to[0] = words.x, to[1] = words.y;
    } else if (WORDS == 1) {
        to[0] = load_global(from);
    }
}

DEVICE int chunks_of_row(int width) { return (width + CODE_CHUNK - 1) / CODE_CHUNK; }

DEVICE void load_code_chunk(CodeChunk& chunk, const WeightCodes& weight, const u32* low, i64 row, int width, int at) {
    const i64 from = row * chunks_of_row(width) + at;
    load_words<LOW_WORDS>(chunk.low, low + from * LOW_WORDS);
    load_words<HIGH_WORDS>(chunk.high, weight.high + from * HIGH_WORDS);
    UNROLL for (int run = 0; run < CODE_RUNS; run++) {
        const int group = group_of_column(at * CODE_CHUNK + run * CODE_RUN);
        chunk.scales[run] = scale_of_group(weight, row, group);
        chunk.offsets[run] = offset_of_group(weight, row, group);
    }
}

// The codes of a quartet of a chunk, a byte each.
DEVICE u32 quartet_of_chunk(const CodeChunk& chunk, int quartet) {
    u32 codes = quartet_bits<LOW_BITS>(chunk.low[quartet_word<LOW_BITS>(quartet)], quartet);
#if HIGH_WORDS
    codes |= quartet_bits<HIGH_BITS>(chunk.high[quartet_word<HIGH_BITS>(quartet)], quartet) << LOW_BITS;
#endif
    return codes;
}

// The codes of the quartet that begins at a column.
DEVICE u32 load_quartet(const WeightCodes& weight, const u32* low, i64 row, int width, int column) {
    const int chunk = column / CODE_CHUNK;
    const int quartet = 2 * position_of_octet(chunk, column % CODE_CHUNK / 8) + column % 8 / 4;
    const i64 from = row * chunks_of_row(width) + chunk;
    u32 codes = quartet_bits<LOW_BITS>(load_global(low + from * LOW_WORDS + quartet_word<LOW_BITS>(quartet)), quartet);
#if HIGH_WORDS
    const u32 high = load_global(weight.high + from * HIGH_WORDS + quartet_word<HIGH_BITS>(quartet));
    codes |= quartet_bits<HIGH_BITS>(high, quartet) << LOW_BITS;
#endif
    return codes;
}

// The numbers of the four columns from a multiple of 4 on; 0 behind the last column.
DEVICE void load_quartet_numbers(float (&numbers)[4], const WeightCodes& weight, const u32* low, i64 row, int width,
                                 int column, u32 table) {
    const u32 codes = load_quartet(weight, low, row, width, column);
    float scale = 0, offset = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        numbers[i] = 0;
        if (column + i >= width) continue;
        if (i % (CODE_RUN < 4 ? CODE_RUN : 4) == 0) {
            const int group = group_of_column(column + i);
            scale = scale_of_group(weight, row, group);
            offset = offset_of_group(weight, row, group);
        }
        numbers[i] = code_number(codes, i, scale, offset, table);
    }
}

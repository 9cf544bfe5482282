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

// The number of a group of a row of weights. `nest` is the number of groups that share a factor.
DEVICE float group_number(const LOCAL GroupPointers& from, int kind, int nest, i64 row, int group, int groups) {
    const i64 at = row * groups + group;
    if (kind == NUMBERS_F16) return f16_to_f32(load_global((GLOBAL const u16*)from.numbers + at));
    if (kind == NUMBERS_BF16) return as_float((u32)load_global((GLOBAL const u16*)from.numbers + at) << 16);
    if (kind == NUMBERS_F32) return load_global((GLOBAL const float*)from.numbers + at);
    const u32 byte = load_global((GLOBAL const u8*)from.numbers + at);
    if (kind == NUMBERS_WHOLE) return (float)byte;
    if (kind == NUMBERS_BYTES) return load_global((GLOBAL const float*)from.table + byte);
    const u16 factor = load_global((GLOBAL const u16*)from.table + row * (groups / nest) + group / nest);
    return f16_to_f32(factor) * (float)((int)byte - from.middle);
}

// The group of a column.
DEVICE int group_of_column(int column) {
    // A compiler would warn of a division by 0.
    return CODE_GROUP == 0 ? 0 : column / (CODE_GROUP == 0 ? 1 : CODE_GROUP);
}

DEVICE float scale_of_group(const LOCAL WeightCodes& weight, i64 row, int group) {
    return group_number(weight.scales, SCALE_NUMBERS, SCALE_NEST, row, group, weight.groups);
}

// The zero or the minimum of a group.
DEVICE float offset_of_group(const LOCAL WeightCodes& weight, i64 row, int group) {
    if (!HAS_OFFSETS) return 0;
    return group_number(weight.offsets, OFFSET_NUMBERS, OFFSET_NEST, row, group, weight.groups);
}

// The octet at a position of a chunk, and the position of an octet.
DEVICE int octet_of_position(int chunk, int position) { return (position + chunk / CHUNKS_OF_128_BYTES) % CODE_OCTETS; }
DEVICE int position_of_octet(int chunk, int octet) {
    return (octet + CODE_OCTETS - chunk / CHUNKS_OF_128_BYTES % CODE_OCTETS) % CODE_OCTETS;
}

// The word of a chunk that has a quartet of a plane of `bits` bits, and the four bytes of the quartet in it.
DEVICE u32 quartet_word(int quartet, int bits) { return quartet * bits / 8; }
DEVICE u32 quartet_bits(u32 word, int quartet, int bits) {
    const u32 mask = 0x01010101u * ((1u << bits) - 1);
    return word >> quartet % (8 / bits) * bits & mask;
}

#define TWO_TO_23 8388608.0f

// The number of code i of a quartet.
DEVICE float code_number(u32 codes, int i, float scale, float offset, SharedFloats table) {
    const u32 code = codes >> 8 * i & 0xff;
    if (CODE_VALUES == VALUES_E4M3) return e4m3_to_f32(code) * scale;
    if (CODE_VALUES == VALUES_E5M2) return f16_to_f32((u16)(code << 8)) * scale;
    if (CODE_VALUES == VALUES_TABLE) return load_shared_float(table, (int)code) * scale;
    const float above = byte_above_two_to_23(codes, i);
    if (CODE_VALUES == VALUES_MINIMUMS) return fused_multiply_add(above - TWO_TO_23, scale, offset);
    if (CODE_VALUES == VALUES_ZEROS && OFFSET_NUMBERS == NUMBERS_WHOLE) return (above - (TWO_TO_23 + offset)) * scale;
    if (CODE_VALUES == VALUES_ZEROS) return (above - TWO_TO_23 - offset) * scale;
    return (above - (TWO_TO_23 + (1 << (CODE_BITS - 1)))) * scale;
}

// The number of the run of column e of an octet that is known when the kernel runs, from the numbers of all runs.
DEVICE float number_of_run(const LOCAL float* numbers, int octet, int e) {
    // With runs of whole octets, the first octets have the first runs.
    float number = numbers[e / CODE_RUN % CODE_RUNS];
    UNROLL for (int other = 1; other < CODE_OCTETS; other++) {
        if (octet == other) number = numbers[(8 * other + e) / CODE_RUN];
    }
    return number;
}

// Loads 0, 1, 2 or 4 words.
DEVICE void load_words(LOCAL u32* to, GLOBAL const u32* from, int words) {
    if (words == 4) {
        const uint4 four = load_global((GLOBAL const uint4*)from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else if (words == 2) {
        const uint2 two = load_global((GLOBAL const uint2*)from);
        to[0] = two.x, to[1] = two.y;
    } else if (words == 1) {
        to[0] = load_global(from);
    }
}

DEVICE int chunks_of_row(int width) { return (width + CODE_CHUNK - 1) / CODE_CHUNK; }

// The codes of the quartet that begins at a column.
DEVICE u32 load_quartet(const LOCAL WeightCodes& weight, GLOBAL const u32* low, i64 row, int width, int column) {
    const int chunk = column / CODE_CHUNK;
    const int quartet = 2 * position_of_octet(chunk, column % CODE_CHUNK / 8) + column % 8 / 4;
    const i64 from = row * chunks_of_row(width) + chunk;
    u32 codes = quartet_bits(load_global(low + from * LOW_WORDS + quartet_word(quartet, LOW_BITS)), quartet, LOW_BITS);
    if (HIGH_WORDS) {
        const u32 high = load_global(weight.high + from * HIGH_WORDS + quartet_word(quartet, HIGH_BITS));
        codes |= quartet_bits(high, quartet, HIGH_BITS) << LOW_BITS;
    }
    return codes;
}

// Computes the numbers of the four columns from a multiple of 4 on; 0 behind the last column.
DEVICE void load_quartet_numbers(LOCAL float* numbers, const LOCAL WeightCodes& weight, GLOBAL const u32* low, i64 row,
                                 int width, int column, SharedFloats table) {
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

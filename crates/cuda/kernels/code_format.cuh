// The formats of keys and values that a cache stores as codes with scales.
#pragma once
#include "specialization.cuh"
#include "device.cuh"

// CODE_FORMAT, with KEY_CODES.
#define CODES_OF_8_BITS 0 // code - 128
#define CODES_OF_E4M3 1   // a float of 8 bits
#define CODES_OF_4_BITS 2 // code - 7.5; byte i of each 16 has the codes of numbers i and i + 16, the first in its low bits

// The columns of a row of `width` numbers that share a scale; all of them if there is one scale.
#define COLUMNS_OF_SCALE(width, columns) (CODE_FORMAT == CODES_OF_4_BITS && (width) % 64 == 0 ? 64 : (columns))
#define KEY_SCALE_COLUMNS COLUMNS_OF_SCALE(HEAD_DIM, HEAD_COLUMNS)
#define VALUE_SCALE_COLUMNS COLUMNS_OF_SCALE(VALUE_DIM, VALUE_COLUMNS)

// The number of a code.
DEVICE float number_of_code(u32 code) {
    if (CODE_FORMAT == CODES_OF_8_BITS) return (float)(int)code - 128.0f;
    if (CODE_FORMAT == CODES_OF_4_BITS) return (float)(int)code - 7.5f;
    const u32 exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return as_float(0x7fc00000u);
    const float magnitude =
        exponent == 0 ? (float)(int)mantissa * 0.001953125f : as_float((exponent + 120) << 23 | mantissa << 20);
    return (code & 128) != 0 ? -magnitude : magnitude;
}

// Functions of numbers for kernels that compute rows in f32, by the names that the shared headers use.
#pragma once
#include "device.cuh"
#include "elements.cuh"

#ifdef EMULATOR
DEVICE float exponential(float x) { return std::exp(x); }
DEVICE float square_root(float x) { return std::sqrt(x); }
#else
DEVICE float exponential(float x) { return precise::exp(x); }
DEVICE float square_root(float x) { return precise::sqrt(x); }
#endif

// log(1 + x), also where 1 + x has few digits of x. The language has no function for it.
DEVICE float log_of_one_plus(float x) {
    const float sum = 1.0f + x;
    return sum == 1.0f ? x : log2_of(sum) * LN_2 * (x / (sum - 1.0f));
}

// erf, with an error of at most 5e-7 (Abramowitz and Stegun, 7.1.26). The language has no function for it.
DEVICE float error_function(float x) {
    const float size = absolute(x), t = 1.0f / (1.0f + 0.3275911f * size);
    const float polynomial =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float above = 1.0f - polynomial * exponential(-size * size);
    return x < 0.0f ? -above : above;
}

// A number rounded to an element.
DEVICE float rounded_to_element(float x) {
#if ELEMENT == 2
    return x;
#else
    return unpack_half((u16)pack_half(x));
#endif
}

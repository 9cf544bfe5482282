// Elements of tensors as numbers of f32, and functions of numbers, for kernels that compute rows in f32.
#pragma once

#include "device.cuh"
#include "elements.cuh"

#ifdef EMULATOR
DEVICE float exponential(float x) { return std::exp(x); }
DEVICE float square_root(float x) { return std::sqrt(x); }
DEVICE float log_of_one_plus(float x) { return std::log1p(x); }
DEVICE float error_function(float x) { return std::erf(x); }
#else
DEVICE float exponential(float x) { return expf(x); }
DEVICE float square_root(float x) { return sqrtf(x); }
DEVICE float log_of_one_plus(float x) { return log1pf(x); }
DEVICE float error_function(float x) { return erff(x); }
#endif

// A number rounded to an element.
DEVICE float rounded_to_element(float x) {
#if ELEMENT == 2
    return x;
#else
    return unpack_half((u16)pack_pair(x, 0.0f));
#endif
}

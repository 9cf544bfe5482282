// Elements of tensors in global memory as numbers of f32.
#pragma once
#include "device.cuh"

DEVICE float load_element(GLOBAL const void* tensor, i64 at) {
#if ELEMENT == 2
    return load_global((GLOBAL const float*)tensor + at);
#else
    return unpack_half(load_global((GLOBAL const u16*)tensor + at));
#endif
}

DEVICE void store_element(GLOBAL void* tensor, i64 at, float x) {
#if ELEMENT == 2
    store_global((GLOBAL float*)tensor + at, x);
#else
    store_global((GLOBAL u16*)tensor + at, (u16)pack_pair(x, 0.0f));
#endif
}

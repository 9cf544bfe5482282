// The Metal kernels by the name that the tests of the CUDA kernels include, whose cases and loops in f64 they share:
// see run_tests.sh. The tests name a function of dropout, which these kernels do not have.
#pragma once
#include "attention.metal"
// The rows of a threadgroup of the decode kernel are fewer than in CUDA, and the tests compute its grid from them.
#undef DECODE_ROWS
#define DECODE_ROWS DECODE_FRAGMENT_ROWS
#define DECODE_THREADS FORWARD_THREADS

#if HAS_DROPOUT || KEY_CODES || KEY_PAGES
#error "the Metal kernels have no dropout, no codes and no pages"
#endif
struct Dropout {
    u32 seed_low, seed_high;
    int batch, head;
};
static u32 dropout_word(const Dropout&, int, int) { return ~0u; }

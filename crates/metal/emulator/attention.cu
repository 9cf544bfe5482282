// The Metal kernels by the name that the tests of the CUDA kernels include, whose cases and loops in f64 they share:
// see run_tests.sh.
#pragma once
#include "attention.metal"
// The rows of a threadgroup of the decode kernel are fewer than in CUDA, and the tests compute its grid from them.
#undef DECODE_ROWS
#define DECODE_ROWS DECODE_FRAGMENT_ROWS
#define DECODE_THREADS FORWARD_THREADS

// The Metal kernels of weights of codes by the name that the tests of the CUDA kernels include, whose cases and loops in
// f64 they share: see run_tests.sh.
#pragma once
#include "codes.metal"

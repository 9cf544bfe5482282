// The Metal kernels as a library for the emulator, which reads the constants of a program at run time:
//
//   g++ -std=gnu++17 -O1 -fno-strict-aliasing -shared -fPIC -DEMULATOR -DELEMENT=.. -DELEMENT_BYTES=.. -I SOURCES
//       -I crates/metal/emulator -I crates/cuda/emulator library.cpp
//
// SOURCES has kernels.metal, of attention or over rows, and run_time_constants.h.
#include "metal_on_cpu.h"
#include "run_time_constants.h"
#include "kernels.metal"
#include "bridge.h"

EXPORT void emulator_set_constants(const i64* values) {
    for (int n = 0; n < CONSTANT_COUNT; n++) run_time_constants[n] = values[n];
}

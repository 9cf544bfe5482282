// The kernels of a source for one specialisation as a library for the emulator. KERNEL_SOURCE is the file in quotes, and
// HEADERS is a folder with the headers that are printed from structs in Rust:
//
//   g++ -std=c++17 -O1 -shared -fPIC -DEMULATOR '-DKERNEL_SOURCE="attention.cu"' -D.. -I crates/cuda/kernels
//       -I crates/cuda/emulator -I HEADERS library.cpp
#include KERNEL_SOURCE
#include "bridge.h"

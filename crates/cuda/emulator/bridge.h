// The exports of a library of kernels for the emulator, for callers in other languages.
//
// A library includes the kernels, then this file. A kernel is launched by its name with a pointer to its argument.
// Calls must not overlap: the emulator's machine is global.
#pragma once
#include "cuda_on_cpu.h"

namespace bridge {
inline std::string& error() {
    static std::string last;
    return last;
}
} // namespace bridge

#define EXPORT extern "C" __attribute__((visibility("default")))

// Launches a kernel of the library, in the order of blocks and threads with the number `order % 3`. Returns 0, or 1 after
// a fault, which emulator_error() describes.
EXPORT int emulator_launch(const char* name, u64 blocks, u32 threads, u32 shared_bytes, const void* arguments,
                           u32 order) {
    bridge::error().clear();
    const emulator::RegisteredKernel* kernel = emulator::find_kernel(name);
    if (!kernel) {
        bridge::error() = std::string("there is no kernel ") + name + " in this specialisation";
        return 1;
    }
    const bool is_done = emulator::launch(name, blocks, int(threads), shared_bytes, [&] { kernel->run(arguments); },
                                          emulator::Order(order % 3), kernel->waits_for_blocks);
    if (!is_done) bridge::error() = emulator::machine().fault;
    return is_done ? 0 : 1;
}

// Allows kernels to access some bytes, or only to read them if they are an input; all others are faults.
EXPORT void emulator_add_buffer(const void* begin, size_t bytes, const char* name, int is_input) {
    emulator::add_buffer(begin, bytes, name, is_input);
}
EXPORT void emulator_clear_buffers() { emulator::clear_buffers(); }
// The fault of the last launch; empty if there was none.
EXPORT const char* emulator_error() { return bridge::error().c_str(); }

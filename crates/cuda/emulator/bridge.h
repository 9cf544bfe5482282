// The exports of a library of kernels for the emulator, for callers in other languages.
//
// A library includes the kernels, then this file, and exports an array of them by EXPORT_KERNELS. A kernel is launched
// with a pointer to its argument, which is copied. Calls must not overlap: the emulator's machine is global.
#pragma once
#include <cstring>
#include "cuda_on_cpu.h"

// The name of a kernel, and the function.
template <class Arguments> struct NamedKernel {
    const char* name;
    void (*run)(const Arguments&);
    bool waits_for_blocks = false; // that start before
};

namespace bridge {
inline std::string& error() {
    static std::string last;
    return last;
}

// Runs a grid of the kernel with this name. Returns 0, or 1 after a fault, which error() describes.
template <class Arguments, size_t COUNT>
int launch(const NamedKernel<Arguments> (&kernels)[COUNT], const char* name, u64 blocks, u32 threads,
           u32 shared_bytes, const void* arguments, u32 order) {
    error().clear();
    for (const auto& kernel : kernels) {
        if (strcmp(kernel.name, name)) continue;
        Arguments own;
        memcpy((void*)&own, arguments, sizeof own);
        const bool is_done = emulator::launch(name, blocks, int(threads), shared_bytes, [&] { kernel.run(own); },
                                              emulator::Order(order % 3), kernel.waits_for_blocks);
        if (!is_done) error() = emulator::machine().fault;
        return is_done ? 0 : 1;
    }
    error() = std::string("there is no kernel ") + name + " in this specialisation";
    return 1;
}
} // namespace bridge

#define EXPORT extern "C" __attribute__((visibility("default")))

// Launches a kernel of the library, in the order of blocks and threads with the number `order % 3`. Returns 0, or 1 after
// a fault.
#define EXPORT_KERNELS(kernels)                                                                                       \
    EXPORT int emulator_launch(const char* kernel, u64 blocks, u32 threads, u32 shared_bytes, const void* arguments,  \
                               u32 order) {                                                                           \
        return bridge::launch(kernels, kernel, blocks, threads, shared_bytes, arguments, order);                      \
    }

// Allows kernels to access some bytes, or only to read them if they are an input; all others are faults.
EXPORT void emulator_add_buffer(const void* begin, size_t bytes, const char* name, int is_input) {
    emulator::add_buffer(begin, bytes, name, is_input);
}
EXPORT void emulator_clear_buffers() { emulator::clear_buffers(); }
// The fault of the last launch; empty if there was none.
EXPORT const char* emulator_error() { return bridge::error().c_str(); }

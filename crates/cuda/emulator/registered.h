// The kernels of a program by their names, for callers that have only the name. The macro KERNEL registers each.
//
// All of it is local to a file: the libraries of several programs have kernels of the same names.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace emulator {
namespace {
struct RegisteredKernel {
    std::string name;
    std::function<void(const void* arguments)> run;
    bool waits_for_blocks = false; // that start before
};

std::vector<RegisteredKernel>& kernels() {
    static std::vector<RegisteredKernel> all;
    return all;
}

RegisteredKernel* find_kernel(const std::string& name) {
    for (auto& kernel : kernels())
        if (kernel.name == name) return &kernel;
    return nullptr;
}

// Registers a kernel when the program starts.
struct Registration {
    template <class Arguments> Registration(const char* name, void (*kernel)(const Arguments&)) {
        RegisteredKernel registered;
        registered.name = name;
        registered.run = [kernel](const void* arguments) { kernel(*(const Arguments*)arguments); };
        kernels().push_back(registered);
    }
};

// Marks a registered kernel as one whose blocks wait for those that start before.
struct WaitsForBlocks {
    explicit WaitsForBlocks(const char* name) { find_kernel(name)->waits_for_blocks = true; }
};
} // namespace
} // namespace emulator

// What the tests of kernels share: random numbers, buffers that the emulator guards, and comparisons.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace testing {

inline std::mt19937_64& generator() {
    static std::mt19937_64 state(12345);
    return state;
}
inline double uniform(double from, double to) { return std::uniform_real_distribution<double>(from, to)(generator()); }
inline double normal() { return std::normal_distribution<double>(0, 1)(generator()); }

#if ELEMENT == 2
typedef float Element;
inline Element to_element(double x) { return float(x); }
inline double from_element(Element x) { return x; }
#else
typedef u16 Element;
inline Element to_element(double x) {
    return ELEMENT == 1 ? emulator::f32_to_bf16(float(x)) : emulator::f32_to_f16(float(x));
}
inline double from_element(Element x) { return unpack_half(x); }
#endif

// An array of exactly its size for the emulator, filled with bits that are NaN in every type.
template <class T> struct Array {
    T* data;
    size_t count;

    Array(size_t count, const char* name) : count(count) {
        const size_t bytes = count * sizeof(T);
        data = (T*)aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
        memset((void*)data, 0xff, bytes);
        emulator::add_buffer(data, bytes, name);
    }
    Array(const Array&) = delete;
    ~Array() { free(data); }
    T& operator[](size_t at) { return data[at]; }
    const T& operator[](size_t at) const { return data[at]; }
};

struct Counts {
    int checks = 0;
    int failures = 0;
};
inline Counts& counts() {
    static Counts all;
    return all;
}

// Compares numbers, relative to the largest expected one.
inline void compare(const std::string& test, const char* what, const std::vector<double>& found,
                    const std::vector<double>& expected, double tolerance) {
    double largest = 1e-3, worst = 0;
    size_t at = 0;
    for (double x : expected) largest = std::max(largest, std::fabs(x));
    for (size_t i = 0; i < expected.size(); i++) {
        const double error = std::fabs(found[i] - expected[i]) / largest;
        if (!(error <= worst)) {
            worst = std::isnan(error) ? 1e30 : error;
            at = i;
            if (std::isnan(error)) break;
        }
    }
    counts().checks++;
    const bool is_right = worst <= tolerance;
    if (!is_right) counts().failures++;
    if (!is_right || getenv("VERBOSE")) {
        printf("  %s %s: %s is off by %.2e of %.3g, allowed %.2e", is_right ? "ok  " : "FAIL", test.c_str(), what,
               worst, largest, tolerance);
        if (!expected.empty()) printf(" (at %zu: %g, expected %g)", at, found[at], expected[at]);
        printf("\n");
    }
}

// Runs a kernel on the emulator. A fault ends the program.
template <class Arguments, class Kernel>
void launch(const char* name, int x, int y, int z, int threads, int shared_bytes, const Arguments& arguments,
            Kernel kernel) {
    if (x * y * z == 0 || emulator::launch(name, x, y, z, threads, shared_bytes, [&] { kernel(arguments); })) return;
    printf("FAIL: %s\n", emulator::machine().fault.c_str());
    std::exit(1);
}

// Prints how many comparisons there were, and returns the exit status of the program.
inline int finish() {
    printf("%d comparisons, %d failed\n", counts().checks, counts().failures);
    return counts().failures || !counts().checks ? 1 : 0;
}

}  // namespace testing

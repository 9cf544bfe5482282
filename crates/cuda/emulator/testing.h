// The common part of the tests of kernels but attention's: random inputs, comparisons, launches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "test_elements.h"

namespace testing {

typedef std::vector<double> Numbers;

inline double tolerance(double f32, double f16, double bf16) { return ELEMENT == 2 ? f32 : ELEMENT == 0 ? f16 : bf16; }
inline int divide_up(int count, int by) { return (count + by - 1) / by; }

// Fills an input of elements or of floats with normal numbers. Kernels may not write to it.
template <class T> void fill(Buffer<T>& numbers, double mean = 0) {
    const bool is_element = sizeof(T) == sizeof(Element);
    for (size_t i = 0; i < numbers.count; i++) {
        const double x = mean + normal();
        numbers[i] = is_element ? T(to_element(x)) : T(x);
    }
    emulator::protect(numbers.data);
}

// Returns the numbers of a buffer of elements or of floats.
template <class T> Numbers numbers_of(const Buffer<T>& numbers) {
    const bool is_element = sizeof(T) == sizeof(Element);
    Numbers result;
    for (size_t i = 0; i < numbers.count; i++) {
        result.push_back(is_element ? to_number(Element(numbers[i])) : double(numbers[i]));
    }
    return result;
}

struct Counts {
    int checks = 0;
    int failures = 0;
};
inline Counts& counts() {
    static Counts all;
    return all;
}

// Compares numbers, relative to the largest expected one.
inline void compare(const std::string& test, const char* what, const Numbers& found, const Numbers& expected,
                    double tolerance) {
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

// Runs a kernel on the emulator with x * y * z blocks. A fault ends the program.
template <class Arguments, class Kernel>
void launch(const char* name, int x, int y, int z, int threads, int shared_bytes, const Arguments& arguments,
            Kernel kernel) {
    const u64 blocks = u64(x) * y * z;
    // Each kernel runs in every order in turn.
    static std::map<std::string, int> launches;
    const auto order = emulator::Order(launches[name]++ % 3);
    if (blocks == 0 || emulator::launch(name, blocks, threads, shared_bytes, [&] { kernel(arguments); }, order)) return;
    printf("FAIL: %s\n", emulator::machine().fault.c_str());
    std::exit(1);
}

// Prints how many comparisons there were, and returns the exit status of the program.
inline int finish() {
    printf("%d comparisons, %d failed\n", counts().checks, counts().failures);
    return counts().failures || !counts().checks ? 1 : 0;
}

}  // namespace testing

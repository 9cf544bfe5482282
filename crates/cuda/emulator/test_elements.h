// Random numbers, elements, and buffers that the emulator guards, for the tests of kernels. It is included after the
// kernels, which define the types of the machine.
#pragma once

#include <cstdlib>
#include <cstring>
#include <random>

inline std::mt19937_64& generator() {
    static std::mt19937_64 state(12345);
    return state;
}
inline double uniform(double from, double to) { return std::uniform_real_distribution<double>(from, to)(generator()); }
inline double normal() { return std::normal_distribution<double>(0, 1)(generator()); }
inline int below(int n) { return int(generator()() % u64(n)); }

#if ELEMENT == 2
typedef float Element;
inline Element to_element(double x) { return float(x); }
inline double to_number(Element x) { return x; }
#else
typedef u16 Element;
inline Element to_element(double x) {
    return ELEMENT == 1 ? emulator::f32_to_bf16(float(x)) : emulator::f32_to_f16(float(x));
}
inline double to_number(Element x) { return unpack_half(x); }
#endif

// Memory of an exact size that kernels may access. By default it is filled with bits that are NaN in every type.
template <class T> struct Buffer {
    T* data;
    size_t count;

    Buffer(size_t count, const char* name, int fill = 0xff) : count(count) {
        const size_t bytes = count * sizeof(T);
        data = (T*)aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
        memset((void*)data, fill, bytes);
        emulator::add_buffer(data, bytes, name);
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { free(data); }
    T& operator[](size_t at) { return data[at]; }
    const T& operator[](size_t at) const { return data[at]; }
};

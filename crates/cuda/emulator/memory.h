// Global and shared memory: which buffers kernels may access, and which words of shared memory they may read or write.
#pragma once
#include "machine.h"

namespace emulator {
// ---- global memory ----

struct Buffer {
    const char* begin;
    const char* end;
    std::string name;
};
inline std::vector<Buffer>& buffers() {
    static std::vector<Buffer> all;
    return all;
}
inline void add_buffer(const void* begin, size_t bytes, const char* name) {
    buffers().push_back({(const char*)begin, (const char*)begin + bytes, name});
}
inline void clear_buffers() { buffers().clear(); }

// Checks that an access is aligned and within a buffer.
inline void check_global(const void* address, size_t bytes, size_t alignment, const char* operation) {
    static size_t last = 0;
    const auto& all = buffers();
    const char* at = (const char*)address;
    if (uintptr_t(address) % alignment) fail(std::string(operation) + ": misaligned global address");
    if (last < all.size() && at >= all[last].begin && at + bytes <= all[last].end) return;
    for (last = 0; last < all.size(); last++)
        if (at >= all[last].begin && at + bytes <= all[last].end) return;
    std::string near;
    for (const auto& buffer : all)
        if (at >= buffer.begin - 4096 && at < buffer.end + 4096)
            near += " near " + buffer.name + " at byte " + std::to_string(at - buffer.begin) + " of " +
                    std::to_string(buffer.end - buffer.begin);
    fail(std::string(operation) + ": global access outside of every buffer," + near);
}

// ---- shared memory ----

inline void check_shared(u32 at, u32 bytes, u32 alignment, const char* operation) {
    const size_t size = machine().shared.size();
    if (at % alignment) fail(std::string(operation) + ": misaligned shared address " + std::to_string(at));
    if (size_t(at) + bytes > size)
        fail(std::string(operation) + ": shared address " + std::to_string(at) + " of " + std::to_string(size));
}
[[noreturn]] inline void fail_at_word(const char* operation, u32 word, const std::string& fault) {
    fail(std::string(operation) + ": shared word " + std::to_string(4 * word) + " is " + fault);
}
inline void note_read(u32 at, u32 bytes, int thread, const char* operation) {
    auto& m = machine();
    const short warp = short(thread / 32);
    for (u32 i = at / 4; i < (at + bytes + 3) / 4; i++) {
        auto& word = m.words[i];
        if (word.is_being_copied) fail_at_word(operation, i, "read before its cp.async arrived");
        if (!word.is_written) fail_at_word(operation, i, "read and was never written");
        if (word.write_epoch == m.epoch && word.writer != warp)
            fail_at_word(operation, i,
                         "read, and warp " + std::to_string(word.writer) + " wrote it since the last barrier");
        if (word.read_epoch != m.epoch) word.read_epoch = m.epoch, word.reader = warp;
        else if (word.reader != warp) word.reader = -2;
    }
}
inline void note_write(u32 at, u32 bytes, int thread, bool is_copy, const char* operation) {
    auto& m = machine();
    const short warp = short(thread / 32);
    for (u32 i = at / 4; i < (at + bytes + 3) / 4; i++) {
        auto& word = m.words[i];
        if (word.is_being_copied) fail_at_word(operation, i, "written before its cp.async arrived");
        if (word.write_epoch == m.epoch && word.writer != warp)
            fail_at_word(operation, i, "written by two warps since the last barrier");
        if (word.read_epoch == m.epoch && word.reader != warp)
            fail_at_word(operation, i, "written, and another warp read it since the last barrier");
        word.write_epoch = m.epoch, word.writer = warp;
        word.is_written = true, word.is_being_copied = is_copy;
    }
}
template <class T> T load_shared(u32 at) {
    auto& m = machine();
    check_shared(at, sizeof(T), sizeof(T) > 16 ? 16 : sizeof(T), "ld.shared");
    note_read(at, sizeof(T), m.current, "ld.shared");
    T x;
    memcpy(&x, &m.shared[at], sizeof(T));
    return x;
}
template <class T> void store_shared(u32 at, T x) {
    auto& m = machine();
    check_shared(at, sizeof(T), sizeof(T) > 16 ? 16 : sizeof(T), "st.shared");
    note_write(at, sizeof(T), m.current, false, "st.shared");
    memcpy(&m.shared[at], &x, sizeof(T));
}

// cp.async of `size` bytes, of which `bytes` are read and the others are zeros.
inline void copy_async(u32 to, const void* from, int bytes, int size) {
    auto& m = machine();
    check_shared(to, size, size, "cp.async");
    if (bytes < 0 || bytes > size) fail("cp.async: " + std::to_string(bytes) + " bytes of " + std::to_string(size));
    if (bytes) check_global(from, bytes, size, "cp.async");
    note_write(to, size, m.current, true, "cp.async");
    memset(&m.shared[to], 0xff, size);
    m.threads[m.current].open.push_back({to, (const char*)from, bytes, size});
}
inline void commit_copies() {
    auto& thread = machine().threads[machine().current];
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}
inline void wait_for_copies(int pending) {
    auto& m = machine();
    auto& thread = m.threads[m.current];
    while (int(thread.groups.size()) > pending) {
        for (const auto& copy : thread.groups.front()) {
            if (copy.bytes) memcpy(&m.shared[copy.to], copy.from, copy.bytes);
            memset(&m.shared[copy.to] + copy.bytes, 0, copy.size - copy.bytes);
            for (u32 i = copy.to / 4; i < (copy.to + copy.size) / 4; i++) {
                auto& word = m.words[i];
                word.is_being_copied = false;
                word.write_epoch = m.epoch, word.writer = short(m.current / 32);
            }
        }
        thread.groups.erase(thread.groups.begin());
    }
}
} // namespace emulator

// Global and shared memory: which buffers kernels may access, and which words of shared memory they may read or write.
#pragma once
#include "machine.h"

namespace emulator {
// ---- global memory ----

struct Buffer {
    const char* begin;
    const char* end;
    std::string name;
    bool is_input; // which kernels may not write
};
inline std::vector<Buffer>& buffers() {
    static std::vector<Buffer> all;
    return all;
}
inline void add_buffer(const void* begin, size_t bytes, const char* name, bool is_input = false) {
    buffers().push_back({(const char*)begin, (const char*)begin + bytes, name, is_input});
}
// Forbids writes to the bytes of a buffer.
inline void protect(const void* begin) {
    for (auto& buffer : buffers())
        if (buffer.begin == begin) buffer.is_input = true;
}
inline void clear_buffers() { buffers().clear(); }

// Checks that an access is aligned and within a buffer, and that a write is within one that is no input.
inline void check_global(const void* address, size_t bytes, size_t alignment, const char* operation, bool is_write) {
    static size_t last = 0;
    const auto& all = buffers();
    const char* at = (const char*)address;
    auto contains = [&](const Buffer& buffer) {
        return at >= buffer.begin && at + bytes <= buffer.end && !(is_write && buffer.is_input);
    };
    if (uintptr_t(address) % alignment) fail(std::string(operation) + ": misaligned global address");
    if (last < all.size() && contains(all[last])) return;
    for (last = 0; last < all.size(); last++)
        if (contains(all[last])) return;
    std::string near;
    for (const auto& buffer : all)
        if (at >= buffer.begin - 4096 && at < buffer.end + 4096)
            near += std::string(buffer.is_input ? " near the input " : " near ") + buffer.name + " at byte " +
                    std::to_string(at - buffer.begin) + " of " + std::to_string(buffer.end - buffer.begin);
    const char* expected = is_write ? ": global write outside of every buffer that is no input,"
                                    : ": global access outside of every buffer,";
    fail(operation + std::string(expected) + near);
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
// An access of a thread now. `lane` is SEVERAL for an instruction of the whole warp.
inline Access access_now(int thread, short lane) {
    auto& m = machine();
    return {m.epoch, m.warps[thread / 32].barriers, short(thread / 32), lane};
}
// Returns which barrier is missing between two accesses, one of them a write; null if there is one. A collective
// operation of a warp, such as a shuffle, does not order the accesses of its lanes to memory.
inline const char* missing_barrier(const Access& earlier, const Access& now) {
    if (earlier.warp == -1 || earlier.epoch != now.epoch) return nullptr;
    if (earlier.warp != now.warp) return "barrier of the block";
    const bool is_same_lane = earlier.lane == now.lane && now.lane != SEVERAL;
    return is_same_lane || earlier.barriers != now.barriers ? nullptr : "barrier of the warp";
}
inline std::string name_of(const Access& access) {
    const std::string warp = access.warp == SEVERAL ? "several warps" : "warp " + std::to_string(access.warp);
    return access.warp == SEVERAL || access.lane == SEVERAL ? warp : warp + ", lane " + std::to_string(access.lane);
}
inline void check_order(const char* operation, u32 word, const char* what, const Access& earlier, const Access& now) {
    if (const char* missing = missing_barrier(earlier, now))
        fail_at_word(operation, word, what + name_of(now) + " after " + name_of(earlier) + ", without a " + missing);
}
// Adds a read to those since the last barriers.
inline void add_read(Access& reads, const Access& now) {
    if (reads.epoch != now.epoch) reads = now;
    else if (reads.warp != now.warp) reads.warp = SEVERAL;
    else if (reads.barriers != now.barriers) reads = now; // earlier ones are before every later write of the warp
    else if (reads.lane != now.lane) reads.lane = SEVERAL;
}
inline void note_read(u32 at, u32 bytes, const Access& now, const char* operation) {
    auto& m = machine();
    for (u32 i = at / 4; i < (at + bytes + 3) / 4; i++) {
        auto& word = m.words[i];
        if (word.write.epoch < m.first_epoch) fail_at_word(operation, i, "read and was never written");
        if (word.is_being_copied) fail_at_word(operation, i, "read before its cp.async arrived");
        check_order(operation, i, "read by ", word.write, now);
        add_read(word.read, now);
    }
}
inline void note_write(u32 at, u32 bytes, const Access& now, bool is_copy, const char* operation) {
    auto& m = machine();
    for (u32 i = at / 4; i < (at + bytes + 3) / 4; i++) {
        auto& word = m.words[i];
        if (word.is_being_copied && word.write.epoch >= m.first_epoch)
            fail_at_word(operation, i, "written before its cp.async arrived");
        check_order(operation, i, "written by ", word.write, now);
        check_order(operation, i, "written by ", word.read, now);
        word.write = now;
        word.is_being_copied = is_copy;
    }
}
// An access of the current thread.
inline Access own_access() { return access_now(machine().current, short(machine().current % 32)); }
template <class T> T load_shared(u32 at) {
    auto& m = machine();
    check_shared(at, sizeof(T), sizeof(T) > 16 ? 16 : sizeof(T), "ld.shared");
    note_read(at, sizeof(T), own_access(), "ld.shared");
    T x;
    memcpy(&x, &m.shared[at], sizeof(T));
    return x;
}
template <class T> void store_shared(u32 at, T x) {
    auto& m = machine();
    check_shared(at, sizeof(T), sizeof(T) > 16 ? 16 : sizeof(T), "st.shared");
    note_write(at, sizeof(T), own_access(), false, "st.shared");
    memcpy(&m.shared[at], &x, sizeof(T));
}

// cp.async of `size` bytes, of which `bytes` are read and the others are zeros.
inline void copy_async(u32 to, const void* from, int bytes, int size) {
    auto& m = machine();
    check_shared(to, size, size, "cp.async");
    if (bytes < 0 || bytes > size) fail("cp.async: " + std::to_string(bytes) + " bytes of " + std::to_string(size));
    if (bytes) check_global(from, bytes, size, "cp.async", false);
    note_write(to, size, own_access(), true, "cp.async");
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
                word.write = own_access();
            }
        }
        thread.groups.erase(thread.groups.begin());
    }
}
} // namespace emulator

// Runs the kernels on a CPU: blocks one after the other, the threads of a block as coroutines.
//
// What is emulated: block barriers, warp shuffles and votes, ldmatrix (x4, plain and transposed), mma.sync (m16n8k16 of
// f16 and bf16, m16n8k8 of TF32) by the layouts of the PTX manual, and cp.async with its groups. A copy arrives at the
// wait for it, as late as a GPU may bring it. Blocks start in the order of their index, and a block that waits for
// another one expects it to have ended.
//
// What is reported as a fault: global accesses outside of all buffers or misaligned; shared accesses outside of the
// block's memory, misaligned, or of words that were never written or are still being copied; two accesses to a shared
// word from different warps, one of them a write, without a block barrier between them; lanes of a warp that meet in
// different collective operations; barriers that not all threads reach; copies that no thread waited for.
//
// The machine is global: one launch at a time.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

// CUDA's vector types.
struct int2 {
    int x, y;
};
struct int4 {
    int x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

namespace emulator {

// Reports a fault and ends the launch.
[[noreturn]] inline void fail(const std::string& fault);

// ---- numbers ----

inline u32 to_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float from_bits(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float bf16_to_f32(u16 half) { return from_bits(u32(half) << 16); }
inline u16 f32_to_bf16(float x) {
    const u32 bits = to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_f32(u16 half) {
    const u32 sign = u32(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {
        const float x = std::ldexp(float(mantissa), -24);
        return sign ? -x : x;
    }
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline u16 f32_to_f16(float x) {
    const u32 bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return u16(sign | 0x7c00);
    if (magnitude < 0x38800000) // subnormal or zero: a multiple of 2^-24, ties to even
        return u16(sign | u32(std::nearbyint(std::ldexp(from_bits(magnitude), 24))));
    const u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return u16(sign | ((rounded - 0x38000000) >> 13));
}
// cvt.rna.tf32.f32
inline float round_to_tf32(float x) {
    const u32 bits = to_bits(x);
    if ((bits & 0x7f800000) == 0x7f800000) return x;
    return from_bits((bits + 0x1000) & 0xffffe000);
}
// The bits of an operand that the tensor core reads.
inline float read_tf32(u32 bits) { return from_bits(bits & 0xffffe000); }

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

// ---- coroutines ----

#if defined(__x86_64__)
// Saves the registers that a call preserves and the stack pointer at *from, and continues with the stack `to`.
extern "C" void emulator_switch_stack(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.globl emulator_switch_stack
.hidden emulator_switch_stack
.type emulator_switch_stack,@function
emulator_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch_stack,.-emulator_switch_stack
)");
#endif

// What a thread waits for.
enum class Wait { Nothing, Warp, Block, Ended };

// A copy that has not arrived.
struct Copy {
    u32 to;
    const char* from;
    int bytes; // that are copied
    int size;  // that are written; zeros follow what is copied
};
struct Warp {
    int arrived = 0; // lanes in the collective operation
    u64 generation = 0;
    const char* operation = nullptr;
    void* arguments[32];
};
struct Thread {
    Wait wait = Wait::Nothing;
    u64 generation = 0; // of the warp or of the block, when the wait began
    std::vector<std::vector<Copy>> groups; // committed, the oldest first
    std::vector<Copy> open;                // not committed
    std::vector<char> stack;
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
};
// The last accesses to a word of shared memory. Epochs count block barriers.
struct Word {
    u32 write_epoch = 0, read_epoch = 0;
    short writer = -1, reader = -1; // warps; a reader of -2 stands for several
    bool is_written = false, is_being_copied = false;
};

struct Machine {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<char> shared;
    std::vector<Word> words;
    u32 epoch = 1;
    int count = 0, arrived = 0, live = 0, current = 0; // threads
    u64 generation = 0;
    u32 block[3] = {0, 0, 0};
    std::string kernel;
    std::string fault; // empty if there was none
    std::function<void()> body;
#if defined(__x86_64__)
    void* scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
};
inline Machine& machine() {
    static Machine one;
    return one;
}

// Continues with the scheduler; returns when it resumes this thread.
inline void yield() {
    auto& m = machine();
    auto& thread = m.threads[m.current];
#if defined(__x86_64__)
    emulator_switch_stack(&thread.stack_pointer, m.scheduler);
#else
    swapcontext(&thread.context, &m.scheduler);
#endif
}

[[noreturn]] inline void fail(const std::string& fault) {
    auto& m = machine();
    m.fault = m.kernel + ", block (" + std::to_string(m.block[0]) + "," + std::to_string(m.block[1]) + "," +
              std::to_string(m.block[2]) + "), thread " + std::to_string(m.current) + ": " + fault;
    yield();
    abort(); // the scheduler resumes no thread after a fault
}

inline void run_thread() {
    auto& m = machine();
    m.body();
    auto& thread = m.threads[m.current];
    for (const auto& group : thread.groups)
        if (!group.empty()) fail("the thread ended with a cp.async that has not arrived");
    if (!thread.open.empty()) fail("the thread ended with a cp.async that is neither committed nor waited for");
    thread.wait = Wait::Ended;
    yield();
    abort();
}
inline void resume(int index) {
    auto& m = machine();
    m.current = index;
    auto& thread = m.threads[index];
    thread.wait = Wait::Nothing;
#if defined(__x86_64__)
    emulator_switch_stack(&m.scheduler, thread.stack_pointer);
#else
    swapcontext(&m.scheduler, &thread.context);
#endif
}

// Prepares the threads, and fills shared memory with NaN of every type.
inline void start_block() {
    auto& m = machine();
    for (auto& warp : m.warps) warp = Warp();
    std::fill(m.shared.begin(), m.shared.end(), char(0xff));
    std::fill(m.words.begin(), m.words.end(), Word());
    m.epoch = 1, m.arrived = 0, m.generation = 0, m.live = m.count;
    for (auto& thread : m.threads) {
        thread.wait = Wait::Nothing;
        thread.groups.clear(), thread.open.clear();
#if defined(__x86_64__)
        char* top = (char*)((uintptr_t)(thread.stack.data() + thread.stack.size()) & ~uintptr_t(63)) - 64;
        void** stack = (void**)top;
        *--stack = nullptr; // a return address of run_thread, so that its stack is aligned as after a call
        *--stack = (void*)&run_thread;
        for (int i = 0; i < 6; i++) *--stack = nullptr;
        thread.stack_pointer = stack;
#else
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, (void (*)())run_thread, 0);
#endif
    }
}

inline std::string describe_waits() {
    auto& m = machine();
    std::string state;
    for (int w = 0; w < m.count / 32; w++) {
        int threads[4] = {0, 0, 0, 0};
        for (int lane = 0; lane < 32; lane++) threads[int(m.threads[w * 32 + lane].wait)]++;
        state += " warp " + std::to_string(w) + ": " + std::to_string(threads[1]) + " at " +
                 (m.warps[w].operation ? m.warps[w].operation : "-") + ", " + std::to_string(threads[2]) +
                 " at a barrier, " + std::to_string(threads[3]) + " ended;";
    }
    return state;
}

inline bool can_continue(int index) {
    auto& m = machine();
    const auto& thread = m.threads[index];
    return thread.wait == Wait::Nothing ||
           (thread.wait == Wait::Warp && m.warps[index / 32].generation != thread.generation) ||
           (thread.wait == Wait::Block && m.generation != thread.generation);
}

inline void end_barrier() {
    auto& m = machine();
    m.arrived = 0, m.generation++, m.epoch++;
}

// Runs one block until all of its threads ended, or to a fault.
inline void run_block() {
    auto& m = machine();
    start_block();
    int ended = 0;
    while (ended < m.count) {
        bool progress = false;
        for (int i = 0; i < m.count; i++) {
            if (m.threads[i].wait == Wait::Ended || !can_continue(i)) continue;
            progress = true;
            resume(i);
            if (!m.fault.empty()) return;
            if (m.threads[i].wait == Wait::Ended) {
                ended++, m.live--;
                if (m.arrived && m.arrived == m.live) end_barrier();
            }
            if (i % 32 != 31) continue;
            // Stays in a warp while it can continue: its lanes meet often.
            for (int lane = i - 31; lane <= i; lane++)
                if (m.threads[lane].wait == Wait::Warp && can_continue(lane)) {
                    i -= 32;
                    break;
                }
        }
        if (!progress) {
            m.current = 0;
            m.fault = m.kernel + ": the threads diverge, none can continue;" + describe_waits();
            return;
        }
    }
}

// Runs a grid. Returns whether there was no fault; machine().fault describes one.
inline bool launch(const char* kernel, u32 grid_x, u32 grid_y, u32 grid_z, int threads, u32 shared_bytes,
                   std::function<void()> body) {
    auto& m = machine();
    m.kernel = kernel;
    m.fault.clear();
    if (threads <= 0 || threads % 32) {
        m.fault = m.kernel + ": a block of " + std::to_string(threads) + " threads, expected whole warps";
        return false;
    }
    m.count = threads;
    m.threads.resize(threads);
    m.warps.resize(threads / 32);
    for (auto& thread : m.threads) thread.stack.resize(256 << 10);
    m.shared.assign((shared_bytes + 15) / 16 * 16, 0);
    m.words.assign(m.shared.size() / 4, Word());
    m.body = body;
    for (u32 z = 0; z < grid_z; z++)
        for (u32 y = 0; y < grid_y; y++)
            for (u32 x = 0; x < grid_x; x++) {
                m.block[0] = x, m.block[1] = y, m.block[2] = z;
                run_block();
                if (!m.fault.empty()) return false;
            }
    return true;
}

// ---- collective operations ----

inline int lane() { return machine().current & 31; }

// Waits for all lanes of the warp; the last one runs `run` with the arguments of all.
template <class Run> void collective(const char* operation, void* argument, Run run) {
    auto& m = machine();
    auto& warp = m.warps[m.current / 32];
    if (warp.arrived == 0) warp.operation = operation;
    else if (strcmp(warp.operation, operation))
        fail(std::string("lanes of a warp diverge: ") + warp.operation + " and " + operation);
    warp.arguments[lane()] = argument;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.generation++;
        run(warp.arguments);
    } else {
        auto& thread = m.threads[m.current];
        thread.wait = Wait::Warp;
        thread.generation = warp.generation;
        yield();
    }
}

// __syncthreads
inline void block_barrier() {
    auto& m = machine();
    auto& warp = m.warps[m.current / 32];
    if (warp.arrived) fail(std::string("a lane is at a barrier while others are in ") + warp.operation);
    if (++m.arrived == m.live) {
        end_barrier();
    } else {
        auto& thread = m.threads[m.current];
        thread.wait = Wait::Block;
        thread.generation = m.generation;
        yield();
    }
}

// __syncthreads_or
inline bool any_in_block(bool x) {
    static int votes[2];
    auto& m = machine();
    const int slot = int(m.generation & 1);
    if (m.arrived == 0) votes[slot] = 0;
    votes[slot] |= x;
    block_barrier();
    return votes[slot];
}

struct ShuffleArgument {
    u32 value;
    int source;
    u32 result;
};
inline u32 shuffle(u32 value, int source, const char* operation) {
    ShuffleArgument own{value, source & 31, 0};
    collective(operation, &own, [](void** all) {
        for (int l = 0; l < 32; l++) {
            auto* one = (ShuffleArgument*)all[l];
            one->result = ((ShuffleArgument*)all[one->source])->value;
        }
    });
    return own.result;
}
inline bool any_in_warp(bool x) {
    ShuffleArgument own{x, 0, 0};
    collective("vote.any", &own, [](void** all) {
        u32 any = 0;
        for (int l = 0; l < 32; l++) any |= ((ShuffleArgument*)all[l])->value;
        for (int l = 0; l < 32; l++) ((ShuffleArgument*)all[l])->result = any;
    });
    return own.result;
}
inline void warp_barrier() {
    int none = 0;
    collective("bar.warp", &none, [](void**) {});
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

// ---- matrices ----

struct LoadMatricesArgument {
    u32 address;
    u32* result;
};
// Matrix n: its 8 rows of 16 bytes are at the addresses of lanes 8n to 8n + 7. Lane l receives the elements (l / 4, 2
// (l % 4)) and the next in the row; transposed, (2 (l % 4), l / 4) and the next in the column.
inline void load_matrices(u32 (&result)[4], u32 address, bool is_transposed) {
    LoadMatricesArgument own{address, result};
    auto run = [is_transposed](void** all) {
        auto& m = machine();
        for (int matrix = 0; matrix < 4; matrix++) {
            u16 x[8][8];
            for (int row = 0; row < 8; row++) {
                const u32 at = ((LoadMatricesArgument*)all[matrix * 8 + row])->address;
                check_shared(at, 16, 16, "ldmatrix");
                note_read(at, 16, m.current, "ldmatrix");
                memcpy(x[row], &m.shared[at], 16);
            }
            for (int l = 0; l < 32; l++) {
                const int group = l / 4, pair = 2 * (l % 4);
                const u32 low = is_transposed ? x[pair][group] : x[group][pair];
                const u32 high = is_transposed ? x[pair + 1][group] : x[group][pair + 1];
                ((LoadMatricesArgument*)all[l])->result[matrix] = low | high << 16;
            }
        }
    };
    collective(is_transposed ? "ldmatrix.trans" : "ldmatrix", &own, run);
}

struct MultiplyArgument {
    float* c;
    const u32* a;
    u32 b0, b1;
};
// Adds a (16 x K) times b (K x 8) to the accumulators of the lanes: row l / 4, and 8 below for the last two; columns
// 2 (l % 4) and the next.
template <int K> void add_products(void** all, const float (&a)[16][K], const float (&b)[K][8]) {
    for (int l = 0; l < 32; l++) {
        auto* one = (MultiplyArgument*)all[l];
        for (int e = 0; e < 4; e++) {
            float sum = 0;
            for (int k = 0; k < K; k++) sum += a[l / 4 + 8 * (e / 2)][k] * b[k][2 * (l % 4) + (e & 1)];
            one->c[e] += sum;
        }
    }
}
template <bool IS_BF16> float half_to_f32(u16 half) { return IS_BF16 ? bf16_to_f32(half) : f16_to_f32(half); }
template <bool IS_BF16> void multiply_add_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MultiplyArgument own{c, a, b0, b1};
    collective(IS_BF16 ? "mma.bf16" : "mma.f16", &own, [](void** all) {
        static float left[16][16], right[16][8];
        for (int l = 0; l < 32; l++) {
            auto* one = (MultiplyArgument*)all[l];
            const int group = l / 4, pair = 2 * (l % 4);
            for (int e = 0; e < 8; e++) { // 2 and 3 of each four are 8 rows below, the last four 8 columns to the right
                const u16 half = u16(one->a[e / 2] >> 16 * (e & 1));
                left[group + 8 * (e / 2 % 2)][pair + (e & 1) + 8 * (e / 4)] = half_to_f32<IS_BF16>(half);
            }
            for (int e = 0; e < 4; e++) { // the last two are 8 rows below
                const u16 half = u16((e < 2 ? one->b0 : one->b1) >> 16 * (e & 1));
                right[pair + (e & 1) + 8 * (e / 2)][group] = half_to_f32<IS_BF16>(half);
            }
        }
        add_products<16>(all, left, right);
    });
}
inline void multiply_add_1688_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MultiplyArgument own{c, a, b0, b1};
    collective("mma.tf32", &own, [](void** all) {
        static float left[16][8], right[8][8];
        for (int l = 0; l < 32; l++) {
            auto* one = (MultiplyArgument*)all[l];
            const int group = l / 4, column = l % 4;
            for (int e = 0; e < 4; e++) left[group + 8 * (e % 2)][column + 4 * (e / 2)] = read_tf32(one->a[e]);
            right[column][group] = read_tf32(one->b0);
            right[column + 4][group] = read_tf32(one->b1);
        }
        add_products<8>(all, left, right);
    });
}
} // namespace emulator

// Blocks, warps and threads: threads are coroutines, which continue in turn and wait for their warp or for their block.
#pragma once
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include "numbers.h"

namespace emulator {
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

// The reason why a thread waits.
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
    u32 barriers = 0;
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
// An access to a word of shared memory. Epochs count the blocks and their barriers, so that what is known of a word of an
// earlier block is of an earlier epoch.
const short SEVERAL = -2; // warps or lanes
struct Access {
    u32 epoch = 0;
    u32 barriers = 0; // of the warp, before the access
    short warp = -1, lane = -1;
};
struct Word {
    Access write, read; // the last ones
    bool is_being_copied = false;
};

// The order in which blocks start, and in which threads run between barriers.
enum class Order { Forward, Backward, Shuffled };
inline const char* name_of(Order order) {
    return order == Order::Forward ? "forward" : order == Order::Backward ? "backward" : "shuffled";
}

struct Machine {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<char> shared;
    std::vector<Word> words;
    u32 epoch = 0, first_epoch = 0; // now, and of the block
    int count = 0, arrived = 0, live = 0, current = 0; // threads
    u64 generation = 0;
    u32 block = 0; // the index of the block that runs
    std::string kernel;
    std::string fault; // empty if there was none
    std::function<void()> body;
    Order order = Order::Forward;
    std::vector<int> warp_order, lane_order; // permutations of the warps of a block and of the lanes of a warp
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

// Reports a fault and ends the launch.
[[noreturn]] inline void fail(const std::string& fault) {
    auto& m = machine();
    m.fault = m.kernel + ", block " + std::to_string(m.block) + ", thread " + std::to_string(m.current) + ", " + name_of(m.order) +
              " order: " + fault;
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
    m.first_epoch = ++m.epoch, m.arrived = 0, m.generation = 0, m.live = m.count;
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

// Resumes the lanes of a warp that can continue, one after the other. Returns whether there was any.
inline bool run_warp(int warp, int& ended) {
    auto& m = machine();
    bool progress = false;
    for (int lane : m.lane_order) {
        const int index = warp * 32 + lane;
        auto& thread = m.threads[index];
        if (thread.wait == Wait::Ended || !can_continue(index)) continue;
        progress = true;
        resume(index);
        if (!m.fault.empty()) return false;
        if (thread.wait == Wait::Ended) {
            ended++, m.live--;
            if (m.arrived && m.arrived == m.live) end_barrier();
        }
    }
    return progress;
}

// Runs one block until all of its threads ended, or to a fault.
inline void run_block() {
    auto& m = machine();
    start_block();
    int ended = 0;
    while (ended < m.count) {
        bool progress = false;
        // Stays in a warp while it can continue: its lanes meet often.
        for (int warp : m.warp_order)
            while (run_warp(warp, ended)) progress = true;
        if (!m.fault.empty()) return;
        if (!progress) {
            m.current = 0;
            m.fault = m.kernel + ": the threads diverge, none can continue;" + describe_waits();
            return;
        }
    }
}

// The numbers below `count` in an order. Shuffled is the same in every run.
inline std::vector<int> in_order(int count, Order order) {
    std::vector<int> numbers(count);
    for (int i = 0; i < count; i++) numbers[i] = order == Order::Backward ? count - 1 - i : i;
    u32 state = 12345;
    for (int i = count - 1; order == Order::Shuffled && i > 0; i--) {
        state = state * 1664525u + 1013904223u;
        std::swap(numbers[i], numbers[(state >> 8) % u32(i + 1)]);
    }
    return numbers;
}

// The block that starts after `started` others: in a shuffled grid every stride-th one, with a stride that has no
// divisor in common with the number of blocks.
inline u64 block_in_order(u64 started, u64 blocks, Order order) {
    if (order == Order::Forward) return started;
    if (order == Order::Backward) return blocks - 1 - started;
    u64 stride = blocks * 5 / 8 + 1;
    while (std::gcd(stride, blocks) != 1) stride++;
    return (started * stride + blocks / 3) % blocks;
}

// The blocks that CUDA launches in the first dimension of a grid, the only one that is used.
const u64 MOST_BLOCKS = 0x7fffffff;

// Runs a grid. Returns whether there was no fault; machine().fault describes one. Blocks of a kernel that waits for
// earlier blocks start in the order of their index.
inline bool launch(const char* kernel, u64 blocks, int threads, u32 shared_bytes, std::function<void()> body,
                   Order order, bool waits_for_blocks = false) {
    auto& m = machine();
    m.kernel = kernel;
    m.fault.clear();
    if (threads <= 0 || threads % 32) {
        m.fault = m.kernel + ": a block of " + std::to_string(threads) + " threads, expected whole warps";
        return false;
    }
    if (blocks > MOST_BLOCKS) {
        m.fault = m.kernel + ": a grid of " + std::to_string(blocks) + " blocks, expected at most " +
                  std::to_string(MOST_BLOCKS);
        return false;
    }
    m.count = threads;
    m.threads.resize(threads);
    m.warps.resize(threads / 32);
    for (auto& thread : m.threads) thread.stack.resize(256 << 10);
    m.shared.assign((shared_bytes + 15) / 16 * 16, 0);
    m.words.assign(m.shared.size() / 4, Word());
    m.body = body;
    m.order = order;
    m.warp_order = in_order(threads / 32, order), m.lane_order = in_order(32, order);
    for (u64 started = 0; started < blocks; started++) {
        m.block = u32(block_in_order(started, blocks, waits_for_blocks ? Order::Forward : order));
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
    collective("bar.warp", &none, [](void**) {
        auto& m = machine();
        m.warps[m.current / 32].barriers++;
    });
}
} // namespace emulator

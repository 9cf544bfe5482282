// The attention kernels of one specialisation as a library for the emulator:
// g++ -std=c++17 -O1 -shared -fPIC -DEMULATOR -D.. -I crates/cuda/kernels -I crates/cuda/emulator library.cpp
#include "attention.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<AttentionArguments> kernels[] = {
#if KERNEL_SET & 1
    NAMED(attention_forward),
#endif
#if KERNEL_SET & 2
    NAMED(attention_decode),
    NAMED(attention_combine),
#endif
#if KERNEL_SET & 4
    NAMED(attention_backward_delta),
    NAMED(attention_backward_tiles),
    {"attention_backward_keys", attention_backward_keys, bool(FUSED_BACKWARD)},
#if FUSED_BACKWARD
    NAMED(attention_backward_finish),
#else
    NAMED(attention_backward_queries),
#endif
    NAMED(attention_backward_sinks),
#if SLOPE_GRADIENT
    NAMED(attention_backward_slopes),
#endif
#if RELATIVE_BIAS_GRADIENT
    NAMED(attention_backward_relative_bias),
#endif
#if BIAS_GRADIENT
    NAMED(attention_backward_bias),
#endif
#endif
};
EXPORT_KERNELS(kernels)

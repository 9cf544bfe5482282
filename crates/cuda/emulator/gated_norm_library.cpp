// The kernels of the gated norm for one specialisation as a library for the emulator: see library.cpp.
#include "gated_norm.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<GatedNormArguments> kernels[] = {
    NAMED(gated_norm_forward),
    NAMED(gated_norm_backward),
    NAMED(gated_norm_sum_weights),
};
EXPORT_KERNELS(kernels)

// The kernels of norms over rows for one specialisation as a library for the emulator: see library.cpp.
#include "norm.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<NormArguments> kernels[] = {
    NAMED(norm_forward),
    NAMED(norm_backward),
    NAMED(norm_parameter_gradients),
    NAMED(norm_sum_parameters),
};
EXPORT_KERNELS(kernels)

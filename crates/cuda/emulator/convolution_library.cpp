// The kernels of the short causal convolution for one specialisation as a library for the emulator: see library.cpp.
#include "convolution.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<ConvolutionArguments> kernels[] = {
    NAMED(convolution_forward),
    NAMED(convolution_backward),
    NAMED(convolution_sum_taps),
};
EXPORT_KERNELS(kernels)

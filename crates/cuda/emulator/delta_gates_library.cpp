// The kernel of decays and betas for one specialisation as a library for the emulator: see library.cpp.
#include "delta_gates.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<DeltaGatesArguments> kernels[] = {NAMED(delta_gates)};
EXPORT_KERNELS(kernels)

// The kernels of the gated delta rule for one specialisation as a library for the emulator: see library.cpp.
#include "delta.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<DeltaArguments> kernels[] = {
    NAMED(delta_prepare),
    NAMED(delta_scan),
    NAMED(delta_step),
#if HAS_BACKWARD
    NAMED(delta_prepare_backward),
    NAMED(delta_scan_backward),
    NAMED(delta_gradients),
    NAMED(delta_step_backward),
#endif
};
EXPORT_KERNELS(kernels)

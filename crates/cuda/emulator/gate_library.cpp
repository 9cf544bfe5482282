// The kernels of gates for one specialisation as a library for the emulator: see library.cpp.
#include "gate.cu"
#include "bridge.h"

#define NAMED(kernel) {#kernel, kernel}
static const NamedKernel<GateArguments> kernels[] = {
    NAMED(gate_forward),
    NAMED(gate_backward),
};
EXPORT_KERNELS(kernels)

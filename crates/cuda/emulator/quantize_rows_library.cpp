// The kernel that quantises rows for one specialisation as a library for the emulator: see library.cpp.
#include "quantize_rows.cu"
#include "bridge.h"

static const NamedKernel<QuantizeRowsArguments> kernels[] = {{"quantize_rows", quantize_rows}};
EXPORT_KERNELS(kernels)

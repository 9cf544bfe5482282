// The kernel of linear layers with few rows for one specialisation as a library for the emulator: see library.cpp.
#include "linear_rows.cu"
#include "bridge.h"

static const NamedKernel<LinearRowsArguments> kernels[] = {{"linear_rows", linear_rows}};
EXPORT_KERNELS(kernels)

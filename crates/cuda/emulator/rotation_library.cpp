// The kernel of the rotation of heads for one specialisation as a library for the emulator: see library.cpp.
#include "rotation.cu"
#include "bridge.h"

static const NamedKernel<RotationArguments> kernels[] = {{"rotate_heads", rotate_heads}};
EXPORT_KERNELS(kernels)

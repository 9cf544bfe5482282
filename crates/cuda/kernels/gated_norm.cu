// The kernels of the gated norm.
#include "gated_norm.cuh"

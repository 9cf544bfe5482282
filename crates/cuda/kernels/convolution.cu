// The kernels of the short causal convolution.
#include "convolution.cuh"

// The kernels of linear layers whose weights are codes with scales.
#include "linear_codes.cuh"

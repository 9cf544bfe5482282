// The kernels of norms over rows.
#include "norm.cuh"

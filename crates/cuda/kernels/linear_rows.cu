// The kernels of linear layers with few rows.
#include "linear_rows.cuh"

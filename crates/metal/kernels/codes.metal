// The kernels of linear layers whose weights are codes with scales, as one source. The files that end with .cuh are
// sources of the CUDA kernels, or are printed from structs in Rust.
//
// Each kernel computes what the CUDA kernel of its name does, with the same argument and the same grid.
#include "device.cuh"
#include "elements.cuh"
#include "row_elements.cuh"
#include "activations.cuh"
#include "linear_codes.metal"

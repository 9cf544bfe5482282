// The kernels over rows, as one source: norms, norms with gates, rotations of heads, gates, and linear layers of few
// rows. The files that end with .cuh are sources of the CUDA kernels, or are printed from structs in Rust.
//
// Each kernel computes what the CUDA kernel of its name does, with the same argument and the same grid.
#include "device.cuh"
#include "elements.cuh"
#include "row_elements.cuh"
#include "activations.cuh"
#include "norm.metal"
#include "gated_norm.metal"
#include "rotation.metal"
#include "gate.metal"
#include "linear_rows.metal"

// The attention kernels of one specialisation, as one source. The files that end with .cuh are sources of the CUDA
// kernels, or are printed from structs in Rust.
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "attention_buffers.metal"
#include "elements.cuh"
#include "masks.cuh"
#include "modifiers.cuh"
#include "row_results.cuh"
#include "tiles.metal"
#include "forward.metal"
#include "combine_rows.cuh"
#include "decode.metal"

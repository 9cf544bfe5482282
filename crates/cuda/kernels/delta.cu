// The kernels of the gated delta rule. delta_tile.cuh says what they compute.
//
// forward:   delta_prepare, delta_scan, delta_step with only_recurrent_heads; or delta_step alone for few tokens
// backward:  the forward kernels with chunk_states and errors and without output, then delta_prepare_backward,
//            delta_scan_backward, delta_gradients and delta_step_backward
//
// With HAS_BACKWARD 0, the kernels of the backward pass are left out.

#include "delta_prepare.cuh"
#include "delta_scan.cuh"
#include "delta_step.cuh"
#if HAS_BACKWARD
#include "delta_gradients.cuh"
#include "delta_step_backward.cuh"
#endif

// The decays and betas of a gated delta net from their projections, a decay for each thread.
//
// Grid: (ceil(B * T * H * W / GATES_THREADS)). Threads: GATES_THREADS.
#include "activations.cuh"
#include "delta_gates_arguments.cuh"

KERNEL(delta_gates, GATES_THREADS, 1, DeltaGatesArguments) {
    const i64 index = (i64)block_index() * GATES_THREADS + thread_index();
    const int width = arguments.heads * arguments.decay_width;
    if (index >= (i64)arguments.entries * arguments.tokens * width) return;
    const i64 row = index / width;
    const int column = (int)(index % width), head = column / arguments.decay_width;
    const i64 entry = row / arguments.tokens, token = row % arguments.tokens;
    const i64 decay_row = entry * arguments.decay_entry_stride + token * arguments.decay_token_stride;
    const float x = load_element(arguments.decay_inputs, decay_row + column) + load_global(arguments.biases + column);
    const float rate = exponential(load_global(arguments.log_rates + head));
    const float decay = arguments.has_lower_bound
                            ? arguments.lower_bound * activate(ACTIVATION_SIGMOID, rate * x).value
                            : -rate * activate(ACTIVATION_SOFTPLUS, x).value;
    store_global(arguments.decays + index, decay);
    if (column % arguments.decay_width) return;
    const i64 beta_row = entry * arguments.beta_entry_stride + token * arguments.beta_token_stride;
    const float beta = activate(ACTIVATION_SIGMOID, load_element(arguments.beta_inputs, beta_row + head)).value;
    store_global(arguments.betas + row * arguments.heads + head, arguments.beta_factor * beta);
}

// The short causal convolution, depthwise, and SiLU: `y[t] = silu(sum over i of taps[i] x[t - K + 1 + i])` of each
// channel.
//
// A thread has one channel of CONVOLUTION_TOKENS tokens.
//
// Grid of both: (ceil(C / 128), ceil(T / CONVOLUTION_TOKENS), B). Threads: 128. convolution_sum_taps has the grid
// (ceil(K * C / 128)).
#pragma once

#include "activations.cuh"
#include "convolution_arguments.cuh"

#ifndef CONVOLUTION_WIDTH // K, the number of taps
#define CONVOLUTION_WIDTH 4
#endif

// The packed sequence of a token.
struct TokenRange {
    int start;
    int end;
};

DEVICE TokenRange range_of_token(const ConvolutionArguments& arguments, int token) {
    TokenRange range;
    range.start = 0;
    range.end = arguments.tokens;
    if (!arguments.cumulative_tokens) return range;
    int low = 0, high = arguments.sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (load_global(arguments.cumulative_tokens + middle) <= token) low = middle;
        else high = middle;
    }
    range.start = load_global(arguments.cumulative_tokens + low);
    range.end = load_global(arguments.cumulative_tokens + low + 1);
    return range;
}

// The input of a channel at a token of an entry. Before the first token of a sequence are the last inputs of earlier
// calls, or zeros.
DEVICE float input_at(const ConvolutionArguments& arguments, int entry, int channel, int token, int start) {
    if (token >= start) {
        const i64 row = entry * arguments.input_entry_stride + token * arguments.input_token_stride;
        return load_element(arguments.inputs, row + channel);
    }
    const int state_row = token - start + CONVOLUTION_WIDTH - 1;
    if (!arguments.state || arguments.cumulative_tokens || state_row < 0) return 0.0f;
    const i64 row = entry * arguments.state_entry_stride + state_row * arguments.state_token_stride;
    return load_element(arguments.state, row + channel);
}

// A channel of some tokens, one after the other, with the inputs that the taps multiply.
struct Window {
    float inputs[CONVOLUTION_WIDTH];
    float taps[CONVOLUTION_WIDTH];
    TokenRange range;
};

// Begins a window whose next token is `token`.
DEVICE void begin_window(const ConvolutionArguments& arguments, Window& window, int entry, int channel, int token) {
    window.range = range_of_token(arguments, token);
    UNROLL for (int i = 0; i < CONVOLUTION_WIDTH; i++) {
        window.taps[i] = load_global(arguments.taps + i * arguments.tap_stride + channel);
        if (i == 0) continue;
        window.inputs[i] = input_at(arguments, entry, channel, token - CONVOLUTION_WIDTH + i, window.range.start);
    }
}

// Moves a window to a token, the next one, and returns the sum.
DEVICE float move_window(const ConvolutionArguments& arguments, Window& window, int entry, int channel, int token) {
    if (token >= window.range.end) {
        // The next packed sequence begins after zeros.
        window.range = range_of_token(arguments, token);
        UNROLL for (int i = 0; i < CONVOLUTION_WIDTH; i++) window.inputs[i] = 0;
    }
    float sum = 0;
    UNROLL for (int i = 0; i < CONVOLUTION_WIDTH; i++) {
        const bool is_own = i == CONVOLUTION_WIDTH - 1;
        window.inputs[i] = is_own ? input_at(arguments, entry, channel, token, window.range.start)
                                  : window.inputs[smaller(i + 1, CONVOLUTION_WIDTH - 1)];
        sum += window.taps[i] * window.inputs[i];
    }
    return sum;
}

// The number of blocks that share a channel of an entry.
DEVICE int token_blocks(const ConvolutionArguments& arguments) {
    return (arguments.tokens + CONVOLUTION_TOKENS - 1) / CONVOLUTION_TOKENS;
}

DEVICE GridPlace convolution_place(const ConvolutionArguments& arguments) {
    const int channel_blocks = (arguments.channels + CONVOLUTION_THREADS - 1) / CONVOLUTION_THREADS;
    return grid_place(channel_blocks, token_blocks(arguments));
}

KERNEL(convolution_forward, CONVOLUTION_THREADS, 1, ConvolutionArguments) {
    const GridPlace place = convolution_place(arguments);
    const int channel = place.x * CONVOLUTION_THREADS + thread_index(), entry = place.z;
    const int first = place.y * CONVOLUTION_TOKENS, end = smaller(first + CONVOLUTION_TOKENS, arguments.tokens);
    if (channel >= arguments.channels) return;
    Window window;
    begin_window(arguments, window, entry, channel, first);
    for (int token = first; token < end; token++) {
        const float sum = move_window(arguments, window, entry, channel, token);
        const i64 to = ((i64)entry * arguments.tokens + token) * arguments.channels + channel;
        store_element(arguments.output, to, activate(ACTIVATION_SILU, sum).value);
    }
    if (!arguments.next_state || end < arguments.tokens) return;
    UNROLL for (int i = 1; i < CONVOLUTION_WIDTH; i++) {
        const i64 to = entry * arguments.next_state_entry_stride + (i - 1) * arguments.next_state_token_stride;
        store_element(arguments.next_state, to + channel, window.inputs[i]);
    }
}

KERNEL(convolution_backward, CONVOLUTION_THREADS, 1, ConvolutionArguments) {
    const GridPlace place = convolution_place(arguments);
    const int channel = place.x * CONVOLUTION_THREADS + thread_index(), entry = place.z;
    const int first = place.y * CONVOLUTION_TOKENS, end = smaller(first + CONVOLUTION_TOKENS, arguments.tokens);
    if (channel >= arguments.channels) return;
    Window window;
    begin_window(arguments, window, entry, channel, first);
    // The gradients of the inputs that the window has, the last one of the token's own, and of the taps.
    float input_gradients[CONVOLUTION_WIDTH], tap_gradients[CONVOLUTION_WIDTH];
    UNROLL for (int i = 0; i < CONVOLUTION_WIDTH; i++) input_gradients[i] = tap_gradients[i] = 0;
    // The K - 1 tokens after the block read inputs of it.
    for (int token = first; token < end + CONVOLUTION_WIDTH - 1; token++) {
        float gradient = 0;
        if (token < arguments.tokens) {
            const float sum = move_window(arguments, window, entry, channel, token);
            const i64 row =
                entry * arguments.output_gradient_entry_stride + token * arguments.output_gradient_token_stride;
            gradient = load_element(arguments.output_gradient, row + channel) * activate(ACTIVATION_SILU, sum).slope;
        }
        UNROLL for (int i = 0; i < CONVOLUTION_WIDTH; i++) {
            const bool is_own = i == CONVOLUTION_WIDTH - 1;
            input_gradients[i] = is_own ? 0.0f : input_gradients[smaller(i + 1, CONVOLUTION_WIDTH - 1)];
            const int input = token - CONVOLUTION_WIDTH + 1 + i;
            if (input >= window.range.start) input_gradients[i] += window.taps[i] * gradient;
            if (token < end) tap_gradients[i] += window.inputs[i] * gradient;
        }
        const int complete = token - CONVOLUTION_WIDTH + 1;
        if (complete >= first && complete < end) {
            const i64 to = ((i64)entry * arguments.tokens + complete) * arguments.channels + channel;
            store_element(arguments.input_gradient, to, input_gradients[0]);
        }
    }
    const i64 block = (i64)entry * token_blocks(arguments) + place.y;
    UNROLL for (int i = 0; i < CONVOLUTION_WIDTH; i++) {
        store_global(arguments.tap_gradient_parts + (block * CONVOLUTION_WIDTH + i) * arguments.channels + channel,
                     tap_gradients[i]);
    }
}

// Adds up the gradients of the taps of all blocks, always in the same order.
KERNEL(convolution_sum_taps, CONVOLUTION_THREADS, 1, ConvolutionArguments) {
    const int index = block_index() * CONVOLUTION_THREADS + thread_index(),
              count = CONVOLUTION_WIDTH * arguments.channels;
    if (index >= count) return;
    const i64 blocks = (i64)arguments.entries * token_blocks(arguments);
    float sum = 0;
    for (i64 block = 0; block < blocks; block++)
        sum += load_global(arguments.tap_gradient_parts + block * count + index);
    store_global(arguments.tap_gradient + index, sum);
}

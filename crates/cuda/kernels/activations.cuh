// Activations of gates, with their derivatives.
#pragma once

#include "row_elements.cuh"

#define ACTIVATION_SIGMOID 0
#define ACTIVATION_SOFTPLUS 1
#define ACTIVATION_SILU 2
#define ACTIVATION_RELU 3
#define ACTIVATION_GELU 4
#define ACTIVATION_GELU_TANH 5

struct ValueAndSlope {
    float value;  // f(x)
    float slope;  // f'(x)
};

// x times the distribution function of the normal distribution, and its approximation by a tanh.
DEVICE ValueAndSlope gelu(float x) {
    const float below = 0.5f * (1.0f + error_function(x * 0.70710678f));
    ValueAndSlope result;
    result.value = x * below;
    result.slope = below + x * 0.39894228f * exponential(-0.5f * x * x);
    return result;
}
DEVICE ValueAndSlope gelu_by_tanh(float x) {
    const float inner_slope = 0.79788456f * (1.0f + 3 * 0.044715f * x * x);
    const float tanh = tanh_of(0.79788456f * (x + 0.044715f * x * x * x));
    ValueAndSlope result;
    result.value = 0.5f * x * (1.0f + tanh);
    result.slope = 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * inner_slope;
    return result;
}

DEVICE ValueAndSlope activate(int activation, float x) {
    if (activation == ACTIVATION_GELU) return gelu(x);
    if (activation == ACTIVATION_GELU_TANH) return gelu_by_tanh(x);
    const float sigmoid = 1.0f / (1.0f + exponential(-x));
    ValueAndSlope result;
    if (activation == ACTIVATION_RELU) {
        result.value = larger(x, 0.0f);
        result.slope = x > 0.0f ? 1.0f : 0.0f;
    } else if (activation == ACTIVATION_SIGMOID) {
        result.value = sigmoid;
        result.slope = sigmoid * (1.0f - sigmoid);
    } else if (activation == ACTIVATION_SOFTPLUS) {
        result.value = larger(x, 0.0f) + log_of_one_plus(exponential(-absolute(x)));
        result.slope = sigmoid;
    } else {
        result.value = x * sigmoid;
        result.slope = sigmoid * (1.0f + x * (1.0f - sigmoid));
    }
    return result;
}

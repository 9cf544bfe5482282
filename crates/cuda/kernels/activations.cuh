// Activations of gates, with their derivatives.
#pragma once

#include "row_elements.cuh"

#define ACTIVATION_SIGMOID 0
#define ACTIVATION_SOFTPLUS 1
#define ACTIVATION_SILU 2

struct ValueAndSlope {
    float value;  // f(x)
    float slope;  // f'(x)
};

DEVICE ValueAndSlope activate(int activation, float x) {
    const float sigmoid = 1.0f / (1.0f + exponential(-x));
    ValueAndSlope result;
    if (activation == ACTIVATION_SIGMOID) {
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

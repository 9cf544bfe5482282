// The short causal convolution, the gated norm, and the decays and betas of a gated delta net on the emulator against
// plain loops in double. A program tests one specialisation: run_delta_tests.sh.
#include "../kernels/convolution.cu"
#include "../kernels/gated_norm.cu"
#include "../kernels/delta_gates.cu"
#include "testing.h"

using namespace testing;

static const int K = CONVOLUTION_WIDTH, D = NORM_WIDTH;

static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct ConvolutionCase {
    const char* name;
    int entries, tokens, channels;
    std::vector<int> cumulative = {}; // packed sequences
    bool has_state = true;
};

// The convolution in double: the output, or the gradients of inputs and taps.
struct Convolution {
    const ConvolutionCase& test;
    const Buffer<Element>&inputs, &state;
    const Buffer<float>& taps;
    i64 entry_stride, token_stride;

    int start_of(int token) const {
        int start = 0;
        for (int first : test.cumulative)
            if (first <= token) start = first;
        return start;
    }
    double input(int entry, int token, int channel, int start) const {
        if (token >= start) return to_number(inputs[entry * entry_stride + token * token_stride + channel]);
        const int row = token - start + K - 1;
        if (!test.has_state || !test.cumulative.empty()) return 0;
        return to_number(state[((i64)entry * (K - 1) + row) * test.channels + channel]);
    }
    double sum(int entry, int token, int channel) const {
        double sum = 0;
        for (int i = 0; i < K; i++) {
            sum += taps[i * test.channels + channel] * input(entry, token - K + 1 + i, channel, start_of(token));
        }
        return sum;
    }
};

static void run(const ConvolutionCase& test) {
    emulator::clear_buffers();
    const int count = test.entries * test.tokens * test.channels, rows = test.entries * test.tokens;
    const i64 token_stride = test.channels + 3, entry_stride = test.tokens * token_stride + 1;
    Buffer<Element> inputs(test.entries * entry_stride, "inputs"),
        gradient(test.entries * entry_stride, "output_gradient");
    Buffer<Element> state(test.entries * (K - 1) * test.channels, "state"), next(state.count, "next_state");
    Buffer<Element> output(count, "output"), input_gradient(count, "input_gradient");
    Buffer<float> taps(K * test.channels, "taps"), tap_gradient(K * test.channels, "tap_gradient");
    Buffer<float> parts(test.entries * divide_up(test.tokens, CONVOLUTION_TOKENS) * K * test.channels,
                       "tap_gradient_parts");
    Buffer<int> cumulative(test.cumulative.size(), "cumulative_tokens");
    std::copy(test.cumulative.begin(), test.cumulative.end(), cumulative.data);
    emulator::protect(cumulative.data);
    fill(inputs), fill(gradient), fill(state), fill(taps);
    ConvolutionArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.inputs = inputs.data, arguments.taps = taps.data, arguments.output = output.data;
    arguments.output_gradient = gradient.data, arguments.input_gradient = input_gradient.data;
    arguments.tap_gradient_parts = parts.data, arguments.tap_gradient = tap_gradient.data;
    if (test.has_state) arguments.state = state.data;
    if (test.cumulative.empty()) arguments.next_state = next.data;
    else arguments.cumulative_tokens = cumulative.data;
    arguments.input_entry_stride = arguments.output_gradient_entry_stride = entry_stride;
    arguments.input_token_stride = arguments.output_gradient_token_stride = token_stride;
    arguments.state_entry_stride = arguments.next_state_entry_stride = (K - 1) * test.channels;
    arguments.state_token_stride = arguments.next_state_token_stride = test.channels;
    arguments.tap_stride = test.channels;
    arguments.entries = test.entries, arguments.tokens = test.tokens, arguments.channels = test.channels;
    arguments.sequences = test.cumulative.empty() ? test.entries : int(test.cumulative.size()) - 1;
    const int x = divide_up(test.channels, CONVOLUTION_THREADS), y = divide_up(test.tokens, CONVOLUTION_TOKENS);
    launch("convolution_forward", x, y, test.entries, CONVOLUTION_THREADS, 0, arguments, convolution_forward);
    launch("convolution_backward", x, y, test.entries, CONVOLUTION_THREADS, 0, arguments, convolution_backward);
    launch("convolution_sum_taps", divide_up(K * test.channels, 128), 1, 1, 128, 0, arguments, convolution_sum_taps);

    const Convolution own{test, inputs, state, taps, entry_stride, token_stride};
    Numbers outputs, input_gradients(count, 0), tap_gradients(K * test.channels, 0), last;
    for (int row = 0; row < rows; row++)
        for (int channel = 0; channel < test.channels; channel++) {
            const int entry = row / test.tokens, token = row % test.tokens, start = own.start_of(token);
            const double z = own.sum(entry, token, channel), s = sigmoid(z);
            outputs.push_back(z * s);
            const double dz =
                to_number(gradient[entry * entry_stride + token * token_stride + channel]) * s * (1 + z * (1 - s));
            for (int i = 0; i < K; i++) {
                const int from = token - K + 1 + i;
                tap_gradients[i * test.channels + channel] += dz * own.input(entry, from, channel, start);
                if (from >= start)
                    input_gradients[(entry * test.tokens + from) * test.channels + channel] +=
                        dz * taps[i * test.channels + channel];
            }
        }
    compare(test.name, "output", numbers_of(output), outputs, tolerance(1e-6, 1e-3, 5e-3));
    compare(test.name, "the gradient of inputs", numbers_of(input_gradient), input_gradients,
            tolerance(1e-6, 1e-3, 5e-3));
    compare(test.name, "the gradient of taps", numbers_of(tap_gradient), tap_gradients, 1e-5);
    if (!test.cumulative.empty()) return;
    for (int entry = 0; entry < test.entries; entry++)
        for (int i = 0; i < K - 1; i++)
            for (int channel = 0; channel < test.channels; channel++)
                last.push_back(own.input(entry, test.tokens - K + 1 + i, channel, 0));
    compare(test.name, "the last inputs", numbers_of(next), last, 0);
}

struct NormCase {
    const char* name;
    int entries, tokens, heads, activation;
    bool has_weights_of_heads = false;
};

static double activated(int activation, double x, double& slope) {
    const double s = sigmoid(x);
    slope = activation == ACTIVATION_SIGMOID    ? s * (1 - s)
            : activation == ACTIVATION_SOFTPLUS ? s
                                                : s * (1 + x * (1 - s));
    return activation == ACTIVATION_SIGMOID ? s : activation == ACTIVATION_SOFTPLUS ? std::log1p(std::exp(x)) : x * s;
}

static void run(const NormCase& test) {
    emulator::clear_buffers();
    const double eps = 1e-6;
    RowStrides strides;
    strides.head = D + 1, strides.row = test.heads * strides.head, strides.sequence = test.tokens * strides.row + 2;
    const int rows = test.entries * test.tokens, count = rows * test.heads * D, parts = 3;
    Buffer<Element> inputs(test.entries * strides.sequence, "inputs"), gates(inputs.count, "gates");
    Buffer<Element> gradient(inputs.count, "output_gradient"), output(count, "output");
    Buffer<Element> input_gradient(count, "input_gradient"), gate_gradient(count, "gate_gradient");
    const int weight_count = (test.has_weights_of_heads ? test.heads : 1) * D;
    Buffer<float> weights(weight_count, "weights"), weight_gradient(weight_count, "weight_gradient");
    Buffer<float> weight_gradient_parts(parts * test.heads * D, "weight_gradient_parts");
    fill(inputs), fill(gates), fill(gradient), fill(weights);
    GatedNormArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.inputs = inputs.data, arguments.gates = gates.data, arguments.weights = weights.data;
    arguments.output = output.data, arguments.output_gradient = gradient.data;
    arguments.input_gradient = input_gradient.data, arguments.gate_gradient = gate_gradient.data;
    arguments.weight_gradient_parts = weight_gradient_parts.data, arguments.weight_gradient = weight_gradient.data;
    arguments.input_strides = arguments.gate_strides = arguments.output_gradient_strides = strides;
    arguments.weight_head_stride = test.has_weights_of_heads ? D : 0;
    arguments.entries = test.entries, arguments.tokens = test.tokens, arguments.heads = test.heads;
    arguments.parts = parts, arguments.activation = test.activation, arguments.epsilon = float(eps);
    launch("gated_norm_forward", divide_up(rows, NORM_WARPS), test.heads, 1, NORM_WARPS * 32, 0, arguments,
           gated_norm_forward);
    launch("gated_norm_backward", parts, test.heads, 1, NORM_WARPS * 32, NORM_WARPS * NORM_LANES * 32 * 4, arguments, gated_norm_backward);
    launch("gated_norm_sum_weights", divide_up(weight_count, 128), 1, 1, 128, 0, arguments, gated_norm_sum_weights);

    Numbers outputs, input_gradients, gate_gradients, weight_gradients(weight_count, 0);
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < test.heads; head++) {
            const i64 at = row / test.tokens * strides.sequence + row % test.tokens * strides.row + head * strides.head;
            double square = 0, along = 0;
            for (int c = 0; c < D; c++) square += to_number(inputs[at + c]) * to_number(inputs[at + c]);
            const double factor = 1 / std::sqrt(square / D + eps);
            Numbers of_weighted(D), normed(D);
            for (int c = 0; c < D; c++) {
                const int weight_at = test.has_weights_of_heads ? head * D + c : c;
                const double weight = weights[weight_at], dy = to_number(gradient[at + c]);
                normed[c] = to_number(inputs[at + c]) * factor;
                double slope;
                const double gate = activated(test.activation, to_number(gates[at + c]), slope);
                outputs.push_back(normed[c] * weight * gate);
                gate_gradients.push_back(dy * normed[c] * weight * slope);
                weight_gradients[weight_at] += dy * gate * normed[c];
                of_weighted[c] = dy * gate * weight;
                along += of_weighted[c] * normed[c] / D;
            }
            for (int c = 0; c < D; c++) input_gradients.push_back((of_weighted[c] - normed[c] * along) * factor);
        }
    compare(test.name, "output", numbers_of(output), outputs, tolerance(1e-6, 1e-3, 5e-3));
    compare(test.name, "the gradient of inputs", numbers_of(input_gradient), input_gradients,
            tolerance(2e-6, 2e-3, 1e-2));
    compare(test.name, "the gradient of gates", numbers_of(gate_gradient), gate_gradients, tolerance(1e-6, 1e-3, 5e-3));
    compare(test.name, "the gradient of weights", numbers_of(weight_gradient), weight_gradients,
            tolerance(1e-5, 2e-3, 1e-2));
}

struct GatesCase {
    const char* name;
    int entries, tokens, heads, decay_width;
    double lower_bound = 0; // 0: none
    double beta_factor = 1;
};

static void run(const GatesCase& test) {
    emulator::clear_buffers();
    const int width = test.heads * test.decay_width, rows = test.entries * test.tokens;
    const i64 beta_stride = test.heads + 1, decay_stride = width + 2;
    Buffer<Element> beta_inputs(rows * beta_stride, "beta_inputs"), decay_inputs(rows * decay_stride, "decay_inputs");
    Buffer<float> biases(width, "biases"), log_rates(test.heads, "log_rates");
    Buffer<float> betas(rows * test.heads, "betas"), decays(rows * width, "decays");
    fill(beta_inputs), fill(decay_inputs), fill(biases), fill(log_rates);
    DeltaGatesArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.beta_inputs = beta_inputs.data, arguments.decay_inputs = decay_inputs.data;
    arguments.biases = biases.data, arguments.log_rates = log_rates.data;
    arguments.betas = betas.data, arguments.decays = decays.data;
    arguments.beta_token_stride = beta_stride, arguments.beta_entry_stride = test.tokens * beta_stride;
    arguments.decay_token_stride = decay_stride, arguments.decay_entry_stride = test.tokens * decay_stride;
    arguments.entries = test.entries, arguments.tokens = test.tokens, arguments.heads = test.heads;
    arguments.decay_width = test.decay_width, arguments.has_lower_bound = test.lower_bound != 0;
    arguments.lower_bound = float(test.lower_bound), arguments.beta_factor = float(test.beta_factor);
    launch("delta_gates", divide_up(rows * width, GATES_THREADS), 1, 1, GATES_THREADS, 0, arguments, delta_gates);

    Numbers expected_betas, expected_decays;
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < test.heads; head++) {
            expected_betas.push_back(test.beta_factor * sigmoid(to_number(beta_inputs[row * beta_stride + head])));
            const double rate = std::exp(log_rates[head]);
            for (int i = 0; i < test.decay_width; i++) {
                const int column = head * test.decay_width + i;
                const double x = to_number(decay_inputs[row * decay_stride + column]) + biases[column];
                const double softplus = std::log1p(std::exp(x));
                expected_decays.push_back(test.lower_bound ? test.lower_bound * sigmoid(rate * x) : -rate * softplus);
            }
        }
    compare(test.name, "betas", numbers_of(betas), expected_betas, 1e-6);
    compare(test.name, "decays", numbers_of(decays), expected_decays, 1e-6);
}

int main() {
    const ConvolutionCase convolutions[] = {
        {"convolution over tokens of several blocks", 2, 2 * CONVOLUTION_TOKENS + 5, 130},
        {"convolution of one token", 3, 1, 7},
        {"convolution of fewer tokens than taps", 2, 2, 5},
        {"convolution after nothing", 1, CONVOLUTION_TOKENS, 3, {}, false},
        {"convolution of packed sequences", 1, 45, 9, {0, 2, 2, 31, 33, 45}},
    };
    for (const ConvolutionCase& test : convolutions) run(test);
    const NormCase norms[] = {
        {"norm gated by silu", 2, 9, 2, ACTIVATION_SILU},
        {"norm gated by sigmoid, weights of heads", 1, 30, 3, ACTIVATION_SIGMOID, true},
        {"norm gated by softplus", 1, 1, 2, ACTIVATION_SOFTPLUS},
    };
    for (const NormCase& test : norms) run(test);
    const GatesCase gates[] = {
        {"decays of heads", 2, 17, 5, 1},
        {"decays of channels with a lower bound, betas up to 2", 1, 3, 2, 70, -5, 2},
    };
    for (const GatesCase& test : gates) run(test);
    return finish();
}

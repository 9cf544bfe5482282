// Norms and gates on the emulator against plain loops in double. A program tests one type of elements:
// run_delta_tests.sh.
#include "../kernels/norm.cu"
#include "../kernels/gate.cu"
#include "testing.h"

using namespace testing;

// Rows (B, T, H, D) that are a view: heads are before tokens in memory, and there is space behind each row and entry.
struct Rows {
    int entries, tokens, heads, width;

    int count() const { return entries * tokens * heads; }
    RowStrides strides() const {
        RowStrides strides;
        strides.row = width + 1, strides.head = tokens * strides.row, strides.sequence = heads * strides.head + 2;
        return strides;
    }
    i64 size() const { return entries * strides().sequence; }
    int head(int row) const { return row % heads; }
    int token(int row) const { return row / heads % tokens; }
    int entry(int row) const { return row / heads / tokens; }
    i64 start(int row) const {
        return entry(row) * strides().sequence + head(row) * strides().head + token(row) * strides().row;
    }
};

struct NormCase {
    const char* name;
    Rows rows;
    int row_warps;
    bool subtracts_mean, has_bias, has_weights_of_heads;
    double mean = 0;
};

static void run(const NormCase& test) {
    emulator::clear_buffers();
    const Rows& rows = test.rows;
    const double eps = 1e-5;
    const int d = rows.width, parts = 3, weight_count = (test.has_weights_of_heads ? rows.heads : 1) * d;
    Buffer<Element> inputs(rows.size(), "inputs"), gradient(rows.size(), "output_gradient");
    Buffer<Element> output(rows.count() * d, "output"), input_gradient(rows.count() * d, "input_gradient");
    Buffer<float> weights(weight_count, "weights"), biases(weight_count, "biases");
    Buffer<float> means(rows.count(), "means"), factors(rows.count(), "factors");
    Buffer<float> weight_parts(parts * weight_count, "weight_gradient_parts"), bias_parts(parts * weight_count, "bias_gradient_parts");
    Buffer<float> weight_gradient(weight_count, "weight_gradient"), bias_gradient(weight_count, "bias_gradient");
    fill(inputs, test.mean), fill(gradient);
    for (int i = 0; i < weight_count; i++) weights[i] = float(normal()), biases[i] = float(normal());
    emulator::protect(weights.data), emulator::protect(biases.data);
    NormArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.inputs = inputs.data, arguments.weights = weights.data, arguments.output = output.data;
    arguments.output_gradient = gradient.data, arguments.input_gradient = input_gradient.data;
    arguments.means = means.data, arguments.factors = factors.data;
    arguments.weight_gradient_parts = weight_parts.data, arguments.weight_gradient = weight_gradient.data;
    if (test.has_bias) {
        arguments.biases = biases.data;
        arguments.bias_gradient_parts = bias_parts.data, arguments.bias_gradient = bias_gradient.data;
    }
    arguments.input_strides = arguments.output_gradient_strides = rows.strides();
    arguments.weight_head_stride = test.has_weights_of_heads ? d : 0;
    arguments.entries = rows.entries, arguments.tokens = rows.tokens, arguments.heads = rows.heads;
    arguments.width = d, arguments.parts = parts, arguments.row_warps = test.row_warps;
    arguments.subtracts_mean = test.subtracts_mean, arguments.epsilon = float(eps);
    const int blocks = divide_up(rows.count() * test.row_warps, ROW_NORM_WARPS);
    launch("norm_forward", blocks, 1, 1, ROW_NORM_WARPS * 32, ROW_NORM_SHARED, arguments, norm_forward);
    launch("norm_backward", blocks, 1, 1, ROW_NORM_WARPS * 32, ROW_NORM_SHARED, arguments, norm_backward);
    launch("norm_parameter_gradients", divide_up(d, ROW_NORM_COLUMNS), parts, test.has_weights_of_heads ? rows.heads : 1,
           ROW_NORM_COLUMNS, 0, arguments, norm_parameter_gradients);
    launch("norm_sum_parameters", divide_up(weight_count, ROW_NORM_COLUMNS), 1, 1, ROW_NORM_COLUMNS, 0, arguments, norm_sum_parameters);

    Numbers outputs, input_gradients, weight_gradients(weight_count, 0), bias_gradients(weight_count, 0);
    for (int row = 0; row < rows.count(); row++) {
        const i64 at = rows.start(row);
        const int weight_at = test.has_weights_of_heads ? rows.head(row) * d : 0;
        double mean = 0, variance = 0, along = 0, of_mean = 0;
        if (test.subtracts_mean)
            for (int c = 0; c < d; c++) mean += to_number(inputs[at + c]) / d;
        for (int c = 0; c < d; c++) variance += std::pow(to_number(inputs[at + c]) - mean, 2) / d;
        const double factor = 1 / std::sqrt(variance + eps);
        Numbers normed(d), of_normed(d);
        for (int c = 0; c < d; c++) {
            const double dy = to_number(gradient[at + c]), weight = weights[weight_at + c];
            normed[c] = (to_number(inputs[at + c]) - mean) * factor;
            outputs.push_back(normed[c] * weight + (test.has_bias ? biases[weight_at + c] : 0));
            weight_gradients[weight_at + c] += dy * normed[c];
            bias_gradients[weight_at + c] += dy;
            of_normed[c] = dy * weight;
            along += of_normed[c] * normed[c] / d;
            of_mean += test.subtracts_mean ? of_normed[c] / d : 0;
        }
        for (int c = 0; c < d; c++) input_gradients.push_back((of_normed[c] - of_mean - normed[c] * along) * factor);
    }
    // Rows far from zero lose digits before the mean is subtracted.
    const double digits = test.mean == 0 ? 1 : 10;
    compare(test.name, "output", numbers_of(output), outputs, tolerance(1e-6 * digits, 1e-3, 5e-3));
    compare(test.name, "the gradient of inputs", numbers_of(input_gradient), input_gradients, tolerance(2e-6 * digits, 1e-3, 5e-3));
    compare(test.name, "the gradient of weights", numbers_of(weight_gradient), weight_gradients, 1e-5 * digits);
    if (test.has_bias) compare(test.name, "the gradient of biases", numbers_of(bias_gradient), bias_gradients, 1e-5);
}

struct GateCase {
    const char* name;
    Rows rows;
    int activation;
    bool is_shared = false;
};

static double activated(int activation, double x) {
    switch (activation) {
    case ACTIVATION_SIGMOID: return 1 / (1 + std::exp(-x));
    case ACTIVATION_SOFTPLUS: return std::log1p(std::exp(x));
    case ACTIVATION_SILU: return x / (1 + std::exp(-x));
    case ACTIVATION_RELU: return std::max(x, 0.0);
    case ACTIVATION_GELU: return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
    default: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
}

static void run(const GateCase& test) {
    emulator::clear_buffers();
    const Rows& rows = test.rows;
    const Rows gate_rows = {rows.entries, rows.tokens, rows.heads, test.is_shared ? 1 : rows.width};
    const int d = rows.width, columns = test.is_shared ? d : 64;
    Buffer<Element> gates(gate_rows.size(), "gates"), values(rows.size(), "values"), gradient(rows.size(), "output_gradient");
    Buffer<Element> output(rows.count() * d, "output"), value_gradient(rows.count() * d, "value_gradient");
    Buffer<Element> gate_gradient(rows.count() * gate_rows.width, "gate_gradient");
    fill(gates), fill(values), fill(gradient);
    GateArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.gates = gates.data, arguments.values = values.data, arguments.output = output.data;
    arguments.output_gradient = gradient.data;
    arguments.gate_gradient = gate_gradient.data, arguments.value_gradient = value_gradient.data;
    arguments.gate_strides = gate_rows.strides();
    arguments.value_strides = arguments.output_gradient_strides = rows.strides();
    arguments.gate_column_stride = test.is_shared ? 0 : 1;
    arguments.entries = rows.entries, arguments.tokens = rows.tokens, arguments.heads = rows.heads;
    arguments.width = d, arguments.columns = columns, arguments.activation = test.activation;
    const int x = divide_up(rows.count(), GATE_WARPS), y = divide_up(d, columns);
    launch("gate_forward", x, y, 1, GATE_WARPS * 32, 0, arguments, gate_forward);
    launch("gate_backward", x, y, 1, GATE_WARPS * 32, 0, arguments, gate_backward);

    Numbers outputs, gate_gradients(gate_gradient.count, 0), value_gradients;
    for (int row = 0; row < rows.count(); row++)
        for (int c = 0; c < d; c++) {
            const int gate_column = test.is_shared ? 0 : c;
            const double gate = to_number(gates[gate_rows.start(row) + gate_column]), small = 1e-5;
            const double value = to_number(values[rows.start(row) + c]), dy = to_number(gradient[rows.start(row) + c]);
            const double slope = (activated(test.activation, gate + small) - activated(test.activation, gate - small)) / (2 * small);
            outputs.push_back(activated(test.activation, gate) * value);
            value_gradients.push_back(activated(test.activation, gate) * dy);
            gate_gradients[row * gate_rows.width + gate_column] += dy * value * slope;
        }
    compare(test.name, "output", numbers_of(output), outputs, tolerance(1e-6, 1e-3, 5e-3));
    compare(test.name, "the gradient of values", numbers_of(value_gradient), value_gradients, tolerance(1e-6, 1e-3, 5e-3));
    compare(test.name, "the gradient of gates", numbers_of(gate_gradient), gate_gradients, tolerance(2e-6, 1e-3, 5e-3));
}

int main() {
    const NormCase norms[] = {
        {"root mean square norm by a warp", {2, 3, 2, 75}, 1, false, false, false},
        {"root mean square norm by a block", {2, 3, 1, 700}, ROW_NORM_WARPS, false, false, false},
        {"root mean square norm with weights of heads", {1, 7, 3, 64}, 1, false, false, true},
        {"layer norm by a warp", {1, 9, 2, 33}, 1, true, true, false},
        {"layer norm by a block", {1, 2, 2, 1025}, ROW_NORM_WARPS, true, true, false},
        {"layer norm without a bias, weights of heads", {2, 2, 3, 20}, 1, true, false, true},
        {"layer norm of rows far from zero", {1, 4, 1, 130}, 1, true, true, false, 30},
        {"norm of one row of three numbers", {1, 1, 1, 3}, 1, false, true, false},
    };
    for (const NormCase& test : norms) run(test);
    const GateCase gates[] = {
        {"gate by silu", {2, 3, 1, 200}, ACTIVATION_SILU},
        {"gate by sigmoid", {1, 5, 3, 40}, ACTIVATION_SIGMOID},
        {"gate of heads by sigmoid", {2, 3, 2, 70}, ACTIVATION_SIGMOID, true},
        {"gate of heads by softplus", {1, 3, 5, 32}, ACTIVATION_SOFTPLUS, true},
        {"gate by relu", {1, 2, 1, 65}, ACTIVATION_RELU},
        {"gate by gelu", {1, 3, 1, 130}, ACTIVATION_GELU},
        {"gate by gelu with tanh", {1, 3, 1, 130}, ACTIVATION_GELU_TANH},
    };
    for (const GateCase& test : gates) run(test);
    return finish();
}

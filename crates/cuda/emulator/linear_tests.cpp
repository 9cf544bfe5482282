// Linear layers of few rows on the emulator against plain loops in double. A program tests one type of elements and one
// number of rows: run_delta_tests.sh.
#include "../kernels/linear_rows.cu"
#include "testing.h"

using namespace testing;

struct LinearCase {
    const char* name;
    int width, outputs, product_warps;
    bool has_up = false, has_bias = false, has_residual = false;
    int activation = LINEAR_NO_ACTIVATION;
    bool is_shifted = false; // tensors begin at an element that is not aligned
};

static double rounded(double x) { return to_number(to_element(x)); }

static double activated(int activation, double x) {
    switch (activation) {
    case LINEAR_NO_ACTIVATION: return x;
    case ACTIVATION_SILU: return x / (1 + std::exp(-x));
    case ACTIVATION_RELU: return std::max(x, 0.0);
    case ACTIVATION_GELU: return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
    default: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
}

// A matrix (rows, columns) or a list that may begin behind the first element of its memory.
struct Matrix {
    Buffer<Element> memory;
    int shift, columns;

    Matrix(int rows, int columns, bool is_shifted, const char* name)
        : memory(i64(rows) * columns + is_shifted, name), shift(is_shifted), columns(columns) {
        fill(memory);
    }
    Element* data() { return memory.data + shift; }
    double at(int row, int column) const { return to_number(memory[shift + i64(row) * columns + column]); }
};

static void run(const LinearCase& test, int rows) {
    emulator::clear_buffers();
    const int k = test.width, n = test.outputs;
    Matrix inputs(rows, k, test.is_shifted, "inputs"), weights(n, k, test.is_shifted, "weights");
    Matrix up_weights(n, k, test.is_shifted, "up_weights"), residuals(rows, n, test.is_shifted, "residuals");
    Matrix biases(1, n, test.is_shifted, "biases"), up_biases(1, n, test.is_shifted, "up_biases");
    Buffer<Element> output(rows * n, "output");
    LinearRowsArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.inputs = inputs.data(), arguments.weights = weights.data(), arguments.output = output.data;
    if (test.has_up) arguments.up_weights = up_weights.data();
    if (test.has_bias) arguments.biases = biases.data();
    if (test.has_bias && test.has_up) arguments.up_biases = up_biases.data();
    if (test.has_residual) arguments.residuals = residuals.data();
    arguments.rows = rows, arguments.width = k, arguments.outputs = n, arguments.product_warps = test.product_warps;
    arguments.is_aligned = !test.is_shifted && k % LINEAR_CHUNK == 0, arguments.activation = test.activation;
    const int pairs = test.has_up ? n : divide_up(n, 2);
    launch("linear_rows", divide_up(pairs * test.product_warps, LINEAR_WARPS), 1, 1, LINEAR_WARPS * 32, LINEAR_WARPS * LINEAR_ROWS * 8,
           arguments, linear_rows);

    Numbers outputs;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < n; column++) {
            double y = test.has_bias ? biases.at(0, column) : 0, up = test.has_bias ? up_biases.at(0, column) : 0;
            for (int c = 0; c < k; c++) {
                y += inputs.at(row, c) * weights.at(column, c);
                up += inputs.at(row, c) * up_weights.at(column, c);
            }
            y = test.has_up ? activated(test.activation, rounded(y)) * rounded(up) : activated(test.activation, y);
            outputs.push_back(y + (test.has_residual ? residuals.at(row, column) : 0));
        }
    const std::string name = std::string(test.name) + ", " + std::to_string(rows) + " rows";
    compare(name, "output", numbers_of(output), outputs, tolerance(2e-6, 1e-3, 5e-3));
}

int main() {
    const LinearCase cases[] = {
        {"a warp for two outputs", 64, 33, 1},
        {"more columns than loads that are underway", 1600, 6, 1},
        {"two warps for two outputs, bias", 520, 20, 2, false, true},
        {"four warps for two outputs, residual", 1048, 11, 4, false, false, true},
        {"eight warps for two outputs, bias and residual", 2056, 5, 8, false, true, true},
        {"one output of one column", 1, 1, 1, false, true},
        {"a width that is no multiple of a load", 77, 19, 1, false, true, true},
        {"a width that is no multiple of a load, eight warps", 601, 4, 8},
        {"unaligned rows", 64, 9, 2, false, true, true, LINEAR_NO_ACTIVATION, true},
        {"gelu", 72, 18, 1, false, true, true, ACTIVATION_GELU},
        {"gate by silu", 136, 21, 1, true, false, false, ACTIVATION_SILU},
        {"gate by silu, four warps, bias", 1032, 9, 4, true, true, false, ACTIVATION_SILU},
        {"gate by gelu with tanh, eight warps, residual", 2048, 3, 8, true, false, true, ACTIVATION_GELU_TANH},
        {"gate by relu, unaligned rows, bias and residual", 95, 7, 2, true, true, true, ACTIVATION_RELU, true},
    };
    for (const LinearCase& test : cases) {
        for (int rows = LINEAR_ROWS / 2 + 1; rows <= LINEAR_ROWS; rows++) run(test, rows);
    }
    return finish();
}

// Rows quantised to 8 bits on the emulator against a plain loop, whose bits are expected, and against the bound of the
// error. A program tests one type of elements: run_delta_tests.sh.
#include "../kernels/quantize_rows.cu"
#include "testing.h"
#include <limits>

using namespace testing;

// The numbers of a row.
enum class Kind { NORMAL, ZEROS, INFINITE, MINUS_INFINITE, NAN_LAST, TINY, BARELY_NORMAL, HUGE_NUMBERS, TIES, COUNT };

static double number_of(Kind kind, int column, int width) {
    const double infinity = std::numeric_limits<double>::infinity();
    switch (kind) {
    case Kind::ZEROS: return column % 2 ? 0.0 : -0.0;
    case Kind::INFINITE: return column == width / 2 ? infinity : normal();
    case Kind::MINUS_INFINITE: return column == 0 ? -infinity : normal();
    case Kind::NAN_LAST: return column == width - 1 ? std::nan("") : normal();
    case Kind::TINY: return normal() * (ELEMENT == 0 ? 1e-7 : 1e-40);
    case Kind::BARELY_NORMAL: return uniform(-1, 1) * 127 * 1.1755e-38;
    case Kind::HUGE_NUMBERS: return uniform(-1, 1) * (ELEMENT == 0 ? 65504 : 3.38e38);
    // Halves between two codes, where the scale is about 1.
    case Kind::TIES: return column == 0 ? -127 : below(254) - 126.5;
    default: return normal();
    }
}

struct QuantizeCase {
    int entries, heads, tokens, width;
};

static void run(const QuantizeCase& test) {
    emulator::clear_buffers();
    const int d = test.width, rows = test.entries * test.heads * test.tokens;
    // Tokens are before heads in memory, with space behind each head and each sequence.
    RowStrides strides;
    strides.head = d + 1, strides.row = test.heads * strides.head, strides.sequence = test.tokens * strides.row + 3;
    Buffer<Element> inputs(test.entries * strides.sequence, "inputs");
    Buffer<u8> codes(rows * d, "codes");
    Buffer<float> scales(rows, "scales");
    const auto start_of = [&](int row) {
        const int token = row % test.tokens, head = row / test.tokens % test.heads;
        return row / test.tokens / test.heads * strides.sequence + head * strides.head + token * strides.row;
    };
    for (int row = 0; row < rows; row++)
        for (int c = 0; c < d; c++)
            inputs[start_of(row) + c] = to_element(number_of(Kind(row % int(Kind::COUNT)), c, d));
    emulator::protect(inputs.data);

    QuantizeRowsArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    arguments.inputs = inputs.data, arguments.codes = codes.data, arguments.scales = scales.data;
    arguments.input_strides = strides;
    arguments.entries = test.entries, arguments.heads = test.heads, arguments.tokens = test.tokens, arguments.width = d;
    launch("quantize_rows", divide_up(rows, QUANTIZE_WARPS), 1, 1, QUANTIZE_WARPS * 32, 0, arguments, quantize_rows);

    // A scale of NaN is compared as -1.
    Numbers found_codes, expected_codes, found_scales, expected_scales, errors;
    for (int row = 0; row < rows; row++) {
        float largest = 0;
        bool is_finite_row = true;
        for (int c = 0; c < d; c++) {
            const float x = float(to_number(inputs[start_of(row) + c]));
            is_finite_row = is_finite_row && std::isfinite(x);
            largest = std::max(largest, std::fabs(x));
        }
        float scale = largest * float(1.0 / 127);
        if (scale < std::numeric_limits<float>::min()) scale = 0;
        found_scales.push_back(std::isnan(scales[row]) ? -1 : scales[row]);
        expected_scales.push_back(is_finite_row ? scale : -1);
        for (int c = 0; c < d; c++) {
            const float x = float(to_number(inputs[start_of(row) + c]));
            const float code = scale == 0 ? 128 : std::floor(x / scale + 128.5f);
            const u8 found = codes[row * d + c];
            found_codes.push_back(found);
            expected_codes.push_back(is_finite_row ? code : 0);
            if (is_finite_row && scale > 0) errors.push_back(((found - 128.0) * scale - x) / largest);
        }
    }
    const std::string name = "rows of " + std::to_string(d);
    for (int row = 0; row < rows; row++)
        compare(name, "a scale", {found_scales[row]}, {expected_scales[row]}, 0);
    compare(name, "the codes", found_codes, expected_codes, 0);
    // The errors are at most half of a code.
    for (double& error : errors) error = std::max(0.0, std::fabs(error) - 1.0001 / 254);
    compare(name, "the error beyond half of a code", errors, Numbers(errors.size(), 0), 0);
}

int main() {
    const QuantizeCase cases[] = {{2, 3, 4, 13}, {1, 2, 9, 64}, {2, 1, 11, 80}, {1, 8, 3, 128}, {3, 2, 5, 256}, {1, 1, 9, 1}};
    for (const QuantizeCase& test : cases) run(test);
    return finish();
}

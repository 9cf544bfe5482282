// Linear layers with weights of codes on the emulator against plain loops in double, and the numbers of the weights to
// the bit. A program tests one format, one type of elements and one number of rows: run_delta_tests.sh, and for the Metal
// kernels run_tests.sh in their package.
#include "linear_codes.cu"
#include "testing.h"

using namespace testing;

struct CodesCase {
    const char* name;
    int width, outputs, product_warps;
    bool has_up = false, has_residual = false;
    bool is_shifted = false; // the inputs begin at an element that is not aligned
};

// A deterministic number from 0 to below - 1.
static u32 draw(u32 below) {
    static u64 state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return u32(state >> 33) % below;
}

// A number whose products stay within f16.
static float small_number() { return (int(draw(2001)) - 1000) / 32000.0f; }

static u16 f16_of(float x) { return emulator::f32_to_f16(x); }
static u16 bf16_of(float x) { return emulator::f32_to_bf16(x); }

// Numbers of groups in memory of every kind, and as floats.
struct Groups {
    std::vector<float> numbers;
    Buffer<u16> halves, factors;
    Buffer<float> floats, table;
    Buffer<u8> bytes;
    GroupPointers arguments;

    Groups(int rows, int groups, int kind, int nest)
        : halves(rows * groups, "halves"), factors(rows * groups / nest, "factors"), floats(rows * groups, "floats"),
          table(256, "table"), bytes(rows * groups, "bytes") {
        memset((void*)&arguments, 0, sizeof arguments);
        arguments.middle = 7;
        for (int i = 0; i < 256; i++) table[i] = small_number();
        for (size_t i = 0; i < factors.count; i++) factors[i] = f16_of(small_number());
        for (int i = 0; i < rows * groups; i++) {
            const float x = small_number();
            halves[i] = kind == NUMBERS_BF16 ? bf16_of(x) : f16_of(x);
            floats[i] = x;
            bytes[i] = draw(16);
            const float factor = emulator::f16_to_f32(factors[i / nest]);
            numbers.push_back(kind == NUMBERS_F16     ? emulator::f16_to_f32(halves[i])
                              : kind == NUMBERS_BF16  ? emulator::bf16_to_f32(halves[i])
                              : kind == NUMBERS_F32   ? floats[i]
                              : kind == NUMBERS_WHOLE ? float(bytes[i])
                              : kind == NUMBERS_BYTES ? table[bytes[i]]
                                                      : factor * float(bytes[i] - arguments.middle));
        }
        arguments.numbers = kind == NUMBERS_F32 ? (void*)floats.data : kind <= NUMBERS_BF16 ? (void*)halves.data : bytes.data;
        if (kind == NUMBERS_BYTES) arguments.table = table.data;
        if (kind == NUMBERS_NESTED) arguments.table = factors.data;
    }
};

static float float8_of(int code) {
    const int exponent_bits = CODE_VALUES == VALUES_E4M3 ? 4 : 5, mantissa_bits = 7 - exponent_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1), exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double magnitude = exponent ? std::ldexp(1 + std::ldexp(mantissa, -mantissa_bits), exponent - bias)
                                      : std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return float(code & 0x80 ? -magnitude : magnitude);
}

// A weight in memory, and its numbers.
struct Weight {
    int width, groups;
    Groups scales, offsets;
    Buffer<u32> low, high;
    Buffer<float> table;
    std::vector<float> numbers;
    WeightCodes arguments;

    static int words(int rows, int width, int bits) { return rows * chunks_of_row(width) * (CODE_CHUNK * bits / 32); }

    Weight(int rows, int width)
        : width(width), groups(CODE_GROUP ? width / CODE_GROUP : 1), scales(rows, groups, SCALE_NUMBERS, SCALE_NEST),
          offsets(rows, groups, OFFSET_NUMBERS, OFFSET_NEST), low(words(rows, width, LOW_BITS), "low"),
          high(words(rows, width, HIGH_BITS) + 1, "high"), table(16, "code_table") {
        for (size_t i = 0; i < low.count; i++) low[i] = 0;
        for (size_t i = 0; i < high.count; i++) high[i] = 0;
        for (int i = 0; i < 16; i++) table[i] = small_number();
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < width; column++) {
                int code = draw(1 << CODE_BITS);
                // Floats up to 2.
                if (CODE_VALUES == VALUES_E4M3 || CODE_VALUES == VALUES_E5M2) code = code % 64 | (code & 0x80);
                put(low, row, column, LOW_BITS, code & ((1 << LOW_BITS) - 1));
                if (HIGH_BITS) put(high, row, column, HIGH_BITS, code >> LOW_BITS);
                const int group = row * groups + (CODE_GROUP ? column / CODE_GROUP : 0);
                numbers.push_back(number(code, scales.numbers[group], offsets.numbers[group]));
            }
        memset((void*)&arguments, 0, sizeof arguments);
        arguments.scales = scales.arguments, arguments.groups = groups;
        if (HAS_OFFSETS) arguments.offsets = offsets.arguments;
        if (HIGH_BITS) arguments.high = high.data;
        if (CODE_VALUES == VALUES_TABLE) arguments.code_table = table.data;
    }

    // Puts the bits of a code at their place: bit by bit, as code_numbers.cuh describes the order.
    void put(Buffer<u32>& plane, int row, int column, int bits, int value) {
        const int chunk = column / CODE_CHUNK, octets = CODE_CHUNK / 8, octet = column % CODE_CHUNK / 8;
        int place = 0;
        while ((place + chunk / (64 / CODE_CHUNK)) % octets != octet) place++;
        const int quartet = 2 * place + column % 8 / 4;
        const i64 first_word = (i64(row) * chunks_of_row(width) + chunk) * (CODE_CHUNK * bits / 32);
        const int in_byte = quartet * bits % 8, word = quartet * bits / 8;
        plane[first_word + word] |= u32(value) << (column % 4 * 8 + in_byte);
    }

    float number(int code, float scale, float offset) const {
        if (CODE_VALUES == VALUES_SIGNED) return (float(code) - (1 << (CODE_BITS - 1))) * scale;
        if (CODE_VALUES == VALUES_ZEROS) return (float(code) - offset) * scale;
        if (CODE_VALUES == VALUES_MINIMUMS) return std::fma(float(code), scale, offset);
        if (CODE_VALUES == VALUES_TABLE) return table[code % 16] * scale;
        return float8_of(code) * scale;
    }
};

static double rounded(double x) { return to_number(to_element(x)); }

static void run(const CodesCase& test, int rows) {
    emulator::clear_buffers();
    const int k = test.width, n = test.outputs;
    Weight weight(n, k), up(n, k);
    Buffer<Element> inputs(rows * k + test.is_shifted, "inputs"), residuals(rows * n, "residuals");
    Buffer<Element> biases(n, "biases"), output(rows * n, "output"), numbers(n * k, "numbers");
    fill(inputs), fill(residuals), fill(biases);
    LinearCodesArguments arguments;
    memset((void*)&arguments, 0, sizeof arguments);
    LinearRowsArguments& linear = arguments.linear;
    linear.inputs = inputs.data + test.is_shifted, linear.weights = weight.low.data, linear.output = output.data;
    linear.biases = biases.data, arguments.weight = weight.arguments;
    if (test.has_up) linear.up_weights = up.low.data, arguments.up_weight = up.arguments;
    if (test.has_residual) linear.residuals = residuals.data;
    linear.rows = rows, linear.width = k, linear.outputs = n, linear.product_warps = test.product_warps;
    linear.is_aligned = !test.is_shifted && k % CODE_CHUNK == 0;
    linear.activation = test.has_up ? ACTIVATION_SILU : LINEAR_NO_ACTIVATION;
    const int pairs = test.has_up ? n : divide_up(n, 2), shared = LINEAR_SUMS_BYTES + 2 * 16 * 4;
    launch("linear_codes", divide_up(pairs * test.product_warps, LINEAR_WARPS), 1, 1, LINEAR_WARPS * 32, shared,
           arguments, linear_codes);
    Numbers outputs;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < n; column++) {
            double y = to_number(biases[column]), factor = 0;
            for (int c = 0; c < k; c++) {
                const double x = to_number(inputs[test.is_shifted + i64(row) * k + c]);
                y += x * weight.numbers[i64(column) * k + c], factor += x * up.numbers[i64(column) * k + c];
            }
            if (test.has_up) y = rounded(y) / (1 + std::exp(-rounded(y))) * rounded(factor);
            outputs.push_back(y + (test.has_residual ? to_number(residuals[row * n + column]) : 0));
        }
    const std::string name = std::string(test.name) + ", " + std::to_string(rows) + " rows";
    compare(name, "output", numbers_of(output), outputs, tolerance(2e-6, 1e-3, 5e-3));

    linear.output = numbers.data;
    launch("dequantize_codes", divide_up(k, 4 * DEQUANTIZE_THREADS) * n, 1, 1, DEQUANTIZE_THREADS, shared, arguments,
           dequantize_codes);
    Numbers expected;
    for (float x : weight.numbers) expected.push_back(rounded(x));
    compare(test.name, "numbers", numbers_of(numbers), expected, 0);
}

int main() {
    const int group = CODE_GROUP ? CODE_GROUP : 32;
    // Widths of whole groups that are whole chunks, and others.
    const int narrow = 32 * group, wide = 2304 / (32 * group) * (32 * group) + narrow;
    const CodesCase cases[] = {
        {"a warp for two outputs", narrow, 5, 1},
        {"two warps for two outputs, residual", narrow, 9, 2, false, true},
        {"eight warps for two outputs", wide, 3, 8},
        {"gate by silu", narrow, 4, 1, true},
        {"gate by silu, four warps, residual", wide, 3, 4, true, true},
        {"unaligned inputs", narrow, 3, 1, false, false, true},
        {"one nest of groups", group * SCALE_NEST * OFFSET_NEST, 3, 1},
    };
    for (const CodesCase& test : cases) {
        for (int rows = LINEAR_ROWS / 2 + 1; rows <= LINEAR_ROWS; rows += 2) run(test, rows);
    }
    return finish();
}

// The kernels of the gated delta rule on the emulator against the recurrence in double, token by token, and its
// adjoint. A program tests one specialisation: run_delta_tests.sh.
#include "../kernels/delta.cu"
#include "testing.h"

using namespace testing;

enum class Decay { None, Heads, Channels };

struct Case {
    const char* name;
    std::vector<int> lengths = {2 * CHUNK + 5, 2 * CHUNK + 5}; // tokens of each sequence
    bool is_packed = false;
    int heads = 2, query_heads = 2, key_heads = 2, value_heads = 2;
    Decay decay = Decay::Heads;
    bool has_betas = true, has_norm = true, has_initial_states = true, has_state_gradient = true;
    double largest_beta = 1, smallest_decay = -1, largest_decay = 0;
    bool clears_states = false;  // some factors are 0
    bool mixes_decays = false;   // four of five decays are a hundredth
    bool has_large_head = false; // the factors of head 0 are too large for the kernels over chunks
    double scale = 0.7;
};

// Rows (heads, T, width) of each entry, with strides as in (B, T, heads, width) and some numbers between the rows.
struct Rows {
    int heads, tokens, width;
    RowStrides strides;
    Buffer<Element> elements;

    Rows(int entries, int heads, int tokens, int width, const char* name)
        : heads(heads), tokens(tokens), width(width), strides(strides_of(heads, tokens, width)),
          elements(entries * strides.sequence, name) {}
    static RowStrides strides_of(int heads, int tokens, int width) {
        RowStrides strides;
        strides.head = width + 1;
        strides.row = heads * strides.head + 2;
        strides.sequence = tokens * strides.row;
        return strides;
    }
    i64 at(int entry, int head, int token, int column) const {
        return entry * strides.sequence + head * strides.head + token * strides.row + column;
    }
    void fill(int entries, double size) {
        for (int entry = 0; entry < entries; entry++)
            for (int head = 0; head < heads; head++)
                for (int token = 0; token < tokens; token++)
                    for (int column = 0; column < width; column++)
                        elements[at(entry, head, token, column)] = to_element(size * normal());
    }
};

// The recurrence of one head in double, and its adjoint.
struct Head {
    int tokens;
    double scale;
    bool has_betas, has_norm;
    Numbers q, k, v, decay, beta, initial; // as they are given: (T, D_k) .., decay (T, D_k)
    Numbers output, final;
    Numbers output_gradient, final_gradient;
    Numbers dq, dk, dv, ddecay, dbeta, dinitial;

    static double square_length(const double* row) {
        double sum = 0;
        for (int d = 0; d < KEY_WIDTH; d++) sum += row[d] * row[d];
        return sum;
    }
    double row_factor(const double* row) const { return has_norm ? 1 / std::sqrt(square_length(row) + 1e-6) : 1; }

    void run() {
        std::vector<Numbers> decayed_states(tokens), states(tokens), errors(tokens);
        Numbers state = initial, q_rows = q, k_rows = k;
        output.assign(tokens * VALUE_WIDTH, 0);
        for (int t = 0; t < tokens; t++) {
            const double q_factor = row_factor(&q[t * KEY_WIDTH]) * scale, k_factor = row_factor(&k[t * KEY_WIDTH]);
            for (int d = 0; d < KEY_WIDTH; d++) {
                q_rows[t * KEY_WIDTH + d] *= q_factor;
                k_rows[t * KEY_WIDTH + d] *= k_factor;
                for (int c = 0; c < VALUE_WIDTH; c++) state[d * VALUE_WIDTH + c] *= std::exp(decay[t * KEY_WIDTH + d]);
            }
            decayed_states[t] = state;
            errors[t].resize(VALUE_WIDTH);
            for (int c = 0; c < VALUE_WIDTH; c++) {
                double error = v[t * VALUE_WIDTH + c];
                for (int d = 0; has_betas && d < KEY_WIDTH; d++)
                    error -= state[d * VALUE_WIDTH + c] * k_rows[t * KEY_WIDTH + d];
                errors[t][c] = error;
            }
            for (int d = 0; d < KEY_WIDTH; d++)
                for (int c = 0; c < VALUE_WIDTH; c++) {
                    double& number = state[d * VALUE_WIDTH + c];
                    number += k_rows[t * KEY_WIDTH + d] * beta[t] * errors[t][c];
                    output[t * VALUE_WIDTH + c] += q_rows[t * KEY_WIDTH + d] * number;
                }
            states[t] = state;
        }
        final = state;
        differentiate(decayed_states, states, errors, q_rows, k_rows);
    }

    void differentiate(const std::vector<Numbers>& decayed_states, const std::vector<Numbers>& states,
                       const std::vector<Numbers>& errors, const Numbers& q_rows, const Numbers& k_rows) {
        dq.assign(q.size(), 0), dk.assign(k.size(), 0), dv.assign(v.size(), 0);
        ddecay.assign(k.size(), 0), dbeta.assign(tokens, 0);
        Numbers of_state = final_gradient;
        for (int t = tokens - 1; t >= 0; t--) {
            Numbers of_error(VALUE_WIDTH, 0);
            for (int c = 0; c < VALUE_WIDTH; c++) {
                const double of_output = output_gradient[t * VALUE_WIDTH + c];
                for (int d = 0; d < KEY_WIDTH; d++) {
                    const int at = d * VALUE_WIDTH + c, row = t * KEY_WIDTH + d;
                    dq[row] += states[t][at] * of_output;
                    of_state[at] += q_rows[row] * of_output;
                    dk[row] += of_state[at] * beta[t] * errors[t][c];
                    of_error[c] += of_state[at] * beta[t] * k_rows[row];
                    dbeta[t] += of_state[at] * k_rows[row] * errors[t][c];
                }
                dv[t * VALUE_WIDTH + c] = of_error[c];
            }
            for (int d = 0; d < KEY_WIDTH; d++)
                for (int c = 0; c < VALUE_WIDTH; c++) {
                    const int at = d * VALUE_WIDTH + c, row = t * KEY_WIDTH + d;
                    if (has_betas) {
                        dk[row] -= decayed_states[t][at] * of_error[c];
                        of_state[at] -= k_rows[row] * of_error[c];
                    }
                    ddecay[row] += of_state[at] * decayed_states[t][at];
                    of_state[at] *= std::exp(decay[row]);
                }
        }
        dinitial = of_state;
        for (int t = 0; t < tokens; t++) {
            differentiate_row(&dq[t * KEY_WIDTH], &q[t * KEY_WIDTH], scale);
            differentiate_row(&dk[t * KEY_WIDTH], &k[t * KEY_WIDTH], 1);
        }
    }

    // The gradient of x from that of scale * x / sqrt(|x|^2 + eps).
    void differentiate_row(double* gradient, const double* row, double factor) const {
        const double own = row_factor(row);
        double along = 0;
        for (int d = 0; d < KEY_WIDTH; d++) along += gradient[d] * row[d] * own;
        for (int d = 0; d < KEY_WIDTH; d++)
            gradient[d] = factor * own * (gradient[d] - (has_norm ? row[d] * own * along : 0));
    }
};

// The buffers of a call.
struct Call {
    const Case& test;
    int entries, tokens, sequences, chunks = 0;
    Rows q, k, v, output, output_gradient;
    Buffer<float> decays, betas, initial_states, final_states, final_state_gradient;
    Buffer<int> cumulative_tokens, cumulative_chunks, recurrent_heads;
    std::vector<Head> heads; // (N, H)

    static int sum(const std::vector<int>& lengths) {
        int total = 0;
        for (int length : lengths) total += length;
        return total;
    }
    int states() const { return sequences * test.heads * KEY_WIDTH * VALUE_WIDTH; }
    int rows() const { return entries * test.heads * tokens; }

    Call(const Case& test)
        : test(test),
          entries(test.is_packed ? 1 : int(test.lengths.size())),
          tokens(test.is_packed ? sum(test.lengths) : test.lengths[0]),
          sequences(int(test.lengths.size())),
          q(entries, test.query_heads, tokens, KEY_WIDTH, "queries"),
          k(entries, test.key_heads, tokens, KEY_WIDTH, "keys"),
          v(entries, test.value_heads, tokens, VALUE_WIDTH, "values"),
          output(entries, test.heads, tokens, VALUE_WIDTH, "output"),
          output_gradient(entries, test.heads, tokens, VALUE_WIDTH, "output_gradient"),
          decays(rows() * (test.decay == Decay::Channels ? KEY_WIDTH : 1), "decays"),
          betas(rows(), "betas"),
          initial_states(states(), "initial_states"),
          final_states(states(), "final_states"),
          final_state_gradient(states(), "final_state_gradient"),
          cumulative_tokens(sequences + 1, "cumulative_tokens"),
          cumulative_chunks(sequences + 1, "cumulative_chunks"),
          recurrent_heads(sequences * test.heads, "recurrent_heads") {
        fill();
        for (int n = 0; n < sequences; n++)
            for (int head = 0; head < test.heads; head++) heads.push_back(reference(n, head));
    }

    void fill() {
        q.fill(entries, test.has_norm ? 1 : 0.3), k.fill(entries, test.has_norm ? 1 : 0.3), v.fill(entries, 1);
        output_gradient.fill(entries, 1);
        for (size_t i = 0; i < decays.count; i++) {
            decays[i] = float(uniform(test.smallest_decay, test.largest_decay));
            if (test.mixes_decays && uniform(0, 1) < 0.8) decays[i] *= 0.01f;
            if (test.clears_states && uniform(0, 1) < 0.1) decays[i] = -INFINITY;
            const size_t head = i / (decays.count / (entries * test.heads)) % test.heads;
            if (test.has_large_head && head == 0) decays[i] = float(uniform(2.6, 2.9));
        }
        for (size_t i = 0; i < betas.count; i++)
            betas[i] = uniform(0, 1) < 0.1 ? 0 : float(uniform(0, test.largest_beta));
        for (size_t i = 0; i < initial_states.count; i++) initial_states[i] = float(0.3 * normal());
        for (size_t i = 0; i < final_state_gradient.count; i++) final_state_gradient[i] = float(0.3 * normal());
        for (int n = 0; n <= sequences; n++) {
            cumulative_tokens[n] = n ? cumulative_tokens[n - 1] + test.lengths[n - 1] : 0;
            cumulative_chunks[n] = n ? cumulative_chunks[n - 1] + (test.lengths[n - 1] + CHUNK - 1) / CHUNK : 0;
        }
        chunks = cumulative_chunks[sequences];
        const void* inputs[] = {q.elements.data, k.elements.data, v.elements.data, output_gradient.elements.data,
                                decays.data, betas.data, initial_states.data, final_state_gradient.data,
                                cumulative_tokens.data, cumulative_chunks.data};
        for (const void* input : inputs) emulator::protect(input);
    }

    int entry_of(int n) const { return test.is_packed ? 0 : n; }
    int first_token(int n) const { return test.is_packed ? cumulative_tokens[n] : 0; }
    // The row in (B, H, T) of a token of a sequence.
    i64 row(int n, int head, int t) const {
        return ((i64)entry_of(n) * test.heads + head) * tokens + first_token(n) + t;
    }

    Head reference(int n, int h) {
        Head head;
        const int length = test.lengths[n], entry = entry_of(n), first = first_token(n);
        head.tokens = length, head.scale = float(test.scale);
        head.has_betas = test.has_betas, head.has_norm = test.has_norm;
        const auto read = [&](const Rows& rows, int count) {
            Numbers numbers;
            for (int t = 0; t < length; t++)
                for (int column = 0; column < rows.width; column++) {
                    numbers.push_back(
                        to_number(rows.elements[rows.at(entry, h / (test.heads / count), first + t, column)]));
                }
            return numbers;
        };
        head.q = read(q, test.query_heads), head.k = read(k, test.key_heads), head.v = read(v, test.value_heads);
        head.output_gradient = read(output_gradient, test.heads);
        for (int t = 0; t < length; t++) {
            head.beta.push_back(test.has_betas ? betas[row(n, h, t)] : 1);
            for (int d = 0; d < KEY_WIDTH; d++) {
                double decay = 0;
                if (test.decay == Decay::Heads) decay = decays[row(n, h, t)];
                if (test.decay == Decay::Channels) decay = decays[row(n, h, t) * KEY_WIDTH + d];
                head.decay.push_back(decay);
            }
        }
        const int size = KEY_WIDTH * VALUE_WIDTH;
        for (int i = 0; i < size; i++) {
            const i64 at = (i64)(n * test.heads + h) * size + i;
            head.initial.push_back(test.has_initial_states ? initial_states[at] : 0);
            head.final_gradient.push_back(test.has_state_gradient ? final_state_gradient[at] : 0);
        }
        head.run();
        return head;
    }

    DeltaArguments arguments() {
        DeltaArguments arguments;
        memset((void*)&arguments, 0, sizeof arguments);
        arguments.queries = q.elements.data, arguments.keys = k.elements.data, arguments.values = v.elements.data;
        arguments.query_strides = q.strides, arguments.key_strides = k.strides, arguments.value_strides = v.strides;
        const i64 width = test.decay == Decay::Channels ? KEY_WIDTH : 1;
        if (test.decay != Decay::None) arguments.decays = decays.data;
        arguments.decay_strides = {(i64)test.heads * tokens * width, tokens * width, width};
        arguments.decay_per_channel = test.decay == Decay::Channels;
        if (test.has_betas) arguments.betas = betas.data;
        arguments.beta_strides = {(i64)test.heads * tokens, tokens, 1};
        if (test.has_initial_states) arguments.initial_states = initial_states.data;
        arguments.output = output.elements.data, arguments.output_strides = output.strides;
        arguments.final_states = final_states.data;
        if (test.is_packed) arguments.cumulative_tokens = cumulative_tokens.data;
        if (test.is_packed) arguments.cumulative_chunks = cumulative_chunks.data;
        arguments.recurrent_heads = recurrent_heads.data;
        arguments.sequences = sequences, arguments.heads = test.heads, arguments.query_heads = test.query_heads;
        arguments.key_heads = test.key_heads, arguments.value_heads = test.value_heads, arguments.tokens = tokens;
        arguments.chunks = chunks, arguments.has_norm = test.has_norm;
        arguments.scale = float(test.scale), arguments.norm_epsilon = 1e-6f;
        return arguments;
    }
};

static void step(DeltaArguments arguments, bool only_recurrent_heads) {
    arguments.only_recurrent_heads = only_recurrent_heads;
    launch("delta_step", divide_up(VALUE_WIDTH, 32), arguments.heads, arguments.sequences, STEP_WARPS * 32, STEP_SHARED,
           arguments, delta_step);
}

static void forward(const DeltaArguments& arguments) {
    const int blocks = divide_up(VALUE_COLUMNS / 16, SCAN_WARPS);
    launch("delta_prepare", arguments.chunks, arguments.heads, 1, PREPARE_WARPS * 32, PREPARE_SHARED, arguments,
           delta_prepare);
    launch("delta_scan", blocks, arguments.heads, arguments.sequences, SCAN_WARPS * 32, SCAN_SHARED, arguments,
           delta_scan);
    step(arguments, true);
}

static void backward(const DeltaArguments& arguments) {
    const int blocks = divide_up(VALUE_COLUMNS / 16, SCAN_WARPS);
    launch("delta_prepare_backward", arguments.chunks, arguments.heads, 1, PREPARE_WARPS * 32, PREPARE_SHARED,
           arguments, delta_prepare_backward);
    launch("delta_scan_backward", blocks, arguments.heads, arguments.sequences, SCAN_WARPS * 32, SCAN_SHARED, arguments,
           delta_scan_backward);
    launch("delta_gradients", arguments.chunks, arguments.heads, 1, GRADIENT_WARPS * 32, GRADIENT_SHARED, arguments,
           delta_gradients);
    launch("delta_step_backward", arguments.heads, arguments.sequences, 1, BACKWARD_STEP_THREADS, BACKWARD_STEP_SHARED,
           arguments, delta_step_backward);
}

// The name of the comparisons of a head.
static std::string name_of(const Call& call, const char* path, int n, int h) {
    return std::string(call.test.name) + ", " + path + ", head " + std::to_string(h) + " of sequence " +
           std::to_string(n);
}

static void check_results(const Call& call, const char* path) {
    for (int n = 0; n < call.sequences; n++)
        for (int h = 0; h < call.test.heads; h++) {
            const Head& head = call.heads[n * call.test.heads + h];
            Numbers outputs, states;
            for (int t = 0; t < head.tokens; t++)
                for (int c = 0; c < VALUE_WIDTH; c++) {
                    const i64 at = call.output.at(call.entry_of(n), h, call.first_token(n) + t, c);
                    outputs.push_back(to_number(call.output.elements[at]));
                }
            for (int i = 0; i < KEY_WIDTH * VALUE_WIDTH; i++) {
                states.push_back(call.final_states[(i64)(n * call.test.heads + h) * (KEY_WIDTH * VALUE_WIDTH) + i]);
            }
            const std::string name = name_of(call, path, n, h);
            compare(name, "output", outputs, head.output, tolerance(4e-6, 2e-3, 8e-3));
            compare(name, "final states", states, head.final, tolerance(4e-6, 2e-3, 4e-3));
        }
}

// Returns numbers divided by the largest of others.
static Numbers divided(const Numbers& numbers, const Numbers& by) {
    double largest = 0;
    for (double x : by) largest = std::max(largest, std::fabs(x));
    Numbers result = numbers;
    for (double& x : result) x /= largest > 0 ? largest : 1;
    return result;
}

// Compares gradients (B, H, T, width), the expected ones as they are or, for one number of a token, summed over
// columns. Both are divided by the largest expected one, which may be tiny.
static void check_rows(const Call& call, const char* what, const Buffer<float>& found, int width,
                       const Numbers Head::* field) {
    for (int n = 0; n < call.sequences; n++)
        for (int h = 0; h < call.test.heads; h++) {
            const Head& head = call.heads[n * call.test.heads + h];
            const Numbers& numbers = head.*field;
            const int columns = head.tokens ? int(numbers.size()) / head.tokens : width;
            Numbers own, expected;
            for (int t = 0; t < head.tokens; t++)
                for (int c = 0; c < width; c++) {
                    own.push_back(found[call.row(n, h, t) * width + c]);
                    double sum = 0;
                    for (int d = c; d < columns; d += width) sum += numbers[t * columns + d];
                    expected.push_back(sum);
                }
            compare(name_of(call, "backward", n, h), what, divided(own, expected), divided(expected, expected),
                    tolerance(1e-5, 4e-3, 8e-3));
        }
}

static void check_gradients(Call& call, DeltaArguments arguments) {
    const Case& test = call.test;
    const int rows = call.rows(), tile_rows = call.chunks * test.heads;
    Buffer<float> dq(rows * KEY_WIDTH, "query_gradient"), dk(rows * KEY_WIDTH, "key_gradient");
    Buffer<float> dv(rows * VALUE_WIDTH, "value_gradient"), ddecay(call.decays.count, "decay_gradient");
    Buffer<float> dbeta(rows, "beta_gradient"), dinitial(call.states(), "initial_state_gradient");
    Buffer<float> chunk_states(tile_rows * VALUE_COLUMNS * KEY_COLUMNS, "chunk_states");
    Buffer<float> chunk_state_gradients(tile_rows * VALUE_COLUMNS * KEY_COLUMNS, "chunk_state_gradients");
    Buffer<float> errors(tile_rows * CHUNK * VALUE_COLUMNS, "errors");
    Buffer<float> error_gradients(tile_rows * CHUNK * VALUE_COLUMNS, "error_gradients");
    arguments.output = nullptr, arguments.final_states = nullptr;
    arguments.chunk_states = chunk_states.data, arguments.errors = errors.data;
    forward(arguments);
    arguments.output_gradient = call.output_gradient.elements.data;
    arguments.output_gradient_strides = call.output_gradient.strides;
    if (test.has_state_gradient) arguments.final_state_gradient = call.final_state_gradient.data;
    arguments.query_gradient = dq.data, arguments.key_gradient = dk.data, arguments.value_gradient = dv.data;
    if (test.decay != Decay::None) arguments.decay_gradient = ddecay.data;
    if (test.has_betas) arguments.beta_gradient = dbeta.data;
    arguments.initial_state_gradient = dinitial.data;
    arguments.chunk_state_gradients = chunk_state_gradients.data, arguments.error_gradients = error_gradients.data;
    backward(arguments);

    check_rows(call, "the gradient of queries", dq, KEY_WIDTH, &Head::dq);
    check_rows(call, "the gradient of keys", dk, KEY_WIDTH, &Head::dk);
    check_rows(call, "the gradient of values", dv, VALUE_WIDTH, &Head::dv);
    const int decays = test.decay == Decay::Channels ? KEY_WIDTH : 1;
    if (test.decay != Decay::None) check_rows(call, "the gradient of decays", ddecay, decays, &Head::ddecay);
    if (test.has_betas) check_rows(call, "the gradient of betas", dbeta, 1, &Head::dbeta);
    for (int i = 0; i < call.sequences * test.heads; i++) {
        const float* first = &dinitial[(i64)i * KEY_WIDTH * VALUE_WIDTH];
        const Numbers own(first, first + KEY_WIDTH * VALUE_WIDTH), expected = call.heads[i].dinitial;
        compare(name_of(call, "backward", i / test.heads, i % test.heads), "the gradient of initial states",
                divided(own, expected), divided(expected, expected), tolerance(1e-5, 4e-3, 8e-3));
    }
}

// Checks that the heads with large factors, and no others, were computed token by token.
static void check_recurrent_heads(const Call& call) {
    Numbers found, expected;
    for (int n = 0; n < call.sequences; n++)
        for (int head = 0; head < call.test.heads; head++) {
            found.push_back(call.recurrent_heads[n * call.test.heads + head]);
            expected.push_back(call.test.has_large_head && head == 0 && call.test.lengths[n] >= 16);
        }
    compare(call.test.name, "the choice of heads", found, expected, 0);
}

static void run(const Case& test) {
    emulator::clear_buffers();
    Call call(test);
    DeltaArguments arguments = call.arguments();
    step(arguments, false);
    check_results(call, "token by token");

    Buffer<float> tiles((size_t)call.chunks * test.heads * TILE_WORDS, "tiles");
    arguments.tiles = tiles.data;
    for (size_t i = 0; i < call.recurrent_heads.count; i++) call.recurrent_heads[i] = 0;
    forward(arguments);
    check_results(call, "chunks");
    check_recurrent_heads(call);
    check_gradients(call, arguments);
}

int main(int count, char** names) {
    const std::vector<Case> all = {
        {.name = "decays of heads"},
        {.name = "decays of channels", .lengths = {CHUNK + 3}, .decay = Decay::Channels},
        {.name = "no decays", .lengths = {CHUNK + 1}, .decay = Decay::None},
        {.name = "no betas", .lengths = {CHUNK + 1}, .has_betas = false, .has_initial_states = false},
        {.name = "neither", .lengths = {3}, .decay = Decay::None, .has_betas = false, .has_norm = false},
        {.name = "betas up to 2", .lengths = {2 * CHUNK}, .has_state_gradient = false, .largest_beta = 2},
        {.name = "grouped heads", .lengths = {7, 7}, .heads = 4, .query_heads = 4, .key_heads = 1, .value_heads = 2},
        {.name = "packed sequences", .lengths = {CHUNK, 0, 1, 2 * CHUNK + 1}, .is_packed = true},
        {.name = "factors of zero", .lengths = {2 * CHUNK + 2}, .decay = Decay::Channels, .clears_states = true},
        {.name = "growing states",
         .lengths = {CHUNK + 4},
         .largest_beta = 0.5,
         .smallest_decay = -0.5,
         .largest_decay = 0.6},
        // f16 has no numbers as large as these outputs.
        {.name = "factors of a head too large for a chunk",
         .lengths = {18},
         .has_initial_states = false,
         .largest_beta = 0.1,
         .has_large_head = ELEMENT != 0},
        {.name = "large factors of channels in packed sequences",
         .lengths = {18, 0, 3},
         .is_packed = true,
         .decay = Decay::Channels,
         .has_betas = false,
         .has_large_head = ELEMENT != 0},
        {.name = "strong decays", .lengths = {CHUNK + 5}, .smallest_decay = -22, .largest_decay = -16},
        {.name = "very strong decays of channels",
         .lengths = {CHUNK + 5},
         .decay = Decay::Channels,
         .smallest_decay = -85,
         .largest_decay = -60},
        {.name = "strong decays among weak ones", .lengths = {2 * CHUNK}, .smallest_decay = -80, .mixes_decays = true},
    };
    for (const Case& test : all) {
        if (count < 2 || std::string(test.name).find(names[1]) != std::string::npos) run(test);
    }
    return finish();
}

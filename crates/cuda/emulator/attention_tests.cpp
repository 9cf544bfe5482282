// The attention kernels on the emulator, against plain loops in f64. A program tests one specialisation; run_tests.sh
// has the list of them. ONLY=words runs the cases whose names contain the words, VERBOSE=1 prints every error.
#include "reference.h"

static int failures = 0, comparisons = 0;

// Compares numbers; the error is relative to the largest of them. Where a gradient is not finite, it may be NaN or
// infinite.
static void compare(const Case& c, const char* what, const std::vector<double>& found,
                    const std::vector<double>& expected, double tolerance, double least_top = 0.05) {
    const bool is_gradient = strstr(what, "gradient");
    double worst = 0, top = least_top;
    size_t at = 0;
    for (double x : expected)
        if (std::isfinite(x)) top = std::max(top, std::fabs(x));
    for (size_t i = 0; i < expected.size(); i++) {
        const bool is_equal = expected[i] == found[i] || (std::isnan(expected[i]) && std::isnan(found[i])) ||
                              (is_gradient && !std::isfinite(expected[i]) && !std::isfinite(found[i]));
        double error = is_equal ? 0 : std::fabs(expected[i] - found[i]) / top;
        if (std::isnan(error)) error = 1e30;
        if (error > worst) worst = error, at = i;
    }
    comparisons++;
    const bool is_good = worst <= tolerance;
    if (!is_good) failures++;
    if (is_good && !getenv("VERBOSE")) return;
    printf("  %s %s, %s: error %.2e of %.2e at %zu", is_good ? "ok  " : "FAIL", c.name, what, worst, tolerance, at);
    if (!expected.empty()) printf(": %g, expected %g", found[at], expected[at]);
    printf("\n");
}

static std::vector<double> to_vector(const Buffer<float>& numbers) {
    return std::vector<double>(numbers.data, numbers.data + numbers.count);
}

// The order of blocks and threads of the case that runs.
static emulator::Order order = emulator::Order::Forward;

// Launches a kernel with x * y * z blocks. Returns false after a fault, which counts as a failure.
static bool launch(const Case& c, const char* kernel, int x, int y, int z, int threads, int shared_bytes,
                   const AttentionArguments& arguments, void (*run)(const AttentionArguments&),
                   bool waits_for_blocks = false) {
    if (emulator::launch(kernel, u64(x) * y * z, threads, shared_bytes, [&] { run(arguments); }, order,
                         waits_for_blocks))
        return true;
    printf("  FAULT %s: %s\n", c.name, emulator::machine().fault.c_str());
    failures++;
    return false;
}

static int quotient(int a, int b) { return (a + b - 1) / b; }

static bool run_forward(Call& call) {
#if KERNEL_SET & 1
    AttentionArguments& a = call.arguments;
    a.blocks = quotient(call.most_queries, FORWARD_QUERIES);
    return launch(call.c, "attention_forward", a.blocks * a.heads * a.sequences, 1, 1, FORWARD_THREADS,
                  FORWARD_SHARED_BYTES, a, attention_forward);
#else
    return false;
#endif
}

static bool run_decode(Call& call) {
#if KERNEL_SET & 2
    AttentionArguments& a = call.arguments;
    Buffer<float> outputs(call.rows() * a.splits * VALUE_DIM, "partial_outputs");
    Buffer<float2> statistics(call.rows() * a.splits, "partial_statistics");
    a.partial_outputs = outputs.data, a.partial_statistics = statistics.data;
    a.blocks = quotient(call.most_queries * a.heads / a.key_heads, DECODE_ROWS);
    if (!launch(call.c, "attention_decode", a.splits, a.blocks * a.key_heads, a.sequences, DECODE_THREADS,
                DECODE_SHARED_BYTES, a, attention_decode))
        return false;
    if (a.splits == 1) return true;
    return launch(call.c, "attention_combine", quotient(int(call.rows()), 4), 1, 1, SMALL_BLOCK_THREADS, 0, a,
                  attention_combine);
#else
    return false;
#endif
}

#if KERNEL_SET & 4
// The results and the scratch of the backward pass.
struct Gradients {
    Rows<Element> q, k, v;
    Buffer<float> delta, sinks, slopes, relative_bias, bias, scores;
    Buffer<int2> query_intervals;
    Buffer<int4> tile_intervals;
    Buffer<float> query_sums, slope_parts, relative_bias_parts;
    Buffer<int> turns;

    Gradients(Call& call, int query_tiles, int key_blocks)
        : q(call.batches, call.c.heads, call.query_count, HEAD_DIM, row_pitch(HEAD_DIM), call.c.is_bthd, "dq"),
          k(call.batches, call.c.key_heads, call.key_count, HEAD_DIM, row_pitch(HEAD_DIM), call.c.is_bthd, "dk"),
          v(call.batches, call.c.key_heads, call.key_count, VALUE_DIM, row_pitch(VALUE_DIM), call.c.is_bthd, "dv"),
          delta(call.rows(), "delta"), sinks(call.c.heads, "sink_gradient"), slopes(call.c.heads, "slope_gradient"),
          relative_bias(size_t(call.c.heads) * call.relative_length, "relative_bias_gradient", 0),
          bias(size_t(call.arguments.bias_sequences) * call.arguments.bias_heads * call.arguments.bias_queries *
                   call.arguments.bias_keys, "bias_gradient"),
          scores(BIAS_GRADIENT ? call.rows() * call.key_count : 0, "score_gradient", 0),
          query_intervals(size_t(call.batches) * call.query_count, "query_intervals"),
          tile_intervals(size_t(call.c.sequences) * query_tiles, "tile_intervals"),
          query_sums(FUSED_BACKWARD ? tiles(call, query_tiles) * BACKWARD_QUERIES * HEAD_COLUMNS : 0,
                     "query_gradient_sums"),
          slope_parts(SLOPE_GRADIENT ? tiles(call, key_blocks) * KEY_WARPS : 0, "slope_gradient_parts", 0),
          relative_bias_parts(RELATIVE_BIAS_GRADIENT ? size_t(call.launch_pairs()) * call.c.heads / call.c.key_heads *
                                                           key_blocks * call.relative_length : 0,
                              "relative_bias_parts", 0),
          turns(tiles(call, query_tiles), "query_gradient_turns") {
        AttentionArguments& a = call.arguments;
        a.query_gradient = q.buffer.data, a.key_gradient = k.buffer.data, a.value_gradient = v.buffer.data;
        a.query_gradient_strides = q.strides, a.key_gradient_strides = k.strides, a.value_gradient_strides = v.strides;
        a.delta = delta.data, a.sink_gradient = sinks.data, a.slope_gradient = slopes.data;
        a.relative_bias_gradient = relative_bias.data, a.bias_gradient = bias.data, a.score_gradient = scores.data;
        a.query_intervals = query_intervals.data, a.tile_intervals = tile_intervals.data;
        a.query_gradient_sums = query_sums.data, a.query_gradient_turns = turns.data;
        a.slope_gradient_parts = slope_parts.data, a.relative_bias_parts = relative_bias_parts.data;
        a.query_tiles = query_tiles, a.key_blocks = key_blocks;
    }
    static size_t tiles(const Call& call, int of_head) { return size_t(call.c.sequences) * call.c.heads * of_head; }
};

static bool run_backward(Call& call, const Gradients& gradients) {
    AttentionArguments& a = call.arguments;
    const Case& c = call.c;
    bool is_good = launch(c, "attention_backward_delta", quotient(call.query_count, 4), a.heads, call.batches,
                          SMALL_BLOCK_THREADS, 0, a, attention_backward_delta);
    if (is_good && c.has_sinks)
        is_good = launch(c, "attention_backward_sinks", a.heads, 1, 1, SMALL_BLOCK_THREADS, 16, a,
                         attention_backward_sinks);
#ifdef TILES_SHARED_BYTES // the Metal kernels find the intervals of tiles themselves
    is_good = is_good && launch(c, "attention_backward_tiles", a.query_tiles, a.sequences, 1, SMALL_BLOCK_THREADS,
                                TILES_SHARED_BYTES, a, attention_backward_tiles);
#endif
#if !FUSED_BACKWARD
    a.blocks = quotient(call.most_queries, QUERY_BLOCK);
    is_good = is_good && launch(c, "attention_backward_queries", a.blocks * a.heads * a.sequences, 1, 1, QUERY_THREADS,
                                QUERY_SHARED_BYTES, a, attention_backward_queries);
#endif
    a.blocks = a.key_blocks;
    const int pairs = a.key_heads * a.sequences;
    for (a.first_pair = 0; is_good && a.first_pair < pairs; a.first_pair += a.pairs) {
        a.pairs = std::min(call.launch_pairs(), pairs - a.first_pair);
        is_good = launch(c, "attention_backward_keys", a.blocks * a.pairs, 1, 1, KEY_THREADS, KEY_SHARED_BYTES, a,
                         attention_backward_keys, FUSED_BACKWARD);
#if RELATIVE_BIAS_GRADIENT
        is_good = is_good && launch(c, "attention_backward_relative_bias",
                                    quotient(a.relative_bias_length, SMALL_BLOCK_THREADS), a.heads, 1,
                                    SMALL_BLOCK_THREADS, 0, a, attention_backward_relative_bias);
#endif
    }
#if FUSED_BACKWARD
    is_good = is_good && launch(c, "attention_backward_finish", a.query_tiles, a.heads, a.sequences, KEY_THREADS, 0, a,
                                attention_backward_finish);
#endif
#if BIAS_GRADIENT
    is_good = is_good && launch(c, "attention_backward_bias", quotient(a.bias_keys, SMALL_BLOCK_THREADS),
                                a.bias_queries, a.bias_sequences * a.bias_heads, SMALL_BLOCK_THREADS, 16, a,
                                attention_backward_bias);
#endif
#if SLOPE_GRADIENT
    is_good = is_good && launch(c, "attention_backward_slopes", a.heads, 1, 1, SMALL_BLOCK_THREADS, 16, a,
                                attention_backward_slopes);
#endif
    return is_good && gradients.q.rows == call.query_count;
}

static void test_backward(Call& call, const Reference& reference) {
    const Case& c = call.c;
    Gradients gradients(call, quotient(call.most_queries, BACKWARD_QUERIES), quotient(call.most_keys, KEY_BLOCK));
    if (!run_backward(call, gradients)) return;
    const double tolerance = ELEMENT == 1 ? 1.5e-2 : ELEMENT == 0 ? 2e-3 : 6e-6;
    // A gradient is the difference of sums over D_v, of which one is of rounded outputs: of one key it is 0, and what
    // is left is the error of these sums.
    const double terms = std::max(4.0, 0.5 * std::sqrt(double(VALUE_DIM)) / (1 - DROPOUT));
    compare(c, "gradient of queries", gradients.q.numbers(), reference.query_gradient, tolerance, terms);
    compare(c, "gradient of keys", gradients.k.numbers(), reference.key_gradient, tolerance, terms);
    compare(c, "gradient of values", gradients.v.numbers(), reference.value_gradient, tolerance, 4);
    // Sums of many terms that nearly cancel.
    if (c.has_sinks)
        compare(c, "gradient of sinks", to_vector(gradients.sinks), reference.sink_gradient, 5 * tolerance, terms);
    if (SLOPE_GRADIENT)
        compare(c, "gradient of slopes", to_vector(gradients.slopes), reference.slope_gradient, 5 * tolerance,
                10 * terms);
    if (RELATIVE_BIAS_GRADIENT)
        compare(c, "gradient of the relative bias", to_vector(gradients.relative_bias),
                reference.relative_bias_gradient, tolerance, terms);
    if (BIAS_GRADIENT)
        compare(c, "gradient of the bias", to_vector(gradients.bias), reference.bias_gradient, tolerance, terms);
}
#endif

static void test(const Case& c) {
    emulator::clear_buffers();
    Call call(c);
    const Reference reference(call);
    if (c.is_decode ? !run_decode(call) : !run_forward(call)) return;
    // Scores of wide heads are sums of more products.
    const double tolerance = ELEMENT == 1 ? 8e-3 : ELEMENT == 0 ? 1.2e-3 : HEAD_DIM > 128 ? 6e-6 : 3e-6;
    compare(c, "output", call.output.numbers(), reference.output, tolerance);
    if (c.has_log_sum_exp)
        compare(c, "log-sum-exp", to_vector(call.log_sum_exp), reference.log_sum_exp, ELEMENT == 2 ? 2e-6 : 2e-5);
#if KERNEL_SET & 4
    if (c.backward) test_backward(call, reference);
#endif
}

static std::vector<Case> list_cases() {
    std::vector<Case> cases;
    auto add = [&](const char* name, auto set) {
        Case c;
        c.name = name;
        set(c);
        cases.push_back(c);
    };
    add("plain", [](Case&) {});
    add("one key, rows of a head together", [](Case& c) { c.is_bthd = false, c.keys = 1, c.queries = 5; });
    add("a head for each key head", [](Case& c) {
        c.heads = c.key_heads = 2, c.sequences = 1, c.queries = 70, c.keys = 333;
    });
    add("no log-sum-exp", [](Case& c) { c.has_log_sum_exp = false, c.backward = false, c.queries = 20; });
    add("causal", [](Case& c) {
        c.causal = true, c.queries = 150, c.keys = 200, c.has_origins = c.has_dropout_seed = true;
    });
    add("causal, more queries than keys", [](Case& c) { c.causal = true, c.queries = 170, c.keys = 90; });
    add("causal with a first position", [](Case& c) {
        c.causal = true, c.has_first_position = true, c.first_position = 17;
    });
    add("causal with first positions and lengths", [](Case& c) {
        c.causal = c.has_first_positions = c.has_lengths = true, c.queries = 160;
    });
    add("prefixes and starts", [](Case& c) { c.causal = c.has_prefixes = c.has_starts = true; });
    add("window", [](Case& c) { c.causal = true, c.window_left = 20, c.queries = c.keys = 200; });
    add("window on both sides", [](Case& c) { c.window_left = 9, c.window_right = 30, c.queries = 140; });
    add("chunks", [](Case& c) { c.chunk = 24, c.has_first_position = true, c.first_position = -30; });
    add("chunks, causal", [](Case& c) { c.causal = true, c.chunk = 70, c.queries = c.keys = 150; });
    add("intervals of queries", [](Case& c) { c.has_query_intervals = true; });
    add("sinks and lengths", [](Case& c) { c.has_sinks = c.has_lengths = c.has_log_sum_exp_gradient = true; });
    add("sinks and fully masked rows", [](Case& c) { c.has_sinks = c.causal = c.has_query_intervals = true; });
    add("keys of one sequence for all", [](Case& c) { c.shares_keys = true, c.backward = false, c.queries = 40; });
    add("special values", [](Case& c) { c.causal = c.has_special = true, c.scale = 0.05; });
    add("special values in a window", [](Case& c) {
        c.causal = c.has_special = c.has_lengths = true, c.scale = 0.05;
        c.window_left = 30, c.queries = 130;
    });
    add("special keys", [](Case& c) { c.has_special_keys = true, c.queries = 40; });
    add("special keys, causal", [](Case& c) { c.causal = c.has_special_keys = true, c.queries = c.keys = 140; });
    add("special keys in a window", [](Case& c) { c.causal = c.has_special_keys = true, c.window_left = 40; });
    add("special queries, causal", [](Case& c) { c.causal = c.has_special_queries = true, c.queries = c.keys = 140; });
    add("special queries in a window, packed", [](Case& c) {
        c.has_special_queries = c.is_packed = true, c.window_left = c.window_right = 20;
    });
    add("special gradients of the output", [](Case& c) { c.causal = c.has_special_gradients = true; });
    add("large values", [](Case& c) { c.has_large_values = true, c.backward = false, c.scale = 0.01, c.queries = 40; });
    add("large sinks", [](Case& c) {
        c.has_sinks = c.has_large_sinks = c.has_query_intervals = c.has_log_sum_exp_gradient = true;
    });
    add("packed", [](Case& c) { c.is_packed = true, c.sequences = 4; });
    add("packed, causal, sinks", [](Case& c) {
        c.is_packed = c.causal = c.has_sinks = true, c.sequences = 5, c.queries = 160;
    });
    add("packed in a window", [](Case& c) { c.is_packed = c.causal = true, c.window_left = 15, c.sequences = 3; });
    add("a bias of all sequences", [](Case& c) { c.one_sequence = true; });
    add("a bias of all heads, causal", [](Case& c) { c.one_head = c.causal = true; });
    add("a bias of all queries", [](Case& c) { c.one_query = true, c.queries = 140; });
    add("a bias of all keys", [](Case& c) { c.one_key = true, c.queries = 40; });
    add("a bias of all but keys", [](Case& c) { c.one_sequence = c.one_head = c.one_query = true, c.keys = 77; });
    add("large biases", [](Case& c) { c.has_large_biases = true, c.queries = 70; });
    add("large biases, causal, sinks", [](Case& c) {
        c.has_large_biases = c.causal = c.has_sinks = c.has_log_sum_exp_gradient = true;
    });
    add("packed, large biases", [](Case& c) { c.has_large_biases = c.is_packed = true, c.sequences = 3; });
    add("few pairs in a launch", [](Case& c) { c.pairs_of_launch = 3, c.sequences = 4, c.queries = c.keys = 70; });
    for (int splits : {1, 3, 40}) {
        auto add_decode = [&](const char* name, auto set) {
            add(name, [&](Case& c) { c.is_decode = true, c.backward = false, c.splits = splits, set(c); });
        };
        add_decode("decode", [](Case& c) { c.queries = 1, c.keys = 300; });
        add_decode("decode, causal, lengths", [](Case& c) {
            c.queries = 3, c.keys = 400, c.heads = 8, c.key_heads = 1, c.causal = c.has_lengths = true;
        });
        add_decode("decode in a window, sinks", [](Case& c) {
            c.queries = 5, c.keys = 500, c.heads = 6, c.causal = c.has_sinks = true, c.window_left = 100;
        });
        add_decode("decode, special values", [](Case& c) {
            c.queries = 9, c.keys = 200, c.causal = c.has_special = true, c.scale = 0.05;
        });
        add_decode("decode, special keys", [](Case& c) {
            c.queries = 9, c.keys = 200, c.causal = c.has_special_keys = true;
        });
        add_decode("decode, large sinks", [](Case& c) { c.queries = 2, c.has_sinks = c.has_large_sinks = true; });
        add_decode("decode, starts", [](Case& c) { c.queries = 2, c.keys = 200, c.has_starts = c.has_origins = true; });
        add_decode("decode, keys of one sequence for all", [](Case& c) {
            c.queries = 1, c.keys = 90, c.shares_keys = true, c.is_bthd = false;
        });
        add_decode("decode, large biases", [](Case& c) {
            c.queries = 2, c.keys = 90, c.has_large_biases = c.backward = c.has_sinks = true;
        });
        add_decode("decode, packed", [](Case& c) {
            c.queries = 3, c.keys = 200, c.is_packed = c.causal = true, c.sequences = 4;
        });
    }
    return cases;
}

// Whether the specialisation has what the case needs.
static bool is_for_this_specialisation(const Case& c) {
    const bool has_score_tensor = HAS_BIAS || HAS_BOOLEAN_MASK;
    const bool is_broadcast = c.one_sequence || c.one_head || c.one_query || c.one_key;
    if (!(KERNEL_SET & (c.is_decode ? 2 : 1))) return false;
    if (has_score_tensor ? c.is_packed : is_broadcast) return false;
    if (c.has_large_biases && !HAS_BIAS && !HAS_RELATIVE_BIAS) return false;
    if (c.pairs_of_launch && !RELATIVE_BIAS_GRADIENT) return false;
    // Aligned rows are read in chunks of keys, whose stride is 1.
    if (c.one_key && (HAS_BIAS && ALIGNED_BIAS || HAS_BOOLEAN_MASK && ALIGNED_BOOLEAN_MASK)) return false;
    const bool has_special_rows = c.has_special_keys || c.has_special_queries || c.has_special_gradients;
    if (KEY_CODES && (c.has_special_keys || c.has_large_values)) return false;
    // The TF32 remainder of an infinite query is NaN; products with codes are not computed again by plain f32.
    if (KEY_CODES && ELEMENT == 2 && c.has_special_queries) return false;
    // A query whose biases are all -inf may have NaN where it attends to an infinity.
    return !((c.has_special || has_special_rows) && HAS_BIAS);
}

int main() {
    const char* only = getenv("ONLY");
    int count = 0;
    for (const Case& c : list_cases()) {
        if (!is_for_this_specialisation(c) || (only && !strstr(c.name, only))) continue;
        order = emulator::Order(count % 3);
        test(c), count++;
    }
    printf("%s: %d comparisons of %d cases, %d failed\n", failures ? "FAILED" : "passed", comparisons, count, failures);
    return failures || !count;
}

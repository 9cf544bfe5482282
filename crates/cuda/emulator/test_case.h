// A case of the tests: sizes and options, and the tensors of the call that they describe.
//
// Tensors have the exact size that a kernel may access, and are registered with the emulator. Rows are padded, with NaN
// in the padding. Keys that no query attends to are NaN, so that a kernel that reads them shows it.
#pragma once
#include <algorithm>
#include <cstdio>
#include <vector>
#include "attention.cu"
#include "test_elements.h"
#include "pages.h"

#if KEY_CODES
// The bytes of the codes, and the scales, of a row of `width` numbers.
inline int code_bytes(int width) { return CODE_FORMAT == 2 ? width / 2 : width; }
inline int scale_count(int width) { return CODE_FORMAT == 2 && width % 64 == 0 ? width / 64 : 1; }
// E4M3: a sign, 4 bits of exponent and 3 of mantissa.
inline double e4m3_number(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 128 ? -size : size;
}
// A byte of codes; those of NaN are not used.
inline u8 draw_codes() {
    const int code = below(256);
    return CODE_FORMAT == 1 && code % 128 == 127 ? 0 : u8(code);
}
#endif

// A tensor (B, H, T, D) with rows of elements, or of codes.
template <class T> struct Rows {
    int batches, heads, rows, width;
    RowStrides strides;
    Buffer<T> buffer;
    Rows(int batches, int heads, int rows, int width, int pitch, bool is_bthd, const char* name)
        : batches(batches), heads(heads), rows(rows), width(width),
          buffer(size_t(batches) * heads * rows * pitch, name) {
        if (is_bthd) strides = {i64(rows) * heads * pitch, pitch, i64(heads) * pitch};
        else strides = {i64(heads) * rows * pitch, i64(rows) * pitch, pitch};
    }
    T& at(int batch, int head, int row, int column) {
        return buffer[batch * strides.sequence + head * strides.head + row * strides.row + column];
    }
    template <class Draw> void fill(Draw draw) {
        for (int b = 0; b < batches; b++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < rows; i++)
                    for (int d = 0; d < width; d++) at(b, h, i, d) = draw();
    }
    // All numbers as f64, (B, H, T, D).
    std::vector<double> numbers() {
        std::vector<double> all;
        for (int b = 0; b < batches; b++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < rows; i++)
                    for (int d = 0; d < width; d++) all.push_back(to_number(at(b, h, i, d)));
        return all;
    }
};

struct Case {
    const char* name = "";
    int sequences = 2, heads = 4, key_heads = 2, queries = 100, keys = 130;
    bool causal = false;
    int window_left = -1, window_right = -1, chunk = 0;
    bool has_first_position = false;
    int first_position = 0;
    bool has_first_positions = false, has_lengths = false, has_starts = false, has_prefixes = false;
    bool has_query_intervals = false;
    bool is_packed = false;
    bool has_sinks = false, has_log_sum_exp = true, has_log_sum_exp_gradient = false;
    bool is_bthd = true;
    bool has_dropout_seed = false; // of the device
    bool has_origins = false;    // an origin of the relative bias for each sequence
    bool shares_keys = false;    // keys and values have a batch of one: no backward pass
    bool is_decode = false;
    int splits = 1;
    bool backward = true;
    int pairs_of_launch = 0;     // of a sequence and a key head, in launches of the kernel of keys; 0 for all
    bool has_special = false;         // values that are not finite, in rows that queries attend to
    bool has_special_keys = false;    // keys that are not finite: some scores are -inf
    bool has_special_queries = false;
    bool has_special_gradients = false; // of the output
    bool has_large_values = false;    // of up to the largest number
    bool has_large_sinks = false;
    bool has_large_biases = false; // biases of a row, and relative biases of a head, are one number, often a large one
    // Dimensions of size 1 of the bias and the boolean mask.
    bool one_sequence = false, one_head = false, one_query = false, one_key = false;
    double scale = 0.3;
};

const double SOFTCAP = 1.7, DROPOUT = HAS_DROPOUT ? 0.3 : 0;

// The keys that a query attends to.
struct Keys {
    int first, end;
};

// A tensor that is broadcast to the scores.
template <class T> struct Scores {
    ScoreStrides strides;
    Buffer<T> buffer;
    static int pitch(const Case& c, bool is_aligned) {
        const int multiple = 16 / int(sizeof(T)), keys = c.one_key ? 1 : c.keys;
        return is_aligned ? (keys + multiple - 1) / multiple * multiple : keys + 1;
    }
    static int count(int size, bool is_one) { return is_one ? 1 : size; }
    Scores(const Case& c, bool is_aligned, const char* name)
        : buffer(size_t(count(c.sequences, c.one_sequence)) * count(c.heads, c.one_head) *
                     count(c.queries, c.one_query) * pitch(c, is_aligned), name) {
        const i64 row = pitch(c, is_aligned), head = row * count(c.queries, c.one_query);
        strides.key = c.one_key ? 0 : 1, strides.query = c.one_query ? 0 : row, strides.head = c.one_head ? 0 : head;
        strides.sequence = c.one_sequence ? 0 : head * count(c.heads, c.one_head);
    }
    size_t index(int sequence, int head, int query, int key) const {
        return sequence * strides.sequence + head * strides.head + query * strides.query + key * strides.key;
    }
};

inline int row_pitch(int width) { return ALIGNED_ROWS ? (width + 15) / 16 * 16 + 16 : width + 3; }

// The tensors of a case, and the arguments that describe them.
struct Call {
    Case c;
    std::vector<int> query_starts, key_starts; // of each sequence, and the totals
    int batches, query_count, key_count;       // of tensors
    int most_queries = 0, most_keys = 0;       // of a sequence
    int relative_length;
    Rows<Element> q, output, output_gradient;
#if KEY_CODES
    Rows<u8> k, v;
    Rows<float> k_scales, v_scales;
#else
    Rows<Element> k, v;
#endif
    Buffer<float> log_sum_exp, row_statistics, log_sum_exp_gradient, sinks, slopes, relative_bias;
    Buffer<int> cumulative_queries, cumulative_keys, first_positions, lengths, starts, prefixes, first_keys, end_keys,
        origins;
    Buffer<u32> dropout_seed;
    Scores<Element> element_bias;
    Scores<float> float_bias;
    Scores<u8> boolean_mask;
#if KEY_PAGES
    std::unique_ptr<Buffer<int>> page_table;
    std::vector<Pool> pools;
#endif
    AttentionArguments arguments;

    static std::vector<int> draw_starts(const Case& c, int longest, int empty) {
        std::vector<int> all = {0};
        for (int b = 0; b < c.sequences; b++)
            all.push_back(all.back() + (!c.is_packed ? longest : b == empty ? 0 : 1 + below(longest)));
        return all;
    }
    static int longest(const std::vector<int>& starts) {
        int most = 0;
        for (size_t b = 1; b < starts.size(); b++) most = std::max(most, starts[b] - starts[b - 1]);
        return most;
    }
    int key_batches() const { return c.shares_keys ? 1 : batches; }

    explicit Call(const Case& test)
        : c(test), query_starts(draw_starts(c, c.queries, 1)), key_starts(draw_starts(c, c.keys, 2)),
          batches(c.is_packed ? 1 : c.sequences), query_count(c.is_packed ? query_starts.back() : c.queries),
          key_count(c.is_packed ? key_starts.back() : c.keys), most_queries(longest(query_starts)),
          most_keys(longest(key_starts)), relative_length(std::max(1, most_queries + most_keys - 1)),
          q(batches, c.heads, query_count, HEAD_DIM, row_pitch(HEAD_DIM), c.is_bthd, "queries"),
          output(batches, c.heads, query_count, VALUE_DIM, row_pitch(VALUE_DIM), c.is_bthd, "output"),
          output_gradient(batches, c.heads, query_count, VALUE_DIM, row_pitch(VALUE_DIM), c.is_bthd, "output_gradient"),
#if KEY_CODES
          k(key_batches(), c.key_heads, key_count, code_bytes(HEAD_DIM), row_pitch(HEAD_DIM), c.is_bthd, "keys"),
          v(key_batches(), c.key_heads, key_count, code_bytes(VALUE_DIM), row_pitch(VALUE_DIM), c.is_bthd, "values"),
          k_scales(key_batches(), c.key_heads, key_count, scale_count(HEAD_DIM), scale_count(HEAD_DIM), !c.is_bthd,
                   "key_scales"),
          v_scales(key_batches(), c.key_heads, key_count, scale_count(VALUE_DIM), scale_count(VALUE_DIM) + 1, c.is_bthd,
                   "value_scales"),
#else
          k(key_batches(), c.key_heads, key_count, HEAD_DIM, row_pitch(HEAD_DIM), c.is_bthd, "keys"),
          v(key_batches(), c.key_heads, key_count, VALUE_DIM, row_pitch(VALUE_DIM), c.is_bthd, "values"),
#endif
          log_sum_exp(rows(), "log_sum_exp"), row_statistics(2 * rows(), "row_statistics"),
          log_sum_exp_gradient(rows(), "log_sum_exp_gradient"),
          sinks(c.heads, "sinks"), slopes(c.heads, "alibi_slopes"),
          relative_bias(size_t(c.heads) * relative_length, "relative_bias"),
          cumulative_queries(c.sequences + 1, "cumulative_queries"),
          cumulative_keys(c.sequences + 1, "cumulative_keys"),
          first_positions(c.sequences, "first_positions"), lengths(c.sequences, "key_lengths"),
          starts(c.sequences, "key_starts"), prefixes(c.sequences, "prefix_lengths"), first_keys(size_t(batches) * query_count, "first_keys"),
          end_keys(size_t(batches) * query_count, "end_keys"), origins(c.sequences, "relative_bias_origins"),
          dropout_seed(2, "dropout_seed"), element_bias(c, ALIGNED_BIAS, "bias"), float_bias(c, ALIGNED_BIAS, "bias"),
          boolean_mask(c, ALIGNED_BOOLEAN_MASK, "boolean_mask") {
        draw_numbers();
        draw_masks();
        describe();
        poison();
        if (c.has_special) put_special_values();
        if (c.has_special_keys) put_special_keys();
        if (c.has_special_queries) put_special_rows(q);
        if (c.has_special_gradients) put_special_rows(output_gradient);
#if KEY_PAGES
        place_in_pages();
#endif
        protect_inputs();
    }

    // The pairs of a sequence and a key head of a launch of the kernel of keys.
    int launch_pairs() const { return c.pairs_of_launch ? c.pairs_of_launch : c.sequences * c.key_heads; }
    size_t rows() const { return size_t(batches) * c.heads * query_count; }
    int queries_of(int b) const { return query_starts[b + 1] - query_starts[b]; }
    int keys_of(int b) const { return key_starts[b + 1] - key_starts[b]; }
    // The batch and the first row of a sequence in tensors of queries and of keys.
    int batch(int b) const { return c.is_packed ? 0 : b; }
    int key_batch(int b) const { return c.shares_keys ? 0 : batch(b); }
    int first_query(int b) const { return c.is_packed ? query_starts[b] : 0; }
    int first_key(int b) const { return c.is_packed ? key_starts[b] : 0; }

#if KEY_CODES
    // The number of a code; `width` is of the row.
    static double coded(Rows<u8>& codes, Rows<float>& scales, int b, int head, int row, int column, int width) {
        const double scale = scales.at(b, head, row, column / (width / scale_count(width)));
        if (CODE_FORMAT == 1) return e4m3_number(codes.at(b, head, row, column)) * scale;
        if (CODE_FORMAT == 0) return (double(codes.at(b, head, row, column)) - 128) * scale;
        const int byte = codes.at(b, head, row, column / 32 * 16 + column % 16);
        return ((column % 32 < 16 ? byte % 16 : byte / 16) - 7.5) * scale;
    }
#endif
    double key(int b, int head, int row, int column) {
#if KEY_CODES
        return coded(k, k_scales, b, head, row, column, HEAD_DIM);
#else
        return to_number(k.at(b, head, row, column));
#endif
    }
    double value(int b, int head, int row, int column) {
#if KEY_CODES
        return coded(v, v_scales, b, head, row, column, VALUE_DIM);
#else
        return to_number(v.at(b, head, row, column));
#endif
    }
    double bias(int sequence, int head, int query, int key) {
        const size_t at = element_bias.index(sequence, head, query, key);
        return HAS_BIAS == 2 ? double(float_bias.buffer[float_bias.index(sequence, head, query, key)])
                             : to_number(element_bias.buffer[at]);
    }
    bool is_kept(int sequence, int head, int query, int key) {
        return !HAS_BOOLEAN_MASK || boolean_mask.buffer[boolean_mask.index(sequence, head, query, key)];
    }
    bool is_dropped(int b, int head, int query, int key) {
        if (!HAS_DROPOUT) return false;
        const Dropout dropout = {77, 5, batch(b), head};
        return dropout_word(dropout, first_query(b) + query, first_key(b) + key) < arguments.dropout_threshold;
    }
    int position(int b, int query) const {
        if (c.has_first_positions) return query + first_positions[b];
        return query + (c.has_first_position ? c.first_position : keys_of(b) - queries_of(b));
    }
    int origin(int b) const { return c.has_origins ? origins[b] : most_queries - 1; }
    Keys attended(int b, int query) const;

private:
    void draw_numbers();
    void draw_large_biases();
    void draw_masks();
    void describe();
    void poison();
    std::vector<std::vector<char>> used_keys() const;
    void place_in_pages();
    void put_special_values();
    void protect_inputs();
    void put_special_keys();
    void put_special_rows(Rows<Element>& rows);
};

// Forbids kernels to write to what they only read.
inline void Call::protect_inputs() {
    const AttentionArguments& a = arguments;
    const void* inputs[] = {a.queries, a.keys, a.values, a.key_scales, a.value_scales, a.bias, a.boolean_mask,
                            a.alibi_slopes, a.relative_bias, a.relative_bias_origins, a.sinks, a.dropout_seed,
                            a.cumulative_queries, a.cumulative_keys, a.page_table, a.first_positions, a.key_lengths,
                            a.key_starts, a.prefix_lengths, a.first_keys, a.end_keys, a.output_gradient, a.log_sum_exp_gradient};
    for (const void* input : inputs)
        if (input) emulator::protect(input);
}

inline void Call::draw_numbers() {
    q.fill([] { return to_element(normal()); });
    output_gradient.fill([] { return to_element(normal()); });
#if KEY_CODES
    k.fill(draw_codes);
    v.fill(draw_codes);
    const double size = CODE_FORMAT == 2 ? 0.15 : 0.01;
    k_scales.fill([&] { return float(size * (1.5 + normal() / 8)); });
    v_scales.fill([&] { return float(size * (1.5 + normal() / 8)); });
#else
    k.fill([] { return to_element(normal()); });
    v.fill([] { return to_element(normal()); });
#endif
    for (size_t i = 0; i < rows(); i++) log_sum_exp_gradient[i] = c.has_log_sum_exp_gradient ? float(normal()) : 0.0f;
    dropout_seed[0] = 77, dropout_seed[1] = 5;
    for (int h = 0; h < c.heads; h++) sinks[h] = float(normal()), slopes[h] = float(0.02 * (h + 1));
    for (size_t i = 0; i < relative_bias.count; i++) relative_bias[i] = float(normal());
    for (size_t i = 0; i < element_bias.buffer.count; i++)
        element_bias.buffer[i] = to_element(below(50) == 0 ? -INFINITY : normal());
    for (size_t i = 0; i < float_bias.buffer.count; i++)
        float_bias.buffer[i] = float(below(50) == 0 ? -INFINITY : normal());
    for (size_t i = 0; i < boolean_mask.buffer.count; i++) boolean_mask.buffer[i] = below(4) != 0;
    if (c.has_large_biases) draw_large_biases();
    if (c.has_large_sinks)
        for (int h = 0; h < c.heads; h++) sinks[h] = h % 2 ? 3e38f : -3e38f;
#if !KEY_CODES
    const double largest = ELEMENT == 0 ? 65504 : 3.38e38;
    if (c.has_large_values) v.fill([&] { return to_element(uniform(-largest, largest)); });
#endif
}

// Next to these numbers, products have no digit left in f32, or few digits next to those of f16: their weights are then
// all the same.
inline void Call::draw_large_biases() {
    const float least = emulator::from_bits(0xff7f0000u); // of bf16
    const bool is_half = ELEMENT == 0 && HAS_BIAS == 1;
    const std::vector<float> all = is_half ? std::vector<float>{-65504, -40000, 0}
                                           : std::vector<float>{least, -1e10f, 1e10f, -1e20f, 0};
    for (int b = 0; b < (c.one_sequence ? 1 : c.sequences); b++)
        for (int h = 0; h < (c.one_head ? 1 : c.heads); h++)
            for (int i = 0; i < (c.one_query ? 1 : c.queries); i++) {
                const float bias = all[below(int(all.size()))];
                for (int j = 0; j < (c.one_key ? 1 : c.keys); j++) {
                    element_bias.buffer[element_bias.index(b, h, i, j)] = to_element(bias);
                    float_bias.buffer[float_bias.index(b, h, i, j)] = bias;
                }
            }
    for (int h = 0; h < c.heads; h++) {
        const float bias = h == 0 ? least : all[below(int(all.size()))];
        for (int n = 0; n < relative_length; n++) relative_bias[size_t(h) * relative_length + n] = bias;
    }
}

inline void Call::draw_masks() {
    for (int b = 0; b <= c.sequences; b++) cumulative_queries[b] = query_starts[b], cumulative_keys[b] = key_starts[b];
    for (int b = 0; b < c.sequences; b++) {
        first_positions[b] = below(40) - 10;
        lengths[b] = b == 0 ? keys_of(b) * 2 / 3 : keys_of(b) - b;
        starts[b] = b == 0 ? 3 : keys_of(b) / 3;
        prefixes[b] = keys_of(b) / 2 + b;
        origins[b] = most_queries - 1 - 2 * b;
    }
    for (size_t i = 0; i < first_keys.count; i++) {
        first_keys[i] = below(most_keys / 3 + 1);
        end_keys[i] = i % 7 == 3 ? 0 : below(most_keys + 20);
    }
}

inline Keys Call::attended(int b, int query) const {
    int first = 0, end = keys_of(b);
    const int at = position(b, query);
    if (c.has_lengths) end = std::min(end, lengths[b]);
    if (c.has_starts) first = std::max(first, starts[b]);
    if (c.causal) end = std::min(end, std::max(at + 1, c.has_prefixes ? prefixes[b] : 0));
    if (c.window_left >= 0) first = std::max(first, at - c.window_left);
    if (c.window_right >= 0) end = std::min(end, at + c.window_right + 1);
    if (c.chunk > 0) {
        const int start = int(std::floor(double(at) / c.chunk)) * c.chunk;
        first = std::max(first, start), end = std::min(end, start + c.chunk);
    }
    const size_t row = size_t(batch(b)) * query_count + first_query(b) + query;
    if (c.has_query_intervals) first = std::max(first, first_keys[row]), end = std::min(end, end_keys[row]);
    return {first, std::max(first, end)};
}

inline void Call::describe() {
    memset((void*)&arguments, 0, sizeof arguments);
    AttentionArguments& a = arguments;
    a.queries = q.buffer.data, a.keys = k.buffer.data, a.values = v.buffer.data, a.output = output.buffer.data;
    a.query_strides = q.strides, a.key_strides = k.strides, a.value_strides = v.strides;
    a.output_strides = output.strides;
    a.output_gradient = output_gradient.buffer.data, a.output_gradient_strides = output_gradient.strides;
#if KEY_CODES
    a.key_scales = k_scales.buffer.data, a.value_scales = v_scales.buffer.data;
    a.key_scale_strides = k_scales.strides, a.value_scale_strides = v_scales.strides;
    if (c.shares_keys) a.key_scale_strides.sequence = a.value_scale_strides.sequence = 0;
#endif
    if (c.shares_keys) a.key_strides.sequence = a.value_strides.sequence = 0;
    if (c.has_log_sum_exp) a.log_sum_exp = log_sum_exp.data;
    if (c.backward) a.row_statistics = row_statistics.data;
    if (c.has_log_sum_exp_gradient) a.log_sum_exp_gradient = log_sum_exp_gradient.data;
    a.bias = HAS_BIAS == 2 ? (const void*)float_bias.buffer.data : (const void*)element_bias.buffer.data;
    a.bias_strides = HAS_BIAS == 2 ? float_bias.strides : element_bias.strides;
    a.boolean_mask = boolean_mask.buffer.data, a.boolean_mask_strides = boolean_mask.strides;
    a.alibi_slopes = slopes.data;
    a.relative_bias = relative_bias.data, a.relative_bias_head_stride = relative_length;
    a.relative_bias_length = relative_length, a.relative_bias_origin = most_queries - 1;
    if (c.has_origins) a.relative_bias_origins = origins.data;
    if (c.has_sinks) a.sinks = sinks.data;
    if (c.is_packed) a.cumulative_queries = cumulative_queries.data, a.cumulative_keys = cumulative_keys.data;
    if (c.has_first_positions) a.first_positions = first_positions.data;
    if (c.has_lengths) a.key_lengths = lengths.data;
    if (c.has_starts) a.key_starts = starts.data;
    if (c.has_prefixes) a.prefix_lengths = prefixes.data;
    if (c.has_query_intervals) a.first_keys = first_keys.data, a.end_keys = end_keys.data;
    a.sequences = c.sequences, a.heads = c.heads, a.key_heads = c.key_heads;
    a.query_count = query_count, a.key_count = key_count;
    a.has_first_position = c.has_first_position, a.first_position = c.first_position, a.causal = c.causal;
    a.window_left = c.window_left, a.window_right = c.window_right, a.chunk = c.chunk;
    a.splits = c.splits, a.section_heads = 1 + below(3);
    a.scale = float(c.scale), a.softcap = float(SOFTCAP);
    a.kept_weight_factor = float(1 / (1 - DROPOUT));
    a.dropout_threshold = u32(std::llround(DROPOUT * 4294967296.0)), a.dropout_seed_low = 77, a.dropout_seed_high = 5;
    if (c.has_dropout_seed) a.dropout_seed = dropout_seed.data, a.dropout_seed_low = a.dropout_seed_high = 0;
    a.bias_sequences = c.one_sequence ? 1 : c.sequences, a.bias_heads = c.one_head ? 1 : c.heads;
    a.bias_queries = c.one_query ? 1 : c.queries, a.bias_keys = c.one_key ? 1 : c.keys;
}

// Returns whether a query attends to each key of each batch.
inline std::vector<std::vector<char>> Call::used_keys() const {
    std::vector<std::vector<char>> is_used(key_batches(), std::vector<char>(key_count, 0));
    for (int b = 0; b < c.sequences; b++)
        for (int i = 0; i < queries_of(b); i++) {
            const Keys keys = attended(b, i);
            for (int j = keys.first; j < keys.end; j++) is_used[key_batch(b)][first_key(b) + j] = 1;
        }
    return is_used;
}

// Replaces the keys that no query attends to by NaN.
inline void Call::poison() {
    const std::vector<std::vector<char>> is_used = used_keys();
    for (int b = 0; b < key_batches(); b++)
        for (int h = 0; h < c.key_heads; h++)
            for (int j = 0; j < key_count; j++) {
                if (is_used[b][j]) continue;
#if KEY_CODES
                for (int n = 0; n < k_scales.width; n++) k_scales.at(b, h, j, n) = NAN;
                for (int n = 0; n < v_scales.width; n++) v_scales.at(b, h, j, n) = NAN;
#else
                for (int d = 0; d < HEAD_DIM; d++) k.at(b, h, j, d) = to_element(NAN);
                for (int d = 0; d < VALUE_DIM; d++) v.at(b, h, j, d) = to_element(NAN);
#endif
            }
}

// Puts values that are not finite into rows, most of them among the last keys.
inline void Call::put_special_values() {
    for (int b = 0; b < key_batches(); b++)
        for (int n = 0; n < 6; n++) {
            const int row = key_count - 1 - (n < 4 ? n : below(key_count)), head = below(c.key_heads);
#if KEY_CODES
            v_scales.at(b, head, row, below(v_scales.width)) = NAN;
#else
            const double special = n % 3 == 0 ? NAN : n % 3 == 1 ? INFINITY : -INFINITY;
            for (int d = 0; d < VALUE_DIM; d++)
                if (below(3)) v.at(b, head, row, d) = to_element(special);
#endif
        }
}

// Puts infinities into a column of some keys, whose scores are then -inf for most queries, and NaN into the last key.
inline void Call::put_special_keys() {
#if !KEY_CODES
    for (int b = 0; b < q.batches; b++)
        for (int h = 0; h < c.heads; h++)
            for (int i = 0; i < q.rows; i++) {
                const double size = 0.5 + std::fabs(normal());
                q.at(b, h, i, 0) = to_element(i % 16 == 3 ? size : -size);
            }
    for (int b = 0; b < key_batches(); b++)
        for (int n = 0; n < 8; n++) {
            const int row = n == 0 ? key_count - 1 : n < 4 ? key_count - 2 - n : below(key_count);
            k.at(b, below(c.key_heads), row, 0) = to_element(n == 0 ? NAN : INFINITY);
        }
#endif
}

// Puts NaN and infinities into some rows, but not into the first ones, which may attend to few keys.
inline void Call::put_special_rows(Rows<Element>& rows) {
    for (int b = 0; b < rows.batches; b++)
        for (int n = 0; n < 6; n++) {
            const double special = n % 3 == 0 ? NAN : n % 3 == 1 ? INFINITY : -INFINITY;
            const int row = rows.rows / 2 + below(rows.rows - rows.rows / 2);
            rows.at(b, below(rows.heads), row, below(rows.width)) = to_element(special);
        }
}

#if KEY_PAGES
// Copies keys and values to pages in a random order, some of which belong to no sequence. Kernels may access the pages
// with a key that a query attends to, and no others: the table has a page far outside of the pools for the rest.
inline void Call::place_in_pages() {
    const int shift = 3 + below(4), page_size = 1 << shift, width = (most_keys + page_size - 1) / page_size + 1;
    const std::vector<std::vector<char>> is_used = used_keys();
    page_table.reset(new Buffer<int>(size_t(c.sequences) * width, "page_table"));
    std::vector<PlacedPage> placed;
    const int batches_with_pages = c.shares_keys ? 1 : c.sequences;
    std::vector<int> order(size_t(batches_with_pages) * width * 2);
    for (size_t n = 0; n < order.size(); n++) order[n] = int(n);
    std::shuffle(order.begin(), order.end(), generator());
    for (int b = 0; b < c.sequences; b++)
        for (int n = 0; n < width; n++) {
            const int first = n * page_size, end = std::min(keys_of(b), first + page_size);
            bool has_used = false;
            for (int key = first; key < end; key++) has_used |= is_used[key_batch(b)][first_key(b) + key] != 0;
            // Sequences that share keys have the same pages.
            const int page = order[size_t(c.shares_keys ? 0 : b) * width + n];
            (*page_table)[size_t(b) * width + n] = has_used ? page : 0x7ffffff0;
            if (has_used) placed.push_back({page, key_batch(b), first_key(b) + first, end - first});
        }
    AttentionArguments& a = arguments;
    a.page_table = page_table->data, a.page_table_width = width, a.page_shift = shift;
    const Paging paging = {page_size, int(order.size()), c.is_bthd, &placed};
    pools.emplace_back(paging, k, a.keys, a.key_strides, "pages of keys");
    pools.emplace_back(paging, v, a.values, a.value_strides, "pages of values");
#if KEY_CODES
    pools.emplace_back(paging, k_scales, a.key_scales, a.key_scale_strides, "pages of key scales");
    pools.emplace_back(paging, v_scales, a.value_scales, a.value_scale_strides, "pages of value scales");
#endif
}
#endif

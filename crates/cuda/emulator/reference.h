// The results of the kernels, computed by plain loops in f64.
#pragma once
#include "test_case.h"

struct Reference {
    std::vector<double> output, log_sum_exp;
    std::vector<double> query_gradient, key_gradient, value_gradient;
    std::vector<double> sink_gradient, slope_gradient, relative_bias_gradient, bias_gradient;
    explicit Reference(Call& call);

private:
    // One query of a head of a sequence.
    struct Row {
        int b, head, query;
        size_t index;                 // in (B, H, T_q)
        Keys keys;
        std::vector<char> is_attended;
        std::vector<double> scores;   // -inf where a key is masked
        std::vector<double> tanh;     // of the softcap
        std::vector<double> weights;  // before dropout
    };
    double score(Call& call, Row& row, int key);
    void forward(Call& call, Row& row);
    void backward(Call& call, const Row& row);
};

// Adds a bias. Next to a large one, a score has the digits of f32.
inline double plus_bias(double score, double bias) {
    return std::fabs(bias) > 1e9 ? double(float(score + bias)) : score + bias;
}

inline double Reference::score(Call& call, Row& row, int key) {
    const Case& c = call.c;
    const int key_head = row.head / (c.heads / c.key_heads);
    double x = 0;
    for (int d = 0; d < HEAD_DIM; d++)
        x += to_number(call.q.at(call.batch(row.b), row.head, call.first_query(row.b) + row.query, d)) *
             call.key(call.key_batch(row.b), key_head, call.first_key(row.b) + key, d);
    x *= c.scale;
    if (HAS_SOFTCAP) row.tanh[key] = std::tanh(x / SOFTCAP), x = row.tanh[key] * SOFTCAP;
    if (HAS_ALIBI) x -= call.slopes[row.head] * std::abs(call.position(row.b, row.query) - key);
    if (HAS_RELATIVE_BIAS) {
        const int entry = call.origin(row.b) + key - row.query;
        if (entry >= 0 && entry < call.relative_length)
            x = plus_bias(x, call.relative_bias[size_t(row.head) * call.relative_length + entry]);
    }
    if (HAS_BIAS) x = plus_bias(x, call.bias(row.b, row.head, row.query, key));
    return x;
}

inline void Reference::forward(Call& call, Row& row) {
    const Case& c = call.c;
    const int keys = call.keys_of(row.b), key_head = row.head / (c.heads / c.key_heads);
    row.scores.assign(keys, -INFINITY), row.tanh.assign(keys, 0), row.weights.assign(keys, 0);
    row.is_attended.assign(keys, 0);
    double top = c.has_sinks ? call.sinks[row.head] : -INFINITY;
    for (int j = row.keys.first; j < row.keys.end; j++)
        if (call.is_kept(row.b, row.head, row.query, j)) {
            row.is_attended[j] = 1, row.scores[j] = score(call, row, j);
            if (row.scores[j] > top) top = row.scores[j]; // NaN reaches the sum
        }
    const double reference = top == -INFINITY ? 0 : top;
    double sum = c.has_sinks ? std::exp(call.sinks[row.head] - reference) : 0;
    for (double x : row.scores) sum += std::exp(x - reference);
    log_sum_exp[row.index] = sum == 0 ? -INFINITY : top + std::log(sum);
    for (int j = 0; j < keys; j++) {
        if (!row.is_attended[j]) continue;
        row.weights[j] = sum == 0 ? 0 : std::exp(row.scores[j] - reference) / sum;
        const double factor = call.is_dropped(row.b, row.head, row.query, j) ? 0 : 1 / (1 - DROPOUT);
        for (int d = 0; d < VALUE_DIM; d++) {
            const double value = call.value(call.key_batch(row.b), key_head, call.first_key(row.b) + j, d);
            // Values that are not finite reach every query that attends to them.
            output[row.index * VALUE_DIM + d] += std::isfinite(value) ? row.weights[j] * factor * value : value;
        }
    }
}

inline void Reference::backward(Call& call, const Row& row) {
    const Case& c = call.c;
    const int key_head = row.head / (c.heads / c.key_heads), batch = call.batch(row.b);
    const int query_row = call.first_query(row.b) + row.query;
    auto gradient = [&](int d) { return to_number(call.output_gradient.at(batch, row.head, query_row, d)); };
    double delta = -call.log_sum_exp_gradient[row.index];
    for (int d = 0; d < VALUE_DIM; d++) delta += output[row.index * VALUE_DIM + d] * gradient(d);
    if (c.has_sinks && log_sum_exp[row.index] > -INFINITY)
        sink_gradient[row.head] -= std::exp(call.sinks[row.head] - log_sum_exp[row.index]) * delta;
    for (int j = 0; j < call.keys_of(row.b); j++) {
        if (!row.is_attended[j]) continue;
        const int key_row = call.first_key(row.b) + j;
        const double kept = call.is_dropped(row.b, row.head, row.query, j) ? 0 : 1 / (1 - DROPOUT);
        double weight_gradient = 0;
        for (int d = 0; d < VALUE_DIM; d++)
            weight_gradient += kept * gradient(d) * call.value(batch, key_head, key_row, d);
        double score_gradient = row.weights[j] * (weight_gradient - delta);
        if (HAS_ALIBI)
            slope_gradient[row.head] -= score_gradient * std::abs(call.position(row.b, row.query) - j);
        const int entry = call.origin(row.b) + j - row.query;
        if (HAS_RELATIVE_BIAS && entry >= 0 && entry < call.relative_length)
            relative_bias_gradient[size_t(row.head) * call.relative_length + entry] += score_gradient;
        if (BIAS_GRADIENT) {
            const AttentionArguments& a = call.arguments;
            size_t at = c.one_sequence ? 0 : row.b;
            at = at * a.bias_heads + (c.one_head ? 0 : row.head);
            at = at * a.bias_queries + (c.one_query ? 0 : row.query);
            bias_gradient[at * a.bias_keys + (c.one_key ? 0 : j)] += score_gradient;
        }
        if (HAS_SOFTCAP) score_gradient *= 1 - row.tanh[j] * row.tanh[j];
        const size_t key_index = (size_t(batch) * c.key_heads + key_head) * call.key_count + key_row;
        for (int d = 0; d < HEAD_DIM; d++) {
            query_gradient[row.index * HEAD_DIM + d] +=
                score_gradient * c.scale * call.key(batch, key_head, key_row, d);
            key_gradient[key_index * HEAD_DIM + d] +=
                score_gradient * c.scale * to_number(call.q.at(batch, row.head, query_row, d));
        }
        for (int d = 0; d < VALUE_DIM; d++)
            value_gradient[key_index * VALUE_DIM + d] += row.weights[j] * kept * gradient(d);
    }
}

inline Reference::Reference(Call& call) {
    const Case& c = call.c;
    const AttentionArguments& a = call.arguments;
    const size_t rows = call.rows(), key_rows = size_t(call.batches) * c.key_heads * call.key_count;
    output.assign(rows * VALUE_DIM, 0), log_sum_exp.assign(rows, 0);
    query_gradient.assign(rows * HEAD_DIM, 0), key_gradient.assign(key_rows * HEAD_DIM, 0);
    value_gradient.assign(key_rows * VALUE_DIM, 0);
    sink_gradient.assign(c.heads, 0), slope_gradient.assign(c.heads, 0);
    relative_bias_gradient.assign(size_t(c.heads) * call.relative_length, 0);
    bias_gradient.assign(BIAS_GRADIENT ? size_t(a.bias_sequences) * a.bias_heads * a.bias_queries * a.bias_keys : 0, 0);
    for (int b = 0; b < c.sequences; b++)
        for (int head = 0; head < c.heads; head++)
            for (int i = 0; i < call.queries_of(b); i++) {
                Row row;
                row.b = b, row.head = head, row.query = i, row.keys = call.attended(b, i);
                row.index = (size_t(call.batch(b)) * c.heads + head) * call.query_count + call.first_query(b) + i;
                forward(call, row);
                if (c.backward) backward(call, row);
            }
}

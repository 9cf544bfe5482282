// Counts the bytes that the Metal kernels of one specialisation read from device memory, and their products, and the same
// of the kernels of MLX and Candle (`sdpa`), from their source: counts.sh prints a table.
#include "test_case.h"

static int quotient(int a, int b) { return (a + b - 1) / b; }

// Bytes read and multiplications with an addition.
struct Counted {
    const char* kernel;
    u64 bytes, products;
};

// steel_attention of MLX and Candle: blocks of 32 queries, whose keys arrive in blocks of 32, or of 16 from D = 128 on.
// With a causal mask, a block goes through the blocks of keys up to its last query.
static Counted count_steel(const Case& c) {
    const int block_keys = HEAD_DIM < 128 ? 32 : 16, blocks = quotient(c.keys, block_keys);
    Counted sum = {"steel_attention", 0, 0};
    for (int first = 0; first < c.queries; first += 32) {
        const int queries = std::min(32, c.queries - first), last = first + 32 + c.keys - c.queries;
        const int own = c.causal ? std::min(blocks, quotient(last, block_keys)) : blocks;
        sum.bytes += u64(queries + 2 * std::min(own * block_keys, c.keys)) * HEAD_DIM * ELEMENT_BYTES;
        sum.products += u64(own) * 2 * 32 * block_keys * HEAD_DIM;
    }
    const u64 heads = u64(c.sequences) * c.heads;
    return {sum.kernel, sum.bytes * heads, sum.products * heads};
}

// sdpa_vector: a threadgroup for each query and head, which reads all keys and values.
static Counted count_vector(const Case& c) {
    const u64 rows = u64(c.sequences) * c.heads * c.queries;
    const u64 keys = rows * 2 * c.keys * HEAD_DIM;
    return {"sdpa_vector", (keys + rows * HEAD_DIM) * ELEMENT_BYTES, keys};
}

static void launch(const char* kernel, int groups, int threads, int shared_bytes, const AttentionArguments& arguments,
                   void (*run)(const AttentionArguments&)) {
    if (emulator::launch(kernel, u64(groups), threads, shared_bytes, [&] { run(arguments); }, emulator::Order::Forward))
        return;
    printf("FAULT: %s\n", emulator::machine().fault.c_str());
    std::exit(1);
}

static Counted count_forward(Call& call) {
    AttentionArguments& a = call.arguments;
    a.blocks = quotient(call.most_queries, FORWARD_QUERIES);
    emulator::counts() = {};
    launch("attention_forward", a.blocks * a.heads * a.sequences, FORWARD_THREADS, FORWARD_SHARED_BYTES, a,
           attention_forward);
    return {"attention_forward", emulator::counts().bytes_read, emulator::counts().products};
}

static Counted count_decode(Call& call) {
    AttentionArguments& a = call.arguments;
    a.blocks = quotient(call.most_queries * a.heads / a.key_heads, DECODE_ROWS);
    emulator::counts() = {};
    launch("attention_decode", a.splits * a.blocks * a.key_heads * a.sequences, FORWARD_THREADS, DECODE_SHARED_BYTES, a,
           attention_decode);
    return {"attention_decode", emulator::counts().bytes_read, emulator::counts().products};
}

// The backward kernels, which MLX and Candle do not have. The other numbers are the products of D columns that each pair
// of a query and a key that is not masked needs: three for queries, and four for keys.
static void count_backward(Call& call) {
    AttentionArguments& a = call.arguments;
    Buffer<float> delta(call.rows(), "delta");
    Rows<Element> q(call.batches, a.heads, call.query_count, HEAD_DIM, row_pitch(HEAD_DIM), true, "dq");
    Rows<Element> k(call.batches, a.key_heads, call.key_count, HEAD_DIM, row_pitch(HEAD_DIM), true, "dk");
    Rows<Element> v(call.batches, a.key_heads, call.key_count, VALUE_DIM, row_pitch(VALUE_DIM), true, "dv");
    a.delta = delta.data;
    a.query_gradient = q.buffer.data, a.key_gradient = k.buffer.data, a.value_gradient = v.buffer.data;
    a.query_gradient_strides = q.strides, a.key_gradient_strides = k.strides, a.value_gradient_strides = v.strides;
    a.key_blocks = quotient(call.most_keys, KEY_BLOCK), a.first_pair = 0, a.pairs = a.key_heads * a.sequences;
    launch("attention_backward_delta", quotient(call.query_count, 4) * a.heads * call.batches, SMALL_BLOCK_THREADS, 0, a,
           attention_backward_delta);
    u64 pairs = 0;
    for (int i = 0; i < call.c.queries; i++) {
        const Keys keys = call.attended(0, i);
        pairs += u64(keys.end - keys.first) * a.heads * a.sequences;
    }
    a.blocks = quotient(call.most_queries, QUERY_BLOCK);
    emulator::counts() = {};
    launch("attention_backward_queries", a.blocks * a.heads * a.sequences, QUERY_THREADS, QUERY_SHARED_BYTES, a,
           attention_backward_queries);
    printf("| %s | `attention_backward_queries` | %.2f | %.1f | of pairs not masked | | %.1f |\n", call.c.name,
           emulator::counts().bytes_read / 1e6, emulator::counts().products / 1e6, pairs * 3e-6 * HEAD_DIM);
    emulator::counts() = {};
    launch("attention_backward_keys", a.key_blocks * a.pairs, KEY_THREADS, KEY_SHARED_BYTES, a, attention_backward_keys);
    printf("| %s | `attention_backward_keys` | %.2f | %.1f | of pairs not masked | | %.1f |\n", call.c.name,
           emulator::counts().bytes_read / 1e6, emulator::counts().products / 1e6, pairs * 4e-6 * HEAD_DIM);
}

static void print(const Case& c, const Counted& own, const Counted& other) {
    printf("| %s | `%s` | %.2f | %.1f | `%s` | %.2f | %.1f |\n", c.name, own.kernel, own.bytes / 1e6,
           own.products / 1e6, other.kernel, other.bytes / 1e6, other.products / 1e6);
}

int main() {
    const char* element = ELEMENT == 0 ? "f16" : ELEMENT == 1 ? "bf16" : "f32";
    Case prompt;
    const std::string size = std::string(element) + ", D " + std::to_string(HEAD_DIM);
    const std::string plain_name = size + ", 512 queries and keys", causal_name = plain_name + ", causal";
    const std::string token_name = size + ", 1 query, 4096 keys, 8 heads of 2";
    const std::string alone_name = size + ", 1 query, 4096 keys, 2 heads of 2";
    prompt.sequences = 1, prompt.heads = 2, prompt.key_heads = 1, prompt.queries = prompt.keys = 512;
    prompt.is_bthd = false, prompt.has_log_sum_exp = false;
    for (bool is_causal : {false, true}) {
        Case c = prompt;
        c.causal = is_causal, c.name = is_causal ? causal_name.c_str() : plain_name.c_str();
        emulator::clear_buffers();
        Call call(c);
        print(c, count_forward(call), count_steel(c));
        count_backward(call);
    }
    for (int heads : {8, 2}) {
        Case c = prompt;
        c.heads = heads, c.key_heads = 2, c.queries = 1, c.keys = 4096, c.backward = false;
        c.name = heads == 8 ? token_name.c_str() : alone_name.c_str();
        emulator::clear_buffers();
        Call call(c);
        print(c, count_decode(call), count_vector(c));
    }
}

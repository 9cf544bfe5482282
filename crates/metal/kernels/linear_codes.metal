// A linear layer of few rows, whose weights are codes with scales.
//
// Such a call takes the time of reading the codes: 16 bytes at a time, each once for all rows. The second kernel
// computes the numbers of rows of the weight, for products of many rows.
#pragma once
#include "linear_pairs.metal"
#include "linear_codes_buffers.metal"
#include "code_numbers.cuh"

#define CODE_TABLES_BYTES (2 * 16 * 4)

// Copies the tables of both weights of a pair to threadgroup memory, if codes have tables. All threads call it.
DEVICE void load_tables(const LOCAL LinearCodesArguments& arguments, SHARED(float) tables, int thread_index) {
    if (CODE_VALUES != VALUES_TABLE) return;
    const int weight = thread_index / 16, code = thread_index % 16;
    if (weight < 2) {
        GLOBAL const float* table = weight == 0 ? arguments.weight.code_table : arguments.up_weight.code_table;
        if (table) store_shared(tables + (weight * 16 + code), load_global(table + code));
    }
    block_barrier();
}

// The rows of codes of a pair of products.
struct CodeRows {
    WeightCodes weights[2];
    GLOBAL const u32* low[2];
    int tables[2]; // the places of their tables in threadgroup memory
};

DEVICE CodeRows rows_of_codes(const LOCAL LinearCodesArguments& arguments) {
    const bool has_up = arguments.linear.up_weights != nullptr;
    CodeRows rows;
    rows.weights[0] = arguments.weight, rows.low[0] = (GLOBAL const u32*)arguments.linear.weights;
    rows.weights[1] = arguments.weight, rows.low[1] = rows.low[0];
    if (has_up) rows.weights[1] = arguments.up_weight, rows.low[1] = (GLOBAL const u32*)arguments.linear.up_weights;
    rows.tables[0] = 0, rows.tables[1] = has_up ? 16 : 0;
    return rows;
}

// The codes of a chunk in two planes: at most 4 words of lower bits and 2 of upper bits.
struct CodeWords {
    u32 low[4];
    u32 high[2];
};

DEVICE CodeWords load_code_words(const LOCAL WeightCodes& weight, GLOBAL const u32* low, i64 row, int width,
                                 int chunk) {
    const i64 from = row * chunks_of_row(width) + chunk;
    CodeWords words;
    load_words(words.low, low + from * LOW_WORDS, LOW_WORDS);
    if (HIGH_WORDS) load_words(words.high, weight.high + from * HIGH_WORDS, HIGH_WORDS);
    return words;
}

// The codes of a quartet of a chunk, a byte each.
DEVICE u32 quartet_of_words(const LOCAL CodeWords& words, int quartet) {
    u32 codes = quartet_bits(words.low[quartet_word(quartet, LOW_BITS)], quartet, LOW_BITS);
    if (HIGH_WORDS) codes |= quartet_bits(words.high[quartet_word(quartet, HIGH_BITS)], quartet, HIGH_BITS) << LOW_BITS;
    return codes;
}

// The numbers of the inputs of an octet of a row.
DEVICE void load_octet(LOCAL float* xs, const LOCAL LinearRowsArguments& linear, int row, int column) {
    UNROLL for (int part = 0; part < 8 / LINEAR_CHUNK; part++)
        load_numbers(xs + part * LINEAR_CHUNK, linear.inputs, linear_input_row(linear, row), linear.width,
                     column / LINEAR_CHUNK + part);
}

// Adds the products of this thread's chunks. Rows of inputs are whole chunks and begin at multiples of 16 bytes.
DEVICE void add_code_chunks(const LOCAL LinearRowsArguments& linear, const LOCAL LinearPair& pair,
                            const LOCAL CodeRows& codes, SHARED(float) tables, LOCAL float* sums) {
    const int count = linear.width / CODE_CHUNK;
    for (int chunk = pair.first; chunk < count; chunk += pair.step) {
        CodeWords words[2];
        float scales[2 * CODE_RUNS], offsets[2 * CODE_RUNS];
        UNROLL for (int p = 0; p < 2; p++) {
            words[p] = load_code_words(codes.weights[p], codes.low[p], pair.rows[p], linear.width, chunk);
            UNROLL for (int run = 0; run < CODE_RUNS; run++) {
                const int group = group_of_column(chunk * CODE_CHUNK + run * CODE_RUN);
                scales[p * CODE_RUNS + run] = scale_of_group(codes.weights[p], pair.rows[p], group);
                offsets[p * CODE_RUNS + run] = offset_of_group(codes.weights[p], pair.rows[p], group);
            }
        }
        UNROLL for (int position = 0; position < CODE_OCTETS; position++) {
            const int octet = octet_of_position(chunk, position);
            float weights[2 * 8];
            UNROLL for (int p = 0; p < 2; p++) {
                UNROLL for (int e = 0; e < 8; e++) {
                    const float scale = number_of_run(scales + p * CODE_RUNS, octet, e);
                    const float offset = HAS_OFFSETS ? number_of_run(offsets + p * CODE_RUNS, octet, e) : 0.0f;
                    const u32 quartet = quartet_of_words(words[p], 2 * position + e / 4);
                    weights[8 * p + e] = code_number(quartet, e % 4, scale, offset, tables + codes.tables[p]);
                }
            }
            UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
                float xs[8];
                load_octet(xs, linear, row, chunk * CODE_CHUNK + octet * 8);
                UNROLL for (int p = 0; p < 2; p++) {
                    float sum = sums[p * LINEAR_ROWS + row];
                    UNROLL for (int e = 0; e < 8; e++) sum = fused_multiply_add(xs[e], weights[8 * p + e], sum);
                    sums[p * LINEAR_ROWS + row] = sum;
                }
            }
        }
    }
}

// As add_code_chunks, for any width and any alignment.
DEVICE void add_quartets(const LOCAL LinearRowsArguments& linear, const LOCAL LinearPair& pair,
                         const LOCAL CodeRows& codes, SHARED(float) tables, LOCAL float* sums) {
    const int width = linear.width;
    for (int column = 4 * pair.first; column < width; column += 4 * pair.step) {
        float weights[2 * 4];
        UNROLL for (int p = 0; p < 2; p++)
            load_quartet_numbers(weights + 4 * p, codes.weights[p], codes.low[p], pair.rows[p], width, column,
                                 tables + codes.tables[p]);
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const i64 from = (i64)linear_input_row(linear, row) * width + column;
            UNROLL for (int e = 0; e < 4; e++) {
                if (column + e >= width) break;
                const float x = load_element(linear.inputs, from + e);
                UNROLL for (int p = 0; p < 2; p++)
                    sums[p * LINEAR_ROWS + row] =
                        fused_multiply_add(x, weights[4 * p + e], sums[p * LINEAR_ROWS + row]);
            }
        }
    }
}

KERNEL_WITH(LinearCodesArguments, LINEAR_CODES, linear_codes, LINEAR_WARPS * 32) {
    SHARED_MEMORY(LINEAR_SUMS_BYTES + CODE_TABLES_BYTES);
    LinearCodesArguments arguments;
    READ_LINEAR_CODES_ARGUMENTS(arguments)
    const LinearPair pair = linear_pair(arguments.linear, (int)group_index, (int)thread_index);
    const CodeRows codes = rows_of_codes(arguments);
    SHARED(float) tables = SHARED_AT(float, LINEAR_SUMS_BYTES);
    float sums[2 * LINEAR_ROWS];
    clear_linear_sums(sums);
    load_tables(arguments, tables, pair.index);
    if (arguments.linear.is_aligned) add_code_chunks(arguments.linear, pair, codes, tables, sums);
    else add_quartets(arguments.linear, pair, codes, tables, sums);
    finish_linear_pair(arguments.linear, pair, SHARED_AT(float, 0), sums);
}

// Writes the numbers of the weight as elements, (N, K). A threadgroup has 4 * DEQUANTIZE_THREADS columns of a row.
KERNEL_WITH(LinearCodesArguments, LINEAR_CODES, dequantize_codes, DEQUANTIZE_THREADS) {
    SHARED_MEMORY(LINEAR_SUMS_BYTES + CODE_TABLES_BYTES);
    LinearCodesArguments arguments;
    READ_LINEAR_CODES_ARGUMENTS(arguments)
    SHARED(float) tables = SHARED_AT(float, LINEAR_SUMS_BYTES);
    load_tables(arguments, tables, (int)thread_index);
    const int width = arguments.linear.width, columns = 4 * DEQUANTIZE_THREADS;
    const int blocks = (width + columns - 1) / columns;
    const i64 row = (int)group_index / blocks;
    const int column = (int)group_index % blocks * columns + 4 * (int)thread_index;
    if (column >= width) return;
    float four[4];
    GLOBAL const u32* codes = (GLOBAL const u32*)arguments.linear.weights;
    load_quartet_numbers(four, arguments.weight, codes, row, width, column, tables);
    UNROLL for (int e = 0; e < 4; e++) {
        if (column + e < width) store_element(arguments.linear.output, row * width + column + e, four[e]);
    }
}

// A linear layer of few rows, whose weights are codes with scales.
//
// Such a call should take the time of reading the codes, 16 bytes at a time and each once for all rows. With one row and
// codes of 4 bits, a weight costs about 4.9 instructions: 1.4 that extract the code, one that subtracts, one or two that
// multiply or add, one that multiplies with the input, and 0.5 that unpack the input for two outputs. An H200 has 33e12
// of them a second, which is 3.4e12 bytes of codes where memory gives 4.4e12. Devices with less memory bandwidth for
// each processor (A100, H100 with 2 TB/s, cards with GDDR) read at the speed of their memory, and so do codes of 5 to 8
// bits everywhere. Each further row costs 1 to 1.5 instructions, so that eight rows take some three times as long.
// A table costs a load from shared memory for each weight, four times the time of an instruction, and reaches half.
//
// The second kernel computes the numbers of rows of the weight, for products of many rows on tensor cores. It takes the
// time of writing them.
#pragma once

#include "linear_pairs.cuh"
#include "code_numbers.cuh"

// The chunks of a row of weights that are underway at a time; more would take too many registers.
#define CODE_LOADS (LINEAR_ROWS <= 2 && !HIGH_WORDS && CODE_RUNS <= 2 && !(ELEMENT == 2 && HAS_OFFSETS) ? 2 : 1)
#define CODE_COLUMNS (LINEAR_ROWS <= 2 && ELEMENT != 2 ? 8 : 4) // the columns that are multiplied at a time
#define CODE_BLOCKS (LINEAR_ROWS <= 2 ? 3 : 2)

// The tables of both weights of a pair are behind the sums in shared memory.
DEVICE u32 table_address(int weight) { return LINEAR_SUMS_BYTES + weight * 16 * 4; }

DEVICE void load_tables(const LinearCodesArguments& arguments) {
#if CODE_VALUES == VALUES_TABLE
    const int weight = thread_index() / 16, code = thread_index() % 16;
    if (weight < 2) {
        const float* table = weight == 0 ? arguments.weight.code_table : arguments.up_weight.code_table;
        if (table) store_shared(table_address(weight) + code * 4, load_global(table + code));
    }
    block_barrier();
#endif
}

// The codes of a chunk, and the numbers of its groups.
struct CodeChunk {
    u32 low[LOW_WORDS];
    u32 high[HIGH_WORDS ? HIGH_WORDS : 1];
    float scales[CODE_RUNS];
    float offsets[CODE_RUNS];
};

DEVICE void load_code_chunk(CodeChunk& chunk, const WeightCodes& weight, const u32* low, i64 row, int width, int at) {
    const i64 from = row * chunks_of_row(width) + at;
    load_words(chunk.low, low + from * LOW_WORDS, LOW_WORDS);
    load_words(chunk.high, weight.high + from * HIGH_WORDS, HIGH_WORDS);
    UNROLL for (int run = 0; run < CODE_RUNS; run++) {
        const int group = group_of_column(at * CODE_CHUNK + run * CODE_RUN);
        chunk.scales[run] = scale_of_group(weight, row, group);
        chunk.offsets[run] = offset_of_group(weight, row, group);
    }
}

// The codes of a quartet of a chunk, a byte each.
DEVICE u32 quartet_of_chunk(const CodeChunk& chunk, int quartet) {
    u32 codes = quartet_bits(chunk.low[quartet_word(quartet, LOW_BITS)], quartet, LOW_BITS);
    if (HIGH_WORDS) codes |= quartet_bits(chunk.high[quartet_word(quartet, HIGH_BITS)], quartet, HIGH_BITS) << LOW_BITS;
    return codes;
}

// The inputs of a row from a column on.
DEVICE void load_inputs(float (&xs)[CODE_COLUMNS], const void* inputs, i64 at) {
#if ELEMENT == 2
    UNROLL for (int n = 0; n < CODE_COLUMNS / 4; n++) {
        const float4 four = load_global((const float4*)((const float*)inputs + at) + n);
        xs[4 * n] = four.x, xs[4 * n + 1] = four.y, xs[4 * n + 2] = four.z, xs[4 * n + 3] = four.w;
    }
#else
    u32 words[CODE_COLUMNS / 2];
    load_words(words, (const u32*)((const u16*)inputs + at), CODE_COLUMNS / 2);
    UNROLL for (int w = 0; w < CODE_COLUMNS / 2; w++) {
        xs[2 * w] = unpack_half((u16)words[w]);
        xs[2 * w + 1] = unpack_half((u16)(words[w] >> 16));
    }
#endif
}

// Adds the products of this lane's chunks. Rows of inputs are whole chunks and begin at multiples of 16 bytes.
DEVICE void add_code_chunks(float (&sums)[2][LINEAR_ROWS], const LinearCodesArguments& arguments,
                            const LinearPair& pair, const WeightCodes& second) {
    const LinearRowsArguments& linear = arguments.linear;
    const int width = linear.width, count = width / CODE_CHUNK;
    for (int first = pair.first; first < count; first += pair.step * CODE_LOADS) {
        CodeChunk chunks[2][CODE_LOADS];
        UNROLL for (int n = 0; n < CODE_LOADS; n++) {
            // The last chunk is read again in place of those behind it, and not added.
            const int chunk = smaller(first + n * pair.step, count - 1);
            load_code_chunk(chunks[0][n], arguments.weight, (const u32*)pair.weights[0], pair.rows[0], width, chunk);
            load_code_chunk(chunks[1][n], second, (const u32*)pair.weights[1], pair.rows[1], width, chunk);
        }
        UNROLL for (int n = 0; n < CODE_LOADS; n++) {
            const int chunk = first + n * pair.step;
            if (chunk >= count) break;
            UNROLL for (int part = 0; part < CODE_CHUNK / CODE_COLUMNS; part++) {
                // The position of the part's first quartet, and its first column in an octet.
                const int quartet = part * CODE_COLUMNS / 4, column = part * CODE_COLUMNS % 8;
                const int octet = octet_of_position(chunk, quartet / 2);
                // The inputs of all parts at once would take too many registers.
                if (LINEAR_ROWS > 2) keep_order();
                float weights[2][CODE_COLUMNS];
                UNROLL for (int p = 0; p < 2; p++) {
                    const u32 table = table_address(linear.up_weights ? p : 0);
                    UNROLL for (int e = 0; e < CODE_COLUMNS; e++) {
                        const float scale = number_of_run(chunks[p][n].scales, octet, column + e);
                        const float offset = HAS_OFFSETS ? number_of_run(chunks[p][n].offsets, octet, column + e) : 0.0f;
                        const u32 codes = quartet_of_chunk(chunks[p][n], quartet + e / 4);
                        weights[p][e] = code_number(codes, e % 4, scale, offset, table);
                    }
                }
                UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
                    float xs[CODE_COLUMNS];
                    load_inputs(xs, linear.inputs,
                                (i64)linear_input_row(linear, row) * width + chunk * CODE_CHUNK + octet * 8 + column);
                    UNROLL for (int p = 0; p < 2; p++) {
                        UNROLL for (int e = 0; e < CODE_COLUMNS; e++) {
                            sums[p][row] = fused_multiply_add(xs[e], weights[p][e], sums[p][row]);
                        }
                    }
                }
            }
        }
    }
}

// As add_code_chunks, for any width and any alignment.
DEVICE void add_quartets(float (&sums)[2][LINEAR_ROWS], const LinearCodesArguments& arguments, const LinearPair& pair,
                         const WeightCodes& second) {
    const LinearRowsArguments& linear = arguments.linear;
    const int width = linear.width;
    for (int column = 4 * pair.first; column < width; column += 4 * pair.step) {
        float weights[2][4];
        load_quartet_numbers(weights[0], arguments.weight, (const u32*)pair.weights[0], pair.rows[0], width, column,
                             table_address(0));
        load_quartet_numbers(weights[1], second, (const u32*)pair.weights[1], pair.rows[1], width, column,
                             table_address(linear.up_weights ? 1 : 0));
        UNROLL for (int row = 0; row < LINEAR_ROWS; row++) {
            const i64 from = (i64)linear_input_row(linear, row) * width;
            UNROLL for (int e = 0; e < 4; e++) {
                if (column + e >= width) break;
                const float x = load_element(linear.inputs, from + column + e);
                UNROLL for (int p = 0; p < 2; p++) sums[p][row] = fused_multiply_add(x, weights[p][e], sums[p][row]);
            }
        }
    }
}

KERNEL(linear_codes, LINEAR_WARPS * 32, CODE_BLOCKS, LinearCodesArguments) {
    const LinearRowsArguments& linear = arguments.linear;
    const LinearPair pair = linear_pair(linear);
    const WeightCodes& second = linear.up_weights ? arguments.up_weight : arguments.weight;
    float sums[2][LINEAR_ROWS];
    clear_linear_sums(sums);
    load_tables(arguments);
    if (linear.is_aligned) add_code_chunks(sums, arguments, pair, second);
    else add_quartets(sums, arguments, pair, second);
    finish_linear_pair(linear, sums);
}

// Writes the numbers of the weight as elements, (N, K). A block has 4 * DEQUANTIZE_THREADS columns of a row; grid:
// ceil(K / (4 * DEQUANTIZE_THREADS)) blocks for each row.
KERNEL(dequantize_codes, DEQUANTIZE_THREADS, 4, LinearCodesArguments) {
    const LinearRowsArguments& linear = arguments.linear;
    load_tables(arguments);
    const int width = linear.width, columns = 4 * DEQUANTIZE_THREADS;
    const int blocks = (width + columns - 1) / columns;
    const i64 row = block_index() / blocks;
    const int column = block_index() % blocks * columns + 4 * thread_index();
    if (column >= width) return;
    float numbers[4];
    load_quartet_numbers(numbers, arguments.weight, (const u32*)linear.weights, row, width, column, table_address(0));
    const i64 to = row * width + column;
    if (width % 4) {
        UNROLL for (int i = 0; i < 4; i++) {
            if (column + i < width) store_element(linear.output, to + i, numbers[i]);
        }
        return;
    }
#if ELEMENT == 2
    float4 four;
    four.x = numbers[0], four.y = numbers[1], four.z = numbers[2], four.w = numbers[3];
    store_global((float4*)((float*)linear.output + to), four);
#else
    uint2 four;
    four.x = pack_pair(numbers[0], numbers[1]), four.y = pack_pair(numbers[2], numbers[3]);
    store_global((uint2*)((u16*)linear.output + to), four);
#endif
}

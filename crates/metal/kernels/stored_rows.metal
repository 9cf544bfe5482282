// Where the rows of keys, values and scales are, and the numbers of codes.
//
// With KEY_PAGES, the rows of a sequence are in pages that a table lists. With KEY_CODES, keys and values are codes with
// scales. The numbers of codes are elements without an error; a scale multiplies products of a key, or the weight of a
// value, in f32, so that no digit is lost.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "masks.cuh"
#include "code_format.cuh"

// The bytes of the strides of keys and values.
#define STORED_BYTES (KEY_CODES ? 1 : ELEMENT_BYTES)

// The rows of the keys, the values or the scales of a head of a sequence.
struct TileRows {
    GLOBAL const char* first; // the row of key 0; with KEY_PAGES the first row of page 0
    i64 row_bytes;            // from key to key, in a page with KEY_PAGES
    i64 page_bytes;           // with KEY_PAGES, from page to page
    GLOBAL const int* pages;  // of the sequence, in the order of its keys
    int page_shift;           // a page has 2^page_shift keys
    int width;   // numbers of a row
    int columns; // of a tile
    int pitch;   // of a tile
};

// The rows of a tensor whose strides count numbers of `bytes` bytes.
DEVICE TileRows rows_of_head(const LOCAL AttentionArguments& arguments, GLOBAL const void* tensor,
                             const LOCAL RowStrides& strides, const LOCAL Sequence& sequence, int sequence_index,
                             int key_head, int bytes) {
    TileRows rows;
    rows.first = row_address(tensor, strides, KEY_PAGES ? 0 : sequence.batch, key_head,
                             KEY_PAGES ? 0 : sequence.first_key, bytes);
    rows.row_bytes = strides.row * bytes;
    if (KEY_PAGES) {
        rows.page_bytes = strides.sequence * bytes;
        rows.pages = arguments.page_table + (i64)sequence_index * arguments.page_table_width;
        rows.page_shift = arguments.page_shift;
    }
    return rows;
}

// The rows of the keys, and of the values, of a head.
DEVICE TileRows key_rows_of_head(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence,
                                 int sequence_index, int key_head) {
    TileRows rows = rows_of_head(arguments, arguments.keys, arguments.key_strides, sequence, sequence_index, key_head,
                                 STORED_BYTES);
    rows.width = HEAD_DIM, rows.columns = HEAD_COLUMNS, rows.pitch = FORWARD_KEY_PITCH;
    return rows;
}
DEVICE TileRows value_rows_of_head(const LOCAL AttentionArguments& arguments, const LOCAL Sequence& sequence,
                                   int sequence_index, int key_head) {
    TileRows rows = rows_of_head(arguments, arguments.values, arguments.value_strides, sequence, sequence_index,
                                 key_head, STORED_BYTES);
    rows.width = VALUE_DIM, rows.columns = VALUE_COLUMNS, rows.pitch = FORWARD_VALUE_PITCH;
    return rows;
}

// The address of the row of a key. With KEY_PAGES, its page has to be in the table.
DEVICE GLOBAL const char* row_of_key(const LOCAL TileRows& rows, int key) {
    if (!KEY_PAGES) return rows.first + key * rows.row_bytes;
    const i64 page = load_global(rows.pages + (key >> rows.page_shift));
    return rows.first + page * rows.page_bytes + (key & ((1 << rows.page_shift) - 1)) * rows.row_bytes;
}

// The byte that has the code of a column, and the bit of the byte from which on it does.
DEVICE int byte_of_code(int column) {
    return CODE_FORMAT == CODES_OF_4_BITS ? column / 32 * 16 + column % 16 : column;
}
DEVICE u32 bit_of_code(int column) { return CODE_FORMAT == CODES_OF_4_BITS && column % 32 >= 16 ? 4 : 0; }
DEVICE u32 mask_of_code() { return CODE_FORMAT == CODES_OF_4_BITS ? 0x0f0f0f0fu : 0xffffffffu; }

// The code of a column of a row.
DEVICE u32 load_code(GLOBAL const char* row, int column) {
    const u32 byte = load_global((GLOBAL const u8*)row + byte_of_code(column));
    return byte >> bit_of_code(column) & mask_of_code();
}

// The codes of four successive columns as bytes; 0 from `width` on.
DEVICE u32 load_codes(GLOBAL const char* row, int column, int width) {
    if (ALIGNED_ROWS && column + 4 <= width) {
        const u32 word = load_global((GLOBAL const u32*)(row + byte_of_code(column)));
        return word >> bit_of_code(column) & mask_of_code();
    }
    u32 codes = 0;
    UNROLL for (int e = 0; e < 4; e++)
        if (column + e < width) codes |= load_code(row, column + e) << 8 * e;
    return codes;
}

// The keys, the values or the scales of a head of a sequence in global memory: rows of one tensor, or with KEY_PAGES
// rows of pages that sequences may share.
#pragma once
#include "specialization.cuh"
#include "device.cuh"
#include "attention_arguments.cuh"
#include "loads.cuh"
#include "masks.cuh"

struct KeyRows {
    const char* first;  // the row of key 0; with KEY_PAGES the first row of page 0
    i64 row_bytes;      // from key to key, in a page with KEY_PAGES
#if KEY_PAGES
    i64 page_bytes;     // from page to page
    const int* pages;   // of the sequence, in the order of its keys
    int page_shift;     // a page has 2^page_shift keys
#endif
    // The address of the row of a key. With KEY_PAGES the page has to be in the table.
    DEVICE_METHOD const char* row(int key) const {
#if KEY_PAGES
        const i64 page = load_global(pages + (key >> page_shift));
        return first + page * page_bytes + (key & ((1 << page_shift) - 1)) * row_bytes;
#else
        return first + key * row_bytes;
#endif
    }
};

// The address of the row of key 0, of numbers of `bytes` bytes; with KEY_PAGES of the first row of page 0.
DEVICE const char* first_key_row(const void* tensor, const RowStrides& strides, const Sequence& sequence, int key_head,
                                 int bytes) {
    return row_address(tensor, strides, KEY_PAGES ? 0 : sequence.batch, key_head, KEY_PAGES ? 0 : sequence.first_key,
                       bytes);
}

// The rows of a tensor of numbers of `bytes` bytes from an address of first_key_row on.
DEVICE KeyRows rows_from(const AttentionArguments& arguments, const void* first, const RowStrides& strides,
                         int sequence_index, int bytes) {
    KeyRows rows;
    rows.first = (const char*)first;
    rows.row_bytes = strides.row * bytes;
#if KEY_PAGES
    rows.page_bytes = strides.sequence * bytes;
    rows.pages = arguments.page_table + (i64)sequence_index * arguments.page_table_width;
    rows.page_shift = arguments.page_shift;
#endif
    return rows;
}

// The rows of a head of a sequence.
DEVICE KeyRows rows_of_keys(const AttentionArguments& arguments, const void* tensor, const RowStrides& strides,
                            const Sequence& sequence, int sequence_index, int key_head, int bytes) {
    const char* first = first_key_row(tensor, strides, sequence, key_head, bytes);
    return rows_from(arguments, first, strides, sequence_index, bytes);
}

#if KEY_PAGES
// Rows of pages that a tile is loaded from, as TileSource.
struct KeyTileSource {
    const char* rows;   // an address that may be read
    KeyRows keys;
    int first_key;      // of row 0 of the tile
    i64 column_bytes;
    int first_row;
    int end_row;
    int width;
    // A row that is not read may be past the table.
    DEVICE_METHOD const char* row(int row, bool is_read) const {
        return is_read ? keys.row(first_key + row) : keys.first;
    }
};
#else
typedef TileSource KeyTileSource;
#endif

// The rows of a tile whose row 0 is `key`, of numbers of `bytes` bytes.
DEVICE KeyTileSource key_tile(const KeyRows& keys, int key, int bytes, int first_row, int end_row, int width) {
#if KEY_PAGES
    const KeyTileSource source = {keys.first, keys, key, bytes, first_row, end_row, width};
#else
    const KeyTileSource source = {keys.row(key), keys.row_bytes, bytes, first_row, end_row, width};
#endif
    return source;
}

// Loads keys of D elements.
template <int ROWS, int THREADS>
DEVICE void load_key_tile(u32 to, const KeyRows& keys, int key, int first_row, int end_row, int thread) {
    const KeyTileSource source =
        key_tile(keys, key, ELEMENT_BYTES, first_row, end_row, HEAD_DIM * ELEMENT_BYTES);
    load_tile<ROWS, HEAD_COLUMNS * ELEMENT_BYTES / 16, HEAD_PITCH, THREADS, ALIGNED_ROWS, ELEMENT_BYTES,
              HEAD_COLUMNS == HEAD_DIM>(to, source, thread);
}

// Loads values of D_v elements.
template <int ROWS, int THREADS>
DEVICE void load_key_values(u32 to, const KeyRows& values, int key, int first_row, int end_row, int thread) {
    const KeyTileSource source =
        key_tile(values, key, ELEMENT_BYTES, first_row, end_row, VALUE_DIM * ELEMENT_BYTES);
    load_tile<ROWS, VALUE_COLUMNS * ELEMENT_BYTES / 16, VALUE_PITCH, THREADS, ALIGNED_ROWS, ELEMENT_BYTES,
              VALUE_COLUMNS == VALUE_DIM>(to, source, thread);
}

// Pools of pages for the tests of attention: copies of rows, of which kernels may access some pages.
#pragma once
#include <memory>
#include <vector>

// A page of a pool, and the rows of a tensor that it has.
struct PlacedPage {
    int page;
    int batch;
    int first_row;
    int rows;
};

// The pages of a call.
struct Paging {
    int page_size;
    int pages;
    bool is_bthd; // whether the heads of a position are together
    const std::vector<PlacedPage>* placed;
};

// A pool (pages, heads, page size, width) with rows of a tensor. Its other rows are NaN, and its other pages are outside
// of every buffer.
struct Pool {
    std::unique_ptr<char, void (*)(void*)> memory{nullptr, free};

    // Sets the address and the strides of the pool.
    template <class R, class Address>
    Pool(const Paging& paging, R& rows, Address& address, RowStrides& strides, const char* name) {
        typedef std::remove_reference_t<decltype(rows.at(0, 0, 0, 0))> Number;
        // As in the tensor; a pitch of more than the width keeps rows aligned.
        const i64 pitch = std::min(rows.strides.head, rows.strides.row);
        const i64 page = pitch * rows.heads * paging.page_size, page_bytes = page * i64(sizeof(Number));
        const size_t bytes = size_t(page_bytes) * paging.pages;
        memory.reset((char*)aligned_alloc(64, (bytes + 63) / 64 * 64 + 64));
        memset((void*)memory.get(), 0xff, bytes);
        strides.sequence = page;
        strides.head = paging.is_bthd ? pitch : pitch * paging.page_size;
        strides.row = paging.is_bthd ? pitch * rows.heads : pitch;
        Number* numbers = (Number*)memory.get();
        for (const PlacedPage& placed : *paging.placed) {
            Number* to = numbers + placed.page * page;
            emulator::add_buffer(to, size_t(page_bytes), name, true);
            for (int h = 0; h < rows.heads; h++)
                for (int row = 0; row < placed.rows; row++)
                    for (int d = 0; d < rows.width; d++)
                        to[h * strides.head + row * strides.row + d] =
                            rows.at(placed.batch, h, placed.first_row + row, d);
        }
        address = numbers;
    }
};

// The constants that the kernels are compiled for. The Rust side defines all of them, and the sizes and places that
// follow
// from them: `Specialization` and the tiles in `src/tiles`. It also checks which of them can be combined.
//
// Inputs that are no constants need no specialisation: every mask that leaves a query an interval of keys, packed
// sequences, sinks, the log-sum-exp, grouped heads, and the broadcasting of a bias or of a boolean mask.
//
// ---- what is computed ----
//
// KERNEL_SET                 the kernels that are compiled, a sum of FORWARD_KERNELS, DECODE_KERNELS and
//                            BACKWARD_KERNELS
// ELEMENT                    the type of queries, keys, values, output and their gradients: 0 f16, 1 bf16, 2 f32
// HEAD_DIM, VALUE_DIM        D, the size of a query and of a key, and D_v, the size of a value
// KEY_CODES                  1: keys and values are codes, where a number is that of its code times the scale of its row
//                            or of a part of the row; not in a backward pass
// CODE_FORMAT                the format of the codes, as code_format.cuh says
// KEY_PAGES                  1: keys and values are rows of pages that a table lists for each sequence; not in a
//                            backward pass
// HAS_SOFTCAP, HAS_ALIBI, HAS_RELATIVE_BIAS, HAS_BOOLEAN_MASK
// HAS_BIAS                   1: a bias of elements, 2: of f32
// HAS_DROPOUT                not in the decode kernel
// BIAS_GRADIENT, SLOPE_GRADIENT, RELATIVE_BIAS_GRADIENT
//                            the backward pass also makes the gradient of each score, of the ALiBi slopes, of the
//                            relative
//                            bias
// MODIFIES_SCORES            1 if more is done to a product than a multiplication by a scale above 0
// HAS_PRODUCT_DERIVATIVE     1 if the derivative of a score with respect to its product is another number than the
//                            scale, for each pair of a query and a key
// NATURAL_SCORES             1 if scores are natural logarithms, which a bias of the least f32 needs; otherwise to
//                            the base
//                            2, which saves a product
//
// ---- memory ----
//
// ALIGNED_ROWS               1: rows of queries, keys, values, output and their gradients begin at multiples of 16
//                            bytes.
//                            Where an alignment is 0, tensors are read one element at a time
// ALIGNED_BIAS, ALIGNED_BOOLEAN_MASK
//                            1: their rows begin at multiples of 16 bytes, and the stride from key to key is 1
// ELEMENT_BYTES, BIAS_BYTES  of an element, and of an element of the bias
// HEAD_COLUMNS, VALUE_COLUMNS
//                            columns of a tile: D and D_v rounded up to matrices of 16, with zeros behind
// HEAD_PITCH, VALUE_PITCH    bytes from row to row in shared memory. The padding keeps rows that are read together in
//                            different banks
//
// The places in the shared memory of a block end with _AT, and the bytes of all with _SHARED_BYTES.
//
// ---- the forward kernel ----
//
// FORWARD_WARPS, FORWARD_ROW_TILES
//                            warps of a block, and rows of 16 queries of a warp
// FORWARD_KEYS               keys of a tile, a multiple of 16
// FORWARD_STAGES             tiles of keys and values in shared memory: 1 or 2
// FORWARD_QUERIES_IN_REGISTERS
//                            1 if queries stay in registers
// FORWARD_QUERIES            queries of a block
//
// ---- the decode kernel: each warp works on separate tiles ----
//
// DECODE_WARPS, DECODE_KEYS  warps of a block, and keys of a tile: 16 or 32
// DECODE_STAGES              tiles of a warp in shared memory, at least 2
// DECODE_OUTPUT_COLUMNS      columns of the output in registers. Codes are read four columns at a time, for four
//                            matrices of
//                            8 columns
//
// ---- the backward kernel of keys ----
//
// FUSED_BACKWARD             1: the gradient of the queries is made by the kernel of keys too, added up in an order
//                            that is
//                            always the same; 0: a kernel of queries makes it
// KEY_WARPS, KEY_ROW_TILES   warps of a block, and rows of 16 keys of a warp
// WARPS_PER_KEYS             warps that share their keys: they divide scores by queries, and gradients by columns
// BACKWARD_QUERIES           queries of a tile, a multiple of 16
// FUSED_ROW_WARPS            with FUSED_BACKWARD, the warps that divide the gradient of a tile of queries by rows;
//                            the others
//                            divide the columns
// KEY_BLOCK                  keys of a block
// KEY_STATISTICS_BYTES       of the statistics, the delta and the interval of each query of a tile: log2_sum of all
//                            queries,
//                            then all deltas, then all intervals, then with NATURAL_SCORES all maxima
// SHARES_SCORE_GRADIENTS, SHARES_BIAS_GRADIENTS
//                            1 if the gradients of scores, and those of relative biases, are in shared memory
//
// ---- the backward kernel of queries ----
//
// QUERY_WARPS, QUERY_ROW_TILES
//                            warps of a block, and rows of 16 queries of a warp
// QUERY_KEYS                 keys of a tile, a multiple of 16
// QUERY_BLOCK                queries of a block
#pragma once

#ifndef HEAD_DIM
#error "expected the constants of a program, which the Rust side defines"
#endif

#define FORWARD_KERNELS 1
#define DECODE_KERNELS 2
#define BACKWARD_KERNELS 4

#define DECODE_QUERIES_IN_REGISTERS (HEAD_DIM * (ELEMENT == 2 ? 2 : 1) <= 192)

#define FORWARD_THREADS (FORWARD_WARPS * 32)
#define DECODE_THREADS (DECODE_WARPS * 32)
#define QUERY_THREADS (QUERY_WARPS * 32)
#define KEY_THREADS (KEY_WARPS * 32)
#define KEY_GROUPS (KEY_WARPS / WARPS_PER_KEYS)

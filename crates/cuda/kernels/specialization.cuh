// The constants that the kernels are compiled for. Each macro can be defined before; its default is here.
//
// Inputs that are no constants need no specialisation: every mask that leaves a query an interval of keys, packed
// sequences, sinks, the log-sum-exp, grouped heads, and the broadcasting of a bias or of a boolean mask.
#pragma once

// ---- what is computed ----

// Which kernels are compiled, a sum: 1 forward, 2 decode, 4 backward.
#ifndef KERNEL_SET
#define KERNEL_SET 7
#endif
// The type of queries, keys, values, output and their gradients: 0 f16, 1 bf16, 2 f32.
#ifndef ELEMENT
#define ELEMENT 1
#endif
// D, the size of a query and of a key.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
// D_v, the size of a value.
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
// Keys and values are 8-bit codes: a number is (code - 128) times the scale of its row. Not in a backward pass.
#ifndef KEY_CODES
#define KEY_CODES 0
#endif
#ifndef HAS_SOFTCAP
#define HAS_SOFTCAP 0
#endif
#ifndef HAS_ALIBI
#define HAS_ALIBI 0
#endif
#ifndef HAS_RELATIVE_BIAS
#define HAS_RELATIVE_BIAS 0
#endif
// 1: a bias of elements, 2: of f32.
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef HAS_BOOLEAN_MASK
#define HAS_BOOLEAN_MASK 0
#endif
// Not in the decode kernel.
#ifndef HAS_DROPOUT
#define HAS_DROPOUT 0
#endif
// The backward pass also makes the gradient of each score, of the ALiBi slopes, of the relative bias.
#ifndef BIAS_GRADIENT
#define BIAS_GRADIENT 0
#endif
#ifndef SLOPE_GRADIENT
#define SLOPE_GRADIENT 0
#endif
#ifndef RELATIVE_BIAS_GRADIENT
#define RELATIVE_BIAS_GRADIENT 0
#endif
// 1 if more is done to a product than a multiplication by a scale above 0. A call whose scale is 0 or less needs 1.
#ifndef MODIFIES_SCORES
#define MODIFIES_SCORES (HAS_SOFTCAP || HAS_ALIBI || HAS_RELATIVE_BIAS || HAS_BIAS || KEY_CODES)
#endif

// ---- alignment: where it is 0, tensors are read one element at a time ----

// Rows of queries, keys, values, output and their gradients begin at multiples of 16 bytes.
#ifndef ALIGNED_ROWS
#define ALIGNED_ROWS 1
#endif
// Rows of the bias begin at multiples of 16 bytes, and its stride from key to key is 1.
#ifndef ALIGNED_BIAS
#define ALIGNED_BIAS 1
#endif
// Rows of the boolean mask begin at multiples of 16 bytes, and its stride from key to key is 1.
#ifndef ALIGNED_BOOLEAN_MASK
#define ALIGNED_BOOLEAN_MASK 1
#endif

// ---- tiles of the forward kernel ----

#ifndef FORWARD_WARPS
#define FORWARD_WARPS 4
#endif
// Rows of 16 queries of a warp.
#ifndef FORWARD_ROW_TILES
#define FORWARD_ROW_TILES (ELEMENT == 2 ? 1 : 2)
#endif
// Keys of a tile, a multiple of 16.
#ifndef FORWARD_KEYS
#define FORWARD_KEYS (ELEMENT == 2 ? 32 : 64)
#endif
// Tiles of keys and values in shared memory: 1 or 2.
#ifndef FORWARD_STAGES
#define FORWARD_STAGES 1
#endif
// 1 if queries stay in registers.
#ifndef FORWARD_QUERIES_IN_REGISTERS
#define FORWARD_QUERIES_IN_REGISTERS 0
#endif

// ---- tiles of the decode kernel: each warp works on tiles of its own ----

#ifndef DECODE_WARPS
#define DECODE_WARPS 4
#endif
// Keys of a warp's tile: 16 or 32.
#ifndef DECODE_KEYS
#define DECODE_KEYS 16
#endif
// A warp's tiles in shared memory, at least 2.
#ifndef DECODE_STAGES
#define DECODE_STAGES 3
#endif
#ifndef DECODE_QUERIES_IN_REGISTERS
#define DECODE_QUERIES_IN_REGISTERS (HEAD_DIM * (ELEMENT == 2 ? 2 : 1) <= 192)
#endif

// ---- tiles of the backward kernel of keys ----

// The gradient of the queries is made by the kernel of keys too, added up in an order that is always the same. With 0,
// a kernel of queries makes it.
#ifndef FUSED_BACKWARD
#define FUSED_BACKWARD 0
#endif
#ifndef KEY_WARPS
#define KEY_WARPS (ELEMENT == 2 ? 4 : 8)
#endif
// Rows of 16 keys of a warp.
#ifndef KEY_ROW_TILES
#define KEY_ROW_TILES 1
#endif
// Warps that share their keys: they divide scores by queries, and gradients by columns.
#ifndef WARPS_PER_KEYS
#define WARPS_PER_KEYS 1
#endif
// Queries of a tile, a multiple of 16.
#ifndef BACKWARD_QUERIES
#define BACKWARD_QUERIES (ELEMENT == 2 ? 16 : 64)
#endif
// With FUSED_BACKWARD, the warps that divide the gradient of a tile of queries by rows; the others divide the columns.
#ifndef FUSED_ROW_WARPS
#define FUSED_ROW_WARPS (BACKWARD_QUERIES == 16 ? 1 : 2)
#endif

// ---- tiles of the backward kernel of queries ----

#ifndef QUERY_WARPS
#define QUERY_WARPS 4
#endif
// Rows of 16 queries of a warp.
#ifndef QUERY_ROW_TILES
#define QUERY_ROW_TILES (ELEMENT == 2 ? 1 : 2)
#endif
// Keys of a tile, a multiple of 16.
#ifndef QUERY_KEYS
#define QUERY_KEYS (ELEMENT == 2 ? 16 : 32)
#endif

// ---- what follows from them ----

#define ELEMENT_BYTES (ELEMENT == 2 ? 4 : 2)
// Scores are natural logarithms, which a bias of the least f32 needs; otherwise to the base 2, which saves a product.
#define NATURAL_SCORES (ELEMENT == 2 || HAS_BIAS || HAS_RELATIVE_BIAS)
#define BIAS_BYTES (HAS_BIAS == 2 ? 4 : ELEMENT_BYTES)
// Columns of a tile: D and D_v rounded up to matrices of 16, with zeros behind.
#define HEAD_COLUMNS ((HEAD_DIM + 15) / 16 * 16)
#define VALUE_COLUMNS ((VALUE_DIM + 15) / 16 * 16)
// Bytes from row to row in shared memory. The padding keeps rows that are read together in different banks.
#define ROW_PADDING (ELEMENT == 2 ? 32 : 16)
#define HEAD_PITCH (HEAD_COLUMNS * ELEMENT_BYTES + ROW_PADDING)
#define VALUE_PITCH (VALUE_COLUMNS * ELEMENT_BYTES + ROW_PADDING)

#define FORWARD_THREADS (FORWARD_WARPS * 32)
#define FORWARD_QUERIES (FORWARD_WARPS * FORWARD_ROW_TILES * 16) // of a block
#define DECODE_THREADS (DECODE_WARPS * 32)
#define DECODE_ROWS 16 // pairs of a query and a head, of a block
#define QUERY_THREADS (QUERY_WARPS * 32)
#define QUERY_BLOCK (QUERY_WARPS * QUERY_ROW_TILES * 16) // queries of a block
#define KEY_THREADS (KEY_WARPS * 32)
#define KEY_GROUPS (KEY_WARPS / WARPS_PER_KEYS)
#define KEY_BLOCK (KEY_GROUPS * KEY_ROW_TILES * 16) // keys of a block
#define SMALL_BLOCK_THREADS 128 // of kernels without products

// ---- what cannot be combined ----

#if ELEMENT < 0 || ELEMENT > 2 || HEAD_DIM < 1 || VALUE_DIM < 1 || HEAD_DIM > 256 || VALUE_DIM > 256
#error "expected an element of 0, 1 or 2, and head dimensions from 1 to 256"
#endif
#if KEY_CODES && (KERNEL_SET & 4)
#error "no gradients flow into 8-bit codes: expected KEY_CODES 0 with the backward kernels"
#endif
#if HAS_DROPOUT && (KERNEL_SET & 2)
#error "the decode kernel drops no weights: expected HAS_DROPOUT 0 with it"
#endif
#if (HAS_SOFTCAP || HAS_ALIBI || HAS_RELATIVE_BIAS || HAS_BIAS || KEY_CODES) && !MODIFIES_SCORES
#error "expected MODIFIES_SCORES 1 with a score modifier"
#endif
#if BIAS_GRADIENT && !HAS_BIAS || SLOPE_GRADIENT && !HAS_ALIBI || RELATIVE_BIAS_GRADIENT && !HAS_RELATIVE_BIAS
#error "expected gradients of score modifiers that the call has"
#endif
#if FORWARD_KEYS % 16 || DECODE_KEYS % 16 || DECODE_KEYS > 32 || BACKWARD_QUERIES % 16 || QUERY_KEYS % 16
#error "expected tiles of a multiple of 16 keys or queries, and at most 32 keys in a tile of the decode kernel"
#endif
#if FORWARD_STAGES < 1 || FORWARD_STAGES > 2 || DECODE_STAGES < 2 || KEY_CODES && FORWARD_STAGES != 1
#error "expected 1 or 2 stages in the forward kernel, 1 with KEY_CODES, and at least 2 in the decode kernel"
#endif
#if KEY_WARPS % WARPS_PER_KEYS || BACKWARD_QUERIES % (16 * WARPS_PER_KEYS) || \
    HEAD_COLUMNS % (16 * WARPS_PER_KEYS) || VALUE_COLUMNS % (16 * WARPS_PER_KEYS)
#error "expected WARPS_PER_KEYS to divide the warps, the queries of a tile and its columns"
#endif
#if FUSED_BACKWARD && (BACKWARD_QUERIES / 16 % FUSED_ROW_WARPS || KEY_WARPS % FUSED_ROW_WARPS || \
                       HEAD_COLUMNS / 16 % (KEY_WARPS / FUSED_ROW_WARPS))
#error "expected FUSED_ROW_WARPS to divide the warps and the queries of a tile, and the other warps its columns"
#endif

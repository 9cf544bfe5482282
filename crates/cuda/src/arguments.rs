//! The argument of the attention kernels.

use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides, ScoreStrides};
use crate::kernel_struct::kernel_struct;

kernel_struct! {
    /// The only argument of every attention kernel.
    ///
    /// B is `sequences`, H is `heads`, H_kv is `key_heads`, T_q is `query_count` and T_kv is `key_count`. Packed
    /// sequences are successive rows of one tensor: then T_q and T_kv are totals, and all tensors but the lengths have
    /// a batch of one. Tensors (B, H, T_q) are contiguous. The others have strides, in elements, and a last dimension
    /// that is contiguous unless a stride for it is named. A pointer that a call does not need is null.
    pub struct AttentionArguments {
        // ---- tensors of the forward pass ----
        /// (B, H, T_q, D), elements.
        pub queries: InputPointer<Elements>,
        /// (B, H_kv, T_kv, D), elements, or codes with KEY_CODES. With KEY_PAGES, keys, values and their scales are
        /// pools of pages instead: (pages, H_kv, page size, ..).
        pub keys: InputPointer<Elements>,
        /// (B, H_kv, T_kv, D_v), as the keys.
        pub values: InputPointer<Elements>,
        /// (B, H_kv, T_kv, scales of a row), with KEY_CODES: a number is that of its code times the scale of its
        /// columns.
        pub key_scales: InputPointer<f32>,
        /// (B, H_kv, T_kv, scales of a row), with KEY_CODES.
        pub value_scales: InputPointer<f32>,
        /// (B, H, T_q, D_v), elements.
        pub output: OutputPointer<Elements>,
        /// (B, H, T_q), natural; -inf for a fully masked row. May be null.
        pub log_sum_exp: OutputPointer<f32>,
        /// (2, B, H, T_q): what the backward pass computes weights from, as row_results.cuh says. May be null in the
        /// forward pass.
        pub row_statistics: OutputPointer<f32>,
        // ---- score modifiers ----
        /// Broadcast to (B, H, T_q, T_kv), with HAS_BIAS: elements, or f32.
        pub bias: InputPointer<Elements>,
        /// Broadcast to (B, H, T_q, T_kv), with HAS_BOOLEAN_MASK: 0 masks a key.
        pub boolean_mask: InputPointer<u8>,
        /// (H), with HAS_ALIBI: -slope * |position of the query - key| is added.
        pub alibi_slopes: InputPointer<f32>,
        /// (B or 1, H, relative_bias_length), with HAS_RELATIVE_BIAS.
        pub relative_bias: InputPointer<f32>,
        /// (B): replaces relative_bias_origin. May be null.
        pub relative_bias_origins: InputPointer<i32>,
        /// (H): a logit that takes weight and has no value. May be null.
        pub sinks: InputPointer<f32>,
        /// (2): low and high half; replaces dropout_seed_low and _high. May be null.
        pub dropout_seed: InputPointer<u32>,
        // ---- which keys a query attends to ----
        /// (B + 1): the first query of each packed sequence, and the total; else null.
        pub cumulative_queries: InputPointer<i32>,
        /// (B + 1): the same of keys; null exactly if cumulative_queries is.
        pub cumulative_keys: InputPointer<i32>,
        /// (B): the position of query 0 among the keys; replaces `first_position`. May be null.
        pub first_positions: InputPointer<i32>,
        /// (B): keys at and past the length are masked. May be null.
        pub key_lengths: InputPointer<i32>,
        /// (B): keys before the start are masked. May be null.
        pub key_starts: InputPointer<i32>,
        /// (B): with `causal`, keys before the prefix's end are not masked. May be null.
        pub prefix_lengths: InputPointer<i32>,
        /// (B, T_q): the first key that a query may attend to. May be null.
        pub first_keys: InputPointer<i32>,
        /// (B, T_q): the key after the last one. May be null.
        pub end_keys: InputPointer<i32>,
        // ---- scratch of the decode kernels ----
        /// (splits, B, H, T_q, D_v), if `splits` is above 1.
        pub partial_outputs: OutputPointer<f32>,
        /// (splits, B, H, T_q): the maximum of the scores, and the sum of the weights.
        pub partial_statistics: OutputPointer<[f32; 2]>,
        // ---- tensors of the backward pass ----
        /// (B, H, T_q, D_v), elements.
        pub output_gradient: InputPointer<Elements>,
        /// (B, H, T_q). May be null.
        pub log_sum_exp_gradient: InputPointer<f32>,
        /// (B, H, T_q, D), elements.
        pub query_gradient: OutputPointer<Elements>,
        /// (B, H_kv, T_kv, D), elements.
        pub key_gradient: OutputPointer<Elements>,
        /// (B, H_kv, T_kv, D_v), elements.
        pub value_gradient: OutputPointer<Elements>,
        /// (B, H, T_q, T_kv), contiguous, zeros before: with BIAS_GRADIENT.
        pub score_gradient: OutputPointer<f32>,
        /// The sum of score_gradient over the dimensions that the bias broadcasts.
        pub bias_gradient: OutputPointer<f32>,
        /// (H).
        pub sink_gradient: OutputPointer<f32>,
        /// (H), with SLOPE_GRADIENT.
        pub slope_gradient: OutputPointer<f32>,
        /// (B or 1, H, relative_bias_length), zeros before: with RELATIVE_BIAS_GRADIENT.
        pub relative_bias_gradient: OutputPointer<f32>,
        // ---- scratch of the backward pass ----
        /// (B, H, T_q): sum of output * output_gradient, less log_sum_exp_gradient.
        pub delta: OutputPointer<f32>,
        /// (B, T_q): the first key that a query attends to, and the one after the last.
        pub query_intervals: OutputPointer<[i32; 2]>,
        /// (B, query_tiles): keys that any query of the tile attends to, and that all do.
        pub tile_intervals: OutputPointer<[i32; 4]>,
        /// (B, H, query_tiles, BACKWARD_QUERIES * HEAD_COLUMNS), with FUSED_BACKWARD.
        pub query_gradient_sums: OutputPointer<f32>,
        /// (B, H, query_tiles), with FUSED_BACKWARD: blocks of keys that were added.
        pub query_gradient_turns: OutputPointer<i32>,
        /// (B, H, key blocks, KEY_WARPS), zeros before: with SLOPE_GRADIENT.
        pub slope_gradient_parts: OutputPointer<f32>,
        /// (pairs, H / H_kv, key blocks, relative_bias_length), zeros before and after: with RELATIVE_BIAS_GRADIENT.
        pub relative_bias_parts: OutputPointer<f32>,
        // ---- strides, in elements ----
        /// The strides of `queries`.
        pub query_strides: RowStrides,
        /// The strides of `keys`.
        pub key_strides: RowStrides,
        /// The strides of `values`.
        pub value_strides: RowStrides,
        /// The strides of `key_scales`.
        pub key_scale_strides: RowStrides,
        /// The strides of `value_scales`.
        pub value_scale_strides: RowStrides,
        /// The strides of `output`.
        pub output_strides: RowStrides,
        /// The strides of `output_gradient`.
        pub output_gradient_strides: RowStrides,
        /// The strides of `query_gradient`.
        pub query_gradient_strides: RowStrides,
        /// The strides of `key_gradient`.
        pub key_gradient_strides: RowStrides,
        /// The strides of `value_gradient`.
        pub value_gradient_strides: RowStrides,
        /// The strides of `bias`.
        pub bias_strides: ScoreStrides,
        /// The strides of `boolean_mask`.
        pub boolean_mask_strides: ScoreStrides,
        /// 0 if the sequences share the biases.
        pub relative_bias_sequence_stride: i64,
        /// From a head of `relative_bias` to the next one.
        pub relative_bias_head_stride: i64,
        // ---- sizes ----
        /// B, the number of sequences.
        pub sequences: i32,
        /// H, the number of heads.
        pub heads: i32,
        /// H_kv, the number of heads of keys and values.
        pub key_heads: i32,
        /// T_q, the number of queries of a sequence, or of all packed sequences.
        pub query_count: i32,
        /// T_kv, the number of keys of a sequence, or of all packed sequences.
        pub key_count: i32,
        // ---- masks ----
        /// 0: the last query is at the last key of its sequence.
        pub has_first_position: i32,
        /// The position of query 0 among the keys, if has_first_position; may be negative.
        pub first_position: i32,
        /// 1: keys after the position of a query are masked.
        pub causal: i32,
        /// Keys more than this before the position are masked; -1 for no bound.
        pub window_left: i32,
        /// Keys more than this after the position are masked; -1 for no bound.
        pub window_right: i32,
        /// Keys in another chunk of this many positions are masked; 0 for no chunks.
        pub chunk: i32,
        // ---- relative bias ----
        /// Entry (origin + key - query) is added to a score, 0 where there is none; key and query count in their
        /// sequence.
        pub relative_bias_origin: i32,
        /// The number of entries of a head.
        pub relative_bias_length: i32,
        // ---- the launch ----
        /// Decode: the number of parts of the keys that blocks work on side by side.
        pub splits: i32,
        /// Blocks of a head of a sequence, in a grid over blocks * heads * sequences; decode: blocks of rows of a key
        /// head.
        pub blocks: i32,
        /// Heads whose blocks start side by side, the longest blocks first; at least 1.
        pub section_heads: i32,
        /// Backward: the number of tiles of BACKWARD_QUERIES queries of the longest sequence.
        pub query_tiles: i32,
        /// Backward: the number of blocks of keys of the longest sequence.
        pub key_blocks: i32,
        /// Backward of keys: the first pair of a sequence and a key head of a launch. Pairs are counted through the key
        /// heads, then the sequences.
        pub first_pair: i32,
        /// Backward of keys: the number of pairs of a launch.
        pub pairs: i32,
        // ---- numbers ----
        /// The factor of products; above 0 unless MODIFIES_SCORES.
        pub scale: f32,
        /// With HAS_SOFTCAP: softcap * tanh(score / softcap).
        pub softcap: f32,
        /// With HAS_DROPOUT: 1 / (1 - p), or 0 if p is 1.
        pub kept_weight_factor: f32,
        /// Weights whose random word is below are dropped: p * 2^32, rounded.
        pub dropout_threshold: u32,
        /// The lower 32 bits of the seed.
        pub dropout_seed_low: u32,
        /// The upper 32 bits of the seed.
        pub dropout_seed_high: u32,
        // ---- the sum of bias gradients ----
        /// The first size of `bias_gradient`: B or 1.
        pub bias_sequences: i32,
        /// The second size of `bias_gradient`: H or 1.
        pub bias_heads: i32,
        /// The third size of `bias_gradient`: T_q or 1.
        pub bias_queries: i32,
        /// The fourth size of `bias_gradient`: T_kv or 1.
        pub bias_keys: i32,
        // ---- pages ----
        /// (B, page_table_width), with KEY_PAGES: the pages of each sequence, in the order of its keys.
        pub page_table: InputPointer<i32>,
        /// The number of entries of a sequence in `page_table`.
        pub page_table_width: i32,
        /// The binary logarithm of the page size.
        pub page_shift: i32,
    }
    /// The pairs of a query and a head that a block of the decode kernel works on.
    pub(crate) const DECODE_ROWS: usize = 16;
    /// The threads of a block of the kernels without products.
    pub const SMALL_BLOCK_THREADS: usize = 128;
}

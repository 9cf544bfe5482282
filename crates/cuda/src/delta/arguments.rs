//! The argument of the kernels of the gated delta rule.

use crate::device::KernelArguments;
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides};
use crate::kernel_struct::kernel_struct;

kernel_struct! {
    /// The only argument of every kernel of the gated delta rule.
    ///
    /// N is `sequences`, H is `heads`, T is `tokens`, D_k and D_v are KEY_WIDTH and VALUE_WIDTH. B is N, or 1 for
    /// packed sequences: successive rows of one entry, of which T is the total. A pointer that a call does not need is
    /// null.
    pub(super) struct DeltaArguments {
        // ---- tensors of the forward pass ----
        /// (B, H_q, T, D_k), elements.
        pub queries: InputPointer<Elements>,
        /// (B, H_k, T, D_k), elements.
        pub keys: InputPointer<Elements>,
        /// (B, H_v, T, D_v), elements.
        pub values: InputPointer<Elements>,
        /// (B, H, T), or (B, H, T, D_k) with decay_per_channel: logarithms of the factors of a state before a token;
        /// null: all factors are 1.
        pub decays: InputPointer<f32>,
        /// (B, H, T); null: a token adds its value, and does not subtract the stored value.
        pub betas: InputPointer<f32>,
        /// (N, H, D_k, D_v), contiguous; null: zeros.
        pub initial_states: InputPointer<f32>,
        /// (B, H, T, D_v), elements; null: not computed.
        pub output: OutputPointer<Elements>,
        /// (N, H, D_k, D_v), contiguous; null: not stored.
        pub final_states: OutputPointer<f32>,
        // ---- sequences ----
        /// (N + 1): the first token of each packed sequence, and T; null: each entry is one.
        pub cumulative_tokens: InputPointer<i32>,
        /// (N + 1): the first chunk of each packed sequence, and `chunks`.
        pub cumulative_chunks: InputPointer<i32>,
        // ---- scratch ----
        /// (chunks, H, TILE_WORDS): see delta_tile.cuh.
        pub tiles: OutputPointer<f32>,
        /// (N, H), zeros before: 1 for heads that are computed token by token.
        pub recurrent_heads: OutputPointer<i32>,
        // ---- tensors of the backward pass ----
        /// (B, H, T, D_v), elements.
        pub output_gradient: InputPointer<Elements>,
        /// (N, H, D_k, D_v), contiguous; null: zeros.
        pub final_state_gradient: InputPointer<f32>,
        /// (B, H, T, D_k), contiguous.
        pub query_gradient: OutputPointer<f32>,
        /// (B, H, T, D_k), contiguous.
        pub key_gradient: OutputPointer<f32>,
        /// (B, H, T, D_v), contiguous.
        pub value_gradient: OutputPointer<f32>,
        /// (B, H, T), or (B, H, T, D_k) with decay_per_channel, contiguous.
        pub decay_gradient: OutputPointer<f32>,
        /// (B, H, T), contiguous; null without betas.
        pub beta_gradient: OutputPointer<f32>,
        /// (N, H, D_k, D_v), contiguous.
        pub initial_state_gradient: OutputPointer<f32>,
        // ---- scratch of the backward pass ----
        /// (chunks, H, VALUE_COLUMNS, KEY_COLUMNS): transposed states before each chunk.
        pub chunk_states: OutputPointer<f32>,
        /// As chunk_states: the gradients of the transposed states after each chunk.
        pub chunk_state_gradients: OutputPointer<f32>,
        /// (chunks, H, CHUNK, VALUE_COLUMNS).
        pub errors: OutputPointer<f32>,
        /// As errors.
        pub error_gradients: OutputPointer<f32>,
        // ---- strides, in elements ----
        /// The strides of `queries`.
        pub query_strides: RowStrides,
        /// The strides of `keys`.
        pub key_strides: RowStrides,
        /// The strides of `values`.
        pub value_strides: RowStrides,
        /// The strides of `decays`.
        pub decay_strides: RowStrides,
        /// The strides of `betas`.
        pub beta_strides: RowStrides,
        /// The strides of `output`.
        pub output_strides: RowStrides,
        /// The strides of `output_gradient`.
        pub output_gradient_strides: RowStrides,
        // ---- sizes ----
        /// N, the sequences.
        pub sequences: i32,
        /// H, the heads.
        pub heads: i32,
        /// Divides `heads`, as key_heads and value_heads do: head h reads h / (heads / count).
        pub query_heads: i32,
        /// As `query_heads`.
        pub key_heads: i32,
        /// As `query_heads`.
        pub value_heads: i32,
        /// T, the tokens of an entry.
        pub tokens: i32,
        /// Chunks of all sequences.
        pub chunks: i32,
        // ---- options ----
        /// 1: a factor for each row of a state.
        pub decay_per_channel: i32,
        /// 1: rows of queries and keys are divided by their lengths.
        pub has_norm: i32,
        /// 1: the kernels that compute token by token skip all other heads.
        pub only_recurrent_heads: i32,
        // ---- numbers ----
        /// The factor of queries.
        pub scale: f32,
        /// The number that is added to the square of a length.
        pub norm_epsilon: f32,
    }

    /// The warps of a block of the kernels that prepare chunks.
    pub(super) const PREPARE_WARPS: usize = 8;
    /// The warps of a block of the kernel that computes token by token.
    pub(super) const STEP_WARPS: usize = 8;
    /// The warps of a block of the backward pass token by token.
    pub(super) const BACKWARD_STEP_WARPS: usize = 8;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for DeltaArguments {}

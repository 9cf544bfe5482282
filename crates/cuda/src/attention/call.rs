//! The types of a call on CUDA, of its results and of the inputs of its backward pass.

use candle_attention_call::{AttentionCall, BoundedKeys};
use candle_core::{Shape, Storage, Tensor};

/// One attention call, whose tensors are on one device: CUDA, or the CPU with the feature `emulator`.
///
/// - Queries are f16, bf16 or f32. Keys and values have their dtype, or are u8 with scales in f32. The strides are any,
///   but the last dimension is contiguous; the stride of keys and values over B may be 0.
/// - Slopes, relative biases and sinks are f32, a boolean mask is u8. A bias is f32 or has the dtype of the queries.
/// - The lists of the ranges of keys are i32.
pub type CudaCall = AttentionCall<Tensor, BoundedKeys<Tensor>>;

/// The results of a forward pass.
#[derive(Debug)]
pub struct ForwardOutput {
    /// The attention output in the dtype of the queries.
    pub output: Storage,
    /// The shape of the output as it is stored: (B, H, T_q, D_v) or (B, T_q, H, D_v).
    pub output_shape: Shape,
    /// The log-sum-exp of the scores in f32, if it was requested; -inf for a fully masked query.
    pub log_sum_exp: Option<Storage>,
    /// (B, H, T_q).
    pub log_sum_exp_shape: Shape,
    /// The statistics of the softmax, from which a backward pass computes the weights, in f32, if they were requested:
    /// the log-sum-exp in two parts, since one f32 would lose the sum next to a large score.
    pub softmax_stats: Option<Storage>,
    /// (2, B, H, T_q).
    pub softmax_stats_shape: Shape,
}

/// The inputs of a backward pass besides the call.
#[derive(Debug, Clone, Copy)]
pub struct BackwardInputs<'a> {
    /// The output of the forward pass, contiguous in the shape in which it is stored.
    pub output: &'a Tensor,
    /// The statistics of the softmax of the forward pass, f32 (2, B, H, T_q).
    pub softmax_stats: &'a Tensor,
    /// The gradient of the output, (B, H, T_q, D_v) in the dtype of the queries, with any strides but a contiguous last
    /// dimension.
    pub output_gradient: &'a Tensor,
    /// The gradient of the log-sum-exp, f32 (B, H, T_q).
    pub log_sum_exp_gradient: Option<&'a Tensor>,
}

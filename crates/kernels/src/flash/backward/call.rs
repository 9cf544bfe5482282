//! The backward pass as the caller describes it, and the same once it is checked.

use super::gradients::GradientPointers;
use crate::flash::inputs::CheckedCall;
use crate::flash::kv_rows::KeysValues;
use crate::flash::options::SoftmaxStats;
use crate::flash::problem::CpuCall;
use crate::number::Strided;
use candle_attention_call::{LayoutStrides, RequestedGradients};

/// A call of [`attend`](crate::flash::attend), its results, and the gradients of a loss with respect to them.
#[derive(Clone, Copy)]
pub struct AttentionBackwardProblem<'a, E> {
    /// The call of the forward pass.
    pub forward: CpuCall<'a>,
    /// The attention output, in the order that the call names.
    pub output: &'a [E],
    /// The softmax statistics of each query: (B, H, T_q).
    pub softmax_stats: &'a [SoftmaxStats],
    /// The gradient of the output: (B, H, T_q), rows of D_v contiguous elements.
    pub output_grad: Strided<'a, E, 3>,
    /// The gradient of the log-sum-exp, if the loss depends on it: (B, H, T_q).
    pub lse_grad: Option<&'a [f32]>,
}

/// A checked problem, and where its gradients are written. Keys and values are never codes here, as they may be in a
/// forward pass.
pub struct BackwardCall<'a, E> {
    pub(super) inputs: CheckedCall<'a>,
    pub(super) q: Strided<'a, E, 3>,
    pub(super) keys_values: KeysValues<'a, E>,
    /// The attention output.
    pub(super) output: &'a [E],
    pub(super) softmax_stats: &'a [SoftmaxStats],
    pub(super) output_grad: Strided<'a, E, 3>,
    pub(super) lse_grad: Option<&'a [f32]>,
    pub(super) requested: RequestedGradients,
    pub(super) to: GradientPointers<E>,
}

impl<E> BackwardCall<'_, E> {
    /// Returns the strides of the gradients of the queries.
    pub(super) fn query_strides(&self) -> LayoutStrides {
        let dims = &self.inputs.dims;
        self.requested.layout.strides(dims.h, dims.t_q, dims.d)
    }

    /// Returns the strides of the gradients of keys or values of a width.
    pub(super) fn key_strides(&self, width: usize) -> LayoutStrides {
        let dims = &self.inputs.dims;
        self.requested.layout.strides(dims.h_kv, dims.t_kv, width)
    }
}

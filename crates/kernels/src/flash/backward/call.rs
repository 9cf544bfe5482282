//! The backward pass as the caller describes it, and the same once it is checked.

use super::output::GradientOutput;
use crate::cpu::SharedPtr;
use crate::error::Error;
use crate::flash::call::AttentionCall;
use crate::flash::dims::AttentionDims;
use crate::flash::options::SoftmaxStats;
use crate::flash::problem::AttentionProblem;
use crate::number::Strided;

/// A call of [`attend`](crate::flash::attend), its results, and the gradients of a loss with respect to them.
#[derive(Clone, Copy)]
pub struct AttentionBackwardProblem<'a, E> {
    /// The call of the forward pass.
    pub forward: AttentionProblem<'a, E>,
    /// The attention output, in the order that the call names.
    pub output: &'a [E],
    /// The softmax statistics of each query: (B, H, T_q).
    pub stats: &'a [SoftmaxStats],
    /// The gradient of the output: (B, H, T_q), rows of D_v contiguous elements.
    pub output_grad: Strided<'a, E, 3>,
    /// The gradient of the log-sum-exp, if the loss depends on it: (B, H, T_q).
    pub lse_grad: Option<&'a [f32]>,
}

/// The gradients that [`attend_backward`](crate::flash::attend_backward) computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedGradients {
    /// The gradient of the queries.
    pub q: bool,
    /// The gradient of the keys.
    pub k: bool,
    /// The gradient of the values.
    pub v: bool,
    /// The shape of the gradient of the bias, each dimension that of (B, H, T_q, T_kv), or 1. The gradients of scores
    /// that share an entry are summed.
    pub bias: Option<[usize; 4]>,
    /// The gradient of the relative bias.
    pub relative_bias: bool,
    /// The gradient of ALiBi's slopes.
    pub slopes: bool,
    /// The gradient of the sinks.
    pub sinks: bool,
}

/// The requested gradients, contiguous.
#[derive(Debug, Clone, Default)]
pub struct AttentionGradients<E> {
    /// (B, H, T_q, D).
    pub q: Option<Vec<E>>,
    /// (B, H_kv, T_kv, D), summed over the queries of the heads that share a key head.
    pub k: Option<Vec<E>>,
    /// (B, H_kv, T_kv, D_v).
    pub v: Option<Vec<E>>,
    /// In the requested shape.
    pub bias: Option<Vec<f32>>,
    /// (B, H) rows of a number for each entry, or (1, H) where sequences share them.
    pub relative_bias: Option<Vec<f32>>,
    /// (H,).
    pub slopes: Option<Vec<f32>>,
    /// (H,).
    pub sinks: Option<Vec<f32>>,
}

/// A checked problem, and where its gradients are written.
pub struct AttentionBackwardCall<'a, E> {
    pub(super) call: AttentionCall<'a, E>,
    pub(super) stats: &'a [SoftmaxStats],
    pub(super) output_grad: Strided<'a, E, 3>,
    pub(super) lse_grad: Option<&'a [f32]>,
    pub(super) requested: RequestedGradients,
    pub(super) to: GradientPointers<E>,
}

/// Pointers to the gradients of a call.
pub(super) struct GradientPointers<E> {
    /// The row terms of the softmax, (B, H, T_q), computed by [`AttentionBackwardCall::write_deltas`].
    pub deltas: SharedPtr<f32>,
    /// The sums of the queries' gradients, (B, H, T_q, D): the gradients themselves in f32.
    pub q_sums: SharedPtr<f32>,
    /// The gradients of the queries where they are not f32.
    pub q: Option<SharedPtr<E>>,
    pub k: Option<SharedPtr<E>>,
    pub v: Option<SharedPtr<E>>,
    pub bias: Option<GradientOutput>,
    pub relative_bias: Option<GradientOutput>,
    /// (H,).
    pub slopes: Option<SharedPtr<f32>>,
    /// (H,).
    pub sinks: Option<SharedPtr<f32>>,
}

impl RequestedGradients {
    /// Checks that the call has the tensors whose gradients are requested.
    pub(super) fn check<E>(&self, forward: &AttentionProblem<E>) -> Result<(), Error> {
        let scores = &forward.scores;
        let missing =
            |name: &str| Err(Error::Shape(format!("expected {name}, whose gradient is requested, found none")));
        if self.bias.is_some() && scores.bias.is_none() {
            return missing("a bias");
        }
        if self.relative_bias && scores.relative_bias.is_none() {
            return missing("a relative bias");
        }
        if self.slopes && scores.alibi.is_none() {
            return missing("slopes");
        }
        if self.sinks && scores.sinks.is_none() {
            return missing("sinks");
        }
        let AttentionDims { b, h, t_q, t_kv, .. } = forward.dims;
        let full = [b, h, t_q, t_kv];
        if let Some(shape) = self.bias
            && shape.iter().zip(full).any(|(&dim, full)| dim != full && dim != 1)
        {
            return Err(Error::Shape(format!("expected a bias that broadcasts to {full:?}, found {shape:?}")));
        }
        Ok(())
    }
}

//! The differentiable inputs of a fused kernel.

use candle_core::{DType, Result, Tensor};

use super::call::{Call, Qkv};

/// The tensors that a call reads besides q, k and v. Gradients flow into them.
#[derive(Clone)]
pub(super) struct ScoreTensors {
    /// Broadcastable to (B, H, T_q, T_kv), in the dtype of the call's bias.
    pub bias: Option<Tensor>,
    /// (B or 1, H, T_q + T_kv - 1) in f32.
    pub relative_bias: Option<Tensor>,
    /// ALiBi slopes (H,) in f32.
    pub slopes: Option<Tensor>,
    /// (H,) in f32.
    pub sinks: Option<Tensor>,
}

impl ScoreTensors {
    pub fn new(call: &Call) -> Result<Self> {
        let bias = match &call.bias {
            Some(bias) => Some(without_repeats(bias)?),
            None => None,
        };
        let relative_bias = match &call.options.relative_bias {
            Some(given) => {
                let biases = given.to_dtype(DType::F32)?.contiguous()?;
                Some(if biases.rank() == 2 { biases.unsqueeze(0)? } else { biases })
            }
            None => None,
        };
        let slopes = kept(call.options.alibi_slopes.as_ref())?;
        let sinks = kept(call.options.sinks.as_ref())?;
        Ok(Self { bias, relative_bias, slopes, sinks })
    }

    /// Returns all differentiable inputs of a kernel.
    pub fn with_qkv<'a>(&'a self, qkv: Qkv<'a>) -> ByInput<Option<&'a Tensor>> {
        let Self { bias, relative_bias, slopes, sinks } = self;
        ByInput {
            q: Some(qkv.q),
            k: Some(qkv.k),
            v: Some(qkv.v),
            bias: bias.as_ref(),
            relative_bias: relative_bias.as_ref(),
            slopes: slopes.as_ref(),
            sinks: sinks.as_ref(),
        }
    }
}

/// Returns a view of a bias in which no entry is repeated by a stride of 0. A repeated entry is one entry, whose
/// gradient is the sum.
fn without_repeats(bias: &Tensor) -> Result<Tensor> {
    let mut narrowed = bias.clone();
    for dim in 0..bias.rank() {
        if bias.dims()[dim] > 1 && bias.stride()[dim] == 0 {
            narrowed = narrowed.narrow(dim, 0, 1)?;
        }
    }
    Ok(narrowed)
}

/// Returns the numbers in f32: of a tracked tensor a copy, since an optimizer's step in place must not change the
/// numbers that the backward pass reads.
fn kept(tensor: Option<&Tensor>) -> Result<Option<Tensor>> {
    let Some(tensor) = tensor else { return Ok(None) };
    let floats = tensor.to_dtype(DType::F32)?;
    Ok(Some(if tensor.track_op() { floats.force_contiguous()? } else { floats.contiguous()? }))
}

/// A value for each differentiable input of a kernel: the input itself, or its gradient.
pub(super) struct ByInput<T> {
    pub q: T,
    pub k: T,
    pub v: T,
    pub bias: T,
    pub relative_bias: T,
    pub slopes: T,
    pub sinks: T,
}

impl<T> ByInput<T> {
    /// Returns the values in the order in which the operation lists its operands and their gradients.
    pub fn in_order(self) -> [T; 7] {
        let Self { q, k, v, bias, relative_bias, slopes, sinks } = self;
        [q, k, v, bias, relative_bias, slopes, sinks]
    }
}

/// Returns whether an input exists and is tracked for gradients.
pub(super) fn is_tracked(input: Option<&Tensor>) -> bool {
    input.is_some_and(Tensor::track_op)
}

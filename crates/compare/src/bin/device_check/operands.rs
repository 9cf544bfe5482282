//! The tensors of a call, as numbers of a dtype.

use candle_core::{Result, Tensor};

use super::case::Layout;

/// The tensors of a call. Gradients reach all of them.
#[derive(Debug, Clone)]
pub struct Operands {
    /// The buffers of which q, k and v are views.
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// Added to the scores.
    pub bias: Option<Tensor>,
    /// (H, T_q + T_kv - 1).
    pub relative_bias: Option<Tensor>,
    /// (H,).
    pub alibi_slopes: Option<Tensor>,
    /// (H,).
    pub sinks: Option<Tensor>,
}

/// q, k and v of a call.
pub struct Qkv {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

impl Operands {
    /// Applies `change` to each tensor, for example a conversion or a move.
    pub fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let changed = |tensor: &Option<Tensor>| tensor.as_ref().map(&change).transpose();
        Ok(Self {
            q: change(&self.q)?,
            k: change(&self.k)?,
            v: change(&self.v)?,
            bias: changed(&self.bias)?,
            relative_bias: changed(&self.relative_bias)?,
            alibi_slopes: changed(&self.alibi_slopes)?,
            sinks: changed(&self.sinks)?,
        })
    }

    /// Returns all tensors.
    pub fn all(&self) -> Vec<&Tensor> {
        let Self { q, k, v, bias, relative_bias, alibi_slopes, sinks } = self;
        [q, k, v].into_iter().chain([bias, relative_bias, alibi_slopes, sinks].into_iter().flatten()).collect()
    }

    /// Returns the views of a layout.
    pub fn views(&self, layout: Layout) -> Result<Qkv> {
        Ok(Qkv { q: layout.view(&self.q)?, k: layout.view(&self.k)?, v: layout.view(&self.v)? })
    }
}

//! Low-rank updates of weights that are parameters by name: LoRA (<https://arxiv.org/abs/2106.09685>).

use candle_core::{Result, Tensor};
use candle_nn::ops::dropout;

use super::expect::accumulation_dtype;
use super::parameters::frozen;

/// A low-rank update: `scaling · dropout(x) Aᵀ Bᵀ` is added to the product of x with a weight.
#[derive(Debug, Clone)]
pub struct LowRankUpdate {
    /// A, (r, in).
    pub a: Tensor,
    /// B, (out, r).
    pub b: Tensor,
    /// The factor of B A.
    pub scaling: f64,
    /// The probability with which an entry of the input is dropped in training.
    pub dropout: f64,
}

impl LowRankUpdate {
    /// Returns a product (N, out) plus the update for its input `xs` (N, in).
    pub(super) fn add_to(&self, product: &Tensor, xs: &Tensor, train: bool) -> Result<Tensor> {
        let mut input = xs.to_dtype(self.a.dtype())?;
        if train && self.dropout > 0.0 {
            input = dropout(&input, self.dropout as f32)?;
        }
        let update = (input.matmul(&self.a.t()?)?.matmul(&self.b.t()?)? * self.scaling)?;
        product + update.to_dtype(product.dtype())?
    }

    /// Returns a weight (out, in) plus the current value of the update, without gradients. The sum is computed in f32,
    /// or in f64 for a weight in f64, and rounded once.
    pub(super) fn merged_into(&self, weight: &Tensor) -> Result<Tensor> {
        let dtype = accumulation_dtype(weight.dtype());
        let b = self.b.detach().to_dtype(dtype)?;
        let a = self.a.detach().to_dtype(dtype)?;
        (weight.detach().to_dtype(dtype)? + (b.matmul(&a)? * self.scaling)?)?.to_dtype(weight.dtype())
    }

    /// Returns a copy with the current values of variables.
    pub(super) fn freeze(&self) -> Result<Self> {
        Ok(Self { a: frozen(&self.a)?, b: frozen(&self.b)?, ..self.clone() })
    }
}

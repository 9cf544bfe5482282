//! Normalisation of queries and keys before attention.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{Init, ops};
use serde::{Deserialize, Serialize};

use crate::sdpa::accumulation_dtype;
use crate::weights::Source;

/// Which normalisation is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNormKind {
    /// Root mean square, a weight and no bias.
    Rms,
    /// Mean and variance, a weight and a bias.
    Layer,
}

/// What one normalisation spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNormScope {
    /// Each head by itself; the weight (D,) is shared by all heads (Qwen 3).
    PerHead,
    /// The whole projection, before it is split into heads (OLMo 2).
    Projection,
}

/// Normalisation of queries and keys: parameters `q_norm.weight`, `k_norm.weight` (and `.bias` for layer norm).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QkNorm {
    /// Root mean square or layer norm.
    pub kind: QkNormKind,
    /// One head or the whole projection.
    pub scope: QkNormScope,
    /// Added to the mean square or the variance.
    pub eps: f64,
}

/// The normalisation of one projection, over its last dimension.
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    kind: QkNormKind,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Norm {
    /// `name.weight` (size,), and `name.bias` for layer norm.
    pub(crate) fn load(norm: QkNorm, name: &str, size: usize, source: &Source) -> Result<Self> {
        let source = source.pp(name);
        let weight = source.get(size, "weight", Init::Const(1.0))?;
        let bias = source.bias("bias", size, norm.kind == QkNormKind::Layer, Init::Const(0.0))?;
        Ok(Self { kind: norm.kind, weight, bias, eps: norm.eps })
    }

    /// (.., size) to the same shape. Candle's fused norms have no backward pass and no f64, so they run only where
    /// neither is needed.
    pub(crate) fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let tracked = [Some(xs), Some(&self.weight), self.bias.as_ref()].into_iter().flatten().any(Tensor::track_op);
        let eps = self.eps as f32;
        match &self.bias {
            _ if tracked || xs.dtype() == DType::F64 => self.differentiable(xs),
            Some(bias) => ops::layer_norm(&xs.contiguous()?, &self.weight, bias, eps),
            None => ops::rms_norm(&xs.contiguous()?, &self.weight, eps),
        }
    }

    fn differentiable(&self, xs: &Tensor) -> Result<Tensor> {
        let size = xs.dim(D::Minus1)? as f64;
        let mut wide = xs.to_dtype(accumulation_dtype(xs.dtype()))?;
        if self.kind == QkNormKind::Layer {
            wide = wide.broadcast_sub(&(wide.sum_keepdim(D::Minus1)? / size)?)?;
        }
        let mean_square = (wide.sqr()?.sum_keepdim(D::Minus1)? / size)?;
        let normed = wide.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?.to_dtype(xs.dtype())?;
        let scaled = normed.broadcast_mul(&self.weight)?;
        match &self.bias {
            Some(bias) => scaled.broadcast_add(bias),
            None => Ok(scaled),
        }
    }

    /// The parameters under the names they were loaded by.
    pub(crate) fn parameters(&self, name: &str) -> Vec<(String, Tensor)> {
        let weight = (format!("{name}.weight"), self.weight.clone());
        let bias = self.bias.iter().map(|bias| (format!("{name}.bias"), bias.clone()));
        std::iter::once(weight).chain(bias).collect()
    }
}

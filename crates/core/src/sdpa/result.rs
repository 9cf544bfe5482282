//! The results that a call of attention can return.

use candle_core::{DType, Result, Tensor};

use super::statistics::AttentionStatistics;

/// A kind of result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResultKind {
    /// The attention output alone.
    Output,
    /// The output and the weights.
    Weights,
    /// The output and the log-sum-exp of the scores.
    LogSumExp,
    /// The output and statistics of the weights.
    Statistics,
}

/// The attention output and the attention weights.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The attention output: (B, H, T_q, D_v).
    pub output: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv).
    pub weights: Tensor,
}

/// The attention output (B, H, T_q, D_v), alone or with other results (B, H, ..).
pub(crate) trait AttentionResult: Sized {
    /// Applies one function to the output and another to each of the other tensors.
    fn map(
        self,
        output: impl FnOnce(Tensor) -> Result<Tensor>,
        others: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self>;

    /// Converts the output and the weights to the dtype of the queries.
    fn to_dtype(self, dtype: DType) -> Result<Self>;

    /// Returns the attention output.
    fn output(&self) -> &Tensor;
}

impl AttentionResult for Tensor {
    fn map(self, output: impl FnOnce(Tensor) -> Result<Tensor>, _: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        output(self)
    }

    fn to_dtype(self, dtype: DType) -> Result<Self> {
        Tensor::to_dtype(&self, dtype)
    }

    fn output(&self) -> &Tensor {
        self
    }
}

impl AttentionResult for AttentionOutput {
    fn map(
        self,
        output: impl FnOnce(Tensor) -> Result<Tensor>,
        others: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok(Self { output: output(self.output)?, weights: others(self.weights)? })
    }

    fn to_dtype(self, dtype: DType) -> Result<Self> {
        Ok(Self { output: self.output.to_dtype(dtype)?, weights: self.weights.to_dtype(dtype)? })
    }

    fn output(&self) -> &Tensor {
        &self.output
    }
}

/// The output and the log-sum-exp (B, H, T_q).
impl AttentionResult for (Tensor, Tensor) {
    fn map(
        self,
        output: impl FnOnce(Tensor) -> Result<Tensor>,
        others: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok((output(self.0)?, others(self.1)?))
    }

    fn to_dtype(self, dtype: DType) -> Result<Self> {
        Ok((self.0.to_dtype(dtype)?, self.1))
    }

    fn output(&self) -> &Tensor {
        &self.0
    }
}

impl AttentionResult for (Tensor, AttentionStatistics) {
    fn map(
        self,
        output: impl FnOnce(Tensor) -> Result<Tensor>,
        others: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok((output(self.0)?, self.1.map(others)?))
    }

    fn to_dtype(self, dtype: DType) -> Result<Self> {
        Ok((self.0.to_dtype(dtype)?, self.1))
    }

    fn output(&self) -> &Tensor {
        &self.0
    }
}

//! The results of a call.

use candle_attention_call::RequestedResults;
use candle_core::{DType, Error, Result, Tensor};

use super::statistics::AttentionStatistics;

/// The attention output and the attention weights.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The attention output: (B, H, T_q, D_v).
    pub output: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv).
    pub weights: Tensor,
}

/// The results of a call: the attention output (B, H, T_q, D_v), and the other [requested](RequestedResults) results,
/// (B, H, ..).
#[derive(Debug, Clone)]
pub(crate) struct Attended {
    pub output: Tensor,
    /// (B, H, T_q, T_kv), after dropout.
    pub weights: Option<Tensor>,
    /// (B, H, T_q).
    pub log_sum_exp: Option<Tensor>,
    pub statistics: Option<AttentionStatistics>,
}

impl From<Tensor> for Attended {
    /// Returns the results of a call that requested the output alone.
    fn from(output: Tensor) -> Self {
        Self { output, weights: None, log_sum_exp: None, statistics: None }
    }
}

impl Attended {
    /// Applies a function to each tensor.
    pub fn map(self, change: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        let Self { output, weights, log_sum_exp, statistics } = self;
        Ok(Self {
            output: change(output)?,
            weights: weights.map(&change).transpose()?,
            log_sum_exp: log_sum_exp.map(&change).transpose()?,
            statistics: statistics.map(|found| found.map(&change)).transpose()?,
        })
    }

    /// Returns the results of packed sequences without B: the output as (total_q, H, D_v), the others as (H, ..).
    pub fn without_batch(mut self) -> Result<Self> {
        self.output = self.output.transpose(1, 2)?;
        self.map(|result| result.squeeze(0))
    }

    /// Converts the output and the weights to the dtype of the queries.
    pub fn into_dtype(mut self, dtype: DType) -> Result<Self> {
        self.output = self.output.to_dtype(dtype)?;
        self.weights = self.weights.map(|weights| weights.to_dtype(dtype)).transpose()?;
        Ok(self)
    }

    /// Returns the output and the weights.
    ///
    /// # Errors
    /// If the weights were not requested.
    pub fn output_and_weights(self) -> Result<AttentionOutput> {
        Ok(AttentionOutput { output: self.output, weights: self.weights.ok_or_else(|| missing("weights"))? })
    }

    /// Returns the output and the log-sum-exp of the scores.
    ///
    /// # Errors
    /// If the log-sum-exp was not requested.
    pub fn output_and_log_sum_exp(self) -> Result<(Tensor, Tensor)> {
        Ok((self.output, self.log_sum_exp.ok_or_else(|| missing("log-sum-exp"))?))
    }

    /// Returns the output and the statistics of the weights.
    ///
    /// # Errors
    /// If the statistics were not requested.
    pub fn output_and_statistics(self) -> Result<(Tensor, AttentionStatistics)> {
        Ok((self.output, self.statistics.ok_or_else(|| missing("statistics"))?))
    }
}

fn missing(result: &str) -> Error {
    Error::msg(format!("[attention] expected results with the {result}, found none"))
}

/// Returns the name of the public function that returns the requested results, for errors.
pub(crate) fn operation(wanted: RequestedResults, is_packed: bool) -> &'static str {
    if wanted.weights {
        return "scaled_dot_product_attention_with_weights";
    }
    match (wanted.statistics.is_some(), wanted.log_sum_exp, is_packed) {
        (true, _, false) => "scaled_dot_product_attention_with_statistics",
        (true, _, true) => "scaled_dot_product_attention_varlen_with_statistics",
        (false, true, false) => "scaled_dot_product_attention_with_lse",
        (false, true, true) => "scaled_dot_product_attention_varlen_with_lse",
        (false, false, false) => "scaled_dot_product_attention",
        (false, false, true) => "scaled_dot_product_attention_varlen",
    }
}

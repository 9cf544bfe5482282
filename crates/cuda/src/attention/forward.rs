//! The forward pass.

use candle_core::Result;

use super::call::{AttentionCall, ForwardOutput};

impl AttentionCall {
    /// Computes the attention output, and the log-sum-exp if `with_log_sum_exp`.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self, _with_log_sum_exp: bool) -> Result<ForwardOutput> {
        Err(self.plan().map(|_| ()).unwrap_err().into())
    }
}

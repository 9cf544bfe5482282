//! The options of the gated delta rule.

use candle_attention_core::Backend;
use candle_attention_kernels::InstructionSet;

/// Options of [`gated_delta_rule`](crate::gated_delta_rule).
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct DeltaOptions {
    pub(super) scale: Option<f64>,
    pub(super) qk_norm: Option<f64>,
    pub(super) backend: Backend,
    pub(super) instruction_set: Option<InstructionSet>,
}

impl DeltaOptions {
    /// Sets the factor on the queries. It is 1/sqrt(D_k) by default.
    pub fn with_scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Sets the epsilon of an L2 norm of queries and keys: each row is divided by `sqrt(sum of its squares + eps)`,
    /// queries before they are scaled. There is no norm by default. It is `use_qk_l2norm_in_kernel` of
    /// flash-linear-attention, whose epsilon is 1e-6.
    pub fn with_qk_norm(mut self, eps: impl Into<Option<f64>>) -> Self {
        self.qk_norm = eps.into();
        self
    }

    /// Sets the implementation that runs. It is [`Backend::Auto`] by default.
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Sets the instruction set of the fused CPU kernel, for tests and comparisons. It is the fastest available by
    /// default. A call fails if the processor lacks it.
    pub fn with_instruction_set(mut self, instruction_set: impl Into<Option<InstructionSet>>) -> Self {
        self.instruction_set = instruction_set.into();
        self
    }
}

//! The argument of the kernels of the gated delta rule, as `kernels/delta_arguments.cuh` declares it.

use crate::arguments::{Address, RowStrides};
use crate::device::KernelArguments;

/// The argument of every kernel of the gated delta rule. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DeltaArguments {
    pub queries: Address,
    pub keys: Address,
    pub values: Address,
    pub decays: Address,
    pub betas: Address,
    pub initial_states: Address,
    pub output: Address,
    pub final_states: Address,

    pub cumulative_tokens: Address,
    pub cumulative_chunks: Address,

    pub tiles: Address,
    pub recurrent_heads: Address,

    pub output_gradient: Address,
    pub final_state_gradient: Address,
    pub query_gradient: Address,
    pub key_gradient: Address,
    pub value_gradient: Address,
    pub decay_gradient: Address,
    pub beta_gradient: Address,
    pub initial_state_gradient: Address,

    pub chunk_states: Address,
    pub chunk_state_gradients: Address,
    pub errors: Address,
    pub error_gradients: Address,

    pub query_strides: RowStrides,
    pub key_strides: RowStrides,
    pub value_strides: RowStrides,
    pub decay_strides: RowStrides,
    pub beta_strides: RowStrides,
    pub output_strides: RowStrides,
    pub output_gradient_strides: RowStrides,

    pub sequences: i32,
    pub heads: i32,
    pub query_heads: i32,
    pub key_heads: i32,
    pub value_heads: i32,
    pub tokens: i32,
    pub chunks: i32,

    pub decay_per_channel: i32,
    pub has_norm: i32,
    pub only_recurrent_heads: i32,

    pub scale: f32,
    pub norm_epsilon: f32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for DeltaArguments {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Program;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn delta_arguments_match_the_source() {
        let sizes = source_sizes(&Program { root: "delta.cu", defines: Vec::new() });
        assert_same_layout!(
            sizes,
            DeltaArguments,
            [
                queries,
                keys,
                values,
                decays,
                betas,
                initial_states,
                output,
                final_states,
                cumulative_tokens,
                cumulative_chunks,
                tiles,
                recurrent_heads,
                output_gradient,
                final_state_gradient,
                query_gradient,
                key_gradient,
                value_gradient,
                decay_gradient,
                beta_gradient,
                initial_state_gradient,
                chunk_states,
                chunk_state_gradients,
                errors,
                error_gradients,
                query_strides,
                key_strides,
                value_strides,
                decay_strides,
                beta_strides,
                output_strides,
                output_gradient_strides,
                sequences,
                heads,
                query_heads,
                key_heads,
                value_heads,
                tokens,
                chunks,
                decay_per_channel,
                has_norm,
                only_recurrent_heads,
                scale,
                norm_epsilon
            ]
        );
    }
}

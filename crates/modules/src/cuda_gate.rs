//! Values times an activated gate by CUDA kernels, as an operation in Candle's graph.

use candle_attention_cuda::{Activation, GateCall, GateGradients};
use candle_core::{Result, Tensor};

use crate::base::record;
use crate::base::rowwise::{with_contiguous_rows, with_four_dimensions};

/// Values times an activated gate that the kernels support, in the form that they read.
pub(crate) struct CudaGate {
    /// (.., D) or (.., 1), with contiguous rows.
    gates: Tensor,
    /// (.., D), with contiguous rows.
    values: Tensor,
    kernels: GateCall,
}

impl CudaGate {
    /// Returns `activation(gates) · values` of at most four dimensions; `None` if the kernels do not support it. The
    /// gates have the shape of the values, or the last dimension 1.
    pub fn plan(gates: &Tensor, values: &Tensor, activation: Activation) -> Option<Self> {
        let (last, others) = values.dims().split_last()?;
        let (gate_last, gate_others) = gates.dims().split_last()?;
        let fits = others == gate_others && [1, *last].contains(gate_last) && gates.dtype() == values.dtype();
        if !fits || values.rank() > 4 {
            return None;
        }
        let gates = with_contiguous_rows(gates).ok()?;
        let values = with_contiguous_rows(values).ok()?;
        let kernels = GateCall {
            gates: with_four_dimensions(&gates.detach()).ok()?,
            values: with_four_dimensions(&values.detach()).ok()?,
            activation,
        };
        kernels.plan().ok()?;
        Some(Self { gates, values, kernels })
    }

    /// Returns the product, contiguous, in the shape of the values.
    pub fn run(self) -> Result<Tensor> {
        let Self { gates, values, kernels } = self;
        let output = kernels.forward()?;
        let shape = values.shape().clone();
        let gate_shape = gates.shape().clone();
        record("gate", &[Some(&gates), Some(&values)], output, values.shape(), move |_, gradient| {
            let gradient = with_four_dimensions(&with_contiguous_rows(gradient)?)?;
            let found: GateGradients = kernels.backward(&gradient)?;
            Ok(vec![Some(found.gates.reshape(&gate_shape)?), Some(found.values.reshape(&shape)?)])
        })
    }
}

//! The first half of a gated feed-forward layer.

use candle_attention_cuda::CodedLinear;
use candle_core::{Module, Result, Tensor, bail};
use candle_nn::Activation;

use super::cuda::{CudaRows, RowsEpilogue};
use super::gpu_codes::codes_on_metal;
use super::metal::rows_on_metal;
use super::product::{Factor, ProductEpilogue, UpProduct, cuda_activation, kernel_activation, product};
use super::{PackedLinear, Weight};
use crate::cuda_gate::CudaGate;
use crate::metal_rows;

const OP: &str = "packed_gated_linear";

/// `activation(gate(x)) · up(x)`: the first half of a gated feed-forward layer (SwiGLU, GeGLU), in one pass over `x`.
///
/// With two packed weights, each tile of the gate is multiplied by the same tile of the other product while both are in
/// a cache, in f32, and rounded once. On a GPU one kernel computes the whole layer for at most eight rows without
/// gradients. With more rows or with gradients, gate and product are multiplied by one kernel, forward and backward, in
/// f32, and rounded once. Otherwise, and for an input that is tracked for gradients on a CPU, the layer computes three
/// operations.
///
/// ```
/// use candle_attention::{PackedGatedLinear, PackedLinear};
/// use candle_core::{Device, Module, Tensor};
/// use candle_nn::{Activation, Linear};
/// # fn main() -> candle_core::Result<()> {
/// let linear = || Ok::<_, candle_core::Error>(Linear::new(Tensor::randn(0f32, 1., (48, 16), &Device::Cpu)?, None));
/// let gate = linear()?;
/// let up = linear()?;
/// let both = PackedGatedLinear::new(gate.clone().try_into()?, up.clone().try_into()?, Activation::Silu)?;
///
/// let xs = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let expected = (gate.forward(&xs)?.silu()? * up.forward(&xs)?)?;
/// let difference = (both.forward(&xs)? - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-3);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PackedGatedLinear {
    gate: PackedLinear,
    up: PackedLinear,
}

impl PackedGatedLinear {
    /// Combines two linear layers without activations, of one shape, dtype and device.
    ///
    /// # Errors
    /// For layers that differ or have an activation, and for an activation that [`PackedLinear::with_activation`] does
    /// not support.
    pub fn new(gate: PackedLinear, up: PackedLinear, activation: Activation) -> Result<Self> {
        for (name, linear) in [("gate", &gate), ("up", &up)] {
            if let Some(own) = linear.activation() {
                bail!("[{OP}] {name} has the activation {own:?}, expected none")
            }
        }
        let found =
            |linear: &PackedLinear| (linear.out_dim(), linear.in_dim(), linear.dtype(), linear.device().location());
        if found(&gate) != found(&up) {
            bail!("[{OP}] up is {:?}, expected the gate's {:?}", found(&up), found(&gate))
        }
        Ok(Self { gate: gate.with_activation(activation)?, up })
    }

    /// Returns a copy for inference after training: with the current values of variables, packed, without gradients.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { gate: self.gate.freeze()?, up: self.up.freeze()? })
    }

    /// Returns the outputs for few rows by a CUDA kernel; `None` if the kernel does not support them.
    pub(super) fn cuda_rows(&self, xs: &Tensor) -> Option<CudaRows> {
        let columns = 0..self.out_dim();
        let activation = Some(cuda_activation(self.gate.activation?)?);
        let epilogue = RowsEpilogue { activation, residual: None };
        if let Some(linear) = self.gate.coded_linear(columns.clone(), xs.dtype()) {
            return CudaRows::plan_codes(xs, linear, Some(self.coded_up(xs)?), epilogue);
        }
        let up = self.up.cuda_parameters(columns.clone())?;
        CudaRows::plan(xs, self.gate.cuda_parameters(columns)?, Some(up), epilogue)
    }

    /// Returns the codes of the factors; `None` if they are floats, or if the layers do not read the inputs in one
    /// order.
    fn coded_up(&self, xs: &Tensor) -> Option<CodedLinear> {
        if self.gate.input_order.is_some() || self.up.input_order.is_some() {
            return None;
        }
        self.up.coded_linear(0..self.out_dim(), xs.dtype())
    }

    /// Returns the outputs for few rows by a Metal kernel; `None` if no kernel computes them.
    pub(super) fn metal_rows(&self, xs: &Tensor) -> Option<Result<Tensor>> {
        let columns = 0..self.out_dim();
        let activation = Some(cuda_activation(self.gate.activation?)?);
        let epilogue = RowsEpilogue { activation, residual: None };
        if let Some(linear) = self.gate.coded_linear(columns.clone(), xs.dtype()) {
            return codes_on_metal(xs, linear, Some(self.coded_up(xs)?), epilogue);
        }
        let up = self.up.cuda_parameters(columns.clone())?;
        rows_on_metal(xs, self.gate.cuda_parameters(columns)?, Some(up), epilogue)
    }

    /// Returns the outputs by Metal kernels: one for few rows, and otherwise one for the gate and its product. `None`
    /// where no kernels run.
    fn on_metal(&self, xs: &Tensor) -> Result<Option<Tensor>> {
        let Some(activation) = self.gate.activation.and_then(cuda_activation) else { return Ok(None) };
        if candle_attention_metal::is_available(xs.device()).is_err() {
            return Ok(None);
        }
        let columns = 0..self.out_dim();
        self.gate.check(xs, &columns)?;
        if let Some(ys) = self.metal_rows(xs) {
            return ys.map(Some);
        }
        let before = self.gate.affine(xs, columns)?;
        let values = self.up.forward(xs)?;
        match metal_rows::gate(&before, &values, activation) {
            Some(ys) => ys.map(Some),
            None => self.gate.activation.map(|own| before.apply(&own)?.mul(&values)).transpose(),
        }
    }

    /// Returns the number of outputs.
    pub fn out_dim(&self) -> usize {
        self.gate.out_dim()
    }

    /// Returns the number of inputs.
    pub fn in_dim(&self) -> usize {
        self.gate.in_dim()
    }
}

/// Maps (.., in) to (.., out) in the input's dtype, which is the weights', or f32 with weights in half precision.
impl Module for PackedGatedLinear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let Self { gate, up } = self;
        if let Weight::Packed(gate_weight) = &gate.weight
            && let Weight::Packed(up_weight) = &up.weight
            && let Some(activation) = gate.activation
            && gate_weight.is_like(up_weight)
            && gate.input_order.is_none()
            && up.input_order.is_none()
            && !xs.track_op()
        {
            let columns = 0..self.out_dim();
            gate.check(xs, &columns)?;
            let epilogue = ProductEpilogue {
                activation: Some(kernel_activation(activation)?),
                up: Some(UpProduct { weight: up_weight, bias: up.bias.as_ref() }),
                residual: None,
            };
            let factor = Factor::Packed { weight: gate_weight.clone(), columns };
            return product(xs, factor, gate.bias.as_ref(), epilogue);
        }
        if xs.device().is_cuda()
            && let Some(activation) = gate.activation
            && let Some(cuda_activation) = cuda_activation(activation)
        {
            let columns = 0..self.out_dim();
            gate.check(xs, &columns)?;
            if let Some(call) = self.cuda_rows(xs) {
                return call.run();
            }
            let before = gate.affine(xs, columns)?;
            let values = up.forward(xs)?;
            return match CudaGate::plan(&before, &values, cuda_activation) {
                Some(call) => call.run(),
                None => before.apply(&activation)?.mul(&values),
            };
        }
        if xs.device().is_metal()
            && let Some(ys) = self.on_metal(xs)?
        {
            return Ok(ys);
        }
        gate.forward(xs)?.mul(&up.forward(xs)?)
    }
}

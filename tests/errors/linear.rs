//! Weights, inputs and columns that do not fit a [`PackedLinear`].

use candle_attention::cpu::Tier;
use candle_attention::{PackedGatedLinear, PackedLinear, packed_linear};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Result, Shape, Tensor, Var};
use candle_nn::{Activation, VarBuilder};

use crate::common::{error_text, present};
use crate::{CPU, Case};

const F32: DType = DType::F32;

fn ones(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::ones(shape, dtype, &CPU)
}

fn var(shape: (usize, usize)) -> Result<Tensor> {
    Ok(Var::ones(shape, F32, &CPU)?.into_inner())
}

fn new(weight: Result<Tensor>, bias: Option<Result<Tensor>>) -> Result<()> {
    PackedLinear::new(&weight?, bias.transpose()?.as_ref()).map(drop)
}

/// A weight (3, 4).
fn packed(dtype: DType) -> Result<PackedLinear> {
    PackedLinear::new(&ones((3, 4), dtype)?, Some(&ones(3, dtype)?))
}

fn forward(of_weight: DType, xs: Result<Tensor>) -> Result<()> {
    packed(of_weight)?.forward(&xs?).map(drop)
}

fn columns(start: usize, end: usize) -> Result<()> {
    packed(F32)?.forward_columns(&ones((2, 4), F32)?, start..end).map(drop)
}

fn on_scalar(weight: &Tensor) -> Result<()> {
    PackedLinear::with_tier(weight, None, Some(Tier::Scalar)).map(drop)
}

fn load(prefix: &str, in_dim: usize) -> Result<()> {
    let tensors = [("up.weight".to_string(), ones((6, 4), F32)?), ("up.bias".to_string(), ones(6, F32)?)];
    packed_linear(in_dim, 6, VarBuilder::from_tensors(tensors.into(), F32, &CPU).pp(prefix)).map(drop)
}

pub const WEIGHTS: &[Case] = cases! {
    "rank 0" => new(ones((), F32), None),
    "rank 1" => new(ones(4, F32), None),
    "rank 3" => new(ones((1, 3, 4), F32), None),
    "whole numbers" => new(ones((3, 4), DType::U32), None),
    "a bias as long as the input" => new(ones((3, 4), F32), Some(ones(4, F32))),
    "a bias of rank 2" => new(ones((3, 4), F32), Some(ones((1, 3), F32))),
    "a bias of rank 0" => new(ones((1, 4), F32), Some(ones((), F32))),
    "a bias of another dtype" => new(ones((3, 4), DType::BF16), Some(ones(3, F32))),
    "a tier for f64" => on_scalar(&ones((3, 4), DType::F64)?),
    "a file without the weight" => load("down", 4),
    "a file with another weight" => load("up", 5),
};

pub const INPUTS: &[Case] = cases! {
    "rank 0" => forward(F32, ones((), F32)),
    "too narrow" => forward(F32, ones((2, 3), F32)),
    "too wide" => forward(F32, ones((2, 5), F32)),
    "no inputs" => forward(F32, ones((2, 0), F32)),
    "transposed" => forward(F32, ones((4, 3), F32)),
    "half precision over f32" => forward(F32, ones((2, 4), DType::BF16)),
    "f16 over bf16" => forward(DType::BF16, ones((2, 4), DType::F16)),
    "bf16 over f16" => forward(DType::F16, ones((2, 4), DType::BF16)),
    "f64" => forward(DType::BF16, ones((2, 4), DType::F64)),
    "whole numbers" => forward(F32, ones((2, 4), DType::I64)),
    "f32 over f64, which is not packed" => forward(DType::F64, ones((2, 4), F32)),
    "columns past the end" => columns(1, 4),
    "columns beyond the end" => columns(4, 4),
    "columns backwards" => columns(2, 1),
    "columns of variables" => PackedLinear::new(&var((3, 4))?, None)?.forward_columns(&ones((2, 4), F32)?, 2..7),
};

fn with_residual(residual: Result<Tensor>) -> Result<()> {
    packed(F32)?.forward_with_residual(&ones((2, 4), F32)?, &residual?).map(drop)
}

fn gated(gate: Result<PackedLinear>, up: Result<PackedLinear>) -> Result<PackedGatedLinear> {
    PackedGatedLinear::new(gate?, up?, Activation::Silu)
}

pub const FOLLOWED: &[Case] = cases! {
    "an activation of another kind" => packed(F32)?.with_activation(Activation::Mish),
    "an activation that halves the output" => packed(F32)?.with_activation(Activation::Swiglu),
    "a residual of the input's shape" => with_residual(ones((2, 4), F32)),
    "a residual to broadcast" => with_residual(ones(3, F32)),
    "a residual of another dtype" => with_residual(ones((2, 3), DType::BF16)),
    "a gate with an activation" => gated(packed(F32)?.with_activation(Activation::Relu), packed(F32)),
    "an up product of another shape" => gated(packed(F32), PackedLinear::new(&ones((4, 4), F32)?, None)),
    "an up product of another dtype" => gated(packed(F32), packed(DType::BF16)),
    "a gated input that is too narrow" => gated(packed(F32), packed(F32))?.forward(&ones((2, 3), F32)?),
};

fn quantized(shape: impl Into<Shape>, bias: Option<Result<Tensor>>) -> Result<()> {
    let weight = QTensor::quantize(&ones(shape, F32)?, GgmlDType::Q8_0)?;
    PackedLinear::from_qtensor(weight, bias.transpose()?.as_ref()).map(drop)
}

fn rows(ids: &[i64], dtype: DType) -> Result<()> {
    packed(F32)?.weight_rows(&Tensor::new(ids, &CPU)?.to_dtype(dtype)?).map(drop)
}

pub const QUANTIZED: &[Case] = cases! {
    "rank 1" => quantized(32, None),
    "rank 3" => quantized((1, 3, 32), None),
    "a bias as long as the input" => quantized((3, 32), Some(ones(32, F32))),
    "a bias of another dtype" => quantized((3, 32), Some(ones(3, DType::F16))),
    "rows by ids of 64 bits" => rows(&[0, 1], DType::I64),
    "a row past the end" => rows(&[2, 3], DType::U32),
};

const HUGE: usize = 1 << 40;

/// A view that pretends to be larger than any memory.
fn view(dims: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::ones(vec![1; dims.len()], dtype, &CPU)?.broadcast_as(dims)
}

fn wide(weight: &Tensor) -> Result<()> {
    PackedLinear::new(weight, None)?.forward_columns(&view(&[1 << 30, 1 << 20], F32)?, 1..2).map(drop)
}

pub const SIZES: &[Case] = cases! {
    "a weight beyond counting" => new(view(&[HUGE, HUGE], F32), None),
    "a weight beyond memory" => new(view(&[1 << 24, HUGE >> 8], DType::BF16), None),
    "an empty weight beyond counting" => new(Tensor::zeros((0, usize::MAX), F32, &CPU), None),
    "a bias beyond memory" => new(Tensor::zeros((1 << 56, 0), F32, &CPU), Some(view(&[1 << 56], F32))),
    "an input beyond counting" => forward(F32, ones(4, F32)?.broadcast_as((HUGE, HUGE, 4))),
    "an output beyond memory" => forward(F32, ones(4, F32)?.broadcast_as((1 << 54, 4))),
    "a copy of an input beyond memory" => wide(&ones((3, 1 << 20), F32)?),
    "a copy of an input for variables" => wide(&var((3, 1 << 20))?),
};

/// A weight of no inputs has no entries, however many outputs: packing it takes no time.
#[test]
fn a_weight_of_many_outputs_and_no_inputs() -> Result<()> {
    let packed = PackedLinear::new(&Tensor::zeros((1 << 56, 0), F32, &CPU)?, None)?;
    let none = packed.forward_columns(&Tensor::zeros((2, 0), F32, &CPU)?, 7..9)?;
    assert_eq!(none.to_vec2::<f32>()?, [[0.0; 2]; 2]);
    Ok(())
}

#[test]
fn a_tier_that_the_processor_lacks_is_named() -> Result<()> {
    let available: Vec<_> = Tier::available().iter().map(Tier::to_string).collect();
    for tier in Tier::ALL.into_iter().filter(|tier| !tier.is_available()) {
        let expected = format!(
            "[packed_linear] this processor lacks the CPU tier {tier}, expected one of {}",
            available.join(", ")
        );
        for dtype in [F32, DType::BF16, DType::F16] {
            assert_eq!(error_text(PackedLinear::with_tier(&ones((3, 4), dtype)?, None, Some(tier))), expected);
        }
    }
    Ok(())
}

/// On a machine with one device these say that they were skipped.
#[test]
fn devices() -> Result<()> {
    for (kind, device) in [("CUDA", Device::new_cuda(0)), ("Metal", Device::new_metal(0))] {
        let Some(device) = present(kind, device) else { continue };
        let (here, there) = (CPU.location(), device.location());
        let (weight, bias) = (ones((3, 4), F32)?, ones(3, F32)?);
        let text = error_text(PackedLinear::new(&weight.to_device(&device)?, Some(&bias)));
        assert_eq!(text, format!("[packed_linear] bias is F32 on {here:?}, expected the weight's F32 on {there:?}"));
        let elsewhere = PackedLinear::new(&weight.to_device(&device)?, None)?;
        assert!(!elsewhere.is_packed());
        let xs = ones((2, 4), F32)?;
        let expected = format!("[packed_linear] input is on {here:?}, expected it beside the weight on {there:?}");
        assert_eq!(error_text(elsewhere.forward(&xs)), expected);
        let expected = format!("[packed_linear] input is on {there:?}, expected it beside the weight on {here:?}");
        assert_eq!(error_text(packed(F32)?.forward(&xs.to_device(&device)?)), expected);
        assert_eq!(elsewhere.forward(&xs.to_device(&device)?)?.to_vec2::<f32>()?, [[4.0; 3]; 2]);
        let text = error_text(PackedLinear::with_tier(&weight.to_device(&device)?, None, Some(Tier::Scalar)));
        let expected =
            format!("[packed_linear] a weight in F32 on {there:?} is not packed, expected no CPU tier, found scalar");
        assert_eq!(text, expected);
    }
    Ok(())
}

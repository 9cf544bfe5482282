//! Weights, inputs and columns that do not fit a [`PackedLinear`].

use candle_attention::cpu::Tier;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Module, Var};
use candle_nn::Activation;

use crate::common::{error_text, present};
use crate::wrong::Fitting;
use crate::*;

const F32: DType = DType::F32;

fn ones(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::ones(shape, dtype, &CPU)
}

fn var(shape: (usize, usize)) -> Result<Tensor> {
    Ok(Var::ones(shape, F32, &CPU)?.into_inner())
}

/// A weight (3, 4) and a bias.
fn packed(dtype: DType) -> Result<PackedLinear> {
    PackedLinear::new(&ones((3, 4), dtype)?, Some(&ones(3, dtype)?))
}

#[test]
fn weights_and_inputs() {
    let dims: [Fitting; 4] = [("weight", F32, "O I"), ("bias", F32, "O"), ("xs", F32, "N I"), ("residual", F32, "N O")];
    let wrong = wrong::tensors("O 3 I 4 N 2", &dims, |tensors| {
        PackedLinear::new(&tensors[0], Some(&tensors[1]))?.forward_with_residual(&tensors[2], &tensors[3])
    });
    let plain = wrong::tensors("I 4 N 2", &[("xs", F32, "N I")], |xs| packed(F32)?.forward(&xs[0]));
    let dtypes = [(DType::BF16, DType::F16), (DType::F16, DType::BF16), (DType::BF16, DType::F64), (DType::F64, F32)];
    let load =
        |prefix, width| packed_linear(width, 6, weights_of(&[("up.weight", &[6, 4]), ("up.bias", &[6])]).pp(prefix));
    let gated = |gate: Result<PackedLinear>, up| PackedGatedLinear::new(gate?, up, Activation::Silu);
    let others = cases! {
        "a tier for f64" => PackedLinear::with_tier(&ones((3, 4), DType::F64)?, None, Some(Tier::Scalar)),
        "a file without the weight" => load("down", 4),
        "a file with another weight" => load("up", 5),
        "columns of variables" => PackedLinear::new(&var((3, 4))?, None)?.forward_columns(&ones((2, 4), F32)?, 2..7),
        "a gate with an activation" => gated(packed(F32)?.with_activation(Activation::Relu), packed(F32)?),
        "an up product of another shape" => gated(packed(F32), PackedLinear::new(&ones((4, 4), F32)?, None)?),
        "an up product of another dtype" => gated(packed(F32), packed(DType::BF16)?),
        "a gated input that is too narrow" => gated(packed(F32), packed(F32)?)?.forward(&ones((2, 3), F32)?),
    };
    assert_reviewed(
        "linear",
        &[
            wrong,
            plain,
            each("a weight and an input in", dtypes, |(weight, xs)| packed(weight)?.forward(&ones((2, 4), xs)?)),
            each("columns", [(1, 4), (4, 4), (2, 1)], |(start, end)| {
                packed(F32)?.forward_columns(&ones((2, 4), F32)?, start..end)
            }),
            each("", [Activation::Mish, Activation::Swiglu], |activation| packed(F32)?.with_activation(activation)),
            others,
        ],
    );
}

#[test]
fn quantized_weights() {
    let quantized = |shape: &[usize], bias: Option<Tensor>| {
        PackedLinear::from_qtensor(QTensor::quantize(&ones(shape, F32)?, GgmlDType::Q8_0)?, bias.as_ref())
    };
    let rows = |ids: &[i64], dtype| packed(F32)?.weight_rows(&Tensor::new(ids, &CPU)?.to_dtype(dtype)?);
    let cases = cases! {
        "rank 1" => quantized(&[32], None),
        "rank 3" => quantized(&[1, 3, 32], None),
        "a bias as long as the input" => quantized(&[3, 32], Some(of(F32, 32))),
        "a bias of another dtype" => quantized(&[3, 32], Some(of(DType::F16, 3))),
        "rows by ids of 64 bits" => rows(&[0, 1], DType::I64),
        "a row past the end" => rows(&[2, 3], DType::U32),
    };
    assert_reviewed("linear_quantized", &[cases]);
}

#[test]
fn sizes() {
    const HUGE: usize = 1 << 40;
    // A view that pretends to be larger than any memory.
    let view = |dims: &[usize], dtype| ones(vec![1; dims.len()], dtype)?.broadcast_as(dims);
    let empty = |rows, columns| Tensor::zeros((rows, columns), F32, &CPU);
    let wide = |weight: Result<Tensor>| {
        PackedLinear::new(&weight?, None)?.forward_columns(&view(&[1 << 30, 1 << 20], F32)?, 1..2)
    };
    let cases = cases! {
        "a weight beyond counting" => PackedLinear::new(&view(&[HUGE, HUGE], F32)?, None),
        "a weight beyond memory" => PackedLinear::new(&view(&[1 << 24, HUGE >> 8], DType::BF16)?, None),
        "an empty weight beyond counting" => PackedLinear::new(&empty(0, usize::MAX)?, None),
        "a bias beyond memory" => PackedLinear::new(&empty(1 << 56, 0)?, Some(&view(&[1 << 56], F32)?)),
        "an input beyond counting" => packed(F32)?.forward(&ones(4, F32)?.broadcast_as((HUGE, HUGE, 4))?),
        "an output beyond memory" => packed(F32)?.forward(&ones(4, F32)?.broadcast_as((1 << 54, 4))?),
        "a copy of an input beyond memory" => wide(ones((3, 1 << 20), F32)),
        "a copy of an input for variables" => wide(var((3, 1 << 20))),
    };
    assert_reviewed("linear_sizes", &[cases]);
}

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
        let lacks = format!("[packed_linear] this processor lacks the CPU tier {tier}, expected one of ");
        for dtype in [F32, DType::BF16, DType::F16] {
            let text = error_text(PackedLinear::with_tier(&ones((3, 4), dtype)?, None, Some(tier)));
            assert_eq!(text, lacks.clone() + &available.join(", "));
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
        let (weight, xs) = (ones((3, 4), F32)?.to_device(&device)?, ones((2, 4), F32)?);
        let (elsewhere, xs_there) = (PackedLinear::new(&weight, None)?, xs.to_device(&device)?);
        let is_on = |one, other| format!("input is on {one:?}, expected it beside the weight on {other:?}");
        for (text, expected) in [
            (
                error_text(PackedLinear::new(&weight, Some(&ones(3, F32)?))),
                format!("bias is F32 on {here:?}, expected the weight's F32 on {there:?}"),
            ),
            (error_text(elsewhere.forward(&xs)), is_on(here, there)),
            (error_text(packed(F32)?.forward(&xs_there)), is_on(there, here)),
            (
                error_text(PackedLinear::with_tier(&weight, None, Some(Tier::Scalar))),
                format!("a weight in F32 on {there:?} is not packed, expected no CPU tier, found scalar"),
            ),
        ] {
            assert_eq!(text, format!("[packed_linear] {expected}"));
        }
        assert!(!elsewhere.is_packed());
        assert_eq!(elsewhere.forward(&xs_there)?.to_vec2::<f32>()?, [[4.0; 3]; 2]);
    }
    Ok(())
}

//! Weights, inputs and columns that do not fit a [`PackedLinear`], an [`RmsNorm`] or a [`LayerNorm`].

use candle_attention::cpu::Tier;
use candle_core::Module;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_nn::Activation;
use serde::Deserialize;

use crate::common::error_text;
use crate::words::{Of, Tensors};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] =
    &[("linear", run::<Product>), ("norm", run::<Norm>), ("linear calls", |line, _| named(CALLS, line))];

const F32: DType = DType::F32;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Product {
    weight: Tensors,
    bias: Option<Tensors>,
    /// Whether it is on the scalar tier.
    #[serde(default)]
    scalar: bool,
    activation: Option<Activation>,
    /// The up product that this is the gate of.
    up: Option<Box<Product>>,
    xs: Tensors,
    residual: Option<Tensors>,
    columns: Option<[usize; 2]>,
}

impl Product {
    fn build(&self) -> Result<PackedLinear> {
        let tier = self.scalar.then_some(Tier::Scalar);
        let linear = PackedLinear::with_tier(&self.weight, self.bias.as_deref(), tier)?;
        self.activation.map_or(Ok(linear.clone()), |activation| linear.with_activation(activation))
    }
}

impl Call for Product {
    fn call(self) -> Result<String> {
        let (linear, xs) = (self.build()?, &self.xs);
        match (&self.up, &self.residual, self.columns) {
            (Some(up), ..) => PackedGatedLinear::new(linear, up.build()?, Activation::Silu)?.forward(xs),
            (_, Some(residual), _) => linear.forward_with_residual(xs, residual),
            (_, _, Some([start, end])) => linear.forward_columns(xs, start..end),
            _ => linear.forward(xs),
        }
        .map(accepted)
    }
}

/// By the root mean square, or a layer norm where it has a bias.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Norm {
    weight: Tensors,
    bias: Option<Tensors>,
    eps: Of<f64>,
    xs: Tensors,
}

impl Call for Norm {
    fn call(self) -> Result<String> {
        let (weight, Of(eps)) = ((*self.weight).clone(), self.eps);
        match self.bias {
            Some(bias) => LayerNorm::new(weight, (*bias).clone(), eps)?.forward(&self.xs),
            None => RmsNorm::new(weight, eps)?.forward(&self.xs),
        }
        .map(accepted)
    }
}

fn ones(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::ones(shape, dtype, &CPU)
}

/// A weight (3, 4) and a bias.
fn packed(dtype: DType) -> Result<PackedLinear> {
    PackedLinear::new(&ones((3, 4), dtype)?, Some(&ones(3, dtype)?))
}

fn quantized(shape: &[usize], bias: Option<Tensor>) -> Result<PackedLinear> {
    PackedLinear::from_qtensor(QTensor::quantize(&ones(shape, F32)?, GgmlDType::Q8_0)?, bias.as_ref())
}

fn rows(ids: &[i64], dtype: DType) -> Result<Tensor> {
    packed(F32)?.weight_rows(&Tensor::new(ids, &CPU)?.to_dtype(dtype)?)
}

fn linears() -> VarBuilder<'static> {
    weights_of(&[("up.weight", &[6, 4]), ("up.bias", &[6])])
}

fn norms() -> VarBuilder<'static> {
    weights_of(&[("norm.weight", &[4]), ("norm.bias", &[4]), ("old.gamma", &[4])])
}

const CALLS: &[Named] = calls! {
    "a linear layer's file without the weight" => packed_linear(4, 6, linears().pp("down")),
    "a linear layer's file with another weight" => packed_linear(5, 6, linears().pp("up")),
    "a quantised weight of rank 1" => quantized(&[32], None),
    "a quantised weight of rank 3" => quantized(&[1, 3, 32], None),
    "a quantised weight with a bias as long as the input" => quantized(&[3, 32], Some(zeros(32))),
    "a quantised weight with a bias of another dtype" => quantized(&[3, 32], Some(of(DType::F16, 3))),
    "rows by ids of 64 bits" => rows(&[0, 1], DType::I64),
    "a row past the end" => rows(&[2, 3], DType::U32),
    "a layer norm without a bias and with an eps that is no number" => LayerNorm::new_no_bias(zeros(4), f64::NAN),
    "a layer norm without a bias and with a weight of whole numbers" => LayerNorm::new_no_bias(of(DType::U32, 4), 1e-5),
    "a norm's file without the weight" => rms_norm(4, 1e-6, norms().pp("other")),
    "a norm's file with another weight" => layer_norm(5, 1e-5, norms().pp("norm")),
    "a norm's file without the bias" => layer_norm(4, 1e-5, norms().pp("old")),
    "a norm's bias that would be lost" => layer_norm_no_bias(4, 1e-5, norms().pp("norm")),
    "a bias of a norm that has none" => rms_norm(4, 1e-6, norms().pp("norm")),
    "a norm's builder of whole numbers" => rms_norm(4, 1e-6, VarBuilder::zeros(DType::U8, &CPU)),
    "a norm's weight that no memory holds" => rms_norm(usize::MAX, 1e-6, variables()),
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
        let lacks = format!("[packed_linear] this processor lacks the CPU tier {tier}, expected one of ");
        for dtype in [F32, DType::BF16, DType::F16] {
            let text = error_text(PackedLinear::with_tier(&ones((3, 4), dtype)?, None, Some(tier)));
            assert_eq!(text, lacks.clone() + &available.join(", "));
        }
    }
    Ok(())
}

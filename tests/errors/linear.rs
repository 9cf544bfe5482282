//! Weights, inputs and columns that do not fit a [`PackedLinear`], an [`RmsNorm`] or a [`LayerNorm`].

use candle_attention::cpu::InstructionSet;
use candle_core::Module;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_nn::Activation;

use crate::common::error_text;
use crate::words::Fields;
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] =
    &[("linear", product), ("norm", norm), ("linear calls", |line, _| named(CALLS, line))];

fn linear(of: &Fields) -> Result<PackedLinear> {
    let weight = of.tensor("weight")?;
    let [bias] = of.tensors(["bias"])?;
    if of.is("quantized") {
        return PackedLinear::from_qtensor(QTensor::quantize(&weight, GgmlDType::Q8_0)?, bias.as_ref());
    }
    let linear =
        PackedLinear::with_instruction_set(&weight, bias.as_ref(), of.is("scalar").then_some(InstructionSet::Scalar))?;
    of.get("activation")?.map_or(Ok(linear.clone()), |activation| linear.with_activation(activation))
}

fn product(_: &str, call: &Fields) -> Result<String> {
    let linear = linear(call)?;
    let xs = &call.tensor("xs")?;
    let [residual, rows] = call.tensors(["residual", "rows"])?;
    if let Some(ids) = rows {
        return linear.weight_rows(&ids).map(accepted);
    }
    match (call.part("up", self::linear)?, residual, call.get::<[usize; 2]>("columns")?) {
        (Some(up), ..) => PackedGatedLinear::new(linear, up, Activation::Silu)?.forward(xs),
        (_, Some(residual), _) => linear.forward_with_residual(xs, &residual),
        (_, _, Some([start, end])) => linear.forward_columns(xs, start..end),
        _ => linear.forward(xs),
    }
    .map(accepted)
}

/// Applies a root mean square norm, also with a gate, or a layer norm if there is a bias.
fn norm(_: &str, call: &Fields) -> Result<String> {
    let weight = call.tensor("weight")?;
    let xs = call.tensor("xs")?;
    let eps = call.need("eps")?;
    match call.tensors(["bias", "gate"])? {
        [Some(bias), _] => LayerNorm::new(weight, bias, eps)?.forward(&xs),
        [None, Some(gate)] => RmsNorm::new(weight, eps)?.forward_gated(&xs, &gate, GateActivation::Silu),
        [None, None] => RmsNorm::new(weight, eps)?.forward(&xs),
    }
    .map(accepted)
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

/// Checks that packing a weight without inputs takes no time: it has no entries for any number of outputs.
#[test]
fn linear_weight_without_inputs_is_packed_at_once() -> Result<()> {
    let none = PackedLinear::new(&zeros((1 << 56, 0)), None)?.forward_columns(&zeros((2, 0)), 7..9)?;
    assert_eq!(none.to_vec2::<f32>()?, [[0.0; 2]; 2]);
    Ok(())
}

#[test]
fn linear_with_unsupported_instruction_set_is_rejected() {
    let available: Vec<_> = InstructionSet::available().iter().map(InstructionSet::to_string).collect();
    for instruction_set in InstructionSet::ALL.into_iter().filter(|instruction_set| !instruction_set.is_available()) {
        let lacks =
            format!("[packed_linear] this processor lacks the instruction set {instruction_set}, expected one of ");
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let text = error_text(PackedLinear::with_instruction_set(&of(dtype, (3, 4)), None, Some(instruction_set)));
            assert_eq!(text, lacks.clone() + &available.join(", "));
        }
    }
}

//! Weights and inputs that do not fit an [`RmsNorm`] or a [`LayerNorm`].

use candle_core::Module;

use crate::*;

#[test]
fn norms_between_layers() {
    let f32 = DType::F32;
    let file = || weights_of(&[("norm.weight", &[4]), ("norm.bias", &[4]), ("old.gamma", &[4])]);
    let weights = cases! {
        "an eps that is no number" => LayerNorm::new_no_bias(zeros(4), f64::NAN),
        "a weight of whole numbers" => LayerNorm::new_no_bias(of(DType::U32, 4), 1e-5),
        "a view that no memory holds" => RmsNorm::new(zeros(1).broadcast_as(1 << 45)?, 1e-6),
        "a file without the weight" => rms_norm(4, 1e-6, file().pp("other")),
        "a file with another weight" => layer_norm(5, 1e-5, file().pp("norm")),
        "a file without the bias" => layer_norm(4, 1e-5, file().pp("old")),
        "a bias that would be lost" => layer_norm_no_bias(4, 1e-5, file().pp("norm")),
        "a bias of a norm that has none" => rms_norm(4, 1e-6, file().pp("norm")),
        "a builder of whole numbers" => rms_norm(4, 1e-6, VarBuilder::zeros(DType::U8, &CPU)),
        "a weight that no memory holds" => rms_norm(usize::MAX, 1e-6, variables()),
        "bf16 beside f64" => RmsNorm::new(of(DType::F64, 4), 1e-6)?.forward(&of(DType::BF16, (2, 4))),
    };
    let eps = each("an eps of", [-1e-6, 1e300], |eps| RmsNorm::new(zeros(4), eps));
    let rms = wrong::tensors("E 4 N 2", &[("weight", f32, "E"), ("xs", f32, "N E")], |tensors| {
        RmsNorm::new(tensors[0].clone(), 1e-6)?.forward(&tensors[1])
    });
    let layer = wrong::tensors("E 4 N 2", &[("weight", f32, "E"), ("bias", f32, "E"), ("xs", f32, "N E")], |tensors| {
        LayerNorm::new(tensors[0].clone(), tensors[1].clone(), 1e-5)?.forward(&tensors[2])
    });
    let endless = each("rows", [1 << 45, usize::MAX / 4], |rows: usize| {
        RmsNorm::new(zeros(4), 1e-6)?.forward(&zeros((1, 4)).broadcast_as(Shape::from((rows, 4)))?)
    });
    assert_reviewed("norms", &[weights, eps, rms, layer, endless]);
}

//! Weights and inputs that do not fit an [`RmsNorm`] or a [`LayerNorm`].

use candle_attention::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
use candle_core::{DType, Module, Result, Shape, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::{CPU, Case, of, zeros};

const F64: DType = DType::F64;

fn forward(of_weight: DType, xs: Tensor) -> Result<Tensor> {
    RmsNorm::new(of(of_weight, 4), 1e-6)?.forward(&xs)
}

fn layer(weight: Tensor, bias: Tensor) -> Result<LayerNorm> {
    LayerNorm::new(weight, bias, 1e-5)
}

fn file() -> VarBuilder<'static> {
    let tensors = ["norm.weight", "norm.bias", "old.gamma"].map(|name| (name.to_string(), zeros(4)));
    VarBuilder::from_tensors(tensors.into(), DType::F32, &CPU)
}

/// Of as many rows as no memory holds, all of them one.
fn endless(rows: usize) -> Result<Tensor> {
    zeros((1, 4)).broadcast_as(Shape::from((rows, 4)))
}

pub const WEIGHTS: &[Case] = cases! {
    "rank 0" => RmsNorm::new(zeros(()), 1e-6),
    "rank 2" => RmsNorm::plus_one(zeros((1, 4)), 1e-6),
    "whole numbers" => LayerNorm::new_no_bias(of(DType::U32, 4), 1e-5),
    "an eps below zero" => RmsNorm::new(zeros(4), -1e-6),
    "an eps that is no number" => LayerNorm::new_no_bias(zeros(4), f64::NAN),
    "an eps that f32 does not hold" => RmsNorm::new(zeros(4), 1e300),
    "a view that no memory holds" => RmsNorm::new(zeros(1).broadcast_as(1 << 45)?, 1e-6),
    "a longer bias" => layer(zeros(4), zeros(5)),
    "a bias of another dtype" => layer(zeros(4), of(DType::BF16, 4)),
    "a file without the weight" => rms_norm(4, 1e-6, file().pp("other")),
    "a file with another weight" => layer_norm(5, 1e-5, file().pp("norm")),
    "a file without the bias" => layer_norm(4, 1e-5, file().pp("old")),
    "a bias that would be lost" => layer_norm_no_bias(4, 1e-5, file().pp("norm")),
    "a bias of a norm that has none" => rms_norm(4, 1e-6, file().pp("norm")),
    "a builder of whole numbers" => rms_norm(4, 1e-6, VarBuilder::zeros(DType::U8, &CPU)),
    "a weight that no memory holds" =>
        rms_norm(usize::MAX, 1e-6, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU)),
};

pub const INPUTS: &[Case] = cases! {
    "rank 0" => forward(DType::F32, zeros(())),
    "another width" => forward(DType::F32, zeros((2, 5))),
    "whole numbers" => forward(DType::F32, of(DType::I64, (2, 4))),
    "f64 beside f32" => forward(DType::F32, of(F64, (2, 4))),
    "bf16 beside f64" => forward(F64, of(DType::BF16, (2, 4))),
    "another width of a layer norm" => layer(zeros(4), zeros(4))?.forward(&zeros((4, 3))),
    "rows that no memory holds" => forward(DType::F32, endless(1 << 45)?),
    "rows that no address counts" => forward(DType::F32, endless(usize::MAX / 4)?),
};

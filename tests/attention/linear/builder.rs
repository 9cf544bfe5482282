//! From a `VarBuilder`, as `candle_nn::linear`.

use std::collections::HashMap;

use candle_attention::{PackedLinear, packed_linear, packed_linear_b, packed_linear_no_bias};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, values};
use crate::linear::case::{CPU, bits};

fn builder(dtype: DType) -> Result<VarBuilder<'static>> {
    let tensors = HashMap::from([
        ("up.weight".to_string(), Tensor::randn(0f32, 1., (6, 4), &CPU)?),
        ("up.bias".to_string(), Tensor::randn(0f32, 1., 6, &CPU)?),
    ]);
    Ok(VarBuilder::from_tensors(tensors, dtype, &CPU))
}

#[test]
fn tensors_are_packed_in_the_builders_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let vb = builder(dtype)?.pp("up");
        let xs = Tensor::randn(0f32, 1., (3, 4), &CPU)?.to_dtype(dtype)?;
        let (weight, bias) = (vb.get((6, 4), "weight")?, vb.get(6, "bias")?);
        let (with, without) = (PackedLinear::new(&weight, Some(&bias))?, PackedLinear::new(&weight, None)?);
        for (built, expected) in [
            (packed_linear(4, 6, vb.clone())?, &with),
            (packed_linear_b(4, 6, true, vb.clone())?, &with),
            (packed_linear_no_bias(4, 6, vb.clone())?, &without),
            (packed_linear_b(4, 6, false, vb.clone())?, &without),
        ] {
            assert!(built.is_packed() && built.dtype() == dtype);
            assert_eq!(bits(&built.forward(&xs)?), bits(&expected.forward(&xs)?), "{dtype:?}");
        }
    }
    Ok(())
}

/// New variables are drawn as Candle draws them, and learn.
#[test]
fn variables_are_made_as_candle_makes_them() -> Result<()> {
    let (vars, others) = (VarMap::new(), VarMap::new());
    let layer = packed_linear(400, 300, VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    let candles = candle_nn::linear(400, 300, VarBuilder::from_varmap(&others, DType::F32, &CPU))?;
    assert!(!layer.is_packed());
    let spread = |tensor: &Tensor| {
        let numbers = values(tensor);
        let largest = numbers.iter().fold(0f64, |most, x| most.max(x.abs()));
        ((numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt(), largest)
    };
    let linear = layer.to_linear()?;
    let (ours, theirs) = (spread(linear.weight()), spread(candles.weight()));
    assert!((ours.0 / theirs.0 - 1.0).abs() < 0.02, "weights of deviation {} and {}", ours.0, theirs.0);
    let (ours, theirs) = (spread(linear.bias().expect("a bias")), spread(candles.bias().expect("a bias")));
    assert!(ours.1 <= 0.05 && theirs.1 <= 0.05 && (ours.0 / theirs.0 - 1.0).abs() < 0.2, "biases {ours:?} {theirs:?}");

    let xs = Tensor::randn(0f32, 1., (2, 400), &CPU)?;
    let before = layer.forward(&xs)?;
    for var in vars.all_vars() {
        var.set(&(var.as_tensor() * 2.0)?)?;
    }
    assert_close(&layer.forward(&xs)?, &(before * 2.0)?, 1e-4, "after a step");
    Ok(())
}

//! What follows a product in its pass - an activation, a gate, a residual - against Candle's own operations after it.

use std::collections::HashMap;

use candle_attention::cpu::Tier;
use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, PackedGatedLinear, PackedLinear};
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::{Activation, VarBuilder};

use crate::common::{assert_close, assert_near, bits};
use crate::linear::case::{CPU, Layout, Product, TYPES};

const ACTIVATIONS: [Activation; 6] = [
    Activation::Gelu,
    Activation::NewGelu,
    Activation::GeluPytorchTanh,
    Activation::Silu,
    Activation::Swish,
    Activation::Relu,
];

/// How far apart results may be: Candle rounds after each operation, the product alone at its end.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 0.1,
        DType::F16 => 0.02,
        _ => 2e-5,
    }
}

/// Of the shape of a product's output, with gaps between its rows where there are several.
fn residual(ys: &Tensor) -> Result<Tensor> {
    let mut dims = ys.dims().to_vec();
    let width = dims.pop().unwrap_or(0);
    dims.push(width + 3);
    Tensor::randn(0f32, 1., dims, &CPU)?.to_dtype(ys.dtype())?.narrow(ys.rank() - 1, 2, width)
}

#[test]
fn every_size_and_layout_on_every_tier() -> Result<()> {
    let mut n = 0;
    for (of_weight, of_input) in TYPES {
        for (rows, inputs, outputs) in
            [(1, 7, 5), (3, 18, 49), (7, 193, 97), (20, 64, 48), (6, 0, 5), (0, 4, 5), (40, 33, 130)]
        {
            let layout = Layout::ALL[n % Layout::ALL.len()];
            let product =
                Product { layout, size: 0.2, ..Product::plain((of_weight, of_input), rows, (inputs, outputs)) };
            let (weight, bias, xs) = product.case().tensors()?;
            let other = (Product { seed: 5, ..product.clone() }).case().weight.tensor(of_weight, &CPU)?;
            n += 1;
            for tier in Tier::available() {
                let packed = PackedLinear::with_tier(&weight, bias.as_ref(), Some(tier))?;
                let up = PackedLinear::with_tier(&other, bias.as_ref(), Some(tier))?;
                let ys = packed.forward(&xs)?;
                let residual = residual(&ys)?;
                let columns = product.some(outputs);
                let close = |found: &Tensor, expected: &Tensor, what: &str| {
                    let what = format!("{tier}: {what}, {product:?}");
                    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()), "{what}");
                    assert_close(found, expected, tolerance(of_input), &what);
                };
                close(&packed.forward_with_residual(&xs, &residual)?, &(&ys + &residual)?, "a residual");
                let activation = ACTIVATIONS[n % ACTIVATIONS.len()];
                let activated = activation.forward(&ys)?;
                let gated = PackedGatedLinear::new(packed.clone(), up.clone(), activation)?;
                close(&gated.forward(&xs)?, &(&activated * up.forward(&xs)?)?, "a gate");
                let packed = packed.with_activation(activation)?;
                close(&packed.forward(&xs)?, &activated, "an activation");
                close(&packed.forward_with_residual(&xs, &residual)?, &(&activated + &residual)?, "both");
                let some = packed.forward_columns(&xs, columns.clone())?;
                let narrowed = packed.forward(&xs)?.narrow(xs.rank() - 1, columns.start, columns.len())?;
                assert_eq!(bits(&some), bits(&narrowed), "{tier}: some columns, {product:?}");
            }
        }
    }
    Ok(())
}

/// In half precision each result is the rounded one of the same call in f32.
#[test]
fn results_are_rounded_once() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let (weight, bias, xs) = Product::plain((dtype, dtype), 5, (16, 50)).case().tensors()?;
        let wide = xs.to_dtype(DType::F32)?;
        // Tiers that multiply pairs of bf16 sum them in another order.
        for tier in [Tier::Scalar, Tier::Avx2, Tier::Avx512, Tier::Neon].into_iter().filter(|tier| tier.is_available())
        {
            let packed = PackedLinear::with_tier(&weight, bias.as_ref(), Some(tier))?;
            for activation in ACTIVATIONS {
                let gated = PackedGatedLinear::new(packed.clone(), packed.clone(), activation)?;
                let packed = packed.clone().with_activation(activation)?;
                let residual = Tensor::randn(0f32, 1., (5, 50), &CPU)?.to_dtype(dtype)?;
                let wide_residual = residual.to_dtype(DType::F32)?;
                for (found, expected) in [
                    (packed.forward(&xs)?, packed.forward(&wide)?),
                    (gated.forward(&xs)?, gated.forward(&wide)?),
                    (
                        packed.forward_with_residual(&xs, &residual)?,
                        packed.forward_with_residual(&wide, &wide_residual)?,
                    ),
                ] {
                    assert_eq!(bits(&found), bits(&expected.to_dtype(dtype)?), "{tier}: {dtype:?} {activation:?}");
                }
            }
        }
    }
    Ok(())
}

/// Inputs and residuals that are variables have the gradients of Candle's operations, through packed weights and
/// through variables, whose numbers are those of the packed ones.
#[test]
fn what_is_tracked_has_gradients() -> Result<()> {
    let (weight, bias, _) = Product::plain(TYPES[0], 2, (13, 21)).case().tensors()?;
    let xs = Var::randn(0f32, 1., (4, 13), &CPU)?;
    let residual = Var::randn(0f32, 1., (4, 21), &CPU)?;
    for weight in [weight.clone(), Var::from_tensor(&weight)?.into_inner()] {
        let plain = PackedLinear::new(&weight, bias.as_ref())?;
        for activation in ACTIVATIONS {
            let ys = plain.forward(&xs)?;
            let activated = activation.forward(&ys)?;
            let packed = plain.clone().with_activation(activation)?;
            let gated = PackedGatedLinear::new(plain.clone(), plain.clone(), activation)?;
            for (found, expected) in [
                (packed.forward(&xs)?, activated.clone()),
                (packed.forward_with_residual(&xs, &residual)?, (&activated + residual.as_tensor())?),
                (packed.forward_with_residual(&xs.detach(), &residual)?, (activated.detach() + residual.as_tensor())?),
                (gated.forward(&xs)?, (activated.clone() * &ys)?),
            ] {
                assert_close(&found, &expected, 1e-5, &format!("{activation:?}"));
                let (found, expected) = (found.sqr()?.sum_all()?.backward()?, expected.sqr()?.sum_all()?.backward()?);
                for of in [&xs, &residual] {
                    match (found.get(of), expected.get(of)) {
                        (Some(found), Some(expected)) => assert_near(found, expected, 1e-4, &format!("{activation:?}")),
                        (found, expected) => assert_eq!(found.is_some(), expected.is_some(), "{activation:?}"),
                    }
                }
            }
        }
    }
    Ok(())
}

/// A layer adds a residual as its caller would: packed, over variables, without an output projection, for one sequence
/// without a batch.
#[test]
fn a_layer_adds_a_residual() -> Result<()> {
    let xs = Tensor::randn(0f32, 1., (2, 3, 8), &CPU)?;
    let residual = Tensor::randn(0f32, 1., (2, 3, 8), &CPU)?;
    for (out_proj, is_trained) in [(true, false), (true, true), (false, false)] {
        let cfg = MultiHeadAttentionConfig::new(8, 2).with_out_proj(out_proj);
        let mut tensors = HashMap::new();
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"].into_iter().take(if out_proj { 4 } else { 3 }) {
            let weight = Tensor::randn(0f32, 0.3, (8, 8), &CPU)?;
            let weight = if is_trained { Var::from_tensor(&weight)?.into_inner() } else { weight };
            tensors.insert(format!("{name}.weight"), weight);
        }
        let mha = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(tensors, DType::F32, &CPU))?;
        let expected = (mha.forward(&xs)? + &residual)?;
        let found = mha.forward_with(AttentionInput::new(&xs).with_residual(&residual))?;
        assert_close(&found, &expected, 1e-5, "a batch");
        let (xs, residual) = (xs.get(0)?, residual.get(0)?);
        let found = mha.forward_with(AttentionInput::new(&xs).with_residual(&residual))?;
        assert_close(&found, &expected.get(0)?, 1e-5, "one sequence");
    }
    Ok(())
}

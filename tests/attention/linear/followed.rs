//! What follows a product in its pass - an activation, a gate, a residual - against Candle's own operations after it.

use crate::linear::case::{Layout, Product, TYPES};
use crate::*;

pub const ACTIVATIONS: [Activation; 6] = [
    Activation::Gelu,
    Activation::NewGelu,
    Activation::GeluPytorchTanh,
    Activation::Silu,
    Activation::Swish,
    Activation::Relu,
];

/// What [`followed`] and [`by_candle`] give, in this order.
pub const STEPS: [&str; 4] = ["a residual", "an activation", "an activation and a residual", "a gate"];

/// Each step in the product's pass.
pub fn followed(
    [gate, up]: [&PackedLinear; 2],
    activation: Activation,
    [xs, residual]: [&Tensor; 2],
) -> Result<[Tensor; 4]> {
    let activated = gate.clone().with_activation(activation)?;
    let gated = PackedGatedLinear::new(gate.clone(), up.clone(), activation)?;
    Ok([
        gate.forward_with_residual(xs, residual)?,
        activated.forward(xs)?,
        activated.forward_with_residual(xs, residual)?,
        gated.forward(xs)?,
    ])
}

/// Each step after the products of gate and up.
pub fn by_candle([gate, up]: [&Tensor; 2], activation: Activation, residual: &Tensor) -> Result<[Tensor; 4]> {
    let activated = activation.forward(gate)?;
    Ok([(gate + residual)?, activated.clone(), (&activated + residual)?, (activated * up)?])
}

/// Of the shape of a product's output, with gaps between its rows where there are several.
fn residual(ys: &Tensor) -> Result<Tensor> {
    let mut dims = ys.dims().to_vec();
    let width = dims.pop().unwrap_or(0);
    dims.push(width + 3);
    random(dims)?.to_dtype(ys.dtype())?.narrow(ys.rank() - 1, 2, width)
}

#[test]
fn every_size_and_layout_on_every_tier() -> Result<()> {
    let sizes = [(1, 7, 5), (3, 18, 49), (7, 193, 97), (20, 64, 48), (6, 0, 5), (0, 4, 5), (40, 33, 130)];
    for (n, (types, (rows, inputs, outputs))) in
        TYPES.into_iter().flat_map(|types| sizes.map(|sizes| (types, sizes))).enumerate()
    {
        let (layout, activation) = (Layout::ALL[n % Layout::ALL.len()], ACTIVATIONS[n % ACTIVATIONS.len()]);
        let rank = 1 + n % 4;
        let product = Product { layout, rank, size: 0.2, ..Product::plain(types, rows, (inputs, outputs)) };
        let (weight, bias, xs) = product.case().tensors()?;
        let (other, ..) = (Product { seed: 5, ..product.clone() }).case().tensors()?;
        // Candle rounds after each operation, the product alone at its end.
        let tolerance = match types.1 {
            DType::BF16 => 0.1,
            DType::F16 => 0.02,
            _ => 2e-5,
        };
        for tier in Tier::available() {
            let [gate, up] = [&weight, &other].map(|weight| PackedLinear::with_tier(weight, bias.as_ref(), Some(tier)));
            let (gate, up) = (gate?, up?);
            let ys = gate.forward(&xs)?;
            let residual = residual(&ys)?;
            let found = followed([&gate, &up], activation, [&xs, &residual])?;
            let expected = by_candle([&ys, &up.forward(&xs)?], activation, &residual)?;
            for ((found, expected), what) in found.iter().zip(&expected).zip(STEPS) {
                assert_eq!(found.dtype(), expected.dtype());
                assert_close(found, expected, tolerance, &format!("{tier}: {what}, {product:?}"));
            }
            // Each result is the rounded one of the same call in f32, which tiers that multiply pairs of bf16 sum in
            // another order.
            let is_alike = [Tier::Scalar, Tier::Avx2, Tier::Avx512, Tier::Neon].contains(&tier);
            for activation in ACTIVATIONS.into_iter().filter(|_| is_alike) {
                let of = |dtype| followed([&gate, &up], activation, [&xs.to_dtype(dtype)?, &residual.to_dtype(dtype)?]);
                for ((found, wide), what) in of(xs.dtype())?.iter().zip(of(DType::F32)?).zip(STEPS) {
                    assert_eq!(bits(found), bits(&wide.to_dtype(xs.dtype())?), "{tier}: {what}, {product:?}");
                }
            }
            let columns = product.some(outputs);
            let some = gate.with_activation(activation)?.forward_columns(&xs, columns.clone())?;
            let narrowed = found[1].narrow(xs.rank() - 1, columns.start, columns.len())?;
            assert_eq!(bits(&some), bits(&narrowed), "{tier}: some columns, {product:?}");
        }
    }
    Ok(())
}

//! Rotary positions from tables that are given.

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, RopeStyle, RotaryEmbedding};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::common::assert_close;
use crate::on_each_device;

on_each_device!(tables_of_a_config_rotate_as_it_does, tables_of_no_angles_and_their_gradients);

/// (P, r/2) of the angles `p · base^(-2i/r)`.
fn angles(positions: u32, base: f64, r: u32, device: &Device) -> Result<Tensor> {
    let pairs =
        (Tensor::arange(0u32, r / 2, device)?.to_dtype(DType::F32)? * (-2.0 / f64::from(r) * base.ln()))?.exp()?;
    let positions = Tensor::arange(0u32, positions, device)?.to_dtype(DType::F32)?;
    positions.unsqueeze(1)?.broadcast_mul(&pairs.unsqueeze(0)?)
}

fn tables_of_a_config_rotate_as_it_does(device: &Device) -> Result<()> {
    let xs = Tensor::randn(0f32, 1.0, (2, 3, 4, 8), device)?;
    let positions = Tensor::new(&[[0u32, 1, 2, 3], [9, 4, 4, 0]], device)?;
    for (style, r) in [(RopeStyle::Halves, 8), (RopeStyle::Halves, 4), (RopeStyle::Interleaved, 8)] {
        let config = RopeConfig::new(100.0).with_style(style).with_rotary_dim(r);
        let angles = angles(10, 100.0, r as u32, device)?;
        let given = RotaryEmbedding::from_tables(&config, 8, &angles.cos()?, &angles.sin()?)?;
        let own = RotaryEmbedding::new(&config, 8)?;
        let what = format!("{style:?}, r = {r}");
        assert_close(&given.apply(&xs, &positions)?, &own.apply(&xs, &positions)?, 2e-6, &what);
        assert_close(&given.apply_from(&xs, 6)?, &own.apply_from(&xs, 6)?, 2e-6, &what);
    }
    Ok(())
}

/// `x cos - y sin` and `y cos + x sin`, whatever the two are, from tables of any dtype and strides.
fn tables_of_no_angles_and_their_gradients(device: &Device) -> Result<()> {
    let (b, h, t, half) = (2, 3, 4, 3);
    let table = || Tensor::randn(0f32, 2.0, (half, 9), device)?.t()?.to_dtype(DType::BF16);
    let (cos, sin) = (table()?, table()?);
    let rotary = RotaryEmbedding::from_tables(&RopeConfig::new(100.0), 2 * half, &cos, &sin)?;
    let xs = Var::randn(0f32, 1.0, (b, h, t, 2 * half), device)?;
    let positions = Tensor::new(&[[8u32, 0, 1, 1], [2, 3, 4, 5]], device)?;
    let at = |table: &Tensor| {
        let rows = table.contiguous()?.index_select(&positions.flatten_all()?, 0)?;
        rows.to_dtype(DType::F32)?.reshape((b, 1, t, half))
    };
    let (cos, sin) = (at(&cos)?, at(&sin)?);
    let (x, y) = (xs.narrow(3, 0, half)?, xs.narrow(3, half, half)?);
    let first = (x.broadcast_mul(&cos)? - y.broadcast_mul(&sin)?)?;
    let second = (y.broadcast_mul(&cos)? + x.broadcast_mul(&sin)?)?;
    let expected = Tensor::cat(&[first, second], D::Minus1)?;
    let found = rotary.apply(&xs, &positions)?;
    assert_close(&found, &expected, 2e-6, "rotated");
    let weigh = Tensor::randn(0f32, 1.0, xs.shape(), device)?;
    let gradient = |ys: &Tensor| -> Result<Tensor> {
        Ok((ys * &weigh)?.sum_all()?.backward()?.get(&xs).expect("xs are tracked").clone())
    };
    assert_close(&gradient(&found)?, &gradient(&expected)?, 2e-6, "the gradient");
    Ok(())
}

#[test]
fn a_layer_takes_given_tables() -> Result<()> {
    let (device, vars, rope) = (Device::Cpu, VarMap::new(), RopeConfig::new(100.0));
    let layer = |rope: RopeConfig| {
        let cfg = MultiHeadAttentionConfig::new(16, 2).with_causal(true).with_rope(rope);
        MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&vars, DType::F32, &device))
    };
    let xs = Tensor::randn(0f32, 1.0, (2, 5, 16), &device)?;
    let expected = layer(RopeConfig::new(7.0))?.forward(&xs)?;
    let angles = angles(5, 7.0, 8, &device)?;
    let given = RotaryEmbedding::from_tables(&rope, 8, &angles.cos()?, &angles.sin()?)?;
    assert_close(&layer(rope)?.with_rotary(given)?.forward(&xs)?, &expected, 2e-6, "tables of another base");
    Ok(())
}

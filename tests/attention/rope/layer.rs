//! Rotary positions in the layer.

use candle_attention::{
    AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, RopeStyle, RotaryEmbedding,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, values};
use crate::on_each_device;

on_each_device!(each_sequence_has_its_own_positions, queries_and_keys_of_cross_attention_have_their_own);

fn rope() -> RopeConfig {
    RopeConfig::new(100.0).with_style(RopeStyle::Interleaved).with_rotary_dim(4)
}

fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(24, 4).with_num_kv_heads(2).with_causal(true).with_rope(rope())
}

/// The same random weights for every config: those of two layers differ in nothing else.
fn layer(cfg: &MultiHeadAttentionConfig, vars: &VarMap, device: &Device) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(cfg, VarBuilder::from_varmap(vars, DType::F32, device))
}

/// Three sequences of 6, 4 and 1 tokens, padded on the left to 6.
fn each_sequence_has_its_own_positions(device: &Device) -> Result<()> {
    let layer = layer(&config(), &VarMap::new(), device)?;
    let xs = Tensor::randn(0f32, 1.0, (3, 6, 24), device)?;
    let ones = Tensor::new(&[[1u8, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]], device)?;
    let positions = Tensor::new(&[[0i64, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0]], device)?;
    let mask = AttentionMask::from_attention_mask(&ones)?;
    let input = AttentionInput::new(&xs).with_mask(&mask).with_positions(&positions);
    let ys = layer.forward_with(input)?;
    for (b, length) in [(0, 6), (1, 4), (2, 1)] {
        let alone = layer.forward(&xs.narrow(0, b, 1)?.narrow(1, 6 - length, length)?)?;
        assert_close(&ys.narrow(0, b, 1)?.narrow(1, 6 - length, length)?, &alone, 2e-6, &format!("sequence {b}"));
    }
    Ok(())
}

/// Moved together they change nothing; the queries alone do.
fn queries_and_keys_of_cross_attention_have_their_own(device: &Device) -> Result<()> {
    let layer = layer(&config().with_causal(false), &VarMap::new(), device)?;
    let xs = Tensor::randn(0f32, 1.0, (2, 3, 24), device)?;
    let memory = Tensor::randn(0f32, 1.0, (2, 5, 24), device)?;
    let cross = || AttentionInput::new(&xs).with_key_value(&memory, &memory);
    let at = |first: i64, t: i64| Tensor::arange(first, first + t, device);
    let plain = layer.forward_with(cross())?;
    let said = layer.forward_with(cross().with_positions(&at(0, 3)?).with_key_positions(&at(0, 5)?))?;
    assert_close(&said, &plain, 0.0, "0..T unless given");
    let moved = layer.forward_with(cross().with_positions(&at(9, 3)?).with_key_positions(&at(9, 5)?))?;
    assert_close(&moved, &plain, 1e-5, "both moved");
    let apart = layer.forward_with(cross().with_positions(&at(9, 3)?))?;
    assert!(values(&(apart - plain)?).iter().any(|difference| difference.abs() > 1e-3));
    Ok(())
}

#[test]
fn positions_given_are_those_of_the_default() -> Result<()> {
    let layer = layer(&config(), &VarMap::new(), &Device::Cpu)?;
    let xs = Tensor::randn(0f32, 1.0, (2, 5, 24), &Device::Cpu)?;
    let positions = Tensor::arange(0u32, 5, &Device::Cpu)?;
    let given = layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))?;
    assert_close(&given, &layer.forward(&xs)?, 0.0, "0..T");
    let one = xs.narrow(0, 1, 1)?.squeeze(0)?;
    assert_close(&layer.forward(&one)?, &given.get(1)?, 1e-6, "one sequence");
    Ok(())
}

#[test]
fn layers_share_tables() -> Result<()> {
    let vars = VarMap::new();
    let own = layer(&config(), &vars, &Device::Cpu)?;
    let rotary = RotaryEmbedding::new(&rope(), 6)?;
    let shared = layer(&config(), &vars, &Device::Cpu)?.with_rotary(rotary.clone())?;
    let xs = Tensor::randn(0f32, 1.0, (2, 5, 24), &Device::Cpu)?;
    assert_close(&shared.forward(&xs)?, &own.forward(&xs)?, 0.0, "the same tables");
    let expect = |cfg: &MultiHeadAttentionConfig, rotary: &RotaryEmbedding, expected: &str| {
        let layer = layer(cfg, &VarMap::new(), &Device::Cpu).expect("the config fits");
        let text = error_text(layer.with_rotary(rotary.clone()));
        assert!(text.starts_with(expected), "{text}");
    };
    let without = MultiHeadAttentionConfig::new(24, 4);
    expect(&without, &rotary, "[multi_head_attention] rotary tables are given, but the config has no rope");
    let other = RotaryEmbedding::new(&rope().with_rotary_dim(2), 6)?;
    expect(&config(), &other, "[multi_head_attention] rotary tables are of RopeConfig { base: 100.0, ");
    let wider = RotaryEmbedding::new(&rope(), 8)?;
    expect(&config(), &wider, "[multi_head_attention] rotary tables are of RopeConfig { base: 100.0, ");
    Ok(())
}

/// Layers that have rotary positions and layers that have none take the same input.
#[test]
fn a_layer_without_rotary_positions_checks_them_only() -> Result<()> {
    let layer = layer(&MultiHeadAttentionConfig::new(24, 4), &VarMap::new(), &Device::Cpu)?;
    let xs = Tensor::randn(0f32, 1.0, (2, 5, 24), &Device::Cpu)?;
    let positions = Tensor::arange(3u32, 8, &Device::Cpu)?;
    let given = layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))?;
    assert_close(&given, &layer.forward(&xs)?, 0.0, "no rope");
    let short = positions.narrow(0, 0, 4)?;
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&xs).with_positions(&short))),
        "[rope] positions have shape [4], expected (T,) = [5] or (B, T) = [2, 5]"
    );
    Ok(())
}

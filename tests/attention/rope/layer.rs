//! Rotary positions in the layer.

use super::layouts;
use crate::layer_kind::LayerKind;
use crate::*;

on_each_device!(
    rope_positions_of_left_padded_sequences_match_unpadded,
    rope_positions_of_queries_and_keys_differ_in_cross_attention,
    rope_in_projected_memory_matches_key_value_inputs,
    rope_axes_with_equal_positions_match_one_axis,
    rope_axes_with_cache_or_packed_sequences_match_one_call,
);

fn rope() -> RopeConfig {
    RopeConfig::new(100.0).with_style(RopeStyle::Interleaved).with_rotary_dim(4)
}

fn config() -> Config {
    Config::new(24, 4).with_num_kv_heads(2).with_causal(true).with_rope(rope())
}

/// Builds a layer with the same random weights for every config, so that two layers differ in nothing else.
fn layer(cfg: &Config, device: &Device) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(cfg, TorchSeed::new(3).var_builder(DType::F32, device))
}

fn with_axes(axes: RopeAxes, scaling: RopeScaling, device: &Device) -> Result<MultiHeadAttention> {
    let rope = RopeConfig::new(50.0).with_scaling(scaling).with_axes(axes);
    layer(&Config::new(12, 2).with_head_dim(16).with_causal(true).with_rope(rope), device)
}

/// Checks three sequences of 6, 4 and 1 tokens, padded on the left to 6.
fn rope_positions_of_left_padded_sequences_match_unpadded(device: &Device) -> Result<()> {
    for kind in [LayerKind::MultiHead(config()), LayerKind::Latent(LatentConfig::new(24, 4))] {
        let layer = kind.layer(TorchSeed::new(3).var_builder(DType::F32, device))?;
        let xs = Tensor::randn(0f32, 1.0, (3, 6, 24), device)?;
        let run = |input: &Tensor| layer.run(input.into());
        let ones = Tensor::new(&[[1u8, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]], device)?;
        let positions = Tensor::new(&[[0i64, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0]], device)?;
        let mask = AttentionMask::from_attention_mask(&ones)?;
        let ys = layer.run(AttentionInput::new(&xs).with_mask(&mask).with_positions(&positions))?;
        for (b, length) in [(0, 6), (1, 4), (2, 1)] {
            let own = |all: &Tensor| all.narrow(0, b, 1)?.narrow(1, 6 - length, length);
            assert_close(&own(&ys)?, &run(&own(&xs)?)?, 2e-6, &format!("sequence {b}"));
        }
        let own = Tensor::arange(0u32, 6, device)?;
        let given = layer.run(AttentionInput::new(&xs).with_positions(&own))?;
        assert_close(&given, &run(&xs)?, 0.0, "0..T unless given");
    }
    Ok(())
}

/// Checks that positions that are moved together change nothing, and that positions of queries alone change the output.
fn rope_positions_of_queries_and_keys_differ_in_cross_attention(device: &Device) -> Result<()> {
    let layer = layer(&config().with_causal(false), device)?;
    let [xs, memory] = [3, 5].map(|t| Tensor::randn(0f32, 1.0, (2, t, 24), device));
    let xs = xs?;
    let memory = memory?;
    let cross = || AttentionInput::new(&xs).with_key_value(&memory, &memory);
    let at = |first: i64, t: i64| Tensor::arange(first, first + t, device);
    let plain = layer.forward_with(cross())?;
    for (first, most) in [(0, 0.0), (9, 1e-5)] {
        let queries = at(first, 3)?;
        let keys = at(first, 5)?;
        let moved = layer.forward_with(cross().with_positions(&queries).with_key_positions(&keys))?;
        assert_close(&moved, &plain, most, "both from the same");
    }
    assert!(max_error(&layer.forward_with(cross().with_positions(&at(9, 3)?))?, &plain) > 1e-3);
    Ok(())
}

/// Checks keys of a memory, which are rotated once, by frequencies that may follow their length.
fn rope_in_projected_memory_matches_key_value_inputs(device: &Device) -> Result<()> {
    for scaling in [RopeScaling::None, RopeScaling::Dynamic { factor: 2.0, original_context: 4 }] {
        let layer = layer(&config().with_causal(false).with_rope(rope().with_scaling(scaling)), device)?;
        for t_q in [1, 3, 9] {
            let [xs, keys] = [t_q, 7].map(|t| Tensor::randn(0f32, 1.0, (2, t, 24), device));
            let xs = xs?;
            let keys = keys?;
            let memory = layer.project_memory(&keys, &keys)?;
            let found = layer.forward_with(AttentionInput::new(&xs).with_memory(&memory))?;
            let expected = layer.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &keys))?;
            assert_close(&found, &expected, 1e-6, &format!("{t_q} queries"));
        }
    }
    Ok(())
}

/// Checks every scaling, and that without positions all axes count tokens.
fn rope_axes_with_equal_positions_match_one_axis(device: &Device) -> Result<()> {
    let xs = Tensor::randn(0f32, 1.0, (2, 5, 12), device)?;
    let positions = Tensor::new(&[[0u32, 1, 2, 3, 4], [7, 8, 9, 10, 11]], device)?;
    let on_all = Tensor::stack(&[&positions, &positions, &positions], 0)?;
    for scaling in [RopeScaling::None, RopeScaling::Dynamic { factor: 2.0, original_context: 8 }] {
        for (axes, _) in layouts().into_iter().take(3) {
            let layer = with_axes(axes, scaling.clone(), device)?;
            let ys = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&on_all))?;
            let expected = layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))?;
            assert_close(&ys, &expected, 1e-6, "one position on all axes");
            let of_text = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&on_all.i((.., 0))?))?;
            assert_close(&of_text, &layer.forward(&xs)?, 1e-6, "those of text");
        }
    }
    Ok(())
}

fn rope_axes_with_cache_or_packed_sequences_match_one_call(device: &Device) -> Result<()> {
    for (axes, _) in layouts() {
        let positions = Tensor::rand(0f32, 9.0, (axes.sections().len(), 2, 5), device)?;
        let layer = with_axes(axes, RopeScaling::None, device)?;
        let xs = Tensor::randn(0f32, 1.0, (2, 5, 12), device)?;
        let whole = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&positions))?;
        let mut cache = AttentionCache::default();
        for (start, t) in [(0, 3), (3, 1), (4, 1)] {
            let tokens = xs.narrow(1, start, t)?.contiguous()?;
            let at = positions.narrow(2, start, t)?;
            let input = AttentionInput::new(&tokens).with_axis_positions(&at).with_cache(&mut cache);
            assert_close(&layer.forward_with(input)?, &whole.narrow(1, start, t)?, 2e-6, "with a cache");
        }
        let sequences = PackedSequences::from_lens(&[5, 5], &[5, 5])?;
        let rows = xs.flatten(0, 1)?;
        let at = positions.flatten(1, 2)?;
        let input = AttentionInput::new(&rows).with_axis_positions(&at).with_packed(&sequences);
        assert_close(&layer.forward_with(input)?, &whole.flatten(0, 1)?, 2e-6, "packed");
    }
    Ok(())
}

/// Checks the tables of the config, and tables of another base.
#[test]
fn rope_tables_shared_by_layers_match_own_tables() -> Result<()> {
    let xs = random((2, 5, 24))?;
    let own = layer(&config(), &CPU)?;
    let shared = own.clone().with_rotary(RotaryEmbedding::new(&rope(), 6)?)?;
    assert_close(&shared.forward(&xs)?, &own.forward(&xs)?, 0.0, "the same tables");
    let of_latents = LatentConfig::new(24, 4);
    let latents = MultiHeadLatentAttention::new(&of_latents, TorchSeed::new(3).var_builder(DType::F32, &CPU))?;
    let tables = RotaryEmbedding::new(of_latents.rope(), of_latents.rope_head_dim())?;
    assert_close(&latents.clone().with_rotary(tables)?.forward(&xs)?, &latents.forward(&xs)?, 0.0, "latents");
    // The angles of base 7, by whose tables a layer of another base goes.
    let of_seven = RopeConfig::new(7.0).with_style(RopeStyle::Interleaved).with_rotary_dim(4);
    let angles = Tensor::arange(0f32, 5.0, &CPU)?.unsqueeze(1)?;
    let angles = angles.broadcast_mul(&Tensor::new(&[[1f32, 7f32.sqrt().recip()]], &CPU)?)?;
    let given = RotaryEmbedding::from_tables(&rope(), 6, &angles.cos()?, &angles.sin()?)?;
    let expected = layer(&config().with_rope(of_seven), &CPU)?.forward(&xs)?;
    assert_close(&layer(&config(), &CPU)?.with_rotary(given)?.forward(&xs)?, &expected, 2e-6, "tables of another base");
    Ok(())
}

/// Checks that layers with and without rotary positions accept the same input.
#[test]
fn positions_are_ignored_by_layer_without_rope() -> Result<()> {
    let layer = layer(&Config::new(24, 4), &CPU)?;
    let xs = random((2, 5, 24))?;
    let positions = Tensor::arange(3u32, 8, &CPU)?;
    let given = layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))?;
    assert_close(&given, &layer.forward(&xs)?, 0.0, "no rope");
    Ok(())
}

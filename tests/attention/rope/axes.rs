//! Rotary positions on several axes, against loops over pairs and against the same positions on one axis.

use candle_attention::{
    AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, PackedSequences, RopeAxes,
    RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle, RotaryEmbedding,
};
use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};

use crate::common::{assert_close, values};
use crate::on_each_device;

on_each_device!(
    every_layout_turns_each_pair_by_its_own_axis,
    one_position_on_all_axes_is_a_position,
    a_cache_and_packed_sequences_give_the_numbers_of_one_call,
);

const B: usize = 2;
const T: usize = 5;
const H: usize = 3;
const D: usize = 20;

/// Layouts of 8 pairs, and for each pair its axis and the exponent of its period.
fn layouts() -> Vec<(RopeAxes, Vec<(usize, f64)>)> {
    let common = |axes: [usize; 8]| axes.into_iter().enumerate().map(|(i, axis)| (axis, i as f64 / 8.0)).collect();
    let axes = |sections: &[usize], layout| RopeAxes::new(sections.to_vec(), layout);
    let own = |counts: &[usize]| {
        let of = |(axis, &n): (usize, &usize)| (0..n).map(move |i| (axis, i as f64 / n as f64)).collect::<Vec<_>>();
        counts.iter().enumerate().flat_map(of).collect()
    };
    let dealt = [(0, 0), (0, 2), (0, 4), (0, 6), (1, 1), (1, 3), (1, 5), (1, 7)];
    vec![
        (axes(&[3, 3, 2], RopeAxisLayout::Sections), common([0, 0, 0, 1, 1, 1, 2, 2])),
        (axes(&[4, 2, 2], RopeAxisLayout::Interleaved), common([0, 1, 2, 0, 1, 2, 0, 0])),
        (axes(&[3, 3, 2], RopeAxisLayout::Interleaved), common([0, 1, 2, 0, 1, 2, 0, 1])),
        (axes(&[4, 4], RopeAxisLayout::Axial), own(&[4, 4])),
        (axes(&[2, 3, 3], RopeAxisLayout::Axial), own(&[2, 3, 3])),
        (axes(&[4, 4], RopeAxisLayout::AxialDealt), dealt.map(|(axis, i)| (axis, f64::from(i) / 8.0)).to_vec()),
    ]
}

fn every_layout_turns_each_pair_by_its_own_axis(device: &Device) -> Result<()> {
    let xs = Tensor::randn(0f32, 1.0, (B, H, T, D), device)?;
    for (axes, pairs) in layouts() {
        let count = axes.sections().len();
        for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
            let rope = RopeConfig::new(50.0).with_style(style).with_rotary_dim(16).with_axes(axes.clone());
            let rotary = RotaryEmbedding::new(&rope, D)?;
            for b in [1, B] {
                let positions = Tensor::rand(-3f32, 9.0, (count, b, T), device)?;
                let given = if b == 1 { positions.squeeze(1)? } else { positions.clone() };
                let found = values(&rotary.apply_on_axes(&xs, &given)?);
                let (xs, at) = (values(&xs), values(&positions));
                for (row, (found, xs)) in found.chunks(D).zip(xs.chunks(D)).enumerate() {
                    let (sequence, t) = (row / (H * T) % b, row % T);
                    for (i, &(axis, exponent)) in pairs.iter().enumerate() {
                        let angle = at[(axis * b + sequence) * T + t] / 50f64.powf(exponent);
                        let (first, second) = if style == RopeStyle::Halves { (i, i + 8) } else { (2 * i, 2 * i + 1) };
                        let (x, y) = (xs[first], xs[second]);
                        let expected = [x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()];
                        for (found, expected) in [found[first], found[second]].into_iter().zip(expected) {
                            assert!((found - expected).abs() < 1e-5, "{rope:?}, row {row}, pair {i}");
                        }
                    }
                    assert_eq!(found[16..], xs[16..], "{rope:?}, row {row}");
                }
            }
        }
    }
    Ok(())
}

fn layer(axes: RopeAxes, scaling: RopeScaling, device: &Device) -> Result<MultiHeadAttention> {
    let rope = RopeConfig::new(50.0).with_scaling(scaling).with_axes(axes);
    let cfg = MultiHeadAttentionConfig::new(12, 2).with_head_dim(16).with_causal(true).with_rope(rope);
    let seed = candle_attention::TorchSeed::new(3);
    MultiHeadAttention::new(&cfg, seed.var_builder(DType::F32, device))
}

/// Whatever the scaling; and text is at no positions but its own.
fn one_position_on_all_axes_is_a_position(device: &Device) -> Result<()> {
    let xs = Tensor::randn(0f32, 1.0, (B, T, 12), device)?;
    let positions = Tensor::new(&[[0u32, 1, 2, 3, 4], [7, 8, 9, 10, 11]], device)?;
    for scaling in [RopeScaling::None, RopeScaling::Dynamic { factor: 2.0, original_context: 8 }] {
        for (axes, _) in layouts().into_iter().take(3) {
            let layer = layer(axes, scaling.clone(), device)?;
            let on_all = Tensor::stack(&[&positions, &positions, &positions], 0)?;
            let ys = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&on_all))?;
            let expected = layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))?;
            assert_close(&ys, &expected, 1e-6, "one position on all axes");
            let first = on_all.i((.., 0))?;
            let ys = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&first))?;
            assert_close(&ys, &layer.forward(&xs)?, 1e-6, "those of text");
        }
    }
    Ok(())
}

fn a_cache_and_packed_sequences_give_the_numbers_of_one_call(device: &Device) -> Result<()> {
    for (axes, _) in layouts() {
        let count = axes.sections().len();
        let layer = layer(axes, RopeScaling::None, device)?;
        let xs = Tensor::randn(0f32, 1.0, (B, T, 12), device)?;
        let positions = Tensor::rand(0f32, 9.0, (count, B, T), device)?;
        let whole = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&positions))?;
        let mut cache = AttentionCache::default();
        for (start, t) in [(0, 3), (3, 1), (4, 1)] {
            let (tokens, at) = (xs.narrow(1, start, t)?.contiguous()?, positions.narrow(2, start, t)?);
            let input = AttentionInput::new(&tokens).with_axis_positions(&at).with_cache(&mut cache);
            assert_close(&layer.forward_with(input)?, &whole.narrow(1, start, t)?, 2e-6, "with a cache");
        }
        let sequences = PackedSequences::from_lens(&[T, T], &[T, T])?;
        let (rows, at) = (xs.flatten(0, 1)?, positions.flatten(1, 2)?);
        let input = AttentionInput::new(&rows).with_axis_positions(&at).with_packed(&sequences);
        assert_close(&layer.forward_with(input)?, &whole.flatten(0, 1)?, 2e-6, "packed");
    }
    Ok(())
}

/// Rotation keeps lengths, so that the gradient of a square is that without it.
#[test]
fn gradients_turn_back() -> Result<()> {
    for (axes, _) in layouts() {
        let positions = Tensor::rand(-3f32, 9.0, (axes.sections().len(), T), &Device::Cpu)?;
        let rotary = RotaryEmbedding::new(&RopeConfig::new(50.0).with_axes(axes), 16)?;
        let xs = Var::from_tensor(&Tensor::randn(0f64, 1.0, (1, 2, T, 16), &Device::Cpu)?)?;
        let store = rotary.apply_on_axes(&xs, &positions)?.sqr()?.sum_all()?.backward()?;
        let gradient = store.get(&xs).expect("xs are tracked");
        assert_close(gradient, &(xs.as_tensor() * 2.0)?, 1e-6, "twice the inputs");
    }
    Ok(())
}

#[test]
fn axes_are_serialised() {
    let rope = RopeConfig::new(1e4).with_axes(RopeAxes::new(vec![4, 2, 2], RopeAxisLayout::Interleaved));
    let text = serde_json::to_string(&rope).expect("JSON");
    assert!(text.contains(r#""axes":{"sections":[4,2,2],"layout":"interleaved"}"#), "{text}");
    assert_eq!(serde_json::from_str::<RopeConfig>(&text).expect("the same"), rope);
    let plain = serde_json::from_str::<RopeConfig>(r#"{"base": 1e4}"#).expect("older configs have no axes");
    assert_eq!(plain, RopeConfig::new(1e4));
}

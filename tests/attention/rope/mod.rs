//! Rotary positions: every scaling against transformers, whose numbers `make.py` writes; and tables and axes by their
//! definitions, with their gradients.

mod layer;

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use crate::*;

on_each_device!(rope_scaling_matches_transformers, rope_tables_and_axes_match_definition,);

/// The heads of `make.py`.
const D: usize = 16;

#[derive(Deserialize)]
struct Numbers {
    calls: Vec<Vec<Vec<u32>>>,
    configs: BTreeMap<String, RopeConfig>,
    #[serde(skip)]
    tensors: HashMap<String, Tensor>,
}

impl Numbers {
    fn open(device: &Device) -> Result<Self> {
        let text = std::fs::read_to_string(recorded("attention/rope/numbers.json"))?;
        let mut numbers: Self = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
        numbers.tensors = candle_core::safetensors::load(recorded("attention/rope/numbers.safetensors"), device)?;
        assert!(numbers.configs.len() >= 16 && numbers.calls.len() == 6);
        Ok(numbers)
    }

    /// Returns positions (T,) or (B, T).
    fn positions(&self, call: usize, device: &Device) -> Result<Tensor> {
        let positions = Tensor::new(self.calls[call].clone(), device)?;
        if positions.dim(0)? == 1 { positions.squeeze(0) } else { Ok(positions) }
    }
}

fn rope_scaling_matches_transformers(device: &Device) -> Result<()> {
    let numbers = Numbers::open(device)?;
    let xs = &numbers.tensors["xs"];
    // Heads last but one, a part of a wider tensor, last dimension strided.
    let wider = Tensor::cat(&[&xs.zeros_like()?, xs, &xs.zeros_like()?], 3)?;
    let views = [
        xs.clone(),
        xs.transpose(1, 2)?.contiguous()?.transpose(1, 2)?,
        wider.narrow(3, D, D)?,
        xs.transpose(2, 3)?.contiguous()?.transpose(2, 3)?,
    ];
    for (name, config) in &numbers.configs {
        // One for all calls: what it keeps of one may not change the next.
        let rotary = RotaryEmbedding::new(config, D)?;
        for n in (0..numbers.calls.len()).chain([0, 2]) {
            let positions = numbers.positions(n, device)?;
            let ys = &numbers.tensors[&format!("{name}.{n}")];
            for (view, input) in views.iter().enumerate() {
                assert_close(&rotary.apply(input, &positions)?, ys, 1e-6, &format!("{name}, call {n}, view {view}"));
            }
            assert_close(&rotary.apply(xs, &positions.to_dtype(DType::I64)?)?, ys, 1e-6, "integers of 64 bits");
            if !device.is_metal() {
                let wide = rotary.apply(&xs.to_dtype(DType::F64)?, &positions)?;
                assert_eq!(wide.dtype(), DType::F64);
                assert_close(&wide, ys, 1e-6, &format!("{name}, call {n} in f64"));
            }
            for dtype in [DType::BF16, DType::F16] {
                let half = xs.to_dtype(dtype)?;
                let rounded = rotary.apply(&half.to_dtype(DType::F32)?, &positions)?.to_dtype(dtype)?;
                let found = rotary.apply(&half, &positions)?;
                assert_eq!(found.dtype(), dtype);
                assert_close(&found, &rounded, 0.0, &format!("{name}, call {n} in {dtype:?}"));
            }
        }
        for (n, offset) in [(0, 0), (1, 7), (3, 61)] {
            let of_positions = rotary.apply(xs, &numbers.positions(n, device)?)?;
            assert_close(&rotary.apply_from(xs, offset)?, &of_positions, 0.0, name);
        }
    }
    Ok(())
}

/// Checks that splitting many tokens over threads changes nothing.
#[test]
fn rope_of_many_tokens_matches_each_token_alone() -> Result<()> {
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), 64)?;
    let xs = random((2, 3, 150, 64))?;
    let positions = Tensor::arange(0u32, 300, &CPU)?.affine(7.0, 5.0)?.reshape((2, 150))?;
    let ys = rotary.apply(&xs, &positions)?;
    for (b, t) in [(0, 0), (0, 149), (1, 0), (1, 77)] {
        let one = |tensor: &Tensor| tensor.narrow(0, b, 1)?.narrow(2, t, 1);
        let alone = rotary.apply_from(&one(&xs)?, 5 + 7 * (150 * b + t))?;
        assert_close(&one(&ys)?, &alone, 0.0, &format!("token {t} of sequence {b}"));
    }
    Ok(())
}

#[test]
fn rope_of_empty_inputs_is_empty() -> Result<()> {
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), 4)?;
    for shape in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)] {
        let xs = Tensor::zeros(shape, DType::F32, &CPU)?;
        assert_eq!(rotary.apply_from(&xs, 2)?.dims4()?, shape);
        let positions = Tensor::zeros((shape.0, shape.2), DType::I64, &CPU)?;
        assert_eq!(rotary.apply(&xs, &positions)?.dims4()?, shape);
    }
    Ok(())
}

/// Lists layouts of 8 pairs, and for each pair its axis and the exponent of its period.
fn layouts() -> Vec<(RopeAxes, Vec<(usize, f64)>)> {
    let common = |axes: [usize; 8]| axes.into_iter().enumerate().map(|(i, axis)| (axis, i as f64 / 8.0)).collect();
    let axes = |sections: &[usize], layout| RopeAxes::new(sections.to_vec(), layout);
    let own = |counts: &[usize]| {
        let of = |(axis, &n): (usize, &usize)| (0..n).map(move |i| (axis, i as f64 / n as f64)).collect::<Vec<_>>();
        counts.iter().enumerate().flat_map(of).collect()
    };
    let turns = (0..8).map(|i| (i % 2, (i / 2) as f64 / 4.0)).collect();
    let dealt = [(0, 0), (0, 2), (0, 4), (0, 6), (1, 1), (1, 3), (1, 5), (1, 7)];
    vec![
        (axes(&[3, 3, 2], RopeAxisLayout::Sections), common([0, 0, 0, 1, 1, 1, 2, 2])),
        (axes(&[4, 2, 2], RopeAxisLayout::Interleaved), common([0, 1, 2, 0, 1, 2, 0, 0])),
        (axes(&[3, 3, 2], RopeAxisLayout::Interleaved), common([0, 1, 2, 0, 1, 2, 0, 1])),
        (axes(&[4, 4], RopeAxisLayout::Axial), own(&[4, 4])),
        (axes(&[2, 3, 3], RopeAxisLayout::Axial), own(&[2, 3, 3])),
        (axes(&[4, 4], RopeAxisLayout::AxialInterleaved), dealt.map(|(axis, i)| (axis, f64::from(i) / 8.0)).to_vec()),
        (axes(&[4, 4], RopeAxisLayout::AxialTurns), turns),
    ]
}

/// A rotation of xs (B, H, T, D) by `x cos - y sin` and `y cos + x sin`, for any cos and sin.
struct Turn {
    style: RopeStyle,
    /// cos and sin of a sequence, a position and a pair.
    pair: Box<dyn Fn(usize, usize, usize) -> [f64; 2]>,
    pairs: usize,
}

impl Turn {
    /// Compares the output and the gradient of its sum, which is all ones rotated back, with the definition.
    fn check(&self, xs: &Var, found: &Tensor, what: &str) -> Result<()> {
        let (_, h, t, d) = xs.dims4()?;
        let store = found.sum_all()?.backward()?;
        let gradient = values(store.get(xs).expect("xs are tracked"));
        let xs = values(xs);
        let found = values(found);
        for (row, ((got, given), slopes)) in found.chunks(d).zip(xs.chunks(d)).zip(gradient.chunks(d)).enumerate() {
            let mut turned = given.to_vec();
            let mut back = vec![1.0; d];
            for i in 0..self.pairs {
                let [cos, sin] = (self.pair)(row / (h * t), row % t, i);
                let (x, y) = if self.style == RopeStyle::RotateHalf { (i, i + self.pairs) } else { (2 * i, 2 * i + 1) };
                (turned[x], turned[y]) = (given[x] * cos - given[y] * sin, given[y] * cos + given[x] * sin);
                (back[x], back[y]) = (cos + sin, cos - sin);
            }
            let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5 * (1.0 + b.abs()));
            assert!(close(got, &turned), "{what}, row {row}: {got:?}, expected {turned:?}");
            assert!(close(slopes, &back), "{what}, row {row}: a gradient of {slopes:?}, expected {back:?}");
            assert_eq!(got[2 * self.pairs..], given[2 * self.pairs..], "{what}: the rest of a head stays");
        }
        Ok(())
    }
}

fn rope_tables_and_axes_match_definition(device: &Device) -> Result<()> {
    const T: usize = 5;
    let xs = Var::randn(0f32, 1.0, (2, 3, T, 20), device)?;
    for style in [RopeStyle::RotateHalf, RopeStyle::Interleaved] {
        for (axes, pairs) in layouts() {
            let count = axes.sections().len();
            let rope = RopeConfig::new(50.0).with_style(style).with_rotary_dim(16).with_axes(axes);
            let rotary = RotaryEmbedding::new(&rope, 20)?;
            for b in [1, 2] {
                let positions = Tensor::rand(-3f32, 9.0, (count, b, T), device)?;
                let given = if b == 1 { positions.squeeze(1)? } else { positions.clone() };
                let at = values(&positions);
                let pairs = pairs.clone();
                let pair = move |sequence: usize, t: usize, i: usize| {
                    let (axis, exponent) = pairs[i];
                    let angle = at[(axis * b + sequence % b) * T + t] / 50f64.powf(exponent);
                    [angle.cos(), angle.sin()]
                };
                let turn = Turn { style, pair: Box::new(pair), pairs: 8 };
                turn.check(&xs, &rotary.apply_on_axes(&xs, &given)?, &format!("{rope:?}"))?;
            }
        }
        // Tables of no angles, of another dtype and strides.
        for width in [20, 12] {
            let tables = [(); 2].map(|()| Tensor::randn(0f32, 2.0, (width / 2, 9), device)?.t()?.to_dtype(DType::BF16));
            let [cos, sin] = tables;
            let cos = cos?;
            let sin = sin?;
            let rope = RopeConfig::new(100.0).with_style(style).with_rotary_dim(width);
            let rotary = RotaryEmbedding::from_tables(&rope, 20, &cos, &sin)?;
            let at = [[8u32, 0, 1, 1, 7], [2, 3, 4, 5, 6]];
            let [cos, sin] = [values(&cos), values(&sin)];
            let place = move |b: usize, t: usize, i: usize| at[b][t] as usize * width / 2 + i;
            let pair = move |b, t, i| [cos[place(b, t, i)], sin[place(b, t, i)]];
            let turn = Turn { style, pair: Box::new(pair), pairs: width / 2 };
            turn.check(&xs, &rotary.apply(&xs, &Tensor::new(&at, device)?)?, &format!("tables, {style:?}, {width}"))?;
            let from = Tensor::new(&[3u32, 4, 5, 6, 7], device)?;
            assert_close(&rotary.apply_from(&xs, 3)?, &rotary.apply(&xs, &from)?, 0.0, "from an offset");
        }
    }
    Ok(())
}

#[test]
fn rope_axes_round_trip_through_json() {
    let rope = RopeConfig::new(1e4).with_axes(RopeAxes::new(vec![4, 2, 2], RopeAxisLayout::Interleaved));
    let text = survives_json(&rope);
    assert!(text.contains(r#""axes":{"sections":[4,2,2],"layout":"interleaved"}"#), "{text}");
    let plain = serde_json::from_str::<RopeConfig>(r#"{"base": 1e4}"#).expect("older configs have no axes");
    assert_eq!(plain, RopeConfig::new(1e4));
}

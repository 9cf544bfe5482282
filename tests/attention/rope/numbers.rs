//! Every scaling against transformers, in every dtype and from every kind of view.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_attention::{RopeConfig, RotaryEmbedding};
use candle_core::{DType, Device, Result, Tensor};
use serde::Deserialize;

use crate::common::{assert_close, values};
use crate::on_each_device;

on_each_device!(every_scaling_gives_transformers_numbers, half_precision_is_rounded_once);

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
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attention/rope");
        let text = std::fs::read_to_string(folder.join("numbers.json"))?;
        let mut numbers: Self = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
        numbers.tensors = candle_core::safetensors::load(folder.join("numbers.safetensors"), device)?;
        assert!(numbers.configs.len() >= 16 && numbers.calls.len() == 6);
        Ok(numbers)
    }

    /// Positions (T,) or (B, T), and the expected ys (2, 1, T, D) of one call.
    fn call(&self, name: &str, n: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let rows = &self.calls[n];
        let positions = Tensor::new(rows.clone(), device)?;
        let positions = if rows.len() == 1 { positions.squeeze(0)? } else { positions };
        Ok((positions, self.tensors[&format!("{name}.{n}")].clone()))
    }
}

fn every_scaling_gives_transformers_numbers(device: &Device) -> Result<()> {
    let numbers = Numbers::open(device)?;
    let xs = &numbers.tensors["xs"];
    for (name, config) in &numbers.configs {
        // One for all calls: what it keeps of one may not change the next.
        let rotary = RotaryEmbedding::new(config, D)?;
        for n in (0..numbers.calls.len()).chain([0, 2]) {
            let (positions, ys) = numbers.call(name, n, device)?;
            let what = format!("{name}, call {n}");
            assert_close(&rotary.apply(xs, &positions)?, &ys, 1e-6, &what);
            assert_close(&rotary.apply(xs, &positions.to_dtype(DType::I64)?)?, &ys, 1e-6, &what);
            for view in views(xs)? {
                assert_close(&rotary.apply(&view, &positions)?, &ys, 1e-6, &format!("{what}, a view"));
            }
            if !device.is_metal() {
                let wide = rotary.apply(&xs.to_dtype(DType::F64)?, &positions)?;
                assert_eq!(wide.dtype(), DType::F64);
                assert_close(&wide, &ys, 1e-6, &format!("{what} in f64"));
            }
        }
        for (n, offset) in [(0, 0), (1, 7), (3, 61)] {
            let (positions, _) = numbers.call(name, n, device)?;
            assert_close(&rotary.apply_from(xs, offset)?, &rotary.apply(xs, &positions)?, 0.0, name);
        }
    }
    Ok(())
}

/// The same numbers, differently laid out: heads last but one, a part of a wider tensor, last dimension strided.
fn views(xs: &Tensor) -> Result<[Tensor; 3]> {
    let wider = Tensor::cat(&[&xs.zeros_like()?, xs, &xs.zeros_like()?], 3)?;
    Ok([
        xs.transpose(1, 2)?.contiguous()?.transpose(1, 2)?,
        wider.narrow(3, D, D)?,
        xs.transpose(2, 3)?.contiguous()?.transpose(2, 3)?,
    ])
}

fn half_precision_is_rounded_once(device: &Device) -> Result<()> {
    let numbers = Numbers::open(device)?;
    for dtype in [DType::BF16, DType::F16] {
        let xs = numbers.tensors["xs"].to_dtype(dtype)?;
        for (name, config) in &numbers.configs {
            let rotary = RotaryEmbedding::new(config, D)?;
            let (positions, _) = numbers.call(name, 4, device)?;
            let ys = rotary.apply(&xs, &positions)?;
            assert_eq!(ys.dtype(), dtype);
            let rounded = rotary.apply(&xs.to_dtype(DType::F32)?, &positions)?.to_dtype(dtype)?;
            assert_close(&ys, &rounded, 0.0, &format!("{name} in {dtype:?}"));
        }
    }
    Ok(())
}

/// Many tokens are split over threads, few are not.
#[test]
fn many_tokens_give_what_each_gives_alone() -> Result<()> {
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), 64)?;
    let xs = Tensor::randn(0f32, 1.0, (2, 3, 150, 64), &Device::Cpu)?;
    let positions = Tensor::arange(0u32, 300, &Device::Cpu)?.affine(7.0, 5.0)?.reshape((2, 150))?;
    let ys = rotary.apply(&xs, &positions)?;
    for (b, t) in [(0, 0), (0, 149), (1, 0), (1, 77)] {
        let one = |tensor: &Tensor| tensor.narrow(0, b, 1)?.narrow(2, t, 1);
        let alone = rotary.apply_from(&one(&xs)?, 5 + 7 * (150 * b + t))?;
        assert_close(&one(&ys)?, &alone, 0.0, &format!("token {t} of sequence {b}"));
    }
    Ok(())
}

#[test]
fn what_is_not_rotated_stays_as_it_is() -> Result<()> {
    let numbers = Numbers::open(&Device::Cpu)?;
    let xs = &numbers.tensors["xs"];
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0).with_rotary_dim(6), D)?;
    let ys = rotary.apply_from(xs, 3)?;
    assert_close(&ys.narrow(3, 6, D - 6)?, &xs.narrow(3, 6, D - 6)?, 0.0, "the rest of the heads");
    let first = RotaryEmbedding::new(&RopeConfig::new(10_000.0), 6)?.apply_from(&xs.narrow(3, 0, 6)?, 3)?;
    assert_close(&ys.narrow(3, 0, 6)?, &first, 0.0, "heads of the rotated width");
    Ok(())
}

/// A score depends on the distance of its query and key, and a rotation keeps lengths.
#[test]
fn scores_depend_on_distances() -> Result<()> {
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), D)?;
    let random = || Tensor::randn(0f64, 1.0, (1, 1, 1, D), &Device::Cpu);
    let (q, k) = (random()?, random()?);
    let score = |q_at: usize, k_at: usize| -> Result<f64> {
        let (q, k) = (rotary.apply_from(&q, q_at)?, rotary.apply_from(&k, k_at)?);
        Ok(values(&q.mul(&k)?.sum_all()?)[0])
    };
    for (q_at, k_at) in [(5, 2), (103, 100), (1003, 1000)] {
        assert!((score(q_at, k_at)? - score(3, 0)?).abs() < 1e-3, "{q_at}, {k_at}");
    }
    assert!((score(4, 0)? - score(3, 0)?).abs() > 1e-3);
    assert!((values(&rotary.apply_from(&q, 77)?.sqr()?.sum_all()?)[0] - values(&q.sqr()?.sum_all()?)[0]).abs() < 1e-5);
    Ok(())
}

#[test]
fn empty_inputs_stay_empty() -> Result<()> {
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), 4)?;
    for shape in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)] {
        let xs = Tensor::zeros(shape, DType::F32, &Device::Cpu)?;
        assert_eq!(rotary.apply_from(&xs, 2)?.dims4()?, shape);
        let positions = Tensor::zeros((shape.0, shape.2), DType::I64, &Device::Cpu)?;
        assert_eq!(rotary.apply(&xs, &positions)?.dims4()?, shape);
    }
    Ok(())
}

//! A whole layer on a device, compared with the same layer on the CPU in f64.

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, GateActivation, GateLayout, GateScope,
    MultiHeadAttention, MultiHeadAttentionConfig, OutputGate, QkNorm, QkNormKind, QkNormScope, RopeConfig,
    WeightLayout,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;

use super::check::{Checked, DTYPES, allowed, gradients, largest_error, relative_error};
use super::progress::Progress;
use super::table::Row;

const BATCH: usize = 2;
const WIDTH: usize = 256;

/// The number of single tokens after a prompt.
const TOKENS: usize = 4;

/// Errors of keys and values that are stored in 8 bits, relative to the largest entry of an output.
const ALLOWED_Q8: f64 = 2e-2;

/// The layers that are checked.
#[derive(Clone, Copy)]
enum Kind {
    Plain,
    /// With rotary positions, norms of queries and keys, sinks and an output gate.
    WithAllParts,
}

impl Kind {
    fn config(self) -> MultiHeadAttentionConfig {
        let plain = MultiHeadAttentionConfig::new(WIDTH, 4).with_num_kv_heads(2).with_causal(true);
        match self {
            Self::Plain => plain,
            Self::WithAllParts => plain
                .with_bias(true)
                .with_rope(RopeConfig::new(10_000.0))
                .with_qk_norm(QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 })
                .with_sinks(true)
                .with_output_gate(OutputGate {
                    activation: GateActivation::Sigmoid,
                    scope: GateScope::Elementwise,
                    layout: GateLayout::Separate { bias: false },
                }),
        }
    }
}

/// Two layers with the same weights, rounded to a dtype: one in that dtype on the device, one on the CPU in f64.
struct Layers {
    here: MultiHeadAttention,
    exact: MultiHeadAttention,
    dtype: DType,
    device: Device,
}

impl Layers {
    fn new(kind: Kind, dtype: DType, device: &Device) -> Result<Self> {
        let cfg = kind.config();
        let weights = weights(&cfg, dtype)?;
        let here = VarBuilder::from_tensors(weights.clone(), dtype, device);
        let exact = VarBuilder::from_tensors(weights, DType::F64, &Device::Cpu);
        Ok(Self {
            here: MultiHeadAttention::new(&cfg, here)?,
            exact: MultiHeadAttention::new(&cfg, exact)?,
            dtype,
            device: device.clone(),
        })
    }

    /// Returns the largest error over a batch of `t` positions under a mask.
    fn compare(&self, t: usize, mask: &AttentionMask) -> Result<Checked> {
        let xs = inputs(t, self.dtype)?;
        let exact = xs.to_dtype(DType::F64)?;
        let expected = self.exact.forward_with(AttentionInput::new(&exact).with_mask(mask))?;
        let found = self.here.forward_with(AttentionInput::new(&xs.to_device(&self.device)?).with_mask(mask))?;
        Ok(Checked { error: relative_error(&found, &expected)?, plan: None })
    }

    /// Checks a prompt, of which each sequence has `lens` tokens, and then single tokens, through a cache. Each
    /// sequence has to have the numbers of a call by itself. The plan is that of the last token.
    fn compare_cached(&self, lens: [usize; BATCH], cache: &AttentionCacheConfig) -> Result<Checked> {
        let longest = lens.into_iter().max().unwrap_or(0);
        let xs = inputs(longest + TOKENS, self.dtype)?;
        let here = xs.to_device(&self.device)?;
        let mut cache = AttentionCache::new(cache)?;
        let prompt = here.narrow(1, 0, longest)?;
        let mut calls =
            vec![self.here.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache).with_valid_lens(&lens))?];
        let mut plan = None;
        for t in longest..longest + TOKENS {
            let token = here.narrow(1, t, 1)?;
            plan = Some(self.here.plan(&AttentionInput::new(&token).with_cache(&mut cache))?);
            calls.push(self.here.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?);
        }
        let found = Tensor::cat(&calls, 1)?;
        let exact = xs.to_dtype(DType::F64)?;
        let mut error = 0f64;
        for (b, len) in lens.into_iter().enumerate() {
            let own = |batch: &Tensor| {
                let row = batch.narrow(0, b, 1)?;
                Tensor::cat(&[row.narrow(1, 0, len)?, row.narrow(1, longest, TOKENS)?], 1)
            };
            error = error.max(relative_error(&own(&found)?, &self.exact.forward(&own(&exact)?)?)?);
        }
        Ok(Checked { error, plan })
    }
}

/// Returns the weights of a new layer by their names.
pub fn weights(cfg: &MultiHeadAttentionConfig, dtype: DType) -> Result<HashMap<String, Tensor>> {
    let drawn = MultiHeadAttention::new(cfg, TorchSeed::new(3).var_builder(dtype, &Device::Cpu))?;
    Ok(drawn.state_dict(WeightLayout::Canonical)?.into_iter().collect())
}

/// Returns the inputs of `t` positions on the CPU.
fn inputs(t: usize, dtype: DType) -> Result<Tensor> {
    TorchSeed::new(4).randn((BATCH, t, WIDTH))?.to_dtype(dtype)
}

/// Checks a causal layer with grouped heads: on whole and on padded sequences, and on one position.
pub fn check(device: &Device, short: bool, tolerance: f64, progress: &Progress) -> Result<Row> {
    let mut row = Row::new("a layer");
    let lengths: &[usize] = if short { &[1, 40] } else { &[1, 40, 257] };
    for dtype in DTYPES {
        progress.note(dtype.as_str());
        for kind in [Kind::Plain, Kind::WithAllParts] {
            let layers = Layers::new(kind, dtype, device)?;
            for &t in lengths {
                let lens = vec![t.div_ceil(2), t];
                let starts = vec![t / 2, 0];
                let masks = [
                    ("whole sequences", AttentionMask::none()),
                    ("padded on the right", AttentionMask::none().with_valid_lens(lens)),
                    ("padded on the left", AttentionMask::none().with_starts(starts)),
                ];
                for (what, mask) in masks {
                    let checked = layers.compare(t, &mask);
                    row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("{what} of {t}"));
                }
            }
        }
    }
    Ok(row)
}

/// Checks a prompt and single tokens through caches: one that grows and one of a fixed size, and one of 8 bits.
pub fn check_cached(device: &Device, tolerance: f64) -> Result<[Row; 2]> {
    let mut floats = Row::new("a layer with a cache");
    let mut codes = Row::new("a layer, cache of 8 bits");
    let caches = [
        ("a cache that grows", AttentionCacheConfig::new().with_capacity(8)),
        ("a cache of a fixed size", AttentionCacheConfig::new().with_capacity(64).with_growth(false)),
        ("a cache of 8 bits", AttentionCacheConfig::new().with_q8()),
    ];
    for dtype in DTYPES {
        for kind in [Kind::Plain, Kind::WithAllParts] {
            let layers = Layers::new(kind, dtype, device)?;
            for (what, cache) in &caches {
                let (row, least) = if cache.q8() { (&mut codes, ALLOWED_Q8) } else { (&mut floats, 0.0) };
                let most = tolerance * allowed(dtype).max(least);
                for lens in [[40, 40], [40, 13]] {
                    let checked = layers.compare_cached(lens, cache);
                    row.add(dtype, checked, most, &format_args!("{what} after prompts of {lens:?}"));
                }
            }
        }
    }
    Ok([floats, codes])
}

/// Checks the gradients of a layer's input and of its parameters.
pub fn check_gradients(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("gradients of a layer");
    for dtype in DTYPES {
        for kind in [Kind::Plain, Kind::WithAllParts] {
            for t in [5, 40] {
                let checked = compare_gradients(kind, t, dtype, device);
                row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("{t} positions"));
            }
        }
    }
    Ok(row)
}

fn compare_gradients(kind: Kind, t: usize, dtype: DType, device: &Device) -> Result<Checked> {
    let cfg = kind.config();
    let weights = weights(&cfg, dtype)?;
    let xs = inputs(t, dtype)?;
    let run = |precision: DType, to: &Device| -> Result<Vec<Tensor>> {
        let variable = |tensor: &Tensor| Var::from_tensor(&tensor.to_dtype(precision)?.to_device(to)?);
        let mut variables = HashMap::new();
        for (name, tensor) in &weights {
            variables.insert(name.clone(), variable(tensor)?.into_inner());
        }
        let mut names: Vec<&String> = weights.keys().collect();
        names.sort();
        let input = variable(&xs)?.into_inner();
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(variables.clone(), precision, to))?;
        let loss = layer.forward(&input)?.sqr()?.sum_all()?;
        let mut tracked = vec![&input];
        tracked.extend(names.iter().filter_map(|name| variables.get(*name)));
        gradients(&loss, &tracked)
    };
    let (found, expected) = (run(dtype, device)?, run(DType::F64, &Device::Cpu)?);
    Ok(Checked { error: largest_error(&found, &expected)?, plan: None })
}

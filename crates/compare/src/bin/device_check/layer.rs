//! A whole layer on a device, compared with the same layer on the CPU in f64.

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionCache, AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

use super::check::{Checked, DTYPES, allowed, relative_error};
use super::progress::Progress;
use super::table::Row;

const BATCH: usize = 2;
const WIDTH: usize = 256;

/// The number of single tokens after a prompt.
const TOKENS: usize = 4;

/// Two layers with the same weights, rounded to a dtype: one in that dtype on the device, one on the CPU in f64.
struct Layers {
    here: MultiHeadAttention,
    exact: MultiHeadAttention,
}

impl Layers {
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let cfg = MultiHeadAttentionConfig::new(WIDTH, 4).with_num_kv_heads(2).with_causal(true);
        let drawn = MultiHeadAttention::new(&cfg, TorchSeed::new(3).var_builder(dtype, &Device::Cpu))?;
        let weights: HashMap<_, _> = drawn.state_dict(WeightLayout::Canonical)?.into_iter().collect();
        let here = VarBuilder::from_tensors(weights.clone(), dtype, device);
        let exact = VarBuilder::from_tensors(weights, DType::F64, &Device::Cpu);
        Ok(Self { here: MultiHeadAttention::new(&cfg, here)?, exact: MultiHeadAttention::new(&cfg, exact)? })
    }

    /// Returns the largest error over a batch of `t` positions under a mask.
    fn compare(&self, t: usize, mask: &AttentionMask, (dtype, device): (DType, &Device)) -> Result<Checked> {
        let xs = TorchSeed::new(4).randn((BATCH, t, WIDTH))?.to_dtype(dtype)?;
        let exact = xs.to_dtype(DType::F64)?;
        let expected = self.exact.forward_with(AttentionInput::new(&exact).with_mask(mask))?;
        let found = self.here.forward_with(AttentionInput::new(&xs.to_device(device)?).with_mask(mask))?;
        Ok(Checked { error: relative_error(&found, &expected)?, plan: None })
    }

    /// Checks a prompt, of which each sequence has `lens` tokens, and then single tokens, through a cache. Each
    /// sequence has to have the numbers of a call by itself.
    fn compare_cached(&self, lens: [usize; BATCH], (dtype, device): (DType, &Device)) -> Result<Checked> {
        let longest = lens.into_iter().max().unwrap_or(0);
        let xs = TorchSeed::new(4).randn((BATCH, longest + TOKENS, WIDTH))?.to_dtype(dtype)?;
        let here = xs.to_device(device)?;
        let mut cache = AttentionCache::default();
        let prompt = here.narrow(1, 0, longest)?;
        let mut calls =
            vec![self.here.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache).with_valid_lens(&lens))?];
        for t in longest..longest + TOKENS {
            let token = here.narrow(1, t, 1)?;
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
        Ok(Checked { error, plan: None })
    }
}

/// Checks a causal layer with grouped heads: through a cache, on whole and on padded sequences, and on one position.
pub fn check(device: &Device, short: bool, (tolerance, progress): (f64, &Progress)) -> Result<Row> {
    let mut row = Row::new("a layer");
    let lengths: &[usize] = if short { &[1, 40] } else { &[1, 40, 257] };
    for dtype in DTYPES {
        progress.note(dtype.as_str());
        let layers = Layers::new(dtype, device)?;
        for lens in [[40, 40], [40, 13]] {
            let checked = layers.compare_cached(lens, (dtype, device));
            row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("a cache after prompts of {lens:?}"));
        }
        for &t in lengths {
            let lens = vec![t.div_ceil(2), t];
            let starts = vec![t / 2, 0];
            let masks = [
                ("whole sequences", AttentionMask::none()),
                ("padded on the right", AttentionMask::none().with_valid_lens(lens)),
                ("padded on the left", AttentionMask::none().with_starts(starts)),
            ];
            for (what, mask) in masks {
                let checked = layers.compare(t, &mask, (dtype, device));
                row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("{what} of {t}"));
            }
        }
    }
    Ok(row)
}

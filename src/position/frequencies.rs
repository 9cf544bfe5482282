//! The frequencies of each scaling, in f32 as Hugging Face's `modeling_rope_utils.py` computes them.
//!
//! Each step rounds where the original's does. Powers are rounded correctly, as in PyTorch's scalar build; its vectorised
//! builds differ in the last digit of about one power in eighty, and not all in the same ones.

use std::f64::consts::PI;

use super::config::{RopeConfig, RopeScaling};

/// Which frequencies a call has, by its length: its largest position + 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Regime {
    /// Those of every call, or of calls within the original context.
    Short,
    /// Those of all calls beyond the original context.
    Long,
    /// Those of calls of exactly this length.
    DynamicNtk(usize),
}

impl Regime {
    pub(super) fn of(scaling: &RopeScaling, length: usize) -> Self {
        match scaling {
            RopeScaling::Dynamic { original_context, .. } if length > *original_context => Self::DynamicNtk(length),
            RopeScaling::LongRope { original_context, .. } if length > *original_context => Self::Long,
            _ => Self::Short,
        }
    }
}

/// The angle between one position and the next for each pair, (r/2,). The config fits the heads.
pub(super) fn frequencies(config: &RopeConfig, head_dim: usize, regime: Regime) -> Vec<f32> {
    let r = config.rotary_dim(head_dim);
    let base = config.base() as f32;
    let plain = || periods(base, r).map(f32::recip);
    match config.scaling() {
        RopeScaling::None => plain().collect(),
        RopeScaling::Linear { factor } => plain().map(|frequency| frequency / *factor as f32).collect(),
        RopeScaling::Dynamic { factor, original_context } => {
            let Regime::DynamicNtk(length) = regime else {
                return plain().collect();
            };
            let stretch = *factor as f32 * length as f32 / *original_context as f32 - (factor - 1.0) as f32;
            let base = base * power(stretch, r as f64 / (r as f64 - 2.0));
            periods(base, r).map(f32::recip).collect()
        }
        &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let context = original_context as f64;
            let scale = |frequency: f32| {
                // PyTorch divides a number by a tensor as its product with the reciprocals.
                let wavelength = frequency.recip() * (2.0 * PI) as f32;
                if wavelength > (context / low_freq_factor) as f32 {
                    return frequency / factor as f32;
                }
                if wavelength < (context / high_freq_factor) as f32 {
                    return frequency;
                }
                let range = (high_freq_factor - low_freq_factor) as f32;
                let smooth = (wavelength.recip() * context as f32 - low_freq_factor as f32) / range;
                (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
            };
            plain().map(scale).collect()
        }
        &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            let boundary = |rotations: f64| {
                let numerator = r as f64 * (original_context as f64 / (rotations * 2.0 * PI)).ln();
                numerator / (2.0 * config.base().ln())
            };
            let (mut low, mut high) = (boundary(beta_fast), boundary(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(r as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let scale = |(i, period): (usize, f32)| {
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let kept = 1.0 - ramp;
                (factor as f32 * period).recip() * (1.0 - kept) + period.recip() * kept
            };
            periods(base, r).enumerate().map(scale).collect()
        }
        RopeScaling::LongRope { short_factor, long_factor, .. } => {
            let divisors = if regime == Regime::Long { long_factor } else { short_factor };
            let scale = |(period, &divisor): (f32, &f64)| (divisor as f32 * period).recip();
            periods(base, r).zip(divisors).map(scale).collect()
        }
        RopeScaling::Proportional { factor, proportion } => {
            let rotated = (proportion * r as f64 / 2.0).floor() as usize;
            let scale = |(i, frequency)| {
                if i < rotated { frequency / *factor as f32 } else { 0.0 }
            };
            plain().enumerate().map(scale).collect()
        }
    }
}

/// The factor on cosines and sines.
pub(super) fn attention_factor(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { attention_factor: Some(given), .. }
        | RopeScaling::LongRope { attention_factor: Some(given), .. } => given,
        RopeScaling::Yarn { factor, mscale, mscale_all_dim, .. } => match (mscale, mscale_all_dim) {
            (Some(one), Some(all)) if one != 0.0 && all != 0.0 => yarn_mscale(factor, one) / yarn_mscale(factor, all),
            _ => yarn_mscale(factor, 1.0),
        },
        RopeScaling::LongRope { factor: Some(factor), original_context, .. } if factor > 1.0 => {
            (1.0 + factor.ln() / (original_context as f64).ln()).sqrt()
        }
        _ => 1.0,
    }
}

/// The factor by which DeepSeek corrects the scale of its scores.
pub(crate) fn score_factor(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { factor, mscale_all_dim: Some(all), .. } => yarn_mscale(factor, all).powi(2),
        _ => 1.0,
    }
}

/// YaRN's correction of the size of the scores.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// `base^(2i/r)` for each pair.
fn periods(base: f32, r: usize) -> impl Iterator<Item = f32> {
    (0..r).step_by(2).map(move |i| power(base, (i as f32 / r as f32).into()))
}

fn power(base: f32, exponent: f64) -> f32 {
    f64::from(base).powf(exponent) as f32
}

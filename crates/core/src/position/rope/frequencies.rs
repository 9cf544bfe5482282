//! The frequencies of each scaling, in f32 as in `modeling_rope_utils.py` of transformers.
//!
//! Every step rounds where the original does. Powers are rounded correctly, as in PyTorch's scalar build. Its
//! vectorised builds differ in the last digit of about one power in eighty, and not all in the same ones.

use std::f64::consts::PI;

use super::config::{RopeConfig, RotatedPair};
use super::scaling::RopeScaling;

/// Returns whether a call of this length has other frequencies than a call within the original context.
pub(super) fn is_long(scaling: &RopeScaling, length: usize) -> bool {
    match scaling {
        RopeScaling::Dynamic { original_context, .. } | RopeScaling::LongRope { original_context, .. } => {
            length > *original_context
        }
        _ => false,
    }
}

/// The axis whose positions rotate a pair, and the pair's frequency: the angle between one position and the next.
#[derive(PartialEq)]
pub(super) struct PairFrequency {
    pub axis: usize,
    pub frequency: f32,
}

/// Returns the frequencies of the r/2 pairs in a call of some length.
pub(super) fn frequencies(config: &RopeConfig, pairs: usize, length: usize) -> Vec<PairFrequency> {
    let scaling = config.scaling();
    let mut base = config.base() as f32;
    let r = 2 * pairs;
    let is_long = is_long(scaling, length);
    if let RopeScaling::Dynamic { factor, original_context } = scaling
        && is_long
    {
        let stretch = *factor as f32 * length as f32 / *original_context as f32 - (factor - 1.0) as f32;
        base *= power(stretch, r as f64 / (r as f64 - 2.0));
    }
    let frequency = |i: usize, period: f32| {
        let plain = period.recip();
        match *scaling {
            RopeScaling::None | RopeScaling::Dynamic { .. } => plain,
            RopeScaling::Linear { factor } => plain / factor as f32,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let context = original_context as f64;
                // PyTorch divides a number by a tensor as its product with the reciprocals.
                let wavelength = plain.recip() * (2.0 * PI) as f32;
                if wavelength > (context / low_freq_factor) as f32 {
                    return plain / factor as f32;
                }
                if wavelength < (context / high_freq_factor) as f32 {
                    return plain;
                }
                let range = (high_freq_factor - low_freq_factor) as f32;
                let smooth = (wavelength.recip() * context as f32 - low_freq_factor as f32) / range;
                (1.0 - smooth) * plain / factor as f32 + smooth * plain
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let boundary = |rotations: f64| {
                    let numerator = r as f64 * (original_context as f64 / (rotations * 2.0 * PI)).ln();
                    numerator / (2.0 * config.base().ln())
                };
                let mut low = boundary(beta_fast);
                let mut high = boundary(beta_slow);
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(r as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let kept = 1.0 - ramp;
                (factor as f32 * period).recip() * (1.0 - kept) + plain * kept
            }
            RopeScaling::LongRope { ref short_factor, ref long_factor, .. } => {
                let divisors = if is_long { long_factor } else { short_factor };
                (divisors[i] as f32 * period).recip()
            }
            RopeScaling::Proportional { factor, proportion } => {
                let rotated = (proportion * r as f64 / 2.0).floor() as usize;
                if i < rotated { plain / factor as f32 } else { 0.0 }
            }
        }
    };
    let mut frequencies = Vec::with_capacity(pairs);
    for (i, RotatedPair { axis, index, count }) in config.pairs(pairs).into_iter().enumerate() {
        let period = power(base, (index as f32 / count as f32).into());
        let frequency = if config.reversed() { -frequency(i, period) } else { frequency(i, period) };
        frequencies.push(PairFrequency { axis, frequency });
    }
    frequencies
}

/// Returns the factor on cosines and sines.
pub(super) fn attention_factor(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { attention_factor: Some(given), .. }
        | RopeScaling::LongRope { attention_factor: Some(given), .. } => given,
        RopeScaling::Yarn { factor, mscale: Some(one), mscale_all_dim: Some(all), .. } if one != 0.0 && all != 0.0 => {
            yarn_mscale(factor, one) / yarn_mscale(factor, all)
        }
        RopeScaling::Yarn { factor, .. } => yarn_mscale(factor, 1.0),
        RopeScaling::LongRope { factor: Some(factor), original_context, .. } if factor > 1.0 => {
            (1.0 + factor.ln() / (original_context as f64).ln()).sqrt()
        }
        _ => 1.0,
    }
}

/// Returns DeepSeek's factor on the scale of the scores.
pub(crate) fn score_factor(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { factor, mscale_all_dim: Some(all), .. } => yarn_mscale(factor, all).powi(2),
        _ => 1.0,
    }
}

/// Returns YaRN's correction of the size of the scores.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

fn power(base: f32, exponent: f64) -> f32 {
    f64::from(base).powf(exponent) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Result;

    /// Compares every scaling and every pair of lengths around the original context of 8.
    #[test]
    fn rope_frequencies_differ_where_the_config_says_so() -> Result<()> {
        let original_context = 8;
        let long = |short_factor: f64, long_factor: f64| RopeScaling::LongRope {
            short_factor: vec![short_factor; 4],
            long_factor: vec![long_factor; 4],
            original_context,
            factor: Some(4.0),
            attention_factor: None,
        };
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context };
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        };
        for (scaling, depends_on_length) in [
            (RopeScaling::None, false),
            (RopeScaling::Linear { factor: 2.0 }, false),
            (RopeScaling::Dynamic { factor: 2.0, original_context }, true),
            (RopeScaling::Dynamic { factor: 1.0, original_context }, true),
            (llama3, false),
            (yarn, false),
            (long(1.0, 2.0), true),
            (long(1.5, 1.5), false),
            (RopeScaling::Proportional { factor: 2.0, proportion: 0.5 }, false),
        ] {
            let config = RopeConfig::new(10_000.0).with_scaling(scaling);
            config.validate(8)?;
            let mut differ = false;
            for earlier in 0..20 {
                for len in 0..20 {
                    let expected = frequencies(&config, 4, earlier) != frequencies(&config, 4, len);
                    assert_eq!(config.frequencies_differ(earlier, len), expected, "{config:?}: {earlier}, {len}");
                    differ |= expected;
                }
            }
            assert_eq!(differ, depends_on_length, "{config:?}");
        }
        Ok(())
    }
}

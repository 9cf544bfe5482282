//! Changes of the frequencies of rotary positions for long contexts.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::OP;
use candle_attention_modules::base::{check_entries, number};

/// A change of the frequencies for contexts longer than those of the training, with the formulas of
/// `modeling_rope_utils.py` in transformers. Positions count from 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No change.
    #[default]
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The length of the context as a multiple of the training's.
        factor: f64,
    },
    /// "NTK" scaling: the base grows with the length of the call if that is more than `original_context`. The length is
    /// the largest position + 1, without padding on the left that a mask names. Keys in a cache stay rotated by the
    /// base of their own call.
    Dynamic {
        /// The length of the context as a multiple of the training's.
        factor: f64,
        /// The number of positions in the training.
        original_context: usize,
    },
    /// Llama 3.1: frequencies of long wavelengths are divided by `factor`, those of short wavelengths do not change,
    /// and those between are interpolated.
    Llama3 {
        /// The length of the context as a multiple of the training's.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f64,
        /// The number of positions in the training.
        original_context: usize,
    },
    /// YaRN (<https://arxiv.org/abs/2309.00071>).
    Yarn {
        /// The length of the context as a multiple of the training's.
        factor: f64,
        /// The number of positions in the training.
        original_context: usize,
        /// The frequencies of pairs that rotate more often than this within `original_context` do not change.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// The frequencies of pairs that rotate less often than this are divided by `factor`.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// The factor on cosines and sines; computed from `factor` and the two options below if not given.
        attention_factor: Option<f64>,
        /// If `mscale` and `mscale_all_dim` are given (DeepSeek), the attention factor is
        /// `(0.1 · mscale · ln(factor) + 1) / (0.1 · mscale_all_dim · ln(factor) + 1)`; otherwise it is
        /// `0.1 · ln(factor) + 1`.
        mscale: Option<f64>,
        /// See `mscale`.
        mscale_all_dim: Option<f64>,
        /// Whether the boundaries between fast and slow pairs are rounded to whole numbers.
        #[serde(default = "default_truncate")]
        truncate: bool,
    },
    /// LongRoPE (<https://arxiv.org/abs/2402.13753>): each frequency is divided by an entry of a list. There is one
    /// list for calls of up to `original_context` positions, and one for longer calls.
    LongRope {
        /// The divisors of the frequencies, r/2 for r rotated dimensions, in calls of at most `original_context`
        /// positions.
        short_factor: Vec<f64>,
        /// The divisors of the frequencies, r/2, in longer calls.
        long_factor: Vec<f64>,
        /// The number of positions in the training.
        original_context: usize,
        /// The length of the context as a multiple of the training's. The attention factor is
        /// `sqrt(1 + ln(factor) / ln(original_context))`, or 1 if `factor` is not given or at most 1.
        factor: Option<f64>,
        /// The factor on cosines and sines, in place of the computed one.
        attention_factor: Option<f64>,
    },
    /// Pairs span the whole head, and only the first ones, with the highest frequencies, are rotated.
    Proportional {
        /// The length of the context as a multiple of the training's; 1 for no change.
        factor: f64,
        /// The proportion of the pairs that is rotated, from 0 to 1.
        proportion: f64,
    },
}

/// Returns the default of `beta_fast` of [`RopeScaling::Yarn`].
fn default_beta_fast() -> f64 {
    32.0
}

/// Returns the default of `beta_slow` of [`RopeScaling::Yarn`].
fn default_beta_slow() -> f64 {
    1.0
}

/// Returns the default of `truncate` of [`RopeScaling::Yarn`].
fn default_truncate() -> bool {
    true
}

impl RopeScaling {
    /// Returns whether frequencies depend on the length of a call.
    pub(crate) fn depends_on_length(&self) -> bool {
        matches!(self, Self::Dynamic { .. } | Self::LongRope { .. })
    }

    /// Returns whether a call that reaches `len` positions has other frequencies than a call that reached `earlier`
    /// positions.
    pub(super) fn frequencies_differ(&self, earlier: usize, len: usize) -> bool {
        match self {
            Self::Dynamic { original_context, .. } => earlier.max(*original_context) != len.max(*original_context),
            Self::LongRope { short_factor, long_factor, original_context, .. } => {
                (earlier > *original_context) != (len > *original_context) && short_factor != long_factor
            }
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } | Self::Yarn { .. } | Self::Proportional { .. } => {
                false
            }
        }
    }

    /// Checks the options of the scaling, for positions with this base that rotate the first `rotary_dim` entries of
    /// heads of width `head_dim`.
    pub(super) fn validate(&self, base: f64, rotary_dim: usize, head_dim: usize) -> Result<()> {
        match self {
            Self::None => {}
            Self::Linear { factor } => above_zero("factor", *factor)?,
            Self::Dynamic { factor, original_context } => {
                check_context(*original_context)?;
                let is_right = |candidate: f64| (candidate as f32).is_finite() && candidate >= 1.0;
                number::expect(OP, "factor", *factor, is_right, "a finite number of at least 1")?;
                number::expect(OP, "rotary_dim", rotary_dim, |dim: usize| dim > 2, "at least 4 with dynamic scaling")?;
            }
            &Self::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } => {
                check_context(original_context)?;
                above_zero("factor", factor)?;
                above_zero("low_freq_factor", low)?;
                above_zero("high_freq_factor", high)?;
                if high <= low {
                    bail!("[{OP}] high_freq_factor is {high}, expected more than low_freq_factor {low}")
                }
            }
            &Self::Yarn { factor, original_context, beta_fast, beta_slow, mscale, mscale_all_dim, .. } => {
                check_context(original_context)?;
                above_zero("factor", factor)?;
                above_zero("beta_fast", beta_fast)?;
                above_zero("beta_slow", beta_slow)?;
                for (name, value) in [("mscale", mscale), ("mscale_all_dim", mscale_all_dim)] {
                    let is_right = |candidate: f64| candidate.is_finite() && candidate >= 0.0;
                    number::expect(OP, name, value, is_right, "a finite number of zero or more")?;
                }
                if beta_fast < beta_slow {
                    bail!("[{OP}] beta_fast is {beta_fast}, expected at least beta_slow {beta_slow}")
                }
                if base == 1.0 {
                    bail!("[{OP}] base is 1, whose frequencies are all the same, expected another with yarn scaling")
                }
            }
            Self::LongRope { short_factor, long_factor, original_context, factor, .. } => {
                check_context(*original_context)?;
                for (name, list) in [("short_factor", short_factor), ("long_factor", long_factor)] {
                    check_entries(OP, name, list.len(), rotary_dim / 2, "pairs")?;
                    list.iter().try_for_each(|&value| above_zero(name, value))?;
                }
                above_zero("factor", *factor)?;
            }
            Self::Proportional { factor, proportion } => {
                above_zero("factor", *factor)?;
                let is_right = |candidate: f64| (0.0..=1.0).contains(&candidate);
                number::expect(OP, "proportion", *proportion, is_right, "a number from 0 to 1")?;
                if rotary_dim != head_dim {
                    bail!(
                        "[{OP}] rotary_dim is {rotary_dim}, but proportional scaling has pairs of whole heads of \
                         {head_dim}"
                    )
                }
            }
        }
        if let Self::Yarn { attention_factor: Some(factor), .. }
        | Self::LongRope { attention_factor: Some(factor), .. } = self
        {
            above_zero("attention_factor", *factor)?;
        }
        Ok(())
    }
}

/// Checks that a number is above zero and finite in f32, in which frequencies are computed.
pub(super) fn above_zero(name: &str, value: impl Into<Option<f64>>) -> Result<()> {
    let is_right = |candidate: f64| (candidate as f32).is_finite() && candidate as f32 > 0.0;
    number::expect(OP, name, value, is_right, "a finite number above zero in F32")
}

/// Checks the number of positions in the training.
fn check_context(original_context: usize) -> Result<()> {
    number::expect(OP, "original_context", original_context, |positions: usize| positions >= 2, "at least 2")
}

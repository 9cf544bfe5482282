//! What belongs to the architecture of rotary positions, on one axis or on several: time, height and width of what
//! images and videos show.

use candle_core::{Result, Tensor, bail};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use crate::position::END;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{Dim, Expect, Options, check_entries, check_memory, count, number, options, yes};

const OP: &str = "rope";

/// Which two entries of a head are rotated as a pair, of the r that are rotated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeStyle {
    /// Entry i with entry i + r/2: Llama as Hugging Face stores it, GPT-NeoX, and most others.
    #[default]
    RotateHalf,
    /// Entry 2i with entry 2i + 1: GPT-J, GLM, Cohere, Llama as Meta stores it.
    Interleaved,
}

/// How frequencies change so that a model reads more positions than it was trained on. The formulas are those of
/// `modeling_rope_utils.py` in Hugging Face's transformers; positions count from 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No change.
    #[default]
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// How many times longer the context is than in training.
        factor: f64,
    },
    /// "NTK" scaling: the base grows with the length of the call (its largest position + 1) once that is more than
    /// `original_context`. Keys that a cache holds stay rotated by the base of the call that put them there.
    Dynamic {
        /// How many times longer the context is to become.
        factor: f64,
        /// The positions of the training.
        original_context: usize,
    },
    /// Llama 3.1: long wavelengths are divided by `factor`, short ones stay, those between are interpolated.
    Llama3 {
        /// How many times longer the context is than in training.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` stay.
        high_freq_factor: f64,
        /// The positions of the training.
        original_context: usize,
    },
    /// YaRN (<https://arxiv.org/abs/2309.00071>).
    Yarn {
        /// How many times longer the context is than in training.
        factor: f64,
        /// The positions of the training.
        original_context: usize,
        /// Pairs that rotate more often than this within `original_context` stay.
        #[serde(default = "count::<32, _>")]
        beta_fast: f64,
        /// Pairs that rotate less often than this are divided by `factor`.
        #[serde(default = "count::<1, _>")]
        beta_slow: f64,
        /// The factor on cosines and sines; worked out from `factor` and the two below unless given.
        attention_factor: Option<f64>,
        /// `0.1 · mscale · ln(factor) + 1` over the same of `mscale_all_dim` is the attention factor where both are
        /// given (DeepSeek); `0.1 · ln(factor) + 1` otherwise.
        mscale: Option<f64>,
        /// See `mscale`.
        mscale_all_dim: Option<f64>,
        /// Whether the boundaries between kinds of pairs are rounded to whole numbers.
        #[serde(default = "yes")]
        truncate: bool,
    },
    /// LongRoPE (<https://arxiv.org/abs/2402.13753>): each frequency has its own divisor, one list for calls up to
    /// `original_context` positions and one for longer ones.
    LongRope {
        /// r/2 divisors for calls of at most `original_context` positions.
        short_factor: Vec<f64>,
        /// r/2 divisors for longer calls.
        long_factor: Vec<f64>,
        /// The positions of the training.
        original_context: usize,
        /// How many times longer the context is than in training; the attention factor is
        /// `sqrt(1 + ln(factor) / ln(original_context))`, or 1 where this is not given or at most 1.
        factor: Option<f64>,
        /// The factor on cosines and sines, in place of the one worked out.
        attention_factor: Option<f64>,
    },
    /// Pairs of the whole head, of which only the first, fastest ones are rotated.
    Proportional {
        /// How many times longer the context is than in training; 1 for no change.
        factor: f64,
        /// The part of the pairs that is rotated, from 0 to 1.
        proportion: f64,
    },
}

/// Rotary positions (<https://arxiv.org/abs/2104.09864>): pair i of a query or key at position p is rotated by the
/// angle `p · base^(-2i/r)`, so that a score depends on the distance of its query and key.
///
/// ```
/// use candle_attention::{MultiHeadAttentionConfig, RopeConfig, RopeScaling};
/// let scaling = RopeScaling::Llama3 {
///     factor: 8.0,
///     low_freq_factor: 1.0,
///     high_freq_factor: 4.0,
///     original_context: 8192,
/// };
/// let rope = RopeConfig::new(500_000.0).with_scaling(scaling);
/// let cfg = MultiHeadAttentionConfig::new(4096, 32).with_num_kv_heads(8).with_causal(true).with_rope(rope);
/// cfg.validate().expect("the numbers fit together");
/// ```
#[apply(options)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct RopeConfig {
    /// The base of the geometric series of frequencies.
    #[methods(get)]
    base: f64,
    /// Which entries are pairs; [`RopeStyle::RotateHalf`] unless given.
    #[serde(default)]
    style: RopeStyle,
    /// r, the number of entries at the beginning of each head that are rotated (Hugging Face's `partial_rotary_factor`
    /// times D); all D unless given.
    #[methods(with)]
    rotary_dim: Option<usize>,
    /// How frequencies change for contexts longer than those of the training; [`RopeScaling::None`] unless given.
    #[serde(default)]
    #[methods(with, get_ref)]
    scaling: RopeScaling,
    /// The axes on which tokens have positions, each for some of the pairs; one axis unless given. See
    /// [`AttentionInput::with_axis_positions`](crate::AttentionInput::with_axis_positions).
    #[methods(with, get_ref)]
    axes: Option<RopeAxes>,
}

/// What turns a pair of entries: an axis, by the frequency at a place in a series of so many.
pub(super) struct Pair {
    pub axis: usize,
    pub place: usize,
    pub count: usize,
}

impl RopeConfig {
    /// Whole heads, in halves, unscaled. `base` is Hugging Face's `rope_theta`, often 10,000.
    pub fn new(base: f64) -> Self {
        Self { base, ..Self::unset() }
    }

    /// The number of entries of a head of width `head_dim` that are rotated.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        self.rotary_dim.unwrap_or(head_dim)
    }

    /// 1 unless the config has axes.
    pub(super) fn num_axes(&self) -> usize {
        self.axes.as_ref().map_or(1, |axes| axes.sections.len())
    }

    /// What turns each of so many pairs.
    pub(super) fn pairs(&self, count: usize) -> Vec<Pair> {
        let Some(RopeAxes { sections, layout }) = &self.axes else {
            return (0..count).map(|place| Pair { axis: 0, place, count }).collect();
        };
        let axes = sections.len();
        let in_sections = sections.iter().enumerate().flat_map(|(axis, &n)| (0..n).map(move |i| (axis, i, n)));
        let of = |(pair, (axis, i, n)): (usize, (usize, usize, usize))| match layout {
            RopeAxisLayout::Sections => Pair { axis, place: pair, count },
            RopeAxisLayout::Interleaved if pair / axes < sections[pair % axes] => {
                Pair { axis: pair % axes, place: pair, count }
            }
            RopeAxisLayout::Interleaved => Pair { axis: 0, place: pair, count },
            RopeAxisLayout::Axial => Pair { axis, place: i, count: n },
            RopeAxisLayout::AxialInterleaved => Pair { axis, place: i * axes + axis, count },
        };
        in_sections.enumerate().map(of).collect()
    }

    /// Returns whether a call that reaches `len` positions (its largest position + 1) rotates by other frequencies than
    /// a call that reached `earlier` positions.
    ///
    /// Only [`RopeScaling::Dynamic`] and [`RopeScaling::LongRope`] have frequencies that depend on the number of
    /// positions. A model that processes a prompt in chunks, or continues from a cache, asks this question twice:
    ///
    /// - A chunk that ends at position `end` of a prompt of `len` tokens gives the numbers of the whole prompt only if
    ///   `frequencies_differ(end, len)` is false. Otherwise the chunk has to be longer.
    /// - If `frequencies_differ(cached, len)` is true, the keys of a cache with `cached` positions have other frequencies
    ///   than the keys that a call up to `len` appends. With LongRoPE this happens once, and Phi 3 in transformers then
    ///   computes the whole cache again ([`AttentionCache::reset`](crate::AttentionCache::reset), and all tokens in one
    ///   call). With dynamic scaling it happens at every position beyond `original_context`, and transformers keeps the
    ///   cached keys as they are.
    ///
    /// In a batch the longest sequence counts, since it determines the frequencies of all sequences.
    ///
    /// ```
    /// use candle_attention::{RopeConfig, RopeScaling};
    /// let dynamic = RopeScaling::Dynamic { factor: 4.0, original_context: 2048 };
    /// let rope = RopeConfig::new(10_000.0).with_scaling(dynamic);
    /// assert!(!rope.frequencies_differ(1, 2048)); // Chunks of a prompt within the original context are safe.
    /// assert!(rope.frequencies_differ(2048, 5000)); // A longer prompt has to be one call.
    /// assert!(rope.frequencies_differ(5000, 5001));
    /// assert!(!RopeConfig::new(10_000.0).frequencies_differ(1, 5000));
    /// ```
    pub fn frequencies_differ(&self, earlier: usize, len: usize) -> bool {
        match &self.scaling {
            RopeScaling::Dynamic { original_context, .. } => {
                earlier.max(*original_context) != len.max(*original_context)
            }
            RopeScaling::LongRope { short_factor, long_factor, original_context, .. } => {
                (earlier > *original_context) != (len > *original_context) && short_factor != long_factor
            }
            RopeScaling::None
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Yarn { .. }
            | RopeScaling::Proportional { .. } => false,
        }
    }

    /// Checks that the numbers fit together and heads of width `head_dim`.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self, head_dim: usize) -> Result<()> {
        let r = self.rotary_dim(head_dim);
        if r == 0 || r > head_dim || !r.is_multiple_of(2) {
            bail!("[{OP}] rotary_dim is {r}, expected an even number from 2 to head_dim {head_dim}")
        }
        above_zero("base", self.base)?;
        if let Some(axes) = &self.axes {
            axes.validate(r / 2, self.scaling != RopeScaling::None)?;
        }
        let all_above_zero = |of: &[(&str, f64)]| of.iter().try_for_each(|&(name, value)| above_zero(name, value));
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => above_zero("factor", *factor)?,
            RopeScaling::Dynamic { factor, original_context } => {
                context(*original_context)?;
                let is_right = |factor: f64| (factor as f32).is_finite() && factor >= 1.0;
                number::expect(OP, "factor", *factor, is_right, "a finite number of at least 1")?;
                number::expect(OP, "rotary_dim", r, |r: usize| r > 2, "at least 4 with dynamic scaling")?;
            }
            &RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } => {
                context(original_context)?;
                all_above_zero(&[("factor", factor), ("low_freq_factor", low), ("high_freq_factor", high)])?;
                if high <= low {
                    bail!("[{OP}] high_freq_factor is {high}, expected more than low_freq_factor {low}")
                }
            }
            &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, mscale, mscale_all_dim, .. } => {
                context(original_context)?;
                all_above_zero(&[("factor", factor), ("beta_fast", beta_fast), ("beta_slow", beta_slow)])?;
                for (name, value) in [("mscale", mscale), ("mscale_all_dim", mscale_all_dim)] {
                    let is_right = |value: f64| value.is_finite() && value >= 0.0;
                    number::expect(OP, name, value, is_right, "a finite number of zero or more")?;
                }
                if beta_fast < beta_slow {
                    bail!("[{OP}] beta_fast is {beta_fast}, expected at least beta_slow {beta_slow}")
                }
                if self.base == 1.0 {
                    bail!("[{OP}] base is 1, whose frequencies are all the same, expected another with yarn scaling")
                }
            }
            RopeScaling::LongRope { short_factor, long_factor, original_context, factor, .. } => {
                context(*original_context)?;
                for (name, list) in [("short_factor", short_factor), ("long_factor", long_factor)] {
                    check_entries(OP, name, list.len(), r / 2, "pairs")?;
                    list.iter().try_for_each(|&value| above_zero(name, value))?;
                }
                above_zero("factor", *factor)?;
            }
            RopeScaling::Proportional { factor, proportion } => {
                above_zero("factor", *factor)?;
                let is_right = |proportion: f64| (0.0..=1.0).contains(&proportion);
                number::expect(OP, "proportion", *proportion, is_right, "a number from 0 to 1")?;
                if r != head_dim {
                    bail!("[{OP}] rotary_dim is {r}, but proportional scaling has pairs of whole heads of {head_dim}")
                }
            }
        }
        if let RopeScaling::Yarn { attention_factor: Some(factor), .. }
        | RopeScaling::LongRope { attention_factor: Some(factor), .. } = &self.scaling
        {
            above_zero("attention_factor", *factor)?;
        }
        Ok(())
    }
}

/// Frequencies are f32.
fn above_zero(name: &str, value: impl Into<Option<f64>>) -> Result<()> {
    let is_right = |value: f64| (value as f32).is_finite() && value as f32 > 0.0;
    number::expect(OP, name, value, is_right, "a finite number above zero in F32")
}

fn context(original_context: usize) -> Result<()> {
    number::expect(OP, "original_context", original_context, |positions: usize| positions >= 2, "at least 2")
}

/// Which axis turns a pair, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RopeAxisLayout {
    /// Axis after axis, in the one series of frequencies of all pairs: Qwen2-VL, GLM-4V. Tokens of text, which have one
    /// position on all axes, are rotated as without axes.
    Sections,
    /// Axes take turns in that series, and the first has what is left: Qwen3-VL.
    Interleaved,
    /// Axis after axis, each with a series of its own, `base^(-i/n)` for its n pairs: the images of Qwen2-VL, DINOv3.
    Axial,
    /// Axis after axis; the one series of all pairs is dealt out to them in turns: Pixtral.
    AxialInterleaved,
}

/// Positions on several axes, each of which turns some of a head's pairs.
///
/// ```
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeAxes, RopeAxisLayout, RopeConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// // Heads of 16 have 8 pairs: 4 for rows of an image, 4 for columns.
/// let axes = RopeAxes::new(vec![4, 4], RopeAxisLayout::Axial);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_rope(RopeConfig::new(10_000.0).with_axes(axes));
/// let layer = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// // A token of the whole image, which is not rotated, and 2 x 3 patches.
/// let positions = Tensor::new(&[[0u32, 0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 0, 1, 2]], &Device::Cpu)?;
/// let xs = Tensor::zeros((1, 7, 64), DType::F32, &Device::Cpu)?;
/// let ys = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&positions))?;
/// # assert_eq!(ys.dims(), [1, 7, 64]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeAxes {
    sections: Vec<usize>,
    layout: RopeAxisLayout,
}

impl RopeAxes {
    /// `sections` has the number of pairs of each axis (`mrope_section`), which are the r/2 of
    /// [`RopeConfig::rotary_dim`](crate::RopeConfig::rotary_dim) together.
    pub fn new(sections: Vec<usize>, layout: RopeAxisLayout) -> Self {
        Self { sections, layout }
    }

    /// The number of pairs of each axis.
    pub fn sections(&self) -> &[usize] {
        &self.sections
    }

    /// Which axis turns a pair.
    pub fn layout(&self) -> RopeAxisLayout {
        self.layout
    }

    /// Whether a token has no angles but by its position on each axis.
    pub(crate) fn is_axial(&self) -> bool {
        matches!(self.layout, RopeAxisLayout::Axial | RopeAxisLayout::AxialInterleaved)
    }

    pub(super) fn validate(&self, pairs: usize, is_scaled: bool) -> Result<()> {
        let Self { sections, layout } = self;
        let count = sections.len();
        let sum = sections.iter().fold(0usize, |sum, &section| sum.saturating_add(section));
        if count < 2 || sections.contains(&0) || sum != pairs {
            bail!("[{OP}] axes have {sections:?} pairs, expected two or more numbers whose sum is {pairs}")
        }
        // The last pair of each axis, where they take turns.
        let reaches = |(axis, section): (usize, &usize)| count * (section - 1) + axis < pairs;
        let fits = match layout {
            RopeAxisLayout::Interleaved => sections.iter().enumerate().skip(1).all(reaches),
            RopeAxisLayout::AxialInterleaved => sections.iter().enumerate().all(reaches),
            RopeAxisLayout::Sections | RopeAxisLayout::Axial => true,
        };
        if !fits {
            bail!("[{OP}] axes have {sections:?} pairs, which cannot take turns in {pairs}")
        }
        if is_scaled && self.is_axial() {
            bail!("[{OP}] axes have series of their own, for which no scaling is defined")
        }
        Ok(())
    }

    /// Positions (A, T) or (A, B, T), which need not be whole numbers, axis by axis and there row by row.
    pub(crate) fn positions(&self, positions: &Tensor, b: usize, t: usize) -> Result<Vec<f32>> {
        let [a, b, t] = [Dim::Named("A", self.sections.len()), Dim::Named("B", b), Dim::Named("T", t)];
        Expect::many(OP, "axis positions", positions).shape_of(&[&[a, t], &[a, b, t]])?;
        let bytes = [positions.dims(), &[size_of::<f32>()]].concat();
        check_memory(OP, format_args!("axis positions of shape {:?}", positions.dims()), &bytes)?;
        let entries = to_vec::<f32>(positions)?;
        if let Some(other) = entries.iter().find(|entry| entry.is_nan() || entry.abs() >= END as f32) {
            bail!("[{OP}] axis positions hold {other}, expected numbers between ±{END}")
        }
        Ok(entries)
    }
}

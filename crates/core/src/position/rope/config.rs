//! The config of rotary positions, on one axis or on several: time, height and width in images and videos.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::position::END;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{Dim, Expect, check_entries, check_memory, number};

const OP: &str = "rope";

/// The two entries of a head that are rotated as a pair.
///
/// A checkpoint is trained for one of the styles. Its weights can be permuted for the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeStyle {
    /// Entry i with entry i + r/2, where r entries are rotated: `rotate_half` of transformers, for Llama as Hugging
    /// Face stores it, GPT-NeoX and most others.
    #[default]
    RotateHalf,
    /// Entry 2i with entry 2i + 1: GPT-J, GLM, Cohere, and Llama as Meta stores it.
    Interleaved,
}

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
    /// "NTK" scaling: the base grows with the length of the call (its largest position + 1) if that is more than
    /// `original_context`. Keys in a cache stay rotated by the base of their own call.
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
        /// r/2 divisors for calls of at most `original_context` positions.
        short_factor: Vec<f64>,
        /// r/2 divisors for longer calls.
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

/// The config of rotary positions (RoPE, <https://arxiv.org/abs/2104.09864>): pair i of the entries of a query or key
/// at position p is rotated by the angle `p · base^(-2i/r)`, where r entries of a head are rotated. A score then
/// depends on the distance between its query and its key.
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct RopeConfig {
    base: f64,
    #[serde(default)]
    style: RopeStyle,
    rotary_dim: Option<usize>,
    #[serde(default)]
    scaling: RopeScaling,
    axes: Option<RopeAxes>,
}

/// The axis whose position rotates a pair of entries, and the pair's frequency: `base^(-index/count)`.
pub(super) struct Pair {
    pub axis: usize,
    pub index: usize,
    pub count: usize,
}

impl RopeConfig {
    /// Returns the config that rotates whole heads in the style [`RopeStyle::RotateHalf`] without scaling. `base` is
    /// `rope_theta` of Hugging Face, often 10,000.
    pub fn new(base: f64) -> Self {
        Self { base, style: RopeStyle::RotateHalf, rotary_dim: None, scaling: RopeScaling::None, axes: None }
    }

    /// Sets which two entries of a head are a pair. The default is [`RopeStyle::RotateHalf`].
    pub fn with_style(mut self, style: RopeStyle) -> Self {
        self.style = style;
        self
    }

    /// Sets the number of entries at the beginning of each head that are rotated (r), an even number:
    /// `partial_rotary_factor · head_dim` of Hugging Face. The default is the whole head.
    pub fn with_rotary_dim(mut self, rotary_dim: usize) -> Self {
        self.rotary_dim = Some(rotary_dim);
        self
    }

    /// Sets a change of the frequencies for contexts longer than those of the training. The default is
    /// [`RopeScaling::None`].
    pub fn with_scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// Sets the axes on which tokens have positions, each of which rotates some of the pairs (M-RoPE, images). The
    /// default is one axis. See [`AttentionInput::with_axis_positions`](crate::AttentionInput::with_axis_positions).
    pub fn with_axes(mut self, axes: RopeAxes) -> Self {
        self.axes = Some(axes);
        self
    }

    /// Returns the base of the geometric series of frequencies.
    pub fn base(&self) -> f64 {
        self.base
    }

    /// Returns which two entries of a head are a pair.
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Returns the number of entries of a head of width `head_dim` that are rotated.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        self.rotary_dim.unwrap_or(head_dim)
    }

    /// Returns the change of the frequencies.
    pub fn scaling(&self) -> &RopeScaling {
        &self.scaling
    }

    /// Returns the axes on which tokens have positions, if there are several.
    pub fn axes(&self) -> Option<&RopeAxes> {
        self.axes.as_ref()
    }

    /// Returns the number of axes.
    pub(super) fn num_axes(&self) -> usize {
        self.axes.as_ref().map_or(1, |axes| axes.sections.len())
    }

    /// Returns the axis and the frequency of each of `count` pairs.
    pub(super) fn pairs(&self, count: usize) -> Vec<Pair> {
        let Some(RopeAxes { sections, layout }) = &self.axes else {
            return (0..count).map(|index| Pair { axis: 0, index, count }).collect();
        };
        let axes = sections.len();
        let mut pairs = Vec::with_capacity(count);
        for (axis, &section) in sections.iter().enumerate() {
            for in_section in 0..section {
                let n = pairs.len();
                pairs.push(match layout {
                    RopeAxisLayout::Sections => Pair { axis, index: n, count },
                    RopeAxisLayout::Interleaved => {
                        let turn = n % axes;
                        // The first axis has the pairs that are left after the last turn of the others.
                        Pair { axis: if n / axes < sections[turn] { turn } else { 0 }, index: n, count }
                    }
                    RopeAxisLayout::Axial => Pair { axis, index: in_section, count: section },
                    RopeAxisLayout::AxialInterleaved => Pair { axis, index: in_section * axes + axis, count },
                });
            }
        }
        pairs
    }

    /// Returns whether a call that reaches `len` positions (its largest position + 1) rotates by other frequencies than
    /// a call that reached `earlier` positions.
    ///
    /// Only [`RopeScaling::Dynamic`] and [`RopeScaling::LongRope`] have frequencies that depend on the number of
    /// positions. A model that processes a prompt in chunks, or continues from a cache, asks this question twice:
    ///
    /// - A chunk that ends at position `end` of a prompt of `len` tokens gives the numbers of the whole prompt only if
    ///   `frequencies_differ(end, len)` is false. Otherwise the chunk has to be longer.
    /// - If `frequencies_differ(cached, len)` is true, the keys of a cache with `cached` positions have other
    ///   frequencies than the keys that a call up to `len` appends. With LongRoPE this happens once, and Phi 3 in
    ///   transformers then computes the whole cache again ([`AttentionCache::reset`](crate::AttentionCache::reset), and
    ///   all tokens in one call). With dynamic scaling it happens at every position beyond `original_context`, and
    ///   transformers keeps the cached keys as they are.
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

    /// Checks that every option is in its range, and that the options fit together and heads of width `head_dim`.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub fn validate(&self, head_dim: usize) -> Result<()> {
        let r = self.rotary_dim(head_dim);
        if r == 0 || r > head_dim || !r.is_multiple_of(2) {
            bail!("[{OP}] rotary_dim is {r}, expected an even number from 2 to head_dim {head_dim}")
        }
        above_zero("base", self.base)?;
        if let Some(axes) = &self.axes {
            axes.validate(r / 2, self.scaling != RopeScaling::None)?;
        }
        self.validate_scaling(head_dim)
    }

    /// Checks the options of the scaling.
    fn validate_scaling(&self, head_dim: usize) -> Result<()> {
        let r = self.rotary_dim(head_dim);
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => above_zero("factor", *factor)?,
            RopeScaling::Dynamic { factor, original_context } => {
                context(*original_context)?;
                let is_right = |candidate: f64| (candidate as f32).is_finite() && candidate >= 1.0;
                number::expect(OP, "factor", *factor, is_right, "a finite number of at least 1")?;
                number::expect(OP, "rotary_dim", r, |r: usize| r > 2, "at least 4 with dynamic scaling")?;
            }
            &RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } => {
                context(original_context)?;
                above_zero("factor", factor)?;
                above_zero("low_freq_factor", low)?;
                above_zero("high_freq_factor", high)?;
                if high <= low {
                    bail!("[{OP}] high_freq_factor is {high}, expected more than low_freq_factor {low}")
                }
            }
            &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, mscale, mscale_all_dim, .. } => {
                context(original_context)?;
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
                let is_right = |candidate: f64| (0.0..=1.0).contains(&candidate);
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

/// Checks that a number is above zero and finite in f32, in which frequencies are computed.
fn above_zero(name: &str, value: impl Into<Option<f64>>) -> Result<()> {
    let is_right = |candidate: f64| (candidate as f32).is_finite() && candidate as f32 > 0.0;
    number::expect(OP, name, value, is_right, "a finite number above zero in F32")
}

/// Checks the number of positions in the training.
fn context(original_context: usize) -> Result<()> {
    number::expect(OP, "original_context", original_context, |positions: usize| positions >= 2, "at least 2")
}

/// The assignment of pairs of entries to axes, and the frequencies of the pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RopeAxisLayout {
    /// The first section of pairs belongs to the first axis, and so on (`mrope_section` of Qwen2-VL, GLM-4V). All pairs
    /// share one series of frequencies, so that a token of text, with the same position on all axes, is rotated as
    /// without axes.
    Sections,
    /// Pair i belongs to axis i mod A until an axis has all of its pairs, and remaining pairs belong to the first axis
    /// (`mrope_interleaved` of Qwen3-VL). All pairs share one series of frequencies.
    Interleaved,
    /// The first section of pairs belongs to the first axis, and so on. The n pairs of an axis have the frequencies
    /// `base^(-i/n)` (the images of Qwen2-VL, DINOv3).
    Axial,
    /// The first section of pairs belongs to the first axis, and so on. The frequencies of one series for all pairs are
    /// assigned to the axes in turns (Pixtral).
    AxialInterleaved,
}

/// Several axes on which tokens have positions: time, height and width of M-RoPE, rows and columns of an image. The
/// position on an axis rotates some of a head's pairs.
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
    /// Returns axes with these numbers of pairs (`mrope_section`), whose sum is half of
    /// [`RopeConfig::rotary_dim`](crate::RopeConfig::rotary_dim).
    pub fn new(sections: Vec<usize>, layout: RopeAxisLayout) -> Self {
        Self { sections, layout }
    }

    /// Returns the number of pairs of each axis.
    pub fn sections(&self) -> &[usize] {
        &self.sections
    }

    /// Returns the assignment of pairs to axes.
    pub fn layout(&self) -> RopeAxisLayout {
        self.layout
    }

    /// Returns whether a token needs a position on each axis, since its angles follow from no single position.
    pub(crate) fn is_axial(&self) -> bool {
        matches!(self.layout, RopeAxisLayout::Axial | RopeAxisLayout::AxialInterleaved)
    }

    /// Checks the numbers of pairs, whose sum is `pairs`.
    pub(super) fn validate(&self, pairs: usize, is_scaled: bool) -> Result<()> {
        let Self { sections, layout } = self;
        let count = sections.len();
        let sum = sections.iter().fold(0usize, |sum, &section| sum.saturating_add(section));
        if count < 2 || sections.contains(&0) || sum != pairs {
            bail!("[{OP}] axes have {sections:?} pairs, expected two or more numbers whose sum is {pairs}")
        }
        // The last pair of each axis, if the axes take turns.
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

    /// Returns positions (A, T) or (A, B, T), which need not be whole numbers, axis by axis and row by row.
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

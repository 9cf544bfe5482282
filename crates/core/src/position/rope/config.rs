//! The config of rotary positions, on one axis or on several: time, height and width in images and videos.

use candle_core::{Result, bail};
use serde::{Deserialize, Deserializer, Serialize};

use super::OP;
use super::axes::{RopeAxes, RopeAxisLayout};
use super::scaling::{RopeScaling, above_zero};
use candle_attention_modules::base::variant;

/// The two entries of a head that are rotated as a pair.
///
/// A checkpoint is trained for one of the styles. Its weights can be permuted for the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeStyle {
    /// Entry i with entry i + r/2, where r entries are rotated: `rotate_half` of transformers, for Llama as Hugging
    /// Face stores it, GPT-NeoX and most others.
    #[doc(alias = "rotate_half")]
    #[default]
    RotateHalf,
    /// Entry 2i with entry 2i + 1: GPT-J, GLM, Cohere, and Llama as Meta stores it.
    #[doc(alias = "view_as_complex")]
    Interleaved,
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
    #[serde(default, deserialize_with = "style")]
    style: RopeStyle,
    rotary_dim: Option<usize>,
    #[serde(default, deserialize_with = "scaling")]
    scaling: RopeScaling,
    axes: Option<RopeAxes>,
    #[serde(default)]
    reversed: bool,
}

/// Reads the option `style`.
fn style<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<RopeStyle, D::Error> {
    variant(value, "style")
}

/// Reads the option `scaling`.
fn scaling<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<RopeScaling, D::Error> {
    variant(value, "scaling")
}

/// The axis whose position rotates a pair of entries, and the pair's frequency: `base^(-index/count)`.
pub(super) struct RotatedPair {
    pub axis: usize,
    pub index: usize,
    pub count: usize,
}

impl RopeConfig {
    /// Returns the config that rotates whole heads in the style [`RopeStyle::RotateHalf`] without scaling. `base` is
    /// `rope_theta` of Hugging Face, often 10,000.
    pub fn new(base: f64) -> Self {
        Self {
            base,
            style: RopeStyle::RotateHalf,
            rotary_dim: None,
            scaling: RopeScaling::None,
            axes: None,
            reversed: false,
        }
    }

    /// Sets which two entries of a head are a pair. The default is [`RopeStyle::RotateHalf`].
    pub fn with_style(mut self, style: RopeStyle) -> Self {
        self.style = style;
        self
    }

    /// Sets the number of entries at the beginning of each head that are rotated (r), an even number:
    /// `partial_rotary_factor · head_dim` of Hugging Face. The default is the whole head.
    #[doc(alias = "partial_rotary_factor")]
    pub fn with_rotary_dim(mut self, rotary_dim: impl Into<Option<usize>>) -> Self {
        self.rotary_dim = rotary_dim.into();
        self
    }

    /// Sets a change of the frequencies for contexts longer than those of the training. The default is
    /// [`RopeScaling::None`].
    #[doc(alias = "rope_scaling")]
    pub fn with_scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// Sets the axes on which tokens have positions, each of which rotates some of the pairs (M-RoPE, images). The
    /// default is one axis. See [`AttentionInput::with_axis_positions`](crate::AttentionInput::with_axis_positions).
    #[doc(alias = "mrope_section")]
    pub fn with_axes(mut self, axes: impl Into<Option<RopeAxes>>) -> Self {
        self.axes = axes.into();
        self
    }

    /// Sets whether pairs are rotated by the opposite angles (nanochat). The default is no.
    pub fn with_reversed(mut self, reversed: bool) -> Self {
        self.reversed = reversed;
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

    /// Returns whether pairs are rotated by the opposite angles.
    pub fn reversed(&self) -> bool {
        self.reversed
    }

    /// Returns the number of parts of a head inside of which entries are paired.
    pub(super) fn parts(&self) -> usize {
        match &self.axes {
            Some(axes) if axes.layout() == RopeAxisLayout::AxialParts => axes.sections().len(),
            _ => 1,
        }
    }

    /// Returns the number of axes.
    pub(super) fn num_axes(&self) -> usize {
        self.axes.as_ref().map_or(1, |axes| axes.sections().len())
    }

    /// Returns the axis and the frequency of each of `count` pairs.
    pub(super) fn pairs(&self, count: usize) -> Vec<RotatedPair> {
        let Some(axes) = &self.axes else {
            return (0..count).map(|index| RotatedPair { axis: 0, index, count }).collect();
        };
        let sections = axes.sections();
        let mut pairs = Vec::with_capacity(count);
        for (axis, &section) in sections.iter().enumerate() {
            for in_section in 0..section {
                let n = pairs.len();
                pairs.push(match axes.layout() {
                    RopeAxisLayout::Sections => RotatedPair { axis, index: n, count },
                    RopeAxisLayout::Interleaved => {
                        let turn = n % sections.len();
                        // The first axis has the pairs that are left after the last turn of the others.
                        let has_turn = n / sections.len() < sections[turn];
                        RotatedPair { axis: if has_turn { turn } else { 0 }, index: n, count }
                    }
                    RopeAxisLayout::Axial | RopeAxisLayout::AxialParts => {
                        RotatedPair { axis, index: in_section, count: section }
                    }
                    RopeAxisLayout::AxialInterleaved => {
                        RotatedPair { axis, index: in_section * sections.len() + axis, count }
                    }
                    RopeAxisLayout::AxialTurns => {
                        RotatedPair { axis: n % sections.len(), index: n / sections.len(), count: section }
                    }
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
        self.scaling.frequencies_differ(earlier, len)
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
        self.scaling.validate(self.base, r, head_dim)
    }
}

//! What belongs to the architecture of an attention layer.

use candle_core::{Result, bail};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use crate::position::{AlibiConfig, AttentionTemperature, ContentPositions, RelativeBiasConfig, RopeConfig};
use candle_attention_modules::base::{Options, number, options, yes};
use candle_attention_modules::gate::OutputGate;
use candle_attention_modules::norm::{self, OutputNorm, QkNorm, QkNormScope};

const OP: &str = "multi_head_attention";

/// The shape and options of a [`MultiHeadAttention`](crate::MultiHeadAttention): everything that belongs to the
/// architecture. What belongs to the data (lengths, padding, bias) is given at the call.
///
/// ```
/// use candle_attention::MultiHeadAttentionConfig;
/// let cfg = MultiHeadAttentionConfig::new(512, 8).with_num_kv_heads(2).with_causal(true).with_qkv_bias(true);
/// assert_eq!((cfg.head_dim(), cfg.out_dim()), (64, 512));
/// ```
///
/// Numbers that do not fit together are found by [`validate`](Self::validate), which every constructor of a layer
/// calls.
#[apply(options)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct MultiHeadAttentionConfig {
    /// E, the width of the layer's input.
    #[check(number::size)]
    #[methods(get)]
    embed_dim: usize,
    /// H, the number of query heads.
    #[check(number::size)]
    #[methods(get)]
    num_heads: usize,
    /// Grouped-query attention: fewer key and value heads, each shared by `num_heads / num_kv_heads` query heads.
    #[check(number::size)]
    #[methods(with)]
    num_kv_heads: Option<usize>,
    /// D, the width of one query and key head; `out_dim / num_heads` unless given.
    #[check(number::size)]
    #[methods(with)]
    head_dim: Option<usize>,
    /// D_v, the width of one value head; D unless given.
    #[check(number::size)]
    #[methods(with)]
    value_head_dim: Option<usize>,
    /// The width of the layer's output (the book's `d_out`, d2l's `num_hiddens`); `embed_dim` unless given.
    #[check(number::size)]
    #[methods(with)]
    out_dim: Option<usize>,
    /// The width of the keys' input in cross-attention (PyTorch's `kdim`); `embed_dim` unless given.
    #[check(number::size)]
    #[methods(with)]
    kdim: Option<usize>,
    /// The width of the values' input in cross-attention (PyTorch's `vdim`); `kdim` unless given.
    #[check(number::size)]
    #[methods(with)]
    vdim: Option<usize>,
    /// A bias on the query projection.
    #[serde(default)]
    #[methods(with)]
    q_bias: bool,
    /// A bias on the key projection.
    #[serde(default)]
    #[methods(with)]
    k_bias: bool,
    /// A bias on the value projection.
    #[serde(default)]
    #[methods(with)]
    v_bias: bool,
    /// A bias on the output projection.
    #[serde(default)]
    out_bias: bool,
    /// Whether there is an output projection; without one the output is the heads' contexts, concatenated. There is one
    /// unless said otherwise.
    #[serde(default = "yes")]
    #[default(true)]
    out_proj: bool,
    /// One more key and value, learned (`bias_k`, `bias_v`), which every query sees: `add_bias_kv` of
    /// `torch.nn.MultiheadAttention`. The weights have T_kv + 1 columns then.
    #[serde(default)]
    bias_kv: bool,
    /// One more key and value, of zeros, after the learned ones, which every query sees: `add_zero_attn` of
    /// `torch.nn.MultiheadAttention`, which no state dict tells. The weights have one more column then.
    #[serde(default)]
    add_zero_attn: bool,
    /// No query sees a later key; aligned to the end, see [`AttentionMask::causal`](crate::AttentionMask::causal).
    #[serde(default)]
    causal: bool,
    /// The most positions that a sequence may have, those in a cache included; more are an error.
    #[check(number::size)]
    context_length: Option<usize>,
    /// The number of keys that a query sees, its own and those before it, see
    /// [`AttentionMask::with_window`](crate::AttentionMask::with_window). Later keys are for [`with_causal`] to hide;
    /// [`with_local_window`](Self::with_local_window) is a window on both sides.
    ///
    /// [`with_causal`]: Self::with_causal
    #[check(number::size)]
    window: Option<usize>,
    /// The numbers of keys that a query sees before its own and after it, see [`with_local_window`](Self::with_local_window).
    #[methods(get)]
    band: Option<(usize, usize)>,
    /// The number of positions of a chunk, beyond which no query sees, see
    /// [`AttentionMask::with_chunk`](crate::AttentionMask::with_chunk) (Llama 4).
    #[check(number::size)]
    chunk: Option<usize>,
    /// The bound ±`clip_qkv` of queries, keys and values as they leave their projections, norms of whole projections
    /// included (MPT, OLMo).
    #[check(number::above_zero)]
    clip_qkv: Option<f64>,
    /// The bound of the scores, see [`SdpaOptions::with_softcap`](crate::SdpaOptions::with_softcap).
    #[check(number::above_zero)]
    softcap: Option<f64>,
    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    #[check(number::finite)]
    scale: Option<f64>,
    /// Learned attention sinks (parameter `sinks`), see [`SdpaOptions::with_sinks`](crate::SdpaOptions::with_sinks).
    #[serde(default)]
    sinks: bool,
    /// The normalisation of queries and keys before attention.
    #[check(norm::check_epsilon)]
    qk_norm: Option<QkNorm>,
    /// The rotary positions of queries and keys, by which these are rotated after their norms.
    #[methods(with, get_ref)]
    rope: Option<RopeConfig>,
    /// Whether heads are normalised after they were rotated, and not before (HunYuan).
    #[serde(default)]
    norm_after_rope: bool,
    /// The normalisation of each value head by its root mean square, without a weight (Gemma 4); this is the epsilon.
    #[check(number::epsilon)]
    value_norm: Option<f64>,
    /// A factor on queries that grows with their positions, after norms and rotation (Llama 4, Ministral 3).
    attention_temperature: Option<AttentionTemperature>,
    /// ALiBi's biases, which are added to the scores.
    #[methods(with, get_ref)]
    alibi: Option<AlibiConfig>,
    /// T5's biases of relative positions, which are added to the scores. They belong to the stack of layers: give each
    /// layer [the one](crate::MultiHeadAttention::with_relative_bias).
    #[methods(with, get_ref)]
    relative_bias: Option<RelativeBiasConfig>,
    /// Terms of the scores that depend on the place of the key from its query and on what one of the two holds.
    #[methods(with, get_ref)]
    content_positions: Option<ContentPositions>,
    /// A gate by which the context is multiplied before the output projection (Qwen3-Next, AFMoE).
    output_gate: Option<OutputGate>,
    /// The normalisation of the context of all heads before the output projection, after a gate (BitNet, Kosmos-2).
    #[check(norm::check_epsilon)]
    output_norm: Option<OutputNorm>,
    /// Where keys and values come from: projections unless given (Gemma 3n, Gemma 4).
    #[serde(default)]
    kv_sharing: KvSharing,
    /// The probability with which a weight is dropped in training.
    #[serde(default)]
    #[check(number::probability)]
    dropout: f64,
}

impl MultiHeadAttentionConfig {
    /// Self-attention over inputs (B, T, `embed_dim`) with `num_heads` heads, an output projection, no biases, no mask.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self { embed_dim, num_heads, ..Self::unset() }
    }

    /// Other numbers of query heads and of key and value heads, of one layer of a model or of a part of a layer.
    pub fn with_heads(self, num_heads: usize, num_kv_heads: usize) -> Self {
        Self { num_heads, num_kv_heads: Some(num_kv_heads), ..self }
    }

    /// Biases on all four projections.
    pub fn with_bias(self, bias: bool) -> Self {
        self.with_qkv_bias(bias).with_out_bias(bias)
    }

    /// Biases on the query, key and value projections.
    pub fn with_qkv_bias(self, bias: bool) -> Self {
        Self { q_bias: bias, k_bias: bias, v_bias: bias, ..self }
    }

    /// A window on both sides: a query sees the keys from `left` before its own to `right` after it, see
    /// [`AttentionMask::with_local_window`](crate::AttentionMask::with_local_window). Local attention of encoders (ModernBERT) has as
    /// many on either side.
    pub fn with_local_window(self, left: usize, right: usize) -> Self {
        Self { band: Some((left, right)), ..self }
    }

    /// Whether the query, key and value projections have biases.
    pub fn qkv_bias(&self) -> [bool; 3] {
        [self.q_bias, self.k_bias, self.v_bias]
    }

    /// How many keys and values of its own the layer appends to those of a call.
    pub(crate) fn appended_keys(&self) -> usize {
        usize::from(self.bias_kv) + usize::from(self.add_zero_attn)
    }

    /// What scores are multiplied by: the [`scale`](Self::scale), or 1 / sqrt(D).
    pub(crate) fn score_scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim() as f64).sqrt())
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        self.check(OP)?;
        if let Some(problem) = self.problem() {
            bail!("[{OP}] {problem}")
        }
        self.attention_temperature.iter().try_for_each(AttentionTemperature::validate)?;
        self.rope.iter().try_for_each(|rope| rope.validate(self.head_dim()))?;
        self.alibi.iter().try_for_each(|alibi| alibi.validate(self.num_heads))?;
        self.relative_bias.iter().try_for_each(RelativeBiasConfig::validate)?;
        self.content_positions.iter().try_for_each(|positions| self.validate_content(positions))
    }

    /// The first of what no layer can have, if the config says any of it.
    fn problem(&self) -> Option<String> {
        let (h, h_kv, d, d_v) = (self.num_heads, self.num_kv_heads(), self.head_dim(), self.value_head_dim());
        let too_wide = |name: &str, width: usize| {
            let text = format!("num_heads {h} times {name} {width} is more than {}", u32::MAX);
            (h.saturating_mul(width) > u32::MAX as usize, text)
        };
        // Without a width of its own, a head has its part of these.
        let heads = if self.out_dim.is_some() { "out_dim" } else { "embed_dim" };
        let whole = self.out_dim.unwrap_or(self.embed_dim);
        let (out_dim, contexts) = (self.out_dim(), h.saturating_mul(d_v));
        let keys = [d, self.kdim(), usize::from(self.k_bias)];
        let values = [d_v, self.vdim(), usize::from(self.v_bias)];
        let of_no_projection = |name: &str, is_set: bool| {
            let text = format!("{name} is set, but keys and values are those of an earlier layer, as it made them");
            (is_set && self.kv_sharing == KvSharing::EarlierLayer, text)
        };
        // Keys of the layer's own come after those of a call, whose norms and positions they do not have.
        let (option, key) =
            if self.bias_kv { ("bias_kv", "a learned key") } else { ("add_zero_attn", "a key of zeros") };
        let beside_appended = |other: &str, is_set: bool, why: String| {
            (is_set && self.appended_keys() > 0, format!("{option} and {other} are both set, but {why}"))
        };
        let no_norm = |other, is_set| beside_appended(other, is_set, format!("no norm is defined for {key}"));
        let no_position = |other, is_set| beside_appended(other, is_set, format!("{key} has no position"));
        let norms_projections = self.qk_norm.is_some_and(|norm| norm.scope == QkNormScope::Projection);
        let problems = [
            (!h.is_multiple_of(h_kv), format!("num_kv_heads is {h_kv}, which does not divide num_heads {h}")),
            too_wide("head_dim", d),
            too_wide("value_head_dim", d_v),
            (
                self.head_dim.is_none() && !whole.is_multiple_of(h),
                format!("num_heads is {h}, which does not divide {heads} {whole}; give head_dim"),
            ),
            (
                !self.out_proj && out_dim != contexts,
                format!(
                    "out_dim is {out_dim}, but without an output projection the {h} heads of width {d_v} give {contexts}"
                ),
            ),
            (!self.out_proj && self.out_bias, "out_bias is set, but there is no output projection".into()),
            (
                self.kv_sharing == KvSharing::KeysAsValues && keys != values,
                format!(
                    "values are the keys' projection, expected one width of heads and inputs and a bias on both or \
                     neither, found {keys:?} for keys and {values:?} for values"
                ),
            ),
            of_no_projection("k_bias", self.k_bias),
            of_no_projection("v_bias", self.v_bias),
            of_no_projection("bias_kv", self.bias_kv),
            of_no_projection("add_zero_attn", self.add_zero_attn),
            of_no_projection("value_norm", self.value_norm.is_some()),
            of_no_projection("content_positions", self.content_positions.is_some()),
            no_norm("qk_norm", self.qk_norm.is_some()),
            no_norm("value_norm", self.value_norm.is_some()),
            no_position("rope", self.rope.is_some()),
            no_position("alibi", self.alibi.is_some()),
            no_position("relative_bias", self.relative_bias.is_some()),
            no_position("content_positions", self.content_positions.is_some()),
            (
                self.norm_after_rope && (self.rope.is_none() || self.qk_norm.is_none()),
                "norm_after_rope is set, expected both qk_norm and rope".into(),
            ),
            (
                self.norm_after_rope && norms_projections,
                "norm_after_rope is set, but a norm of whole projections comes before heads".into(),
            ),
        ];
        problems.into_iter().find(|&(is_there, _)| is_there).map(|(_, text)| text)
    }

    /// Positions by content, and that they fit the layer.
    fn validate_content(&self, positions: &ContentPositions) -> Result<()> {
        const OP: &str = "content_positions";
        positions.validate()?;
        let (h, h_kv) = (self.num_heads, self.num_kv_heads());
        match (positions, self.scale) {
            (ContentPositions::Grid { .. }, _) if self.softcap.is_some() => {
                bail!("[{OP}] softcap is set, which bounds scores before relative positions of a grid are added")
            }
            (ContentPositions::Grid { .. }, Some(scale)) if scale as f32 == 0.0 => {
                bail!("[{OP}] scale is 0, expected another beside relative positions of a grid")
            }
            (ContentPositions::CosineWindow { .. }, Some(scale)) => {
                bail!("[{OP}] scale is {scale}, expected none beside the factors of cosine scores")
            }
            (ContentPositions::TransformerXl, _) if !self.embed_dim.is_multiple_of(2) => {
                bail!("[{OP}] embed_dim is {}, expected pairs of sines and cosines", self.embed_dim)
            }
            (ContentPositions::Disentangled(_), _) if h != h_kv => {
                bail!("[{OP}] num_kv_heads is {h_kv}, expected the {h} query heads of disentangled positions")
            }
            _ => Ok(()),
        }
    }
}

/// Readers of numbers and widths, with defaults filled in.
impl MultiHeadAttentionConfig {
    /// H_kv, the number of key and value heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// D, the width of one query and key head.
    pub fn head_dim(&self) -> usize {
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        self.head_dim.unwrap_or_else(|| out_dim.checked_div(self.num_heads).unwrap_or(0))
    }

    /// D_v, the width of one value head.
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim.unwrap_or_else(|| self.head_dim())
    }

    /// The width of the layer's output.
    pub fn out_dim(&self) -> usize {
        match (self.out_dim, self.out_proj) {
            (Some(out_dim), _) => out_dim,
            (None, true) => self.embed_dim,
            (None, false) => self.num_heads.saturating_mul(self.value_head_dim()),
        }
    }

    /// The width of the keys' input.
    pub fn kdim(&self) -> usize {
        self.kdim.unwrap_or(self.embed_dim)
    }

    /// The width of the values' input.
    pub fn vdim(&self) -> usize {
        self.vdim.unwrap_or_else(|| self.kdim())
    }
}

/// Where a layer's keys and values come from.
///
/// ```
/// use candle_attention::{KvSharing, MultiHeadAttentionConfig};
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_kv_sharing(KvSharing::KeysAsValues);
/// cfg.validate().expect("keys and values are of one width");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KvSharing {
    /// A projection of its own for each.
    #[default]
    None,
    /// One projection for both: values are what it gives, before norms and positions of the keys (`attention_k_eq_v` of
    /// Gemma 4).
    KeysAsValues,
    /// None: the layer reads what an earlier layer keeps in its
    /// [cache](crate::AttentionInput::with_shared_cache), or has projected to a
    /// [memory](crate::AttentionInput::with_memory) (`num_kv_shared_layers` of Gemma 3n and Gemma 4).
    EarlierLayer,
}

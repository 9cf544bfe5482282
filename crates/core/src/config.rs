//! The config of a [`MultiHeadAttention`](crate::MultiHeadAttention): everything that belongs to the architecture.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::position::{AlibiConfig, AttentionTemperature, ContentPositions, RelativeBiasConfig, RopeConfig};
use candle_attention_modules::base::number;
use candle_attention_modules::gate::OutputGate;
use candle_attention_modules::norm::{self, OutputNorm, QkNorm, QkNormScope};

const OP: &str = "multi_head_attention";

/// The shape and options of a [`MultiHeadAttention`](crate::MultiHeadAttention).
///
/// A config has what belongs to the architecture of a model. What belongs to the data of one call (padding, masks, a
/// cache, positions) is an [`AttentionInput`](crate::AttentionInput).
///
/// [`new`](Self::new) is self-attention with an output projection and no biases, masks or positions. Every `with_*`
/// method changes one option and returns the config; the method of the same name without `with_` reads it.
///
/// ```
/// use candle_attention::{MultiHeadAttentionConfig, RopeConfig};
/// // Llama 3: 32 query heads in groups of 4, rotary positions.
/// let cfg = MultiHeadAttentionConfig::new(4096, 32)
///     .with_num_kv_heads(8)
///     .with_causal(true)
///     .with_rope(RopeConfig::new(500_000.0));
/// assert_eq!((cfg.head_dim(), cfg.out_dim()), (128, 4096));
/// ```
///
/// [`validate`](Self::validate) checks that the options fit together. Every constructor of a layer calls it, so model
/// code does not have to. A config is serialised with the names of its options:
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use candle_attention::MultiHeadAttentionConfig;
/// let cfg: MultiHeadAttentionConfig = serde_json::from_str(r#"{"embed_dim": 512, "num_heads": 8, "causal": true}"#)?;
/// assert_eq!(cfg, MultiHeadAttentionConfig::new(512, 8).with_causal(true));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct MultiHeadAttentionConfig {
    embed_dim: usize,
    num_heads: usize,
    num_kv_heads: Option<usize>,
    head_dim: Option<usize>,
    value_head_dim: Option<usize>,
    out_dim: Option<usize>,
    kdim: Option<usize>,
    vdim: Option<usize>,
    #[serde(default)]
    q_bias: bool,
    #[serde(default)]
    k_bias: bool,
    #[serde(default)]
    v_bias: bool,
    #[serde(default)]
    out_bias: bool,
    #[serde(default = "has_out_proj")]
    out_proj: bool,
    #[serde(default)]
    bias_kv: bool,
    #[serde(default)]
    add_zero_attn: bool,
    #[serde(default)]
    causal: bool,
    context_length: Option<usize>,
    window: Option<usize>,
    local_window: Option<LocalWindow>,
    chunk: Option<usize>,
    clip_qkv: Option<f64>,
    softcap: Option<f64>,
    scale: Option<f64>,
    #[serde(default)]
    sinks: bool,
    qk_norm: Option<QkNorm>,
    rope: Option<RopeConfig>,
    #[serde(default)]
    norm_after_rope: bool,
    value_norm: Option<f64>,
    attention_temperature: Option<AttentionTemperature>,
    alibi: Option<AlibiConfig>,
    relative_bias: Option<RelativeBiasConfig>,
    content_positions: Option<ContentPositions>,
    output_gate: Option<OutputGate>,
    output_norm: Option<OutputNorm>,
    #[serde(default)]
    kv_sharing: KvSharing,
    #[serde(default)]
    dropout: f64,
}

/// Returns the default of [`MultiHeadAttentionConfig::out_proj`].
fn has_out_proj() -> bool {
    true
}

/// A window on both sides of a query: it attends to the keys from `left` before its own position to `right` after it.
/// See [`MultiHeadAttentionConfig::with_local_window`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalWindow {
    /// The number of keys before the query's own.
    pub left: usize,
    /// The number of keys after the query's own.
    pub right: usize,
}

/// The shape of the layer.
impl MultiHeadAttentionConfig {
    /// Returns the config of self-attention over inputs (B, T, `embed_dim`) with `num_heads` heads of width
    /// `embed_dim / num_heads`, an output projection, no biases and no mask.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: None,
            head_dim: None,
            value_head_dim: None,
            out_dim: None,
            kdim: None,
            vdim: None,
            q_bias: false,
            k_bias: false,
            v_bias: false,
            out_bias: false,
            out_proj: true,
            bias_kv: false,
            add_zero_attn: false,
            causal: false,
            context_length: None,
            window: None,
            local_window: None,
            chunk: None,
            clip_qkv: None,
            softcap: None,
            scale: None,
            sinks: false,
            qk_norm: None,
            rope: None,
            norm_after_rope: false,
            value_norm: None,
            attention_temperature: None,
            alibi: None,
            relative_bias: None,
            content_positions: None,
            output_gate: None,
            output_norm: None,
            kv_sharing: KvSharing::None,
            dropout: 0.0,
        }
    }

    /// Sets the numbers of query heads and of key and value heads, for one layer of a model or one rank of a layer.
    pub fn with_heads(mut self, num_heads: usize, num_kv_heads: usize) -> Self {
        self.num_heads = num_heads;
        self.num_kv_heads = Some(num_kv_heads);
        self
    }

    /// Sets the number of key and value heads (H_kv), for grouped-query attention: each is shared by
    /// `num_heads / num_kv_heads` query heads, which must be a whole number. One head is multi-query attention. The
    /// default is `num_heads`.
    pub fn with_num_kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = Some(num_kv_heads);
        self
    }

    /// Sets the width of one query head and of one key head (D). The default is `out_dim / num_heads`, or
    /// `embed_dim / num_heads` without an `out_dim`.
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    /// Sets the width of one value head (D_v). The default is the head dimension of queries and keys.
    pub fn with_value_head_dim(mut self, value_head_dim: usize) -> Self {
        self.value_head_dim = Some(value_head_dim);
        self
    }

    /// Sets the width of the layer's output. The default is `embed_dim`, or `num_heads · value_head_dim` without an
    /// output projection.
    pub fn with_out_dim(mut self, out_dim: usize) -> Self {
        self.out_dim = Some(out_dim);
        self
    }

    /// Sets the width of the input that keys are projected from, in cross-attention: `kdim` of
    /// `torch.nn.MultiheadAttention`. The default is `embed_dim`.
    pub fn with_kdim(mut self, kdim: usize) -> Self {
        self.kdim = Some(kdim);
        self
    }

    /// Sets the width of the input that values are projected from, in cross-attention: `vdim` of
    /// `torch.nn.MultiheadAttention`. The default is `kdim`.
    pub fn with_vdim(mut self, vdim: usize) -> Self {
        self.vdim = Some(vdim);
        self
    }

    /// Returns the width of the layer's input (E).
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// Returns the number of query heads (H).
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Returns the number of key and value heads (H_kv).
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// Returns the width of one query head and of one key head (D).
    pub fn head_dim(&self) -> usize {
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        self.head_dim.unwrap_or_else(|| out_dim.checked_div(self.num_heads).unwrap_or(0))
    }

    /// Returns the width of one value head (D_v).
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim.unwrap_or_else(|| self.head_dim())
    }

    /// Returns the width of the layer's output.
    pub fn out_dim(&self) -> usize {
        match self.out_dim {
            Some(out_dim) => out_dim,
            None if self.out_proj => self.embed_dim,
            None => self.num_heads.saturating_mul(self.value_head_dim()),
        }
    }

    /// Returns the width of the input that keys are projected from.
    pub fn kdim(&self) -> usize {
        self.kdim.unwrap_or(self.embed_dim)
    }

    /// Returns the width of the input that values are projected from.
    pub fn vdim(&self) -> usize {
        self.vdim.unwrap_or_else(|| self.kdim())
    }
}

/// Projections and their biases.
impl MultiHeadAttentionConfig {
    /// Sets whether all four projections have biases.
    pub fn with_bias(self, bias: bool) -> Self {
        self.with_qkv_bias(bias).with_out_bias(bias)
    }

    /// Sets whether the query, key and value projections have biases. The default is no.
    pub fn with_qkv_bias(self, bias: bool) -> Self {
        self.with_q_bias(bias).with_k_bias(bias).with_v_bias(bias)
    }

    /// Sets whether the query projection has a bias. The default is no.
    pub fn with_q_bias(mut self, q_bias: bool) -> Self {
        self.q_bias = q_bias;
        self
    }

    /// Sets whether the key projection has a bias. The default is no.
    pub fn with_k_bias(mut self, k_bias: bool) -> Self {
        self.k_bias = k_bias;
        self
    }

    /// Sets whether the value projection has a bias. The default is no.
    pub fn with_v_bias(mut self, v_bias: bool) -> Self {
        self.v_bias = v_bias;
        self
    }

    /// Sets whether the output projection has a bias. The default is no.
    pub fn with_out_bias(mut self, out_bias: bool) -> Self {
        self.out_bias = out_bias;
        self
    }

    /// Sets whether there is an output projection. The default is yes; without one, the output is the concatenation of
    /// the heads' outputs.
    pub fn with_out_proj(mut self, out_proj: bool) -> Self {
        self.out_proj = out_proj;
        self
    }

    /// Sets whether keys and values are projected by the layer itself. The default is [`KvSharing::None`]: they are,
    /// by one projection each.
    pub fn with_kv_sharing(mut self, kv_sharing: KvSharing) -> Self {
        self.kv_sharing = kv_sharing;
        self
    }

    /// Sets whether a learned key and value (parameters `bias_k` and `bias_v`) are appended to those of a call, for
    /// every query to attend to: `add_bias_kv` of `torch.nn.MultiheadAttention`. Attention weights then have T_kv + 1
    /// columns. The default is no.
    pub fn with_bias_kv(mut self, bias_kv: bool) -> Self {
        self.bias_kv = bias_kv;
        self
    }

    /// Sets whether a key and a value of zeros are appended to those of a call, after the learned ones:
    /// `add_zero_attn` of `torch.nn.MultiheadAttention`, which no checkpoint records. Attention weights then have one
    /// more column. The default is no.
    pub fn with_add_zero_attn(mut self, add_zero_attn: bool) -> Self {
        self.add_zero_attn = add_zero_attn;
        self
    }

    /// Sets a bound: queries, keys and values are clamped to ±`clip_qkv` after their projections, after norms of whole
    /// projections and before norms of heads (MPT, OLMo). There is none by default.
    pub fn with_clip_qkv(mut self, clip_qkv: f64) -> Self {
        self.clip_qkv = Some(clip_qkv);
        self
    }

    /// Returns whether the query, the key and the value projection have biases, in this order.
    pub fn qkv_bias(&self) -> [bool; 3] {
        [self.q_bias, self.k_bias, self.v_bias]
    }

    /// Returns whether the output projection has a bias.
    pub fn out_bias(&self) -> bool {
        self.out_bias
    }

    /// Returns whether there is an output projection.
    pub fn out_proj(&self) -> bool {
        self.out_proj
    }

    /// Returns which keys and values the layer shares.
    pub fn kv_sharing(&self) -> KvSharing {
        self.kv_sharing
    }

    /// Returns whether a learned key and value are appended to those of a call.
    pub fn bias_kv(&self) -> bool {
        self.bias_kv
    }

    /// Returns whether a key and a value of zeros are appended to those of a call.
    pub fn add_zero_attn(&self) -> bool {
        self.add_zero_attn
    }

    /// Returns the bound of queries, keys and values.
    pub fn clip_qkv(&self) -> Option<f64> {
        self.clip_qkv
    }

    /// Returns the number of keys and values that the layer appends to those of a call.
    pub(crate) fn appended_keys(&self) -> usize {
        usize::from(self.bias_kv) + usize::from(self.add_zero_attn)
    }
}

/// The keys that a query attends to. These options are combined with AND, with each other and with the mask of a call.
impl MultiHeadAttentionConfig {
    /// Sets whether later keys are masked. The mask is aligned to the end, as a cache needs it: the last query is at
    /// the last key, see [`AttentionMask::causal`](crate::AttentionMask::causal). The default is no.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the most positions that a sequence may have, with those in a cache. More are an error. There is no limit by
    /// default.
    pub fn with_context_length(mut self, context_length: usize) -> Self {
        self.context_length = Some(context_length);
        self
    }

    /// Sets a sliding window: a query attends to its own key and the `window - 1` keys before it, as with
    /// `sliding_window` of Hugging Face, see [`AttentionMask::with_window`](crate::AttentionMask::with_window). Later
    /// keys are masked by [`with_causal`](Self::with_causal) only.
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// Sets a window on both sides: a query attends to the keys from `left` before its own to `right` after it, as in
    /// the local layers of encoders (ModernBERT). See
    /// [`AttentionMask::with_local_window`](crate::AttentionMask::with_local_window).
    pub fn with_local_window(mut self, left: usize, right: usize) -> Self {
        self.local_window = Some(LocalWindow { left, right });
        self
    }

    /// Sets the length of chunks (`attention_chunk_size` of Llama 4): positions 0 to `chunk - 1` are the first chunk,
    /// and so on, and a query attends to keys of the same chunk only. See
    /// [`AttentionMask::with_chunk`](crate::AttentionMask::with_chunk).
    pub fn with_chunk(mut self, chunk: usize) -> Self {
        self.chunk = Some(chunk);
        self
    }

    /// Returns whether later keys are masked.
    pub fn causal(&self) -> bool {
        self.causal
    }

    /// Returns the most positions that a sequence may have.
    pub fn context_length(&self) -> Option<usize> {
        self.context_length
    }

    /// Returns the number of keys of a sliding window, with the query's own.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Returns the window on both sides of a query.
    pub fn local_window(&self) -> Option<LocalWindow> {
        self.local_window
    }

    /// Returns the length of chunks.
    pub fn chunk(&self) -> Option<usize> {
        self.chunk
    }
}

/// Scores and weights.
impl MultiHeadAttentionConfig {
    /// Sets the factor on q kᵀ. The default is `1 / sqrt(head_dim)`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets a bound of the scores: they become `softcap · tanh(score / softcap)`, as in Gemma 2. There is none by
    /// default.
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Sets whether there are learned attention sinks, one logit for each query head (parameter `sinks`), see
    /// [`SdpaOptions::with_sinks`](crate::SdpaOptions::with_sinks). The default is no.
    pub fn with_sinks(mut self, sinks: bool) -> Self {
        self.sinks = sinks;
        self
    }

    /// Sets the probability with which an attention weight is dropped in training. The default is 0.
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Sets the factor on queries that grows with their position, after norms and rotation (Llama 4, Ministral 3).
    /// There is none by default.
    pub fn with_attention_temperature(mut self, attention_temperature: AttentionTemperature) -> Self {
        self.attention_temperature = Some(attention_temperature);
        self
    }

    /// Returns the factor on q kᵀ that was set. Without one, it is `1 / sqrt(head_dim)`.
    pub fn scale(&self) -> Option<f64> {
        self.scale
    }

    /// Returns the bound of the scores.
    pub fn softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// Returns whether there are learned attention sinks.
    pub fn sinks(&self) -> bool {
        self.sinks
    }

    /// Returns the probability with which an attention weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Returns the factor on queries that grows with their position.
    pub fn attention_temperature(&self) -> Option<AttentionTemperature> {
        self.attention_temperature
    }

    /// Returns the factor on q kᵀ.
    pub(crate) fn score_scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim() as f64).sqrt())
    }
}

/// Positions. There are none by default.
impl MultiHeadAttentionConfig {
    /// Sets rotary positions: queries and keys are rotated by their positions, after their norms.
    pub fn with_rope(mut self, rope: RopeConfig) -> Self {
        self.rope = Some(rope);
        self
    }

    /// Sets ALiBi's biases, which are added to the scores by the distance of query and key.
    pub fn with_alibi(mut self, alibi: AlibiConfig) -> Self {
        self.alibi = Some(alibi);
        self
    }

    /// Sets T5's biases by distance, which are added to the scores. The layers of a stack share one table: give each
    /// layer [the table](crate::MultiHeadAttention::with_relative_bias) after it was built.
    pub fn with_relative_bias(mut self, relative_bias: RelativeBiasConfig) -> Self {
        self.relative_bias = Some(relative_bias);
        self
    }

    /// Sets relative positions that depend on the content of queries or keys, or on positions in an image.
    pub fn with_content_positions(mut self, content_positions: ContentPositions) -> Self {
        self.content_positions = Some(content_positions);
        self
    }

    /// Returns the rotary positions.
    pub fn rope(&self) -> Option<&RopeConfig> {
        self.rope.as_ref()
    }

    /// Returns ALiBi's biases.
    pub fn alibi(&self) -> Option<&AlibiConfig> {
        self.alibi.as_ref()
    }

    /// Returns T5's biases by distance.
    pub fn relative_bias(&self) -> Option<&RelativeBiasConfig> {
        self.relative_bias.as_ref()
    }

    /// Returns the relative positions that depend on content.
    pub fn content_positions(&self) -> Option<&ContentPositions> {
        self.content_positions.as_ref()
    }
}

/// Norms and gates. There are none by default.
impl MultiHeadAttentionConfig {
    /// Sets the norm of queries and keys before attention.
    pub fn with_qk_norm(mut self, qk_norm: QkNorm) -> Self {
        self.qk_norm = Some(qk_norm);
        self
    }

    /// Sets whether heads are normalised after their rotation (HunYuan). The default is no: before it.
    pub fn with_norm_after_rope(mut self, norm_after_rope: bool) -> Self {
        self.norm_after_rope = norm_after_rope;
        self
    }

    /// Sets the epsilon of a norm of each value head: its root mean square, without a weight (Gemma 4).
    pub fn with_value_norm(mut self, eps: f64) -> Self {
        self.value_norm = Some(eps);
        self
    }

    /// Sets the gate by which the heads' outputs are multiplied before the output projection (Qwen3-Next, AFMoE).
    pub fn with_output_gate(mut self, output_gate: OutputGate) -> Self {
        self.output_gate = Some(output_gate);
        self
    }

    /// Sets the norm of the concatenated heads' outputs, after a gate and before the output projection (BitNet,
    /// Kosmos-2).
    pub fn with_output_norm(mut self, output_norm: OutputNorm) -> Self {
        self.output_norm = Some(output_norm);
        self
    }

    /// Returns the norm of queries and keys.
    pub fn qk_norm(&self) -> Option<QkNorm> {
        self.qk_norm
    }

    /// Returns whether heads are normalised after their rotation.
    pub fn norm_after_rope(&self) -> bool {
        self.norm_after_rope
    }

    /// Returns the epsilon of the norm of each value head.
    pub fn value_norm(&self) -> Option<f64> {
        self.value_norm
    }

    /// Returns the gate of the heads' outputs.
    pub fn output_gate(&self) -> Option<OutputGate> {
        self.output_gate
    }

    /// Returns the norm of the concatenated heads' outputs.
    pub fn output_norm(&self) -> Option<OutputNorm> {
        self.output_norm
    }
}

/// Validation.
impl MultiHeadAttentionConfig {
    /// Checks that every option is in its range and that the options fit together.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub fn validate(&self) -> Result<()> {
        self.validate_ranges()?;
        self.validate_heads()?;
        self.validate_kv_sharing()?;
        self.validate_appended_keys()?;
        self.validate_norms()?;
        if let Some(temperature) = &self.attention_temperature {
            temperature.validate()?;
        }
        if let Some(rope) = &self.rope {
            rope.validate(self.head_dim())?;
        }
        if let Some(alibi) = &self.alibi {
            alibi.validate(self.num_heads)?;
        }
        if let Some(relative_bias) = &self.relative_bias {
            relative_bias.validate()?;
        }
        if let Some(positions) = &self.content_positions {
            positions.validate()?;
            self.validate_content_positions(positions)?;
        }
        Ok(())
    }

    /// Checks every number by itself.
    fn validate_ranges(&self) -> Result<()> {
        number::size(OP, "embed_dim", self.embed_dim)?;
        number::size(OP, "num_heads", self.num_heads)?;
        number::size(OP, "num_kv_heads", self.num_kv_heads)?;
        number::size(OP, "head_dim", self.head_dim)?;
        number::size(OP, "value_head_dim", self.value_head_dim)?;
        number::size(OP, "out_dim", self.out_dim)?;
        number::size(OP, "kdim", self.kdim)?;
        number::size(OP, "vdim", self.vdim)?;
        number::size(OP, "context_length", self.context_length)?;
        number::size(OP, "window", self.window)?;
        number::size(OP, "chunk", self.chunk)?;
        number::above_zero(OP, "clip_qkv", self.clip_qkv)?;
        number::above_zero(OP, "softcap", self.softcap)?;
        number::finite(OP, "scale", self.scale)?;
        norm::check_epsilon(OP, "qk_norm", self.qk_norm)?;
        number::epsilon(OP, "value_norm", self.value_norm)?;
        norm::check_epsilon(OP, "output_norm", self.output_norm)?;
        number::probability(OP, "dropout", self.dropout)
    }

    /// Checks the numbers of heads, their widths and the width of the output.
    fn validate_heads(&self) -> Result<()> {
        const MOST: usize = u32::MAX as usize;
        let (h, h_kv, d, d_v) = (self.num_heads, self.num_kv_heads(), self.head_dim(), self.value_head_dim());
        if !h.is_multiple_of(h_kv) {
            bail!("[{OP}] num_kv_heads is {h_kv}, which does not divide num_heads {h}")
        }
        for (name, width) in [("head_dim", d), ("value_head_dim", d_v)] {
            if h.saturating_mul(width) > MOST {
                bail!("[{OP}] num_heads {h} times {name} {width} is more than {MOST}")
            }
        }
        if self.head_dim.is_none() {
            let (name, width) = match self.out_dim {
                Some(out_dim) => ("out_dim", out_dim),
                None => ("embed_dim", self.embed_dim),
            };
            if !width.is_multiple_of(h) {
                bail!("[{OP}] num_heads is {h}, which does not divide {name} {width}; give head_dim")
            }
        }
        if self.out_proj {
            return Ok(());
        }
        let (out_dim, concatenated) = (self.out_dim(), h.saturating_mul(d_v));
        if out_dim != concatenated {
            bail!(
                "[{OP}] out_dim is {out_dim}, but without an output projection the {h} heads of width {d_v} give \
                 {concatenated}"
            )
        }
        if self.out_bias {
            bail!("[{OP}] out_bias is set, but there is no output projection")
        }
        Ok(())
    }

    /// Checks the options of keys and values that are shared.
    fn validate_kv_sharing(&self) -> Result<()> {
        match self.kv_sharing {
            KvSharing::None => Ok(()),
            KvSharing::KeysAsValues => {
                let keys = [self.head_dim(), self.kdim(), usize::from(self.k_bias)];
                let values = [self.value_head_dim(), self.vdim(), usize::from(self.v_bias)];
                if keys != values {
                    bail!(
                        "[{OP}] values are the keys' projection, expected one width of heads and inputs and a bias on \
                         both or neither, found {keys:?} for keys and {values:?} for values"
                    )
                }
                Ok(())
            }
            KvSharing::EarlierLayer => {
                for (name, is_set) in [
                    ("k_bias", self.k_bias),
                    ("v_bias", self.v_bias),
                    ("bias_kv", self.bias_kv),
                    ("add_zero_attn", self.add_zero_attn),
                    ("value_norm", self.value_norm.is_some()),
                    ("content_positions", self.content_positions.is_some()),
                ] {
                    if is_set {
                        bail!(
                            "[{OP}] {name} is set, but keys and values are those of an earlier layer, as it made them"
                        )
                    }
                }
                Ok(())
            }
        }
    }

    /// Checks the options that a layer with appended keys cannot have: these keys come after the call's, and have
    /// neither their norms nor their positions.
    fn validate_appended_keys(&self) -> Result<()> {
        let (option, key) = if self.bias_kv {
            ("bias_kv", "a learned key")
        } else if self.add_zero_attn {
            ("add_zero_attn", "a key of zeros")
        } else {
            return Ok(());
        };
        for (other, is_set) in [("qk_norm", self.qk_norm.is_some()), ("value_norm", self.value_norm.is_some())] {
            if is_set {
                bail!("[{OP}] {option} and {other} are both set, but no norm is defined for {key}")
            }
        }
        for (other, is_set) in [
            ("rope", self.rope.is_some()),
            ("alibi", self.alibi.is_some()),
            ("relative_bias", self.relative_bias.is_some()),
            ("content_positions", self.content_positions.is_some()),
        ] {
            if is_set {
                bail!("[{OP}] {option} and {other} are both set, but {key} has no position")
            }
        }
        Ok(())
    }

    /// Checks that heads can be normalised after their rotation, if they are.
    fn validate_norms(&self) -> Result<()> {
        if !self.norm_after_rope {
            return Ok(());
        }
        let Some(qk_norm) = self.qk_norm.filter(|_| self.rope.is_some()) else {
            bail!("[{OP}] norm_after_rope is set, expected both qk_norm and rope")
        };
        if qk_norm.scope == QkNormScope::Projection {
            bail!("[{OP}] norm_after_rope is set, but a norm of whole projections comes before heads")
        }
        Ok(())
    }

    /// Checks that relative positions by content fit the layer.
    fn validate_content_positions(&self, positions: &ContentPositions) -> Result<()> {
        const OP: &str = "content_positions";
        let (h, h_kv) = (self.num_heads, self.num_kv_heads());
        match positions {
            ContentPositions::Grid { .. } => {
                if self.softcap.is_some() {
                    bail!("[{OP}] softcap is set, which bounds scores before relative positions of a grid are added")
                }
                if self.scale.is_some_and(|scale| scale as f32 == 0.0) {
                    bail!("[{OP}] scale is 0, expected another beside relative positions of a grid")
                }
            }
            ContentPositions::CosineWindow { .. } => {
                if let Some(scale) = self.scale {
                    bail!("[{OP}] scale is {scale}, expected none beside the factors of cosine scores")
                }
            }
            ContentPositions::TransformerXl => {
                if !self.embed_dim.is_multiple_of(2) {
                    bail!("[{OP}] embed_dim is {}, expected pairs of sines and cosines", self.embed_dim)
                }
            }
            ContentPositions::Disentangled(_) => {
                if h != h_kv {
                    bail!("[{OP}] num_kv_heads is {h_kv}, expected the {h} query heads of disentangled positions")
                }
            }
            ContentPositions::Window { .. } | ContentPositions::Clipped { .. } => {}
        }
        Ok(())
    }
}

/// Which keys and values a layer shares.
///
/// ```
/// use candle_attention::{KvSharing, MultiHeadAttentionConfig};
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_kv_sharing(KvSharing::KeysAsValues);
/// cfg.validate().expect("keys and values have one width");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KvSharing {
    /// Nothing is shared: keys and values have a projection each.
    #[default]
    None,
    /// One projection for both: values are the keys before these are normalised and rotated (`attention_k_eq_v` of
    /// Gemma 4).
    KeysAsValues,
    /// The layer has no key and value projections. It reads what an earlier layer stored in its
    /// [cache](crate::AttentionInput::with_shared_cache) or projected to a
    /// [memory](crate::AttentionInput::with_memory) (`num_kv_shared_layers` of Gemma 3n and Gemma 4).
    EarlierLayer,
}

//! What belongs to the architecture of an attention layer.

mod content_positions;
mod kv_source;
mod options;

pub use kv_source::KvSource;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::gate::OutputGate;
use crate::norm::{ContextNorm, QkNorm, QkNormScope};
use crate::position::{AlibiConfig, ContentPositions, QueryScaling, RelativeBiasConfig, RopeConfig};
use crate::sdpa::HeadGroups;

/// The shape and options of a [`MultiHeadAttention`](crate::MultiHeadAttention): everything that belongs to the
/// architecture. What belongs to the data (lengths, padding, bias) is given at the call.
///
/// ```
/// use candle_attention::MultiHeadAttentionConfig;
/// let cfg = MultiHeadAttentionConfig::new(512, 8).with_num_kv_heads(2).with_causal(true).with_qkv_bias(true);
/// assert_eq!((cfg.head_dim(), cfg.out_dim()), (64, 512));
/// ```
///
/// Numbers that do not fit together are found by [`validate`](Self::validate), which every constructor of a layer calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct MultiHeadAttentionConfig {
    embed_dim: usize,
    num_heads: usize,
    num_kv_heads: Option<usize>,
    /// Those of a process whose heads are not whole groups.
    head_groups: Option<HeadGroups>,
    head_dim: Option<usize>,
    value_head_dim: Option<usize>,
    out_dim: Option<usize>,
    key_size: Option<usize>,
    value_size: Option<usize>,
    #[serde(default)]
    q_bias: bool,
    #[serde(default)]
    k_bias: bool,
    #[serde(default)]
    v_bias: bool,
    #[serde(default)]
    out_bias: bool,
    #[serde(default = "yes")]
    out_proj: bool,
    #[serde(default)]
    bias_kv: bool,
    #[serde(default)]
    add_zero_attn: bool,
    #[serde(default)]
    causal: bool,
    context_length: Option<usize>,
    window: Option<usize>,
    band: Option<(usize, usize)>,
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
    query_scaling: Option<QueryScaling>,
    alibi: Option<AlibiConfig>,
    relative_bias: Option<RelativeBiasConfig>,
    content_positions: Option<ContentPositions>,
    output_gate: Option<OutputGate>,
    context_norm: Option<ContextNorm>,
    #[serde(default)]
    kv_source: KvSource,
    #[serde(default)]
    dropout: f64,
}

fn yes() -> bool {
    true
}

impl MultiHeadAttentionConfig {
    /// Self-attention over inputs (B, T, `embed_dim`) with `num_heads` heads, an output projection, no biases, no mask.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: None,
            head_groups: None,
            head_dim: None,
            value_head_dim: None,
            out_dim: None,
            key_size: None,
            value_size: None,
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
            band: None,
            chunk: None,
            clip_qkv: None,
            softcap: None,
            scale: None,
            sinks: false,
            qk_norm: None,
            rope: None,
            norm_after_rope: false,
            value_norm: None,
            query_scaling: None,
            alibi: None,
            relative_bias: None,
            content_positions: None,
            output_gate: None,
            context_norm: None,
            kv_source: KvSource::Projected,
            dropout: 0.0,
        }
    }
}

impl MultiHeadAttentionConfig {
    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("embed_dim", Some(self.embed_dim)),
            ("num_heads", Some(self.num_heads)),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("value_head_dim", self.value_head_dim),
            ("out_dim", self.out_dim),
            ("key_size", self.key_size),
            ("value_size", self.value_size),
            ("context_length", self.context_length),
            ("window", self.window),
            ("chunk", self.chunk),
        ];
        for (name, size) in sizes {
            match size {
                Some(0) => bail!("[multi_head_attention] {name} is 0, expected at least 1"),
                // Products of two sizes must fit a tensor's shape.
                Some(size) if size > u32::MAX as usize => {
                    bail!("[multi_head_attention] {name} is {size}, expected at most {}", u32::MAX)
                }
                _ => {}
            }
        }
        let (h, h_kv) = (self.num_heads, self.num_kv_heads());
        match self.head_groups {
            Some(groups) => groups.check("multi_head_attention", h, h_kv)?,
            None if h.is_multiple_of(h_kv) => {}
            None => bail!("[multi_head_attention] num_kv_heads is {h_kv}, which does not divide num_heads {h}"),
        }
        for (name, width) in [("head_dim", self.head_dim()), ("value_head_dim", self.value_head_dim())] {
            if h.saturating_mul(width) > u32::MAX as usize {
                bail!("[multi_head_attention] num_heads {h} times {name} {width} is more than {}", u32::MAX)
            }
        }
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        if self.head_dim.is_none() && !out_dim.is_multiple_of(h) {
            let name = if self.out_dim.is_some() { "out_dim" } else { "embed_dim" };
            bail!("[multi_head_attention] num_heads is {h}, which does not divide {name} {out_dim}; give head_dim")
        }
        let heads = h.saturating_mul(self.value_head_dim());
        if !self.out_proj && self.out_dim() != heads {
            bail!(
                "[multi_head_attention] out_dim is {}, but without an output projection the {h} heads of width {} give {heads}",
                self.out_dim(),
                self.value_head_dim()
            )
        }
        if !self.out_proj && self.out_bias {
            bail!("[multi_head_attention] out_bias is set, but there is no output projection")
        }
        if !(0.0..=1.0).contains(&self.dropout) {
            bail!("[multi_head_attention] dropout is {}, expected a probability from 0 to 1", self.dropout)
        }
        for (name, number) in [("softcap", self.softcap), ("clip_qkv", self.clip_qkv)] {
            if let Some(number) = number.filter(|number| !number.is_finite() || *number <= 0.0) {
                bail!("[multi_head_attention] {name} is {number}, expected a finite number above zero")
            }
        }
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            bail!("[multi_head_attention] scale is {scale}, expected a finite number")
        }
        if let Some(norm) = self.qk_norm.filter(|norm| !((norm.eps as f32).is_finite() && norm.eps >= 0.0)) {
            bail!("[multi_head_attention] qk_norm has eps {}, expected a finite number of zero or more", norm.eps)
        }
        if let Some(eps) = self.value_norm.filter(|eps| !((*eps as f32).is_finite() && *eps >= 0.0)) {
            bail!("[multi_head_attention] value_norm is {eps}, expected a finite number of zero or more")
        }
        if let Some(norm) = self.context_norm.filter(|norm| !((norm.eps as f32).is_finite() && norm.eps >= 0.0)) {
            bail!("[multi_head_attention] context_norm has eps {}, expected a finite number of zero or more", norm.eps)
        }
        if let Some(scaling) = &self.query_scaling {
            scaling.validate()?;
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
        self.validate_kv_source()?;
        self.validate_content_positions()?;
        self.validate_appended()?;
        self.validate_order()
    }

    /// Keys of the layer's own come after those of a call, whose norms and positions they do not have.
    fn validate_appended(&self) -> Result<()> {
        let (option, key) = match (self.bias_kv, self.add_zero_attn) {
            (true, _) => ("bias_kv", "a learned key"),
            (false, true) => ("add_zero_attn", "a key of zeros"),
            (false, false) => return Ok(()),
        };
        let others = [
            ("qk_norm", self.qk_norm.is_some(), format!("no norm is defined for {key}")),
            ("value_norm", self.value_norm.is_some(), format!("no norm is defined for {key}")),
            ("rope", self.rope.is_some(), format!("{key} has no position")),
            ("alibi", self.alibi.is_some(), format!("{key} has no position")),
            ("relative_bias", self.relative_bias.is_some(), format!("{key} has no position")),
            ("content_positions", self.content_positions.is_some(), format!("{key} has no position")),
        ];
        match others.into_iter().find(|&(_, is_set, _)| is_set) {
            Some((other, _, why)) => bail!("[multi_head_attention] {option} and {other} are both set, but {why}"),
            None => Ok(()),
        }
    }

    fn validate_order(&self) -> Result<()> {
        if !self.norm_after_rope {
            return Ok(());
        }
        match (&self.rope, self.qk_norm) {
            (Some(_), Some(norm)) if norm.scope == QkNormScope::Projection => {
                bail!(
                    "[multi_head_attention] norm_after_rope is set, but a norm of whole projections comes before heads"
                )
            }
            (Some(_), Some(_)) => Ok(()),
            _ => bail!("[multi_head_attention] norm_after_rope is set, expected both qk_norm and rope"),
        }
    }
}

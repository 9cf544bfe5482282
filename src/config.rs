//! What belongs to the architecture of an attention layer.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::QkNorm;

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
pub struct MultiHeadAttentionConfig {
    embed_dim: usize,
    num_heads: usize,
    #[serde(default)]
    num_kv_heads: Option<usize>,
    #[serde(default)]
    head_dim: Option<usize>,
    #[serde(default)]
    value_head_dim: Option<usize>,
    #[serde(default)]
    out_dim: Option<usize>,
    #[serde(default)]
    key_size: Option<usize>,
    #[serde(default)]
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
    causal: bool,
    #[serde(default)]
    context_length: Option<usize>,
    #[serde(default)]
    window: Option<usize>,
    #[serde(default)]
    softcap: Option<f64>,
    #[serde(default)]
    scale: Option<f64>,
    #[serde(default)]
    sinks: bool,
    #[serde(default)]
    qk_norm: Option<QkNorm>,
    #[serde(default)]
    dropout: f64,
}

fn yes() -> bool {
    true
}

/// Builders: each takes the config and gives it back with one thing changed.
impl MultiHeadAttentionConfig {
    /// Self-attention over inputs (B, T, `embed_dim`) with `num_heads` heads, an output projection, no biases, no mask.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: None,
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
            causal: false,
            context_length: None,
            window: None,
            softcap: None,
            scale: None,
            sinks: false,
            qk_norm: None,
            dropout: 0.0,
        }
    }

    /// Grouped-query attention: fewer key and value heads, each shared by `num_heads / num_kv_heads` query heads.
    pub fn with_num_kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = Some(num_kv_heads);
        self
    }

    /// D, the width of one query and key head; `out_dim / num_heads` unless given.
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    /// D_v, the width of one value head; D unless given.
    pub fn with_value_head_dim(mut self, value_head_dim: usize) -> Self {
        self.value_head_dim = Some(value_head_dim);
        self
    }

    /// The width of the layer's output (the book's `d_out`, d2l's `num_hiddens`); `embed_dim` unless given.
    pub fn with_out_dim(mut self, out_dim: usize) -> Self {
        self.out_dim = Some(out_dim);
        self
    }

    /// The width of the keys' input in cross-attention (PyTorch's `kdim`); `embed_dim` unless given.
    pub fn with_key_size(mut self, key_size: usize) -> Self {
        self.key_size = Some(key_size);
        self
    }

    /// The width of the values' input in cross-attention (PyTorch's `vdim`); `key_size` unless given.
    pub fn with_value_size(mut self, value_size: usize) -> Self {
        self.value_size = Some(value_size);
        self
    }

    /// Biases on all four projections.
    pub fn with_bias(self, bias: bool) -> Self {
        self.with_qkv_bias(bias).with_out_bias(bias)
    }

    /// Biases on the query, key and value projections.
    pub fn with_qkv_bias(self, bias: bool) -> Self {
        self.with_q_bias(bias).with_k_bias(bias).with_v_bias(bias)
    }

    /// A bias on the query projection.
    pub fn with_q_bias(mut self, bias: bool) -> Self {
        self.q_bias = bias;
        self
    }

    /// A bias on the key projection.
    pub fn with_k_bias(mut self, bias: bool) -> Self {
        self.k_bias = bias;
        self
    }

    /// A bias on the value projection.
    pub fn with_v_bias(mut self, bias: bool) -> Self {
        self.v_bias = bias;
        self
    }

    /// A bias on the output projection.
    pub fn with_out_bias(mut self, bias: bool) -> Self {
        self.out_bias = bias;
        self
    }

    /// Whether there is an output projection; without one the heads' contexts stand side by side.
    pub fn with_out_proj(mut self, out_proj: bool) -> Self {
        self.out_proj = out_proj;
        self
    }

    /// One more key and value, learned (`bias_k`, `bias_v`), which every query sees: `add_bias_kv` of
    /// `torch.nn.MultiheadAttention`. The weights have T_kv + 1 columns then.
    pub fn with_bias_kv(mut self, bias_kv: bool) -> Self {
        self.bias_kv = bias_kv;
        self
    }

    /// No query sees a later key; aligned to the end, see [`AttentionMask::causal`](crate::AttentionMask::causal).
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// The most positions that a call may have; more are an error.
    pub fn with_context_length(mut self, context_length: usize) -> Self {
        self.context_length = Some(context_length);
        self
    }

    /// The number of keys that a query sees back from its own, see
    /// [`AttentionMask::with_window`](crate::AttentionMask::with_window).
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// Bounds the scores, see [`SdpaOptions::with_softcap`](crate::SdpaOptions::with_softcap).
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Learned attention sinks (parameter `sinks`), see [`SdpaOptions::with_sinks`](crate::SdpaOptions::with_sinks).
    pub fn with_sinks(mut self, sinks: bool) -> Self {
        self.sinks = sinks;
        self
    }

    /// Normalises queries and keys before attention.
    pub fn with_qk_norm(mut self, qk_norm: QkNorm) -> Self {
        self.qk_norm = Some(qk_norm);
        self
    }

    /// The probability with which a weight is dropped in training.
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }
}

/// Readers, with what was not given worked out.
impl MultiHeadAttentionConfig {
    /// E, the width of the layer's input.
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// H, the number of query heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

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
    pub fn key_size(&self) -> usize {
        self.key_size.unwrap_or(self.embed_dim)
    }

    /// The width of the values' input.
    pub fn value_size(&self) -> usize {
        self.value_size.unwrap_or_else(|| self.key_size())
    }

    /// Whether the query, key and value projections have biases.
    pub fn qkv_bias(&self) -> [bool; 3] {
        [self.q_bias, self.k_bias, self.v_bias]
    }

    /// Whether the output projection has a bias.
    pub fn out_bias(&self) -> bool {
        self.out_bias
    }

    /// Whether there is an output projection.
    pub fn out_proj(&self) -> bool {
        self.out_proj
    }

    /// Whether a learned key and value are appended.
    pub fn bias_kv(&self) -> bool {
        self.bias_kv
    }

    /// Whether later keys are hidden.
    pub fn causal(&self) -> bool {
        self.causal
    }

    /// The most positions that a call may have.
    pub fn context_length(&self) -> Option<usize> {
        self.context_length
    }

    /// The number of keys that a query sees back from its own.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// The bound of the scores.
    pub fn softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// The factor on q kᵀ where it is not 1/sqrt(D).
    pub fn scale(&self) -> Option<f64> {
        self.scale
    }

    /// Whether there are learned attention sinks.
    pub fn sinks(&self) -> bool {
        self.sinks
    }

    /// The normalisation of queries and keys.
    pub fn qk_norm(&self) -> Option<QkNorm> {
        self.qk_norm
    }

    /// The probability with which a weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

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
        if !h.is_multiple_of(h_kv) {
            bail!("[multi_head_attention] num_kv_heads is {h_kv}, which does not divide num_heads {h}")
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
        if let Some(softcap) = self.softcap.filter(|&softcap| !(softcap.is_finite() && softcap > 0.0)) {
            bail!("[multi_head_attention] softcap is {softcap}, expected a finite number above zero")
        }
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            bail!("[multi_head_attention] scale is {scale}, expected a finite number")
        }
        if self.bias_kv && self.qk_norm.is_some() {
            bail!("[multi_head_attention] bias_kv and qk_norm are both set, but no norm is defined for a learned key")
        }
        if let Some(norm) = self.qk_norm.filter(|norm| !((norm.eps as f32).is_finite() && norm.eps >= 0.0)) {
            bail!("[multi_head_attention] qk_norm has eps {}, expected a finite number of zero or more", norm.eps)
        }
        Ok(())
    }
}

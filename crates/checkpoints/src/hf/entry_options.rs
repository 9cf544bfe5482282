//! The options of a layer's attention that columns of a family describe.

use candle_attention_core::MultiHeadAttentionConfig;
use candle_attention_modules::norm::QkNorm;
use candle_core::Result;
use serde_json::Value;

use super::columns::Number;
use super::entry::Entry;
use super::families::{Bias, Family, Heads, Mask, Scale};
use super::fields::Fields;

/// The field of the number of key and value heads.
const KEY_HEADS: &str = "num_key_value_heads";

impl Entry<'_> {
    /// Returns a config with the width of the input and the heads.
    pub(super) fn heads(&self, fields: &Fields) -> Result<MultiHeadAttentionConfig> {
        let Family { size_names, heads, .. } = self.family;
        let stages = self.family.stages.as_ref();
        let embed_dim = match stages {
            Some(stages) => stages.width(fields, size_names.embed_dim, self.family.default_sizes.embed_dim)?,
            None => self.embed_dim(fields)?,
        };
        let num_heads = match stages {
            Some(stages) => stages.num_heads(fields, size_names.num_heads)?,
            None => self.num_heads(fields)?,
        };
        let cfg = MultiHeadAttentionConfig::new(embed_dim, num_heads);
        if self.family.head_dim_follows || matches!(heads, Heads::Equal) {
            fields.agrees("head_dim", embed_dim / num_heads)?;
        }
        let (kv_heads, head_dim) = match heads {
            Heads::By(key_heads) => return Ok(cfg.with_num_kv_heads(key_heads(fields, num_heads)?)),
            Heads::Equal => return fields.agrees("num_key_value_heads", num_heads).map(|()| cfg),
            Heads::Same(name) => return fields.agrees(name, num_heads).map(|()| cfg.with_num_kv_heads(num_heads)),
            Heads::Grouped(kv_heads, head_dim) => (kv_heads, head_dim),
        };
        let kv_heads = fields.nullable(KEY_HEADS, kv_heads)?.unwrap_or(num_heads);
        if !fields.has(KEY_HEADS) {
            refuse_other_key_heads(fields, kv_heads)?;
        }
        let cfg = cfg.with_num_kv_heads(kv_heads);
        Ok(match fields.nullable("head_dim", head_dim)? {
            Some(head_dim) => cfg.with_head_dim(head_dim),
            // The check of the config finds a remainder.
            None if embed_dim.is_multiple_of(num_heads) => cfg.with_head_dim(embed_dim / num_heads),
            None => cfg,
        })
    }

    /// Sets which projections have biases.
    pub(super) fn biases(&self, fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        Ok(match self.family.bias {
            Bias::None => cfg,
            Bias::All => cfg.with_bias(true),
            Bias::AllIf(name, default) => cfg.with_bias(fields.flag(name, default)?),
            Bias::Qkv => cfg.with_qkv_bias(true),
            Bias::QkvIf(name, default) => cfg.with_qkv_bias(fields.flag(name, default)?),
            Bias::Out => cfg.with_out_bias(true),
            Bias::OutAndQkvIf(name, default) => cfg.with_qkv_bias(fields.flag(name, default)?).with_out_bias(true),
            Bias::OutAndQvIf(name, default) => {
                cfg.with_qkv_bias(fields.flag(name, default)?).with_out_bias(true).with_k_bias(false)
            }
            Bias::AllButKey => cfg.with_bias(true).with_k_bias(false),
            Bias::Each([q, k, v, out]) => cfg
                .with_q_bias(fields.flag(q.0, q.1)?)
                .with_k_bias(fields.flag(k.0, k.1)?)
                .with_v_bias(fields.flag(v.0, v.1)?)
                .with_out_bias(fields.flag(out.0, out.1)?),
        })
    }

    /// Sets the rotary positions.
    pub(super) fn rope(
        &self,
        fields: &Fields,
        window: Option<usize>,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        let Some(rope) = self.family.rope else { return Ok(cfg) };
        let head_dim = cfg.head_dim();
        let rope = match self.family.windowed_rope {
            Some(windowed) if window.is_some() => windowed.of_kind(fields, "sliding_attention", head_dim)?,
            Some(_) => rope.of_kind(fields, "full_attention", head_dim)?,
            None if rope.rotates(fields, window)? => rope.config(fields, head_dim)?,
            None => return Ok(cfg),
        };
        Ok(cfg.with_rope(rope))
    }

    /// Sets the norm of queries and keys, the scale, the sinks, and the gate of the attention output.
    pub(super) fn scores(
        &self,
        fields: &Fields,
        mut cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        if let Some(norm) = self.family.qk_norm
            && norm.flag.map_or(Ok(true), |flag| fields.flag(flag, false))?
        {
            let eps = fields.get_or(norm.eps.0, norm.eps.1)?;
            cfg = cfg.with_qk_norm(QkNorm { kind: norm.kind, scope: norm.scope, eps });
        }
        if let Some(scale) = self.family.scale {
            let width = cfg.head_dim() as f64;
            cfg = cfg.with_scale(match scale {
                Scale::Fixed(scale) => scale,
                Scale::Field(Number(name, default)) => fields.get_or(name, default)?,
                Scale::RootOf(Number(name, default)) => fields.get_or(name, default)?.powf(-0.5),
                Scale::UsualOr(name) => fields.optional(name)?.unwrap_or(width.powf(-0.5)),
                Scale::UsualTimes(Number(name, default)) => fields.optional(name)?.unwrap_or(default) / width.sqrt(),
            });
        }
        cfg = cfg.with_output_gate(self.family.gate);
        Ok(if self.family.sinks { cfg.with_sinks(true) } else { cfg })
    }

    /// Sets whether the layer is causal, and its window.
    pub(super) fn mask(
        &self,
        fields: &Fields,
        window: Option<usize>,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        let is_decoder = match self.family.mask {
            Mask::Encoder => false,
            Mask::CausalIf(name) => fields.flag(name, false)?,
            Mask::CausalOrBidirectional if is_bidirectional(fields)? => {
                fields.only("is_causal", true)?;
                // Half of the window is on each side of the query.
                let side = window.map(|window| window / 2);
                return Ok(with_window_on_each_side(cfg.with_causal(false), side));
            }
            Mask::Causal | Mask::CausalOrBidirectional => true,
        };
        if is_decoder && fields.flag("is_causal", true)? {
            return Ok(cfg.with_causal(true).with_window(window));
        }
        Ok(with_window_on_each_side(cfg.with_causal(false), window))
    }
}

/// Refuses a number of key heads under a name that other models have, which transformers ignores: the config was
/// written out. `kv_heads` is the number without the field.
fn refuse_other_key_heads(fields: &Fields, kv_heads: usize) -> Result<()> {
    for name in ["num_kv_heads", "n_kv_heads", "num_heads_kv", "n_head_kv", "num_key_value_head", "kv_heads"] {
        match fields.get(name) {
            Some(number) if *number != kv_heads => {
                return fields.fail(format!("{name} is {number}, but the model's field is {KEY_HEADS}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Sets a window of this many keys on each side of a query; `None` means all keys.
fn with_window_on_each_side(cfg: MultiHeadAttentionConfig, side: Option<usize>) -> MultiHeadAttentionConfig {
    match side {
        Some(side) => cfg.with_local_window(side, side),
        None => cfg,
    }
}

/// Reads Gemma 4's `use_bidirectional_attention`: a flag, `"all"`, or `"vision"` for images alone, which the caller's
/// mask has to say.
fn is_bidirectional(fields: &Fields) -> Result<bool> {
    const NAME: &str = "use_bidirectional_attention";
    match fields.get(NAME).and_then(Value::as_str) {
        Some("all") => Ok(true),
        Some("vision") => Ok(false),
        _ => fields.flag(NAME, false),
    }
}

//! A config.json and the row of the table that reads it: the config of a layer's attention.

use std::sync::{LazyLock, Once};

use candle_attention_core::{KvSharing, MultiHeadAttentionConfig, MultiHeadLatentAttentionConfig};
use candle_attention_delta::GatedDeltaNetConfig;
use candle_attention_modules::base::did_you_mean;
use candle_attention_modules::norm::QkNorm;
use candle_core::{Result, bail};
use serde_json::Value;

use super::families::{Bias, DECODER_LAYERS, Family, HIDDEN, Heads, Mask, Number, SIZE_NAMES, Scale, families};
use super::fields::{Fields, with};

/// A model, or its decoder's part.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub json: &'a Value,
    /// The row of the model, or of the part, which has the model's name.
    pub family: Family,
}

/// The values of `model_type` that are known, in alphabetical order.
pub(super) fn model_types() -> impl Iterator<Item = &'static str> {
    static SORTED: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let mut known: Vec<_> = families().map(|family| family.model_type).collect();
        known.sort_unstable();
        known
    });
    SORTED.iter().copied()
}

/// The row of a config.
fn known(json: &Value) -> Option<&'static Family> {
    let model_type = json["model_type"].as_str()?;
    families().find(|family| family.model_type == model_type)
}

impl<'a> Entry<'a> {
    /// The model that a configuration names.
    pub fn of(json: &'a Value) -> Result<Self> {
        const EXPECTED: &str = "expected one of `hf::architectures()`";
        let Some(object) = json.as_object() else { bail!("[hf] the config is {json}, expected an object") };
        let Some(model_type) = object.get("model_type") else { bail!("[hf] the config has no model_type, {EXPECTED}") };
        if let Some(family) = known(json) {
            return Ok(Self { json, family: *family });
        }
        let parts = object.iter().filter(|(_, part)| known(part).is_some());
        let parts: Vec<_> = parts.map(|(name, part)| format!("{name} ({})", part["model_type"])).collect();
        match parts.as_slice() {
            [] => {
                let name = model_type.as_str().unwrap_or_default();
                bail!("[hf] unknown model_type {model_type}, {}", did_you_mean(name, model_types(), || EXPECTED.into()))
            }
            parts => bail!("[hf] unknown model_type {model_type}, but its parts are known: {}", parts.join(", ")),
        }
    }

    /// The decoder beside an encoder.
    pub fn decoder(self) -> Result<Self> {
        self.part(self.family.decoder, "decoder beside an encoder")
    }

    /// The decoder's attention to an encoder's outputs.
    pub fn cross(self) -> Result<Self> {
        self.part(self.family.cross, "attention to an encoder's outputs")
    }

    fn part(self, part: Option<&Family>, what: &str) -> Result<Self> {
        let Family { model_type, sizes, dropout, decoder_sizes, .. } = self.family;
        match part {
            Some(part) => {
                let sizes = decoder_sizes.unwrap_or(sizes);
                Ok(Self { family: part.of(model_type).sizes(sizes).dropout(dropout), ..self })
            }
            None => bail!("[hf] {model_type}: there is no {what} in this architecture, or none that is supported"),
        }
    }

    /// The attention of one layer.
    pub fn attention(&self, layer: usize) -> Result<MultiHeadAttentionConfig> {
        let fields = &self.fields(layer)?;
        self.refuse_linear(fields)?;
        if self.family.latent.is_some() {
            return fields
                .fail("attention is latent, expected a call of `latent_attention_config` or `load_latent_attention`");
        }
        self.refuse_others(fields)?;
        let window = self.family.window.of(fields)?;
        let cfg = self.heads(fields)?;
        let Number(name, default) = self.family.dropout;
        let cfg = cfg.with_dropout(fields.nullable(name, Some(default))?.unwrap_or(0.0));
        let cfg = self.rope(fields, window, self.biases(fields, cfg)?)?;
        let cfg = self.scores(fields, cfg)?;
        let cfg = self.mask(fields, window, cfg)?;
        let cfg = match self.family.positions {
            Some(positions) => positions.add(fields, cfg)?,
            None => cfg,
        };
        let cfg = self.family.rules.iter().try_fold(cfg, |cfg, rule| rule(fields, cfg))?;
        let cfg = match self.earlier(fields)? {
            Some(_) => cfg.with_kv_sharing(KvSharing::EarlierLayer).with_k_bias(false).with_v_bias(false),
            None if self.family.value_norm => cfg.with_value_norm(fields.get_or("rms_norm_eps", 1e-6)?),
            None => cfg,
        };
        cfg.validate()?;
        Ok(cfg)
    }

    /// The latent attention of one layer.
    pub fn latent_attention(&self, layer: usize) -> Result<MultiHeadLatentAttentionConfig> {
        let fields = &self.fields(layer)?;
        self.refuse_linear(fields)?;
        let (Some(latent), Some(rope)) = (self.family.latent, &self.family.rope) else {
            return fields.fail("attention is not latent, expected a call of `attention_config` or `load_attention`");
        };
        self.refuse_others(fields)?;
        let (embed_dim, num_heads) = (self.size(fields, 1)?, self.size(fields, 2)?);
        let cfg = latent.config(fields, embed_dim, num_heads, rope)?;
        cfg.validate()?;
        Ok(cfg)
    }

    /// Whether the attention of one layer is linear.
    pub fn is_linear(&self, layer: usize) -> Result<bool> {
        let fields = &self.fields(layer)?;
        self.family.linear.map_or(Ok(false), |linear| linear.is_in(fields))
    }

    /// The linear attention of one layer.
    pub fn linear_attention(&self, layer: usize) -> Result<GatedDeltaNetConfig> {
        let fields = &self.fields(layer)?;
        match self.family.linear {
            Some(linear) if linear.is_in(fields)? => {
                let [_, embed_dim, heads] = self.family.sizes;
                let cfg = linear.config(fields, [embed_dim, heads])?;
                cfg.validate()?;
                Ok(cfg)
            }
            _ => {
                let kind = if self.family.latent.is_some() { "latent_attention" } else { "attention" };
                fields.fail(format!(
                    "layer {layer} has no linear attention, expected a call of `{kind}_config` or `load_{kind}`"
                ))
            }
        }
    }

    /// An error if the attention of a layer is linear, or of a kind that is not supported.
    fn refuse_linear(&self, fields: &Fields) -> Result<()> {
        let Some(linear) = self.family.linear else { return Ok(()) };
        if linear.is_in(fields)? {
            return fields.fail(format!(
                "layer {} has linear attention, expected a call of `linear_attention_config` or `load_linear_attention`",
                fields.layer
            ));
        }
        match self.family.unsupported {
            Some(kind) => fields.fail(format!("layer {} has {kind}, which is not supported", fields.layer)),
            None => Ok(()),
        }
    }

    /// The earlier layer whose keys and values a layer reads.
    pub fn kv_shared_layer(&self, layer: usize) -> Result<Option<usize>> {
        self.earlier(&self.fields(layer)?)
    }

    /// What stands for `{}` in the names of a layer.
    pub fn place(&self, layer: usize) -> Result<Vec<usize>> {
        match &self.family.stages {
            Some(stages) => Ok(stages.place(&self.fields(layer)?)?.to_vec()),
            None => Ok(vec![layer]),
        }
    }

    fn fields(&self, layer: usize) -> Result<Fields<'a>> {
        let Family { model_type, names, sizes, usual_names, .. } = self.family;
        let Some(object) = self.json.as_object() else { bail!("[hf] the config is {}, expected an object", self.json) };
        // The usual names of sizes are read too, where a family has others.
        let renamed = SIZE_NAMES.into_iter().zip(names).filter(|(usual, own)| usual_names && usual != own);
        let fields = Fields::new(model_type, object, self.family.aliases.iter().copied().chain(renamed).collect());
        let fields = match self.family.section {
            // Older configurations have the text's fields beside those of the other parts.
            Some(name) if fields.has(name) || !fields.has(HIDDEN) => fields.section(name)?,
            _ => fields,
        };
        if let Some(stages) = &self.family.stages {
            let fields = fields.of(layer, 0)?;
            stages.place(&fields)?;
            return Ok(fields);
        }
        let layers = match names[0] {
            // T5's decoders are as deep as their encoders unless they say otherwise.
            DECODER_LAYERS if fields.get(DECODER_LAYERS).is_none() => fields.get_or("num_layers", sizes[0])?,
            _ => self.size(&fields, 0)?,
        };
        if layer >= layers {
            return fields.fail(format!("there is no layer {layer}, {} is {layers}", names[0]));
        }
        fields.of(layer, layers)
    }

    /// Reads the number of layers, `embed_dim` or `num_heads`, or their default where transformers has one.
    fn size(&self, fields: &Fields, which: usize) -> Result<usize> {
        let Family { names, sizes, has_default_sizes, model_type, .. } = self.family;
        if !has_default_sizes {
            return fields.required(names[which]);
        }
        if which == 2 && !fields.has(names[2]) && fields.has(names[1]) {
            static LOGGED: Once = Once::new();
            LOGGED.call_once(|| {
                log::warn!(
                    "[hf] {model_type}: {} is missing beside {}, the default of transformers is {}",
                    names[2],
                    names[1],
                    sizes[2]
                );
            });
        }
        fields.get_or(names[which], sizes[which])
    }

    fn refuse_others(&self, fields: &Fields) -> Result<()> {
        self.family
            .only
            .iter()
            .try_for_each(|(name, only)| fields.only(name, only.parse::<Value>().unwrap_or_default()))
    }

    fn heads(&self, fields: &Fields) -> Result<MultiHeadAttentionConfig> {
        let Family { names, heads, .. } = self.family;
        let embed_dim = self.size(fields, 1)?;
        let [embed_dim, num_heads] = match &self.family.stages {
            Some(stages) => stages.sizes(fields, embed_dim, names[2])?,
            None => [embed_dim, self.size(fields, 2)?],
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
        let kv_heads = fields.nullable("num_key_value_heads", kv_heads)?.unwrap_or(num_heads);
        let cfg = cfg.with_num_kv_heads(kv_heads);
        Ok(match fields.nullable("head_dim", head_dim)? {
            Some(head_dim) => cfg.with_head_dim(head_dim),
            // Where there is a remainder, the config's own check finds it.
            None if embed_dim.is_multiple_of(num_heads) => cfg.with_head_dim(embed_dim / num_heads),
            None => cfg,
        })
    }

    fn biases(&self, fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
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

    fn rope(
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

    /// What scores are made of, and the gate of the context.
    fn scores(&self, fields: &Fields, mut cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
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
        let cfg = with(cfg, self.family.gate, MultiHeadAttentionConfig::with_output_gate);
        Ok(if self.family.sinks { cfg.with_sinks(true) } else { cfg })
    }

    fn mask(
        &self,
        fields: &Fields,
        window: Option<usize>,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        // What an encoder sees on each side, if not all keys.
        let encoder = match self.family.mask {
            Mask::Encoder => Some(window),
            Mask::CausalIf(name) => (!fields.flag(name, false)?).then_some(window),
            Mask::CausalOrBidirectional if is_bidirectional(fields)? => {
                fields.only("is_causal", true)?;
                Some(window.map(|window| window / 2))
            }
            Mask::Causal | Mask::CausalOrBidirectional => None,
        };
        let causal = encoder.is_none() && fields.flag("is_causal", true)?;
        let cfg = cfg.with_causal(causal);
        Ok(match encoder.unwrap_or(window) {
            Some(window) if causal => cfg.with_window(window),
            Some(side) => cfg.with_local_window(side, side),
            None => cfg,
        })
    }

    /// The last layer of the same kind before the `num_kv_shared_layers` last ones, for these.
    fn earlier(&self, fields: &Fields) -> Result<Option<usize>> {
        const SHARED: &str = "num_kv_shared_layers";
        let Some(default) = self.family.kv_shared_layers else { return Ok(None) };
        let shared = fields.count(SHARED, default)?;
        let own = fields.num_layers.saturating_sub(shared);
        if fields.layer < own {
            return Ok(None);
        }
        let mut other = fields.clone();
        let mut is_windowed = |layer| {
            other.layer = layer;
            self.family.window.of(&other).map(|window| window.is_some())
        };
        let kind = is_windowed(fields.layer)?;
        for earlier in (0..own).rev() {
            if is_windowed(earlier)? == kind {
                return Ok(Some(earlier));
            }
        }
        let layer = fields.layer;
        fields.fail(format!("{SHARED} is {shared}, but no layer of the kind of layer {layer} comes before these"))
    }
}

/// Gemma 4 says `"all"`, and `"vision"` for images alone, whose places the caller's mask knows.
fn is_bidirectional(fields: &Fields) -> Result<bool> {
    const NAME: &str = "use_bidirectional_attention";
    match fields.get(NAME).and_then(Value::as_str) {
        Some("all") => Ok(true),
        Some("vision") => Ok(false),
        _ => fields.flag(NAME, false),
    }
}

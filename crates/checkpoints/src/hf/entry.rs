//! The config of a layer's attention, from a config.json and the row of the table that reads it.

use std::sync::LazyLock;

use candle_attention_core::{
    CompressedKeyAttentionConfig, KvSharing, MultiHeadAttentionConfig, MultiHeadLatentAttentionConfig,
};
use candle_attention_delta::GatedDeltaNetConfig;
use candle_attention_modules::base::did_you_mean;
use candle_attention_modules::warn_once;
use candle_core::{Result, bail};
use serde_json::{Map, Value};

use super::columns::Number;
use super::families::{Family, Sizes, families};
use super::fields::Fields;
use super::latent::Windowed;
use super::linear;
use super::names::{DECODER_LAYERS, HIDDEN};
use super::refused;

/// The beginning of the names of fields that are for layers with a window.
const WINDOWED_FIELDS: &str = "swa_";

/// A model or its decoder: a config and a row of the table.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub json: &'a Value,
    /// The row of the model, or of its decoder, which has the name of the model.
    pub family: Family,
}

/// Returns the values of `model_type` that are known, in alphabetical order.
pub(super) fn model_types() -> impl Iterator<Item = &'static str> {
    static SORTED: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let mut known: Vec<_> = families().map(|family| family.model_type).collect();
        known.sort_unstable();
        known
    });
    SORTED.iter().copied()
}

/// Returns the row of a config.
fn known(json: &Value) -> Option<&'static Family> {
    let model_type = json["model_type"].as_str()?;
    families().find(|family| family.model_type == model_type)
}

impl<'a> Entry<'a> {
    /// Finds the model that a config names.
    pub fn of(json: &'a Value) -> Result<Self> {
        const EXPECTED: &str = "expected one of `hf::architectures()`";
        let Some(object) = json.as_object() else { bail!("[hf] the config is {json}, expected an object") };
        let Some(model_type) = object.get("model_type") else { bail!("[hf] the config has no model_type, {EXPECTED}") };
        if let Some(family) = known(json) {
            return Ok(Self { json, family: *family });
        }
        let name = model_type.as_str().unwrap_or_default();
        let parts = object.iter().filter(|(_, part)| known(part).is_some());
        let parts: Vec<_> = parts.map(|(field, part)| format!("{field} ({})", part["model_type"])).collect();
        let parts = parts.join(", ");
        match refused::reason(name) {
            Some(reason) if parts.is_empty() => bail!("[hf] model_type {model_type} is not supported: {reason}"),
            Some(reason) => {
                bail!("[hf] model_type {model_type} is not supported: {reason}; its parts are supported: {parts}")
            }
            None if parts.is_empty() => {
                bail!("[hf] unknown model_type {model_type}, {}", did_you_mean(name, model_types(), || EXPECTED.into()))
            }
            None => bail!("[hf] unknown model_type {model_type}, but its parts are known: {parts}"),
        }
    }

    /// Returns the self-attention of the decoder of a model with an encoder.
    pub fn decoder(self) -> Result<Self> {
        self.part(self.family.decoder, "decoder with an encoder")
    }

    /// Returns the decoder's attention to an encoder's outputs.
    pub fn cross(self) -> Result<Self> {
        self.part(self.family.cross, "attention to an encoder's outputs")
    }

    /// Returns the names of the model's attention besides the self-attention of its layers.
    pub fn attention_names(&self) -> Vec<&'static str> {
        self.family.named.iter().map(|named| named.name).collect()
    }

    /// Returns the attention of this name.
    pub fn named(self, name: &str) -> Result<Self> {
        let model = self.family.model_type;
        if let Some(named) = self.family.named.iter().find(|named| named.name == name) {
            return Ok(Self { family: named.family.of(model), ..self });
        }
        let expected = match self.attention_names() {
            names if names.is_empty() => "which has no attention with a name".to_string(),
            names => format!("expected one of: {}", names.join(", ")),
        };
        bail!("[hf] {model}: there is no attention {name:?} in this architecture, {expected}")
    }

    fn part(self, part: Option<&Family>, what: &str) -> Result<Self> {
        let Family { model_type, default_sizes, dropout, default_decoder_sizes, .. } = self.family;
        match part {
            Some(part) => {
                let sizes = default_decoder_sizes.unwrap_or(default_sizes);
                Ok(Self { family: part.of(model_type).default_sizes(sizes).dropout(dropout), ..self })
            }
            None => bail!("[hf] {model_type}: there is no {what} in this architecture, or none that is supported"),
        }
    }

    /// Returns the config of one layer's attention.
    pub fn attention(&self, layer: usize) -> Result<MultiHeadAttentionConfig> {
        let fields = &self.fields(layer)?;
        self.refuse_linear(fields)?;
        if self.family.latent.is_some() {
            return fields
                .fail("attention is latent, expected a call of `latent_attention_config` or `load_latent_attention`");
        }
        if self.family.compressed.is_some() {
            return fields.fail(
                "attention is to compressed keys, expected a call of `compressed_key_attention_config` or \
                 `load_compressed_key_attention`",
            );
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

    /// Returns the config of one layer's latent attention.
    pub fn latent_attention(&self, layer: usize) -> Result<MultiHeadLatentAttentionConfig> {
        let fields = &self.fields(layer)?;
        self.refuse_linear(fields)?;
        let (Some(latent), Some(rope)) = (self.family.latent, &self.family.rope) else {
            return fields.fail("attention is not latent, expected a call of `attention_config` or `load_attention`");
        };
        self.refuse_others(fields)?;
        let embed_dim = self.embed_dim(fields)?;
        let window = self.family.window.of(fields)?;
        let cfg = match latent.windowed {
            Some(Windowed { kind, num_heads, latent }) if window.is_some() => {
                let kind = kind(fields)?;
                let fields = &fields.clone().preferring(WINDOWED_FIELDS);
                let num_heads = fields.get_or(self.family.size_names.num_heads, *num_heads)?;
                let width = latent.rotary_width(fields)?;
                let own_rope = self.family.windowed_rope.unwrap_or(*rope).of_kind(fields, kind, width)?;
                latent.config(fields, embed_dim, num_heads, own_rope)?
            }
            windowed => {
                let num_heads = self.num_heads(fields)?;
                let width = latent.rotary_width(fields)?;
                let own_rope = match windowed {
                    Some(Windowed { kind, .. }) => rope.of_kind(fields, kind(fields)?, width)?,
                    None => rope.config(fields, width)?,
                };
                latent.config(fields, embed_dim, num_heads, own_rope)?
            }
        };
        let cfg = cfg.with_window(window);
        cfg.validate()?;
        Ok(cfg)
    }

    /// Returns the config of one layer's attention to compressed keys.
    pub fn compressed_key_attention(&self, layer: usize) -> Result<CompressedKeyAttentionConfig> {
        let fields = &self.fields(layer)?;
        let (Some(compressed), Some(rope)) = (self.family.compressed, self.family.rope) else {
            return fields.fail(
                "attention is not to compressed keys, expected a call of `attention_config` or `load_attention`",
            );
        };
        self.refuse_others(fields)?;
        let cfg = compressed.config(fields, self.embed_dim(fields)?, self.num_heads(fields)?, rope)?;
        cfg.validate()?;
        Ok(cfg)
    }

    /// Returns whether the attention of one layer is linear.
    pub fn is_linear(&self, layer: usize) -> Result<bool> {
        let fields = &self.fields(layer)?;
        self.family.linear.map_or(Ok(false), |linear| linear.is_in(fields))
    }

    /// Returns the config of one layer's linear attention.
    pub fn linear_attention(&self, layer: usize) -> Result<GatedDeltaNetConfig> {
        let fields = &self.fields(layer)?;
        match self.family.linear {
            Some(linear) if linear.is_in(fields)? => {
                let Sizes { embed_dim, num_heads, .. } = self.family.default_sizes;
                let cfg = linear.config(fields, linear::LinearSizes { embed_dim, num_heads })?;
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

    /// Refuses a layer whose attention is linear.
    fn refuse_linear(&self, fields: &Fields) -> Result<()> {
        let Some(linear) = self.family.linear else { return Ok(()) };
        if linear.is_in(fields)? {
            return fields.fail(format!(
                "layer {} has linear attention, expected a call of `linear_attention_config` or \
                 `load_linear_attention`",
                fields.layer
            ));
        }
        Ok(())
    }

    /// Returns the earlier layer whose keys and values a layer reads.
    pub fn kv_shared_layer(&self, layer: usize) -> Result<Option<usize>> {
        self.earlier(&self.fields(layer)?)
    }

    /// Returns the numbers that take the place of `{}` in the names of a layer.
    pub fn numbers(&self, layer: usize) -> Result<Vec<usize>> {
        match (&self.family.stages, self.family.attentions_of_layer) {
            (Some(stages), _) => Ok(stages.place(&self.fields(layer)?)?.to_vec()),
            (None, 1) => Ok(vec![layer]),
            (None, of_layer) => Ok(vec![layer / of_layer, layer % of_layer]),
        }
    }

    fn fields(&self, layer: usize) -> Result<Fields<'a>> {
        let Family { model_type, size_names, default_sizes, usual_names, has_default_sizes, .. } = self.family;
        let Some(object) = self.json.as_object() else { bail!("[hf] the config is {}, expected an object", self.json) };
        if has_default_sizes {
            warn_of_defaults(model_type, object);
        }
        let mut aliases = self.family.aliases.to_vec();
        if usual_names {
            aliases.extend(size_names.aliases());
        }
        let mut fields = Fields::new(model_type, object, aliases);
        // Older configurations have the fields of the text next to the other parts.
        if let Some(name) = self.family.section
            && (fields.has(name) || !fields.has(HIDDEN))
        {
            fields = fields.section(name)?;
        }
        if let Some(stages) = &self.family.stages {
            let fields = fields.of(layer, 0)?;
            stages.place(&fields)?;
            return Ok(fields);
        }
        if self.family.once {
            if layer > 0 {
                return fields.fail(format!("there is no layer {layer}, the model has this attention once"));
            }
            return fields.of(layer, 1);
        }
        // T5's decoders have the layers of their encoders unless the config has another number.
        let name = if size_names.layers == DECODER_LAYERS && fields.get(DECODER_LAYERS).is_none() {
            "num_layers"
        } else {
            size_names.layers
        };
        let of_model = self.size(&fields, name, default_sizes.layers)?;
        let layers = of_model.saturating_mul(self.family.attentions_of_layer);
        if layer >= layers {
            return fields.fail(format!("there is no layer {layer}, {} is {of_model}", size_names.layers));
        }
        fields.of(layer, layers)
    }

    /// Reads a size, or its default where transformers has one.
    fn size(&self, fields: &Fields, name: &str, default: usize) -> Result<usize> {
        if self.family.has_default_sizes { fields.get_or(name, default) } else { fields.required(name) }
    }

    pub(super) fn embed_dim(&self, fields: &Fields) -> Result<usize> {
        self.size(fields, self.family.size_names.embed_dim, self.family.default_sizes.embed_dim)
    }

    /// Reads the number of heads. A config that has a width and no number of heads is likely a mistake, which is logged
    /// once.
    pub(super) fn num_heads(&self, fields: &Fields) -> Result<usize> {
        let Family { size_names, default_sizes, model_type, has_default_sizes, .. } = self.family;
        let name = size_names.num_heads;
        let width = size_names.embed_dim;
        if has_default_sizes && !fields.has(name) && fields.has(width) {
            let default = default_sizes.num_heads;
            warn_once!("[hf] {model_type}: {width} is given without {name}, whose default is {default}");
        }
        self.size(fields, name, default_sizes.num_heads)
    }

    fn refuse_others(&self, fields: &Fields) -> Result<()> {
        self.family
            .only
            .iter()
            .try_for_each(|(name, only)| fields.only(name, only.parse::<Value>().unwrap_or_default()))
    }

    /// Returns the layer whose keys and values one of the last `num_kv_shared_layers` layers reads: the last layer of
    /// the same kind before them.
    fn earlier(&self, fields: &Fields) -> Result<Option<usize>> {
        const SHARED: &str = "num_kv_shared_layers";
        let Some(default) = self.family.kv_shared_layers else { return Ok(None) };
        let shared = fields.count(SHARED, default)?;
        let first_shared = fields.num_layers.saturating_sub(shared);
        if fields.layer < first_shared {
            return Ok(None);
        }
        let mut other = fields.clone();
        let mut is_windowed = |layer| {
            other.layer = layer;
            self.family.window.of(&other).map(|window| window.is_some())
        };
        let kind = is_windowed(fields.layer)?;
        for earlier in (0..first_shared).rev() {
            if is_windowed(earlier)? == kind {
                return Ok(Some(earlier));
            }
        }
        let layer = fields.layer;
        fields.fail(format!("{SHARED} is {shared}, but no layer of the kind of layer {layer} comes before these"))
    }
}

/// Logs a warning, once in a process, for a config that has no field of a model but its type: all sizes are the
/// defaults of transformers, which the files of few models have.
fn warn_of_defaults(model_type: &str, object: &Map<String, Value>) {
    const NOTES: [&str; 7] =
        ["model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "auto_map"];
    if object.keys().all(|key| NOTES.contains(&key.as_str())) {
        warn_once!(
            "[hf] {model_type}: the config has no sizes, and all of them are the defaults of transformers; expected the \
             config.json of a checkpoint"
        );
    }
}

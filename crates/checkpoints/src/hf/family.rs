//! One row of the table of model families, and the config of a layer that it gives.

use std::sync::LazyLock;

use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::families::{DECODER_LAYERS, HIDDEN, SIZE_NAMES, families};
use super::fields::{Aliases, Fields};
use super::names::load_module;
pub(super) use super::names::{ModuleNames, at};
use super::rope::Rope;
pub(super) use super::stages::Stages;
use candle_attention_core::internal::{did_you_mean, has};
use candle_attention_core::{
    ContentPositions, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttentionConfig, QkNorm, QkNormKind,
    QkNormScope, RelativeBias, RelativeBiasConfig, RelativeEmbeddings, WeightLayout,
};

/// Latent attention of a `config.json`; the sizes are those of the row.
type Latent = fn(&Fields, [usize; 3]) -> Result<MultiHeadLatentAttentionConfig>;

/// A value of `model_type`: how its `config.json` describes attention, and where its checkpoints keep it. A default is
/// that of the class in transformers.
pub(super) struct Family {
    pub model_type: &'static str,
    pub aliases: Aliases,
    /// The field with the text's config, in a model that has other parts too.
    pub section: Option<&'static str>,
    pub modules: &'static [ModuleNames],
    /// The fields of the number of layers, of `embed_dim` and of `num_heads`, where [`SIZE_NAMES`] become aliases.
    pub names: [&'static str; 3],
    /// Whether that is so; not in decoders beside an encoder, whose sizes the usual names are.
    pub usual_names: bool,
    /// Their defaults.
    pub sizes: [usize; 3],
    /// Where layers stand in stages: `names` and `sizes` are of the first stage's width then.
    pub stages: Option<Stages>,
    pub heads: Heads,
    /// Whether heads are always `embed_dim / num_heads` wide, whatever `head_dim` is.
    pub head_dim_follows: bool,
    /// The field with the dropout of the weights, and its default; null is 0.
    pub dropout: (&'static str, f64),
    pub bias: Bias,
    /// The parameter below the attention module of the keys' bias, where some files have one beside that of the queries
    /// and others have none.
    pub key_bias: Option<&'static str>,
    pub rope: Rotary,
    pub qk_norm: Option<Norm>,
    /// The window of a layer.
    pub window: fn(&Fields, usize) -> Result<Option<usize>>,
    pub mask: Mask,
    /// The scale of the scores as a power of a field: its name, its default and the exponent.
    pub scale: Option<(&'static str, f64, f64)>,
    /// Fields that change the numbers, and the one value that is supported, in JSON.
    pub only: &'static [(&'static str, &'static str)],
    /// Where a checkpoint keeps the relative bias, or DeBERTa's vectors of distances, if there is such.
    pub bias_place: BiasPlace,
    /// The earlier layer whose keys and values a layer reads, if it has none of its own.
    pub kv_layer: fn(&Fields, usize) -> Result<Option<usize>>,
    /// What no column says.
    pub adjust: fn(&Fields, usize, MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig>,
    /// The decoder's self-attention and its attention to the encoder's outputs, where this row is of the encoder beside
    /// it.
    pub decoder: Option<&'static Family>,
    pub cross: Option<&'static Family>,
    /// In place of most columns, for latent attention.
    pub latent: Option<Latent>,
}

/// How many key heads there are, and how wide heads are.
pub(super) enum Heads {
    /// A key head for each query head, `embed_dim / num_heads` wide; other fields may only agree.
    Equal,
    /// `num_key_value_heads` and `head_dim`; without a default they follow from the other sizes.
    Grouped(Option<usize>, Option<usize>),
    /// So many key heads, for so many query heads.
    Computed(fn(&Fields, usize) -> Result<usize>),
}

/// Which projections have biases: by a field and its default, or always.
pub(super) enum Bias {
    None,
    All,
    AllIf(&'static str, bool),
    Qkv,
    QkvIf(&'static str, bool),
    /// The output projection always, the others by a field.
    OutAndQkvIf(&'static str, bool),
    AllButKey,
}

/// Where a parameter of relative positions is.
pub(super) enum BiasPlace {
    /// In the first layer, for all.
    FirstLayer,
    /// In each layer, for itself.
    EachLayer,
    /// In a module below the layers' prefix, for all.
    Module(&'static str),
}

/// Which layers have rotary positions.
pub(super) enum Rotary {
    None,
    All(Rope),
    /// Layers with a window.
    Windowed(Rope),
    /// Layers with a window, and layers without. Whether `rope_scaling` of older configurations is for the former too.
    ByKind {
        windowed: Rope,
        full: Rope,
        scales_windowed: bool,
    },
    If(fn(&Fields, usize) -> Result<bool>, Rope),
}

/// Norms of queries and keys.
pub(super) struct Norm {
    /// The field that turns them on.
    pub flag: Option<&'static str>,
    pub kind: QkNormKind,
    pub scope: QkNormScope,
    /// The epsilon of the model's other norms, and its default.
    pub eps: (&'static str, f64),
}

/// Which keys a layer sees.
pub(super) enum Mask {
    /// Causal unless `is_causal` is false, which makes an encoder of any decoder: its window is on both sides then, and
    /// one key wider.
    Causal,
    CausalIf(&'static str),
    /// As `Causal`, or with `use_bidirectional_attention` half of the window on each side.
    CausalOrBidirectional,
    /// All keys, or so many on each side.
    Encoder,
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

impl Family {
    /// The family that a configuration names.
    pub fn of(json: &Value) -> Result<&'static Self> {
        const EXPECTED: &str = "expected one of `hf::architectures()`";
        let known = |json: &Value| {
            let model_type = json["model_type"].as_str()?;
            families().find(|family| family.model_type == model_type)
        };
        let Some(object) = json.as_object() else { bail!("[hf] the config is {json}, expected an object") };
        let Some(model_type) = object.get("model_type") else { bail!("[hf] the config has no model_type, {EXPECTED}") };
        if let Some(family) = known(json) {
            return Ok(family);
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
    pub fn decoder(&self) -> Result<&'static Self> {
        self.part(self.decoder, "decoder beside an encoder")
    }

    /// The decoder's attention to an encoder's outputs.
    pub fn cross(&self) -> Result<&'static Self> {
        self.part(self.cross, "attention to an encoder's outputs")
    }

    fn part(&self, part: Option<&'static Self>, what: &str) -> Result<&'static Self> {
        match part {
            Some(part) => Ok(part),
            None => {
                bail!("[hf] {}: there is no {what} in this architecture, or none that is supported", self.model_type)
            }
        }
    }

    /// The attention of one layer.
    pub fn attention(&self, json: &Value, layer: usize) -> Result<MultiHeadAttentionConfig> {
        let fields = &self.fields(json, layer)?;
        if self.latent.is_some() {
            return fields
                .fail("attention is latent, expected a call of `latent_attention_config` or `load_latent_attention`");
        }
        for (name, only) in self.only {
            fields.only(name, only.parse::<Value>().unwrap_or_default())?;
        }
        let window = (self.window)(fields, layer)?;
        let cfg = self.bias(fields, self.heads(fields, layer)?)?;
        let cfg = cfg.with_dropout(fields.nullable(self.dropout.0, Some(self.dropout.1))?.unwrap_or(0.0));
        let cfg = self.rope(fields, layer, window, cfg)?;
        let cfg = match &self.qk_norm {
            Some(norm) if norm.flag.map_or(Ok(true), |flag| fields.flag(flag, false))? => cfg.with_qk_norm(QkNorm {
                kind: norm.kind,
                scope: norm.scope,
                eps: fields.get_or(norm.eps.0, norm.eps.1)?,
            }),
            _ => cfg,
        };
        let cfg = match self.scale {
            Some((name, default, exponent)) => cfg.with_scale(fields.get_or(name, default)?.powf(exponent)),
            None => cfg,
        };
        let cfg = (self.adjust)(fields, layer, self.mask(fields, window, cfg)?)?;
        cfg.validate()?;
        Ok(cfg)
    }

    /// The latent attention of one layer.
    pub fn latent_attention(&self, json: &Value, layer: usize) -> Result<MultiHeadLatentAttentionConfig> {
        let fields = self.fields(json, layer)?;
        let Some(latent) = self.latent else {
            return fields.fail("attention is not latent, expected a call of `attention_config` or `load_attention`");
        };
        let cfg = latent(&fields, self.sizes)?;
        cfg.validate()?;
        Ok(cfg)
    }

    fn fields<'a>(&self, json: &'a Value, layer: usize) -> Result<Fields<'a>> {
        let Some(object) = json.as_object() else { bail!("[hf] the config is {json}, expected an object") };
        let renamed = SIZE_NAMES.into_iter().zip(self.names).filter(|(usual, own)| self.usual_names && usual != own);
        let fields = Fields::new(self.model_type, object, self.aliases.iter().copied().chain(renamed).collect());
        let fields = match self.section {
            // Older configurations have the text's fields beside those of the other parts.
            Some(name) if fields.has(name) || !fields.has(HIDDEN) => fields.section(name)?,
            _ => fields,
        };
        if let Some(stages) = &self.stages {
            stages.place(&fields, layer)?;
            return Ok(fields);
        }
        let name = self.names[0];
        // T5's decoders are as deep as their encoders unless they say otherwise.
        let default = if name == DECODER_LAYERS { fields.get_or("num_layers", self.sizes[0])? } else { self.sizes[0] };
        let layers = match name == DECODER_LAYERS && fields.get(name).is_none() {
            true => default,
            false => fields.get_or(name, default)?,
        };
        if layer >= layers {
            return fields.fail(format!("there is no layer {layer}, {name} is {layers}"));
        }
        fields.of_layer_config(layer)
    }

    /// The earlier layer whose keys and values a layer reads.
    pub fn kv_layer(&self, json: &Value, layer: usize) -> Result<Option<usize>> {
        (self.kv_layer)(&self.fields(json, layer)?, layer)
    }

    /// What stands for `{}` in the names of a layer.
    pub fn place(&self, json: &Value, layer: usize) -> Result<Vec<usize>> {
        match &self.stages {
            Some(stages) => Ok(stages.place(&self.fields(json, layer)?, layer)?.to_vec()),
            None => Ok(vec![layer]),
        }
    }

    fn heads(&self, fields: &Fields, layer: usize) -> Result<MultiHeadAttentionConfig> {
        let embed_dim = fields.get_or(self.names[1], self.sizes[1])?;
        let [embed_dim, num_heads] = match &self.stages {
            Some(stages) => stages.sizes(fields, layer, embed_dim, self.names[2])?,
            None => [embed_dim, fields.get_or(self.names[2], self.sizes[2])?],
        };
        let cfg = MultiHeadAttentionConfig::new(embed_dim, num_heads);
        if self.head_dim_follows || matches!(self.heads, Heads::Equal) {
            fields.agrees("head_dim", embed_dim / num_heads)?;
        }
        Ok(match self.heads {
            Heads::Equal => {
                fields.agrees("num_key_value_heads", num_heads)?;
                cfg
            }
            Heads::Computed(key_heads) => cfg.with_num_kv_heads(key_heads(fields, num_heads)?),
            Heads::Grouped(num_kv_heads, head_dim) => {
                let num_kv_heads = fields.nullable("num_key_value_heads", num_kv_heads)?.unwrap_or(num_heads);
                let cfg = cfg.with_num_kv_heads(num_kv_heads);
                match fields.nullable("head_dim", head_dim)? {
                    Some(head_dim) => cfg.with_head_dim(head_dim),
                    // Where there is a remainder, the config's own check finds it.
                    None if embed_dim.is_multiple_of(num_heads) => cfg.with_head_dim(embed_dim / num_heads),
                    None => cfg,
                }
            }
        })
    }

    fn bias(&self, fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        Ok(match self.bias {
            Bias::None => cfg,
            Bias::All => cfg.with_bias(true),
            Bias::AllIf(name, default) => cfg.with_bias(fields.flag(name, default)?),
            Bias::Qkv => cfg.with_qkv_bias(true),
            Bias::QkvIf(name, default) => cfg.with_qkv_bias(fields.flag(name, default)?),
            Bias::OutAndQkvIf(name, default) => cfg.with_qkv_bias(fields.flag(name, default)?).with_out_bias(true),
            Bias::AllButKey => cfg.with_bias(true).with_k_bias(false),
        })
    }

    fn rope(
        &self,
        fields: &Fields,
        layer: usize,
        window: Option<usize>,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        let head_dim = cfg.head_dim();
        let rope = match &self.rope {
            Rotary::All(rope) => rope.config(fields, head_dim)?,
            Rotary::Windowed(rope) if window.is_some() => rope.config(fields, head_dim)?,
            Rotary::If(rotates, rope) if rotates(fields, layer)? => rope.config(fields, head_dim)?,
            Rotary::ByKind { windowed, scales_windowed, .. } if window.is_some() => {
                windowed.of_kind(fields, "sliding_attention", *scales_windowed, head_dim)?
            }
            Rotary::ByKind { full, .. } => full.of_kind(fields, "full_attention", true, head_dim)?,
            Rotary::None | Rotary::Windowed(_) | Rotary::If(..) => return Ok(cfg),
        };
        Ok(cfg.with_rope(rope))
    }

    fn mask(
        &self,
        fields: &Fields,
        window: Option<usize>,
        cfg: MultiHeadAttentionConfig,
    ) -> Result<MultiHeadAttentionConfig> {
        // What an encoder sees on each side, if not all keys.
        let encoder = match self.mask {
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
            Some(side) => cfg.with_band(side, side),
            None => cfg,
        })
    }

    /// One layer of a checkpoint.
    pub fn load(&self, json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
        let load = |cfg: &_, layout, module: &str| MultiHeadAttention::load(cfg, layout, vb.pp(module));
        self.load_with_bias(json, layer, &vb, load, Ok)
    }

    /// The layer that `load` gives, with the heads of the relative bias that `shard` gives, if it needs one.
    pub fn load_with_bias(
        &self,
        json: &Value,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&MultiHeadAttentionConfig, WeightLayout, &str) -> Result<MultiHeadAttention>,
        shard: impl FnOnce(RelativeBias) -> Result<RelativeBias>,
    ) -> Result<MultiHeadAttention> {
        let cfg = self.attention(json, layer)?;
        self.refuse_quantized(json)?;
        let attention = load_module(self.modules, &self.place(json, layer)?, vb, |layout, module| {
            let of_queries = cfg.qkv_bias()[0];
            let of_keys = self.key_bias.is_some_and(|name| of_queries && has(vb, &format!("{module}.{name}")));
            let cfg = if of_keys { cfg.clone().with_k_bias(true) } else { cfg.clone() };
            load(&cfg, layout, module)
        })?;
        let attention = match cfg.content_positions() {
            Some(ContentPositions::Disentangled(positions)) => {
                let module = self.shared_module(layer, vb, "rel_embeddings.weight")?;
                let embeddings = RelativeEmbeddings::new(positions, cfg.embed_dim(), vb.pp(module))?;
                attention.with_relative_embeddings(embeddings)?
            }
            _ => attention,
        };
        match cfg.relative_bias() {
            Some(buckets) => {
                attention.with_relative_bias(shard(self.relative_bias(buckets, cfg.num_heads(), layer, vb)?)?)
            }
            None => Ok(attention),
        }
    }

    /// The relative bias that all layers of a checkpoint share.
    pub fn load_relative_bias(&self, json: &Value, vb: &VarBuilder) -> Result<RelativeBias> {
        let cfg = self.attention(json, 0)?;
        self.refuse_quantized(json)?;
        let Some(buckets) = cfg.relative_bias() else {
            bail!("[hf] {}: there is no relative bias in this architecture", self.model_type)
        };
        if matches!(self.bias_place, BiasPlace::EachLayer) {
            bail!("[hf] {}: every layer has a relative bias of its own, which comes with it", self.model_type)
        }
        self.relative_bias(buckets, cfg.num_heads(), 0, vb)
    }

    fn relative_bias(
        &self,
        buckets: &RelativeBiasConfig,
        num_heads: usize,
        layer: usize,
        vb: &VarBuilder,
    ) -> Result<RelativeBias> {
        let module = self.shared_module(layer, vb, "relative_attention_bias.weight")?;
        RelativeBias::new(buckets, num_heads, vb.pp(module))
    }

    /// The module of a parameter that stands where [`bias_place`](Self::bias_place) says: the first that the builder
    /// has.
    fn shared_module(&self, layer: usize, vb: &VarBuilder, parameter: &str) -> Result<String> {
        let modules: Vec<_> = match self.bias_place {
            BiasPlace::FirstLayer => self.modules.iter().flat_map(|names| names.modules(&[0])).collect(),
            BiasPlace::EachLayer => self.modules.iter().flat_map(|names| names.modules(&[layer])).collect(),
            BiasPlace::Module(path) => {
                self.modules.iter().flat_map(|names| names.prefixes).map(|prefix| format!("{prefix}{path}")).collect()
            }
        };
        let found = modules.iter().find(|module| has(vb, &format!("{module}.{parameter}")));
        match found.or(modules.first()) {
            Some(module) => Ok(module.clone()),
            None => bail!("[hf] there is no name for {parameter}"),
        }
    }

    /// An error for quantised weights, but for MXFP4, in which experts are and attention is not, and for float8, whose
    /// scales are applied where tensors are read (or refused there).
    pub fn refuse_quantized(&self, json: &Value) -> Result<()> {
        match json.get("quantization_config") {
            None | Some(Value::Null) => Ok(()),
            Some(quantization) if ["mxfp4", "fp8"].iter().any(|known| quantization["quant_method"] == *known) => Ok(()),
            Some(quantization) => bail!(
                "[hf] {}: quantization_config is {quantization}, expected weights that are not quantised",
                self.model_type
            ),
        }
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

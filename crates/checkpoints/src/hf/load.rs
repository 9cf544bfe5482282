//! A layer of a checkpoint, where it is, and what it shares with other layers.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::entry::Entry;
use super::families::SharedPlace;
use super::linear::Linear;
use candle_attention_core::{
    ContentPositions, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig, RelativeBias, RelativeBiasConfig, RelativeEmbeddings, WeightLayout,
};
use candle_attention_delta::{DeltaLayout, GatedDeltaNet, GatedDeltaNetConfig};
use candle_attention_modules::base::has;

impl Entry<'_> {
    /// One layer of a checkpoint.
    pub fn load(&self, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
        let load = |cfg: &_, layout, module: &str| MultiHeadAttention::load(cfg, layout, vb.pp(module));
        self.load_with(layer, &vb, load, Ok)
    }

    /// The layer that `load` gives, with the heads of the relative bias that `shard` gives, if it needs one.
    pub fn load_with(
        &self,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&MultiHeadAttentionConfig, WeightLayout, &str) -> Result<MultiHeadAttention>,
        shard: impl FnOnce(RelativeBias) -> Result<RelativeBias>,
    ) -> Result<MultiHeadAttention> {
        let cfg = self.attention(layer)?;
        self.refuse_quantized()?;
        let attention = load_module(self.modules(), &self.place(layer)?, vb, |layout, module| {
            let of_queries = cfg.qkv_bias()[0];
            let of_keys = self.family.key_bias.is_some_and(|name| of_queries && has(vb, &format!("{module}.{name}")));
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

    /// The layer of latent attention that `load` gives.
    pub fn load_latent_with(
        &self,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&MultiHeadLatentAttentionConfig, &str) -> Result<MultiHeadLatentAttention>,
    ) -> Result<MultiHeadLatentAttention> {
        let cfg = self.latent_attention(layer)?;
        self.refuse_quantized()?;
        load_module(self.modules(), &self.place(layer)?, vb, |_, module| load(&cfg, module))
    }

    /// The layer of linear attention that `load` gives.
    pub fn load_linear_with(
        &self,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&GatedDeltaNetConfig, DeltaLayout, &str) -> Result<GatedDeltaNet>,
    ) -> Result<GatedDeltaNet> {
        let cfg = self.linear_attention(layer)?;
        self.refuse_quantized()?;
        let Some(Linear { names, layout, .. }) = self.family.linear else { bail!("[hf] no layer is linear") };
        let names = ModuleNames { parameter: Some("A_log"), ..names };
        load_module([&names].into_iter(), &[layer], vb, |_, module| load(&cfg, layout, module))
    }

    /// The relative bias that all layers of a checkpoint share.
    pub fn load_relative_bias(&self, vb: &VarBuilder) -> Result<RelativeBias> {
        let (cfg, model) = (self.attention(0)?, self.family.model_type);
        self.refuse_quantized()?;
        let Some(buckets) = cfg.relative_bias() else {
            bail!("[hf] {model}: there is no relative bias in this architecture")
        };
        if matches!(self.family.shared_place, SharedPlace::EachLayer) {
            bail!("[hf] {model}: every layer has a relative bias of its own, which comes with it")
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

    /// The module of a parameter that stands where the family's `shared_place` says: the first that the builder has.
    fn shared_module(&self, layer: usize, vb: &VarBuilder, parameter: &str) -> Result<String> {
        let of_layer = |layer: usize| self.modules().flat_map(|names| names.modules(&[layer])).collect();
        let modules: Vec<_> = match self.family.shared_place {
            SharedPlace::FirstLayer => of_layer(0),
            SharedPlace::EachLayer => of_layer(layer),
            SharedPlace::Module(path) => {
                self.modules().flat_map(|names| names.prefixes).map(|prefix| format!("{prefix}{path}")).collect()
            }
        };
        let found = modules.iter().find(|module| has(vb, &format!("{module}.{parameter}")));
        match found.or(modules.first()) {
            Some(module) => Ok(module.clone()),
            None => bail!("[hf] there is no name for {parameter}"),
        }
    }

    fn modules(&self) -> impl Iterator<Item = &ModuleNames> {
        self.family.modules.iter().flatten()
    }

    /// An error for quantised weights, but for MXFP4, in which experts are and attention is not, and for float8, whose
    /// scales are applied where tensors are read (or refused there).
    fn refuse_quantized(&self) -> Result<()> {
        match self.json.get("quantization_config") {
            None | Some(Value::Null) => Ok(()),
            Some(quantization) if ["mxfp4", "fp8"].iter().any(|known| quantization["quant_method"] == *known) => Ok(()),
            Some(quantization) => bail!(
                "[hf] {}: quantization_config is {quantization}, expected weights that are not quantised",
                self.family.model_type
            ),
        }
    }
}

/// The names of the attention modules of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModuleNames {
    /// The possible prefixes of `path`, that of new checkpoints first: as a rule the name of the base model in a model
    /// with a head, then none.
    pub prefixes: &'static [&'static str],
    /// The attention module, with `{}` for the layer, or for its stage and its number there.
    pub path: &'static str,
    pub layout: WeightLayout,
    /// The parameter whose presence shows that a module is there, if it is not the layout's query.
    pub parameter: Option<&'static str>,
}

pub(super) const fn at(prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> ModuleNames {
    ModuleNames { prefixes, path, layout, parameter: None }
}

impl ModuleNames {
    /// The layer's module with each prefix.
    pub fn modules(&self, place: &[usize]) -> impl Iterator<Item = String> + use<'_> {
        let filled = |path: String, number: &usize| path.replacen("{}", &number.to_string(), 1);
        let path = place.iter().fold(self.path.to_string(), filled);
        self.prefixes.iter().map(move |prefix| format!("{prefix}{path}"))
    }

    fn parameter(&self, module: &str) -> String {
        let [query, _] = self.layout.query_and_output(true);
        format!("{module}.{}", self.parameter.unwrap_or(&query))
    }
}

/// Calls `load` with the layout and the name of the attention of the layer at a place: the first that the builder has.
/// A builder that claims every name (zeros, fresh variables) gets the first of all.
pub(super) fn load_module<'a, T>(
    names: impl Iterator<Item = &'a ModuleNames>,
    place: &[usize],
    vb: &VarBuilder,
    load: impl Fn(WeightLayout, &str) -> Result<T>,
) -> Result<T> {
    let candidates: Vec<_> = names.flat_map(|names| names.modules(place).map(move |module| (module, names))).collect();
    if let Some((module, names)) = candidates.iter().find(|(module, names)| has(vb, &names.parameter(module))) {
        return load(names.layout, module);
    }
    let layer = place.iter().map(usize::to_string).collect::<Vec<_>>().join(".");
    let Some((module, names)) = candidates.first() else { bail!("[hf] there is no name for layer {layer}") };
    load(names.layout, module).map_err(|_| {
        let looked: Vec<_> = candidates.iter().map(|(module, names)| names.parameter(module)).collect();
        Error::msg(format!(
            "[hf] no attention of layer {layer} in the checkpoint, looked for {}; is the builder at the model's root?",
            looked.join(", ")
        ))
    })
}

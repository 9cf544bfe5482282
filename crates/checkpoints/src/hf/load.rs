//! Loads the layers of a checkpoint, and the parameters that they share.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;

use super::entry::Entry;
use super::families::{Family, SharedPlace};
use super::linear::Linear;
use super::names::{Candidate, ModuleNames, candidates, load_module};
use candle_attention_core::{
    CompressedKeyAttention, ContentPositions, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig, RelativeBias, RelativeBiasConfig, RelativeEmbeddings, WeightLayout,
};
use candle_attention_delta::{DeltaLayout, GatedDeltaNet, GatedDeltaNetConfig};
use candle_attention_modules::base::{ConfigMethod, Fact, has};

impl Entry<'_> {
    /// Loads one layer of a checkpoint.
    pub fn load(&self, layer: usize, given: VarBuilder) -> Result<MultiHeadAttention> {
        let vb = self.with_own_names(self.with_norms_as_in_pytorch(given));
        let load = |cfg: &_, layout, module: &str| MultiHeadAttention::load(cfg, layout, vb.pp(module));
        self.load_with(layer, &vb, load, Ok)
    }

    /// Returns a builder that has the sinks under the name of this crate, and without the module that the caller runs.
    pub fn with_own_names<'a>(&self, vb: VarBuilder<'a>) -> VarBuilder<'a> {
        let Family { sinks_name, of_caller, .. } = self.family;
        if sinks_name.is_none() && of_caller.is_none() {
            return vb;
        }
        // A renamed builder has its prefix twice, so the names are changed at the root.
        let prefix = vb.prefix();
        let renamed = vb.root().rename_f(move |name| {
            let module_of_parameter = name.rsplit('.').nth(1);
            if of_caller.is_some() && of_caller == module_of_parameter {
                return format!("{name} of the caller");
            }
            match (sinks_name, name.strip_suffix(".sinks")) {
                (Some(theirs), Some(module)) => format!("{module}.{theirs}"),
                _ => name.to_string(),
            }
        });
        if prefix.is_empty() { renamed } else { renamed.pp(prefix) }
    }

    /// Loads a layer with `load`, and if it has a relative bias, the heads of it that `shard` returns.
    pub fn load_with(
        &self,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&MultiHeadAttentionConfig, WeightLayout, &str) -> Result<MultiHeadAttention>,
        shard: impl FnOnce(RelativeBias) -> Result<RelativeBias>,
    ) -> Result<MultiHeadAttention> {
        let cfg = self.attention(layer)?;
        self.refuse_quantized(vb)?;
        let mut attention = load_module(self.modules(), &self.numbers(layer)?, vb, |layout, module| {
            let has_key_bias = |name: &str| cfg.q_bias() && has(vb, &format!("{module}.{name}"));
            if self.family.key_bias.is_some_and(has_key_bias) {
                return load(&cfg.clone().with_k_bias(true), layout, module);
            }
            load(&cfg, layout, module)
        })?;
        if let Some(ContentPositions::Disentangled(positions)) = cfg.content_positions() {
            let module = self.shared_module(layer, vb, "rel_embeddings.weight")?;
            let embeddings = RelativeEmbeddings::new(positions, cfg.embed_dim(), vb.pp(module))?;
            attention = attention.with_relative_embeddings(embeddings)?;
        }
        if let Some(buckets) = cfg.relative_bias() {
            let bias = self.relative_bias(buckets, cfg.num_heads(), layer, vb)?;
            attention = attention.with_relative_bias(shard(bias)?)?;
        }
        Ok(attention)
    }

    /// Returns the modules that may have the attention of a layer. Modules that the builder has come first.
    pub fn attention_modules(&self, layer: usize, vb: &VarBuilder) -> Result<Vec<Candidate>> {
        let mut modules = candidates(self.modules(), &self.numbers(layer)?);
        modules.sort_by_key(|candidate| !has(vb, &candidate.parameter));
        Ok(modules)
    }

    /// Loads a layer of latent attention with `load`.
    pub fn load_latent_with(
        &self,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&MultiHeadLatentAttentionConfig, &str) -> Result<MultiHeadLatentAttention>,
    ) -> Result<MultiHeadLatentAttention> {
        let cfg = self.latent_attention(layer)?;
        self.refuse_quantized(vb)?;
        let attention = load_module(self.modules(), &self.numbers(layer)?, vb, |_, module| load(&cfg, module))?;
        if !cfg.rotates() || !self.family.latent.is_some_and(|latent| latent.learned_frequencies) {
            return Ok(attention);
        }
        // All layers share the factors, which a model that was not trained with them does not have.
        let prefixes = self.modules().flat_map(|names| names.prefixes);
        let mut names = prefixes.flat_map(|prefix| ["rotary_emb", "lerope"].map(|at| format!("{prefix}{at}.alpha")));
        match names.find(|name| has(vb, name)) {
            Some(name) => attention.with_frequency_factors(&vb.get(cfg.rope_head_dim() / 2, &name)?.exp()?.detach()),
            None => Ok(attention),
        }
    }

    /// Loads a layer of attention to compressed keys.
    pub fn load_compressed_key(&self, layer: usize, vb: &VarBuilder) -> Result<CompressedKeyAttention> {
        let cfg = self.compressed_key_attention(layer)?;
        self.refuse_quantized(vb)?;
        let load = |_, module: &str| CompressedKeyAttention::new(&cfg, vb.pp(module));
        load_module(self.modules(), &self.numbers(layer)?, vb, load)
    }

    /// Loads a layer of linear attention with `load`.
    pub fn load_linear_with(
        &self,
        layer: usize,
        vb: &VarBuilder,
        load: impl Fn(&GatedDeltaNetConfig, DeltaLayout, &str) -> Result<GatedDeltaNet>,
    ) -> Result<GatedDeltaNet> {
        let cfg = self.linear_attention(layer)?;
        self.refuse_quantized(vb)?;
        let Some(Linear { names, layout, .. }) = self.family.linear else { bail!("[hf] no layer is linear") };
        let names = ModuleNames { parameter: Some("A_log"), ..names };
        load_module([&names].into_iter(), &[layer], vb, |_, module| load(&cfg, layout, module))
    }

    /// Loads the relative bias that all layers of a checkpoint share.
    pub fn load_relative_bias(&self, vb: &VarBuilder) -> Result<RelativeBias> {
        let cfg = self.attention(0)?;
        let model = self.family.model_type;
        self.refuse_quantized(vb)?;
        let Some(buckets) = cfg.relative_bias() else {
            bail!("[hf] {model}: there is no relative bias in this architecture")
        };
        if matches!(self.family.shared_place, SharedPlace::EachLayer) {
            bail!("[hf] {model}: each layer has its own relative bias, which is loaded with it")
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

    /// Returns the module of a parameter that layers share: the first that the builder has, of those that the family's
    /// `shared_place` names.
    fn shared_module(&self, layer: usize, vb: &VarBuilder, parameter: &str) -> Result<String> {
        let of_layer = |number: usize| self.modules().flat_map(|names| names.modules(&[number])).collect();
        let modules: Vec<_> = match self.family.shared_place {
            SharedPlace::FirstLayer => of_layer(0),
            SharedPlace::EachLayer => of_layer(layer),
            SharedPlace::Module(path) => {
                self.modules().flat_map(|names| names.prefixes).map(|prefix| format!("{prefix}{path}")).collect()
            }
        };
        let found = modules.iter().find(|module| has(vb, &format!("{module}.{parameter}")));
        match found.or_else(|| modules.first()) {
            Some(module) => Ok(module.clone()),
            None => bail!("[hf] there is no name for {parameter}"),
        }
    }

    fn modules(&self) -> impl Iterator<Item = &ModuleNames> {
        self.family.modules.iter().flatten()
    }

    /// Refuses a config with a `quantization_config`, at any level, except MXFP4, which quantises experts and not
    /// attention, and float8, whose scales the reader of tensors applies (or refuses). MLX's key `quantization` has
    /// exceptions for some layers, whose tensors decide. So do the tensors of the builder of `weights::open`, which
    /// reads quantised weights, and refuses those that it cannot read.
    fn refuse_quantized(&self, vb: &VarBuilder) -> Result<()> {
        if Fact::Opened.is_known_of(vb) {
            return Ok(());
        }
        for quantization in ConfigMethod::objects(self.json) {
            if !["mxfp4", "fp8"].iter().any(|known| quantization["quant_method"] == *known) {
                let looks = match ConfigMethod::of(self.json) {
                    Some(found) => format!(" ({})", found.method),
                    None => String::new(),
                };
                bail!(
                    "[hf] {}: quantization_config is {quantization}{looks}, expected weights that are not quantised",
                    self.family.model_type
                )
            }
        }
        Ok(())
    }
}

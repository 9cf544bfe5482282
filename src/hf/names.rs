//! The names of attention modules in the checkpoints of each family.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;

use crate::weights::{PackedNaming, QkvOrder, has};
use crate::{RelativeBias, RelativeBiasConfig, WeightLayout};

/// The names of the attention modules of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModuleNames {
    /// The possible prefixes of `path`, that of new checkpoints first: as a rule the name of the base model in a model with
    /// a head, then none.
    prefixes: &'static [&'static str],
    /// The attention module, with `{}` for the layer.
    path: &'static str,
    layout: WeightLayout,
    /// The parameter whose presence shows that a module is there, if it is not the layout's query.
    parameter: Option<&'static str>,
}

const fn at(prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> ModuleNames {
    ModuleNames { prefixes, path, layout, parameter: None }
}

const MODEL: &[&str] = &["model.", ""];
const TRANSFORMER: &[&str] = &["transformer.", ""];
const NOMIC: &[&str] = &["nomic_bert.", "bert.", ""];
const QUERY_KEY_VALUE: WeightLayout = WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead);
const C_ATTN: WeightLayout = WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead);

pub(super) const BERT: &[ModuleNames] = &[at(&["bert.", ""], "encoder.layer.{}.attention", WeightLayout::Bert)];
/// Latent attention names its parameters itself, and those of queries differ between checkpoints.
pub(super) const DEEPSEEK: &[ModuleNames] = &[ModuleNames {
    parameter: Some("kv_a_proj_with_mqa.weight"),
    ..at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)
}];
pub(super) const DISTILBERT: &[ModuleNames] =
    &[at(&["distilbert.", ""], "transformer.layer.{}.attention", WeightLayout::DistilBert)];
/// As transformers saves it, as published, and without a head.
pub(super) const GEMMA3: &[ModuleNames] = &[at(
    &["model.language_model.", "language_model.model.", "language_model."],
    "layers.{}.self_attn",
    WeightLayout::Canonical,
)];
pub(super) const GPT2: &[ModuleNames] = &[at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d)];
pub(super) const GPT_BIGCODE: &[ModuleNames] = &[at(TRANSFORMER, "h.{}.attn", C_ATTN)];
pub(super) const OPT: &[ModuleNames] = &[at(MODEL, "decoder.layers.{}.self_attn", WeightLayout::Opt)];
pub(super) const FALCON: &[ModuleNames] = &[at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE)];
pub(super) const GPT_NEOX: &[ModuleNames] = &[at(&["gpt_neox.", ""], "layers.{}.attention", QUERY_KEY_VALUE)];
pub(super) const GPTJ: &[ModuleNames] = &[at(TRANSFORMER, "h.{}.attn", WeightLayout::Opt)];
pub(super) const LLAMA: &[ModuleNames] = &[at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)];
pub(super) const MODERNBERT: &[ModuleNames] =
    &[at(MODEL, "layers.{}.attn", WeightLayout::Packed(PackedNaming::WqkvWo, QkvOrder::ByPart))];
pub(super) const MPT: &[ModuleNames] =
    &[at(TRANSFORMER, "blocks.{}.attn", WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart))];
/// As published, and by the names of transformers' own module.
pub(super) const NOMIC_BERT: &[ModuleNames] = &[
    at(NOMIC, "encoder.layers.{}.attn", WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart)),
    at(NOMIC, "layers.{}.self_attn", WeightLayout::Canonical),
];
pub(super) const PHI: &[ModuleNames] = &[at(MODEL, "layers.{}.self_attn", WeightLayout::Phi)];
pub(super) const PHI3: &[ModuleNames] =
    &[at(MODEL, "layers.{}.self_attn", WeightLayout::Packed(PackedNaming::QkvProj, QkvOrder::ByPart))];
pub(super) const ROBERTA: &[ModuleNames] = &[at(&["roberta.", ""], "encoder.layer.{}.attention", WeightLayout::Bert)];
/// With its decoder or by itself, and below a classifier.
pub(super) const T5: &[ModuleNames] =
    &[at(&["", "transformer."], "encoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)];

impl ModuleNames {
    /// The layer's module with each prefix.
    fn modules(&self, layer: usize) -> impl Iterator<Item = String> {
        let path = self.path.replace("{}", &layer.to_string());
        self.prefixes.iter().map(move |prefix| format!("{prefix}{path}"))
    }

    fn parameter(&self, module: &str) -> String {
        let parameter = self.parameter.map_or_else(|| self.layout.query_parameter(), String::from);
        format!("{module}.{parameter}")
    }
}

/// Calls `load` with the layout and the name of a layer's attention: the first that the builder has. A builder that claims
/// every name (zeros, fresh variables) gets the first of all.
pub(super) fn load<T>(
    names: &[ModuleNames],
    layer: usize,
    vb: &VarBuilder,
    load: impl Fn(WeightLayout, &str) -> Result<T>,
) -> Result<T> {
    let candidates: Vec<_> =
        names.iter().flat_map(|names| names.modules(layer).map(move |module| (module, names))).collect();
    if let Some((module, names)) = candidates.iter().find(|(module, names)| has(vb, &names.parameter(module))) {
        return load(names.layout, module);
    }
    let Some((module, names)) = candidates.first() else { bail!("[hf] there is no name for layer {layer}") };
    load(names.layout, module).map_err(|_| {
        let looked: Vec<_> = candidates.iter().map(|(module, names)| names.parameter(module)).collect();
        candle_core::Error::msg(format!(
            "[hf] no attention of layer {layer} in the checkpoint, looked for {}; is the builder at the model's root?",
            looked.join(", ")
        ))
    })
}

/// The relative bias that all layers share, which is stored with the first.
pub(super) fn load_relative_bias(
    names: &[ModuleNames],
    buckets: &RelativeBiasConfig,
    num_heads: usize,
    vb: &VarBuilder,
) -> Result<RelativeBias> {
    let modules: Vec<_> = names.iter().flat_map(|names| names.modules(0)).collect();
    let found = modules.iter().find(|module| has(vb, &format!("{module}.relative_attention_bias.weight")));
    let Some(module) = found.or(modules.first()) else { bail!("[hf] there is no name for a relative bias") };
    RelativeBias::new(buckets, num_heads, vb.pp(module))
}

//! The names of fields and of attention modules.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use crate::files::OF_MLX;
use candle_attention_core::WeightLayout;
use candle_attention_core::internal::wrapper_prefixes;
use candle_attention_modules::base::{Fact, QuantizationSigns, has};
use candle_attention_modules::linear::Projection;

pub(super) const LAYERS: &str = "num_hidden_layers";
pub(super) const HIDDEN: &str = "hidden_size";
pub(super) const HEADS: &str = "num_attention_heads";
/// T5's name of the number of layers of its decoder.
pub(super) const DECODER_LAYERS: &str = "num_decoder_layers";
/// The number of layers from one that attends to all keys to the next.
pub(super) const PATTERN: &str = "sliding_window_pattern";

/// The prefixes of a base model: below a head, alone, and next to an encoder of images.
pub(super) const MODEL: &[&str] =
    &["model.", "", "model.language_model.", "language_model.model.", "model.text_model."];

/// The names of the attention modules of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModuleNames {
    /// The possible prefixes of `path`, that of new checkpoints first: in most families the name of the base model in a
    /// model with a head, then none.
    pub prefixes: &'static [&'static str],
    /// The attention module, with `{}` for the layer, or for its stage and its number there.
    pub path: &'static str,
    /// The layout of its weights.
    pub layout: WeightLayout,
    /// The parameter whose presence shows that a module is there, if it is not the query of the layout.
    pub parameter: Option<&'static str>,
}

/// Returns the names of modules that are found by the query of their layout.
pub(super) const fn at(prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> ModuleNames {
    ModuleNames { prefixes, path, layout, parameter: None }
}

impl ModuleNames {
    /// Returns the module of a layer with each prefix. `numbers` are the numbers of the layer, or of its stage and of
    /// the layer there.
    pub fn modules(&self, numbers: &[usize]) -> impl Iterator<Item = String> + use<'_> {
        let mut path = self.path.to_string();
        for number in numbers {
            path = path.replacen("{}", &number.to_string(), 1);
        }
        self.prefixes.iter().map(move |prefix| format!("{prefix}{path}"))
    }

    /// Returns the name of the parameter that shows that a module is there.
    fn parameter(&self, module: &str) -> String {
        match self.parameter {
            Some(parameter) => format!("{module}.{parameter}"),
            None => format!("{module}.{}", self.layout.weight_name(Projection::Query, true)),
        }
    }
}

/// A module that may have the attention of a layer.
pub(super) struct Candidate {
    pub layout: WeightLayout,
    pub module: String,
    /// The parameter whose presence shows that the module is there.
    pub parameter: String,
}

/// Loads the attention of a layer: calls `load` with the layout and the name of the first module that the builder has.
/// A builder that claims every name (zeros, fresh variables) gets the first module.
///
/// # Errors
/// If there is no such module, and the errors of `load`.
pub(super) fn load_module<'a, T>(
    names: impl Iterator<Item = &'a ModuleNames>,
    numbers: &[usize],
    vb: &VarBuilder,
    load: impl Fn(WeightLayout, &str) -> Result<T>,
) -> Result<T> {
    let candidates = candidates(names, numbers);
    if let Some(found) = candidates.iter().find(|candidate| has(vb, &candidate.parameter)) {
        return load(found.layout, &found.module);
    }
    let layer = numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(".");
    let Some(first) = candidates.first() else { bail!("[hf] there is no name for layer {layer}") };
    load(first.layout, &first.module).map_err(|_| {
        let looked: Vec<_> = candidates.iter().map(|candidate| candidate.parameter.as_str()).collect();
        let hint = elsewhere(&candidates, vb);
        let hint = hint.unwrap_or_else(|| "is the builder at the model's root?".to_string());
        let looked = looked.join(", ");
        let hint = if Fact::WrittenByMlx.is_known_of(vb) { format!("{hint}; {OF_MLX}") } else { hint };
        Error::msg(format!("[hf] no attention of layer {layer} in the checkpoint, looked for {looked}; {hint}"))
    })
}

/// Returns the modules that may have the attention of a layer, that of new checkpoints first.
pub(super) fn candidates<'a>(names: impl Iterator<Item = &'a ModuleNames>, numbers: &[usize]) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    for module_names in names {
        candidates.extend(module_names.modules(numbers).map(|module| Candidate {
            layout: module_names.layout,
            parameter: module_names.parameter(&module),
            module,
        }));
    }
    candidates
}

/// Returns the reason why a builder has none of the candidates, if it is known: the names begin with the prefix of a
/// wrapper, or the builder has an adapter alone.
fn elsewhere(candidates: &[Candidate], vb: &VarBuilder) -> Option<String> {
    for Candidate { parameter, module, layout } in candidates {
        if let Some(quantized) = QuantizationSigns::beside(parameter, |beside| has(vb, beside)) {
            return Some(format!("{parameter} {quantized}"));
        }
        for tensor in layout.tensors(0, true) {
            for prefix in ["base_model.model.", ""] {
                let matrix = format!("{prefix}{module}.{}.lora_A.weight", tensor.module);
                if has(vb, &matrix) {
                    return Some(format!(
                        "{matrix} is that of an adapter of PEFT, expected the checkpoint of the model that it was \
                         trained on, and `peft::Adapter` for the adapter"
                    ));
                }
            }
        }
        if let Some(prefix) = wrapper_prefixes().find(|prefix| has(vb, &format!("{prefix}.{parameter}"))) {
            return Some(format!("its names begin with `{prefix}.`, expected the builder `vb.pp({prefix:?})`"));
        }
    }
    None
}

//! The names of fields and of attention modules.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use candle_attention_core::WeightLayout;
use candle_attention_modules::base::has;
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
struct Candidate {
    layout: WeightLayout,
    module: String,
    /// The parameter whose presence shows that the module is there.
    parameter: String,
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
    let mut candidates = Vec::new();
    for module_names in names {
        candidates.extend(module_names.modules(numbers).map(|module| Candidate {
            layout: module_names.layout,
            parameter: module_names.parameter(&module),
            module,
        }));
    }
    if let Some(found) = candidates.iter().find(|candidate| has(vb, &candidate.parameter)) {
        return load(found.layout, &found.module);
    }
    let layer = numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(".");
    let Some(first) = candidates.first() else { bail!("[hf] there is no name for layer {layer}") };
    load(first.layout, &first.module).map_err(|_| {
        let looked: Vec<_> = candidates.iter().map(|candidate| candidate.parameter.as_str()).collect();
        Error::msg(format!(
            "[hf] no attention of layer {layer} in the checkpoint, looked for {}; is the builder at the model's root?",
            looked.join(", ")
        ))
    })
}

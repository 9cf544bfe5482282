//! Where the checkpoints of a model keep its attention.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use candle_attention_core::WeightLayout;
use candle_attention_core::internal::has;

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
        let [query, _] = self.layout.query_and_output();
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

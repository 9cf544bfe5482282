//! Low-rank adapters (LoRA) of a layer: loaded, merged into the weights, and unloaded.

use candle_core::{Result, Tensor, bail};

use super::{MultiHeadAttention, OP};
use crate::params::{
    AdaptableModule, AdapterMatrices, ParameterName, Replacement, WeightLayout, module_weights, replaced_rows,
};
use candle_attention_modules::base::{Expect, LowRankUpdate, ParameterList};
use candle_attention_modules::linear::Projections;

/// The adapter of a layer, and the layer without it.
#[derive(Debug, Clone)]
pub(super) struct LoadedAdapter {
    /// The layer without the adapter.
    base: Weights,
    /// The layer with weights and adapter apart, while the layer has merged weights.
    unmerged: Option<Weights>,
}

/// The projections and the other parameters of a layer.
#[derive(Debug, Clone)]
struct Weights {
    projections: Projections,
    parameters: ParameterList,
}

impl Weights {
    fn freeze(&self) -> Result<Self> {
        Ok(Self { projections: self.projections.freeze()?, parameters: self.parameters.freeze()? })
    }
}

/// A linear layer of content-based positions that adapters may change.
struct PositionModule {
    module: AdaptableModule,
    /// This crate's name of the weight.
    weight: &'static str,
}

impl LoadedAdapter {
    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { base: self.base.freeze()?, unmerged: self.unmerged.as_ref().map(Weights::freeze).transpose()? })
    }
}

impl MultiHeadAttention {
    /// Returns the modules of a layout that an adapter may change: projections, and linear layers of content-based
    /// positions.
    ///
    /// # Errors
    /// For a config that does not fit the layout, and for a layout without linear layers for whole projections.
    #[doc(hidden)]
    pub fn adaptable_modules(&self, layout: WeightLayout) -> Result<Vec<AdaptableModule>> {
        let projections = module_weights(OP, &self.config, layout)?.into_iter().map(|weight| weight.module);
        Ok(projections.chain(self.position_modules()?.into_iter().map(|own| own.module)).collect())
    }

    /// Returns the linear layers of content-based positions, under the names that they have in the file of the layer.
    fn position_modules(&self) -> Result<Vec<PositionModule>> {
        let mut modules = Vec::new();
        let Some(positions) = self.config.content_positions() else { return Ok(modules) };
        for &weight in positions.linear_weights() {
            let stored = self.parameters.stored_name(weight).and_then(|stored| stored.strip_suffix(".weight"));
            if let (Some(stored), Some(current)) = (stored, self.parameters.tensor(weight)?) {
                let (outputs, inputs) = current.dims2()?;
                modules.push(PositionModule {
                    module: AdaptableModule { name: stored.to_string(), other_name: None, outputs, inputs },
                    weight,
                });
            }
        }
        Ok(modules)
    }

    /// Adds an adapter to modules of a layout: `read` returns the matrices of a module, if the adapter has some.
    ///
    /// # Errors
    /// As [`adaptable_modules`](Self::adaptable_modules), and the errors of `read`.
    #[doc(hidden)]
    pub fn with_adapter(
        &self,
        layout: WeightLayout,
        mut read: impl FnMut(&AdaptableModule) -> Result<Option<AdapterMatrices>>,
    ) -> Result<Self> {
        let mut layer = self.unmerge_adapter()?;
        for weight in module_weights(OP, &self.config, layout)? {
            if let Some(matrices) = read(&weight.module)? {
                layer.start_adapter();
                layer.projections = layer.projections.with_update(&weight.split(&matrices))?;
            }
        }
        for PositionModule { module, weight } in self.position_modules()? {
            if let Some(AdapterMatrices { a, b, scaling, dropout }) = read(&module)? {
                layer.start_adapter();
                layer.parameters = layer.parameters.with_update(weight, LowRankUpdate { a, b, scaling, dropout })?;
            }
        }
        layer.rebuilt()
    }

    /// Replaces parameters by the parameters of an adapter, such as its biases. `replacement` receives the names of a
    /// parameter and its current value, and returns the new value, if there is one. The layer computes in
    /// its own dtype; a variable of another dtype is read in every call.
    ///
    /// # Errors
    /// As [`adaptable_modules`](Self::adaptable_modules), for a replacement of another shape or on another device, and
    /// the errors of `replacement`.
    #[doc(hidden)]
    pub fn with_replaced_parameters(
        &self,
        layout: WeightLayout,
        mut replacement: impl FnMut(&ParameterName, &Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Self> {
        // Layouts of no linear layers are refused before a bias is read.
        module_weights(OP, &self.config, layout)?;
        let mut layer = self.unload_adapter()?;
        let replacement: &mut Replacement = &mut |name, current| {
            let Some(values) = replacement(name, current)? else { return Ok(None) };
            Expect::one(OP, &name.name, &values).sizes(current.dims())?.same_device("the weights", current.device())?;
            Ok(Some(values))
        };
        let replaced = replaced_rows(OP, &layer.config, layout, &layer.projections, replacement)?;
        let mut parameters = layer.parameters.clone();
        let mut is_changed = !replaced.is_empty();
        for own in layer.parameters.stored()? {
            if let Some(values) = replacement(&ParameterName { name: own.stored, other: None }, &own.tensor)? {
                parameters.replace(&own.name, own.row, values)?;
                is_changed = true;
            }
        }
        if !is_changed {
            return Ok(self.clone());
        }
        if self.adapter.is_some() {
            bail!("[{OP}] the layer has an adapter already, expected at most one with biases or whole modules")
        }
        layer.start_adapter();
        layer.projections = layer.projections.with_replaced(&replaced)?;
        layer.with_parameters(parameters)
    }

    /// Notes the layer as it is before the first adapter.
    pub(super) fn start_adapter(&mut self) {
        if self.adapter.is_none() {
            self.adapter = Some(LoadedAdapter { base: self.weights(), unmerged: None });
        }
    }

    fn weights(&self) -> Weights {
        Weights { projections: self.projections.clone(), parameters: self.parameters.clone() }
    }

    /// Returns the layer with what it derives from its projections, such as vectors of distances, computed anew.
    fn rebuilt(self) -> Result<Self> {
        let parameters = self.parameters.clone();
        self.with_parameters(parameters)
    }

    /// Returns whether the layer has an adapter, merged or not.
    #[doc(alias = "lora")]
    pub fn has_adapter(&self) -> bool {
        self.adapter.is_some()
    }

    /// Returns a copy whose weights include the current values of the adapter, which it keeps: `W + scaling · B A`.
    ///
    /// Calls cost what they cost without an adapter. The copy keeps the original weights too, so that
    /// [`unmerge_adapter`](Self::unmerge_adapter) returns the same bits as before; the memory is that of both.
    /// [`merge_and_unload`](Self::merge_and_unload) keeps the merged weights alone. Sums are computed in f32 (in f64
    /// for weights in f64) and rounded once. Quantised weights with an update become f32.
    ///
    /// # Errors
    /// For a layer without an adapter or with adapters by name, for an adapted module of the caller's, and if the
    /// weights do not fit in memory.
    #[doc(alias = "lora")]
    pub fn merge_adapter(&self) -> Result<Self> {
        let Some(adapter) = &self.adapter else { bail!("[{OP}] there is no adapter to merge") };
        if !self.projections.named_updates().is_empty() {
            bail!(
                "[{OP}] the layer has the adapters {:?}, of which each sequence of a call chooses one, expected a layer \
                 with a single adapter (`Adapter::load_onto`) to merge",
                self.adapter_names()
            )
        }
        let unmerged = adapter.unmerged.clone().unwrap_or_else(|| self.weights());
        let projections = unmerged.projections.merge()?;
        let parameters = unmerged.parameters.merge()?;
        let adapter = Some(LoadedAdapter { unmerged: Some(unmerged), ..adapter.clone() });
        Self { projections, adapter, ..self.clone() }.with_parameters(parameters)
    }

    /// Returns a copy whose adapter is not merged: the original weights, and the matrices of the adapter. Nothing is
    /// subtracted, so the outputs have the same bits as before [`merge_adapter`](Self::merge_adapter).
    ///
    /// # Errors
    /// If memory is short.
    #[doc(alias = "lora")]
    pub fn unmerge_adapter(&self) -> Result<Self> {
        let mut layer = self.clone();
        let Some(unmerged) = layer.adapter.as_mut().and_then(|adapter| adapter.unmerged.take()) else {
            return Ok(layer);
        };
        layer.projections = unmerged.projections;
        layer.with_parameters(unmerged.parameters)
    }

    /// Returns a layer without an adapter whose weights include its current values, for inference or to
    /// [`save`](Self::save) it in any layout.
    ///
    /// # Errors
    /// As [`merge_adapter`](Self::merge_adapter).
    #[doc(alias = "lora")]
    pub fn merge_and_unload(&self) -> Result<Self> {
        Ok(Self { adapter: None, ..self.merge_adapter()? })
    }

    /// Returns the layer as it was before the first adapter was loaded; a layer without an adapter as it is.
    ///
    /// # Errors
    /// If memory is short.
    #[doc(alias = "unload")]
    pub fn unload_adapter(&self) -> Result<Self> {
        let Some(adapter) = &self.adapter else { return Ok(self.clone()) };
        let Weights { projections, parameters } = adapter.base.clone();
        Self { projections, adapter: None, ..self.clone() }.with_parameters(parameters)
    }

    /// Refuses to return the weights of a layer with an adapter.
    pub(super) fn refuse_adapter(&self) -> Result<()> {
        if self.adapter.is_some() {
            bail!(
                "[{OP}] the layer has an adapter, expected `merge_and_unload` for its weights with the adapter, or \
                 `unload_adapter` for those without it; `peft::Adapter::save` writes the adapter alone"
            )
        }
        Ok(())
    }
}

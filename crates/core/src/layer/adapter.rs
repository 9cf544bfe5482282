//! Low-rank adapters (LoRA) of a layer: loaded, merged into the weights, and unloaded.

use std::collections::HashMap;

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;

use super::shard::specs;
use super::{MultiHeadAttention, OP};
use crate::params::{AdaptableModule, AdapterMatrices, WeightLayout, load_projections, module_weights, state_dict};
use candle_attention_modules::base::{HeadCounts, ParameterList, ParameterReader};
use candle_attention_modules::linear::Projections;

/// The adapter of a layer, and the layer without it.
#[derive(Debug, Clone)]
pub(super) struct LoadedAdapter {
    /// The projections without the adapter.
    base_projections: Projections,
    /// The other parameters without the adapter.
    base_parameters: ParameterList,
    /// The projections with weights and adapter apart, while the layer has merged weights.
    unmerged: Option<Projections>,
}

impl LoadedAdapter {
    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self {
            base_projections: self.base_projections.freeze()?,
            base_parameters: self.base_parameters.freeze()?,
            unmerged: self.unmerged.as_ref().map(Projections::freeze).transpose()?,
        })
    }
}

impl MultiHeadAttention {
    /// Returns the modules of a layout that an adapter may change.
    ///
    /// # Errors
    /// For a config that does not fit the layout, and for a layout without linear layers for whole projections.
    #[doc(hidden)]
    pub fn adaptable_modules(&self, layout: WeightLayout) -> Result<Vec<AdaptableModule>> {
        Ok(module_weights(OP, &self.config, layout)?.into_iter().map(|weight| weight.module).collect())
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
        layer.rebuilt()
    }

    /// Replaces parameters by the parameters of an adapter, such as its biases. `replacement` receives the name of a
    /// parameter in the layout and its current value, and returns the new value, if there is one.
    ///
    /// # Errors
    /// If the layout cannot store the layer, for a replacement of another shape, and the errors of `replacement`.
    #[doc(hidden)]
    pub fn with_replaced_parameters(
        &self,
        layout: WeightLayout,
        mut replacement: impl FnMut(&str, &Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Self> {
        let base = self.unload_adapter()?;
        let linears = base.projections.to_linears()?;
        let mut tensors = HashMap::new();
        let mut is_changed = false;
        for (name, tensor) in state_dict(&base.config, layout, &linears)?.into_iter().chain(base.parameters.named()?) {
            let replaced = replacement(&name, &tensor)?;
            is_changed |= replaced.is_some();
            tensors.insert(name, replaced.unwrap_or(tensor));
        }
        if !is_changed {
            return Ok(self.clone());
        }
        if self.adapter.is_some() {
            bail!("[{OP}] the layer has an adapter already, expected at most one with biases or whole modules")
        }
        let heads = HeadCounts { query: self.config.num_heads(), key: self.config.num_kv_heads() };
        let vb = VarBuilder::from_tensors(tensors, base.projections.dtype, &base.projections.device);
        let reader = ParameterReader::new(OP, layout, vb)?.with_heads(heads)?;
        let mut layer = base.clone();
        layer.start_adapter();
        layer.projections = load_projections(&self.config, layout, &reader)?;
        layer.with_parameters(ParameterList::load(&specs(&self.config, &reader)?, &reader)?)
    }

    /// Notes the layer as it is before the first adapter.
    fn start_adapter(&mut self) {
        if self.adapter.is_none() {
            self.adapter = Some(LoadedAdapter {
                base_projections: self.projections.clone(),
                base_parameters: self.parameters.clone(),
                unmerged: None,
            });
        }
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
    /// For a layer without an adapter, for an adapted module of the caller's, and if the weights do not fit in memory.
    #[doc(alias = "lora")]
    pub fn merge_adapter(&self) -> Result<Self> {
        let Some(adapter) = &self.adapter else { bail!("[{OP}] there is no adapter to merge") };
        let unmerged = adapter.unmerged.as_ref().unwrap_or(&self.projections);
        let projections = unmerged.merge()?;
        let adapter = Some(LoadedAdapter { unmerged: Some(unmerged.clone()), ..adapter.clone() });
        Self { projections, adapter, ..self.clone() }.rebuilt()
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
        layer.projections = unmerged;
        layer.rebuilt()
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
        let projections = adapter.base_projections.clone();
        Self { projections, adapter: None, ..self.clone() }.with_parameters(adapter.base_parameters.clone())
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

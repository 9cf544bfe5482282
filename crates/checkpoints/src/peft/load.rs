//! An adapter loaded onto a layer: which of the layer's modules and parameters it changes.

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::OP;
use super::adapter::Adapter;
use super::config::AdapterBias;
use super::fit::Target;
use super::names::{LoraMatrix, PREFIX, is_below, join};
use super::tensors::RequiredParameter;
use crate::hf;
use candle_attention_core::internal::{AdaptableModule, AdapterMatrices, ParameterName};
use candle_attention_core::{MultiHeadAttention, WeightLayout};

/// The name of the sinks of a layer, for which some model types have another name.
const SINKS: &str = "sinks";

/// The parameters for which an adapter may have other values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Taken {
    /// Whether the parameter is of a module that may have low-rank matrices.
    pub is_linear: bool,
    /// Whether a value that is there is used if no option names it, as PEFT does.
    pub takes_all: bool,
}

impl Adapter {
    /// Returns a copy of a layer with the adapter. `module` is the full name of the attention module in the model,
    /// and `layout` has the names of its projections.
    ///
    /// The layer's own weights are shared, and not tracked for gradients if they are plain tensors. Low-rank matrices
    /// of one packed module (`qkv_proj`, `c_attn`) apply to all projections in it. Linear layers of content-based
    /// positions (`pos_key_proj`, `linear_pos`) may have matrices too. Several adapters of one layer are added up.
    ///
    /// A layer that the options exclude (`layers_to_transform`, `exclude_modules`, a regular expression) is returned
    /// without an adapter, if the adapter changes the same modules of another layer.
    ///
    /// The rows of the projections have to be in the order of the model that the adapter was trained on. GGUF files of
    /// Llama have another order.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, named with both shapes, including biases and saved modules that the options
    /// promise; for a tensor of the file below `module` that is of no module of the layer; if no tensor is of this
    /// layer, with a name of each side; and for a layout without linear layers for whole projections.
    pub fn load_onto(
        &self,
        layer: &MultiHeadAttention,
        layout: WeightLayout,
        module: &str,
    ) -> Result<MultiHeadAttention> {
        let own = self.own_modules(layer, layout, module)?;
        let target = Target { module, layout, own: &own };
        self.check_matrices(&target)?;
        let loaded = self.with_own_parameters(layer, &target, |_| Ok(()))?;
        let loaded = loaded.with_adapter(layout, |linear| self.matrices_below(module, linear))?;
        if !loaded.has_adapter() {
            self.check_excluded(&target)?;
        }
        self.check_names_below(&target)?;
        Ok(loaded)
    }

    /// Returns a copy of a layer that has the adapter under a name, for calls that choose it.
    ///
    /// # Errors
    /// As [`load_onto`](Self::load_onto), and for other values of the layer's own parameters, such as biases.
    pub(super) fn load_onto_by_name(
        &self,
        name: &str,
        layer: &MultiHeadAttention,
        layout: WeightLayout,
        module: &str,
    ) -> Result<MultiHeadAttention> {
        let own = self.own_modules(layer, layout, module)?;
        let target = Target { module, layout, own: &own };
        self.check_matrices(&target)?;
        self.with_own_parameters(layer, &target, |parameter| shared_by_sequences(name, parameter))?;
        let mut is_changed = false;
        let loaded = layer.with_named_adapter(name, layout, |linear| {
            let matrices = self.matrices_below(module, linear)?;
            is_changed |= matrices.is_some();
            Ok(matrices)
        })?;
        if !is_changed {
            self.check_excluded(&target)?;
        }
        self.check_names_below(&target)?;
        Ok(loaded)
    }

    /// Returns the modules of a layer that the adapter may change, under the adapter's names.
    fn own_modules(
        &self,
        layer: &MultiHeadAttention,
        layout: WeightLayout,
        module: &str,
    ) -> Result<Vec<AdaptableModule>> {
        let mut own = layer.adaptable_modules(layout)?;
        for renamed in &mut own {
            renamed.name = self.name_of(module, renamed);
        }
        Ok(own)
    }

    /// Returns a copy of a layer with the adapter's own values of parameters: trained biases and saved modules. `check`
    /// receives the name of each of them.
    fn with_own_parameters(
        &self,
        layer: &MultiHeadAttention,
        target: &Target,
        check: impl Fn(&str) -> Result<()>,
    ) -> Result<MultiHeadAttention> {
        let takes_all = self.takes_all_parameters(target);
        let has_parameters = self.config.replaces_parameters() || (takes_all && self.has_parameters_of(target));
        if !has_parameters {
            return Ok(layer.clone());
        }
        let modules = layer.adaptable_modules(target.layout)?;
        layer.with_replaced_parameters(target.layout, |name, current| {
            let is_linear = modules.iter().any(|linear| is_parameter_of(&name.name, |of| of == linear.name));
            let parameter = self.parameter_of(target.module, name);
            let replacement = self.replacement(&parameter, current, Taken { is_linear, takes_all })?;
            if replacement.is_some() {
                check(&parameter)?;
            }
            Ok(replacement)
        })
    }

    /// Loads one layer's attention as [`hf::load_attention`] does, and the adapter onto it. `vb` is a builder at the
    /// root of the model.
    ///
    /// # Errors
    /// As [`hf::load_attention`] and [`load_onto`](Self::load_onto).
    pub fn load_attention(&self, json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
        let places = hf::attention_modules(json, layer, &vb)?;
        let attention = hf::load_attention(json, layer, vb)?;
        match self.place_of(&attention, &places)? {
            Some((layout, module)) => self.load_onto(&attention, *layout, module),
            None => Ok(attention),
        }
    }

    /// Returns the place of an attention module in the model that the adapter was trained on: the first for which it
    /// has matrices, or the first of all.
    pub(super) fn place_of<'p>(
        &self,
        attention: &MultiHeadAttention,
        places: &'p [(WeightLayout, String)],
    ) -> Result<Option<&'p (WeightLayout, String)>> {
        // An adapter may have been trained on the model without its head, or with one.
        for place in places {
            let (layout, module) = place;
            let has_matrices = |own: &AdaptableModule| {
                let name = self.name_of(module, own);
                self.tensors.matrix_names(&join(module, &name)).any().is_some()
            };
            if attention.adaptable_modules(*layout)?.iter().any(has_matrices) {
                return Ok(Some(place));
            }
        }
        Ok(places.first())
    }

    /// Returns the name that the adapter has for a module below an attention module.
    fn name_of(&self, attention: &str, own: &AdaptableModule) -> String {
        let Some(other) = &own.other_name else { return own.name.clone() };
        let has_tensors = |name: &str| {
            let full = join(attention, name);
            let is_there = |leaf: &str| self.tensors.parameter_name(&format!("{full}.{leaf}")).is_some();
            self.tensors.matrix_names(&full).any().is_some() || is_there("weight") || is_there("bias")
        };
        let is_named = |name: &str| {
            let full = join(attention, name);
            self.config.saved_by(&full).is_some() || self.config.is_target(&full).unwrap_or(false)
        };
        let is_other_named = is_named(other) && !is_named(&own.name);
        if has_tensors(other) || (is_other_named && !has_tensors(&own.name)) { other.clone() } else { own.name.clone() }
    }

    /// Returns the full name that the adapter has for a parameter below an attention module.
    fn parameter_of(&self, attention: &str, own: &ParameterName) -> String {
        let full = join(attention, &own.name);
        let mut other_names: Vec<String> = own.other.iter().cloned().collect();
        if own.name == SINKS {
            other_names.extend(hf::other_names_of_sinks().map(String::from));
        }
        let is_saved = |name: &str| is_parameter_of(name, |module| self.config.saved_by(module).is_some());
        let is_there = |name: &str| self.tensors.parameter_name(name).is_some();
        for other_name in other_names {
            let other = join(attention, &other_name);
            let is_other_named = is_saved(&other) && !is_saved(&full);
            if is_there(&other) || (is_other_named && !is_there(&full)) {
                return other;
            }
        }
        full
    }

    /// Returns whether a module, by its full name, has low-rank matrices.
    ///
    /// # Errors
    /// For a file and options that disagree, and for a regular expression that is not supported.
    pub(super) fn is_adapted(&self, module: &str) -> Result<bool> {
        let names = self.tensors.matrix_names(module);
        match (self.config.is_target(module), names.any()) {
            (Ok(true), _) => Ok(true),
            (Ok(false), Some(name)) => {
                bail!("[{OP}] {name} is in the file, but target_modules does not name {module}")
            }
            (Ok(false), None) => Ok(false),
            // PEFT has written matrices of the modules that it matched.
            (Err(_), Some(_)) => Ok(true),
            (Err(error), None) if self.tensors.is_new() => Err(error),
            (Err(_), None) => Ok(false),
        }
    }

    /// Returns the matrices of a module below an attention module, if it has some.
    fn matrices_below(&self, attention: &str, own: &AdaptableModule) -> Result<Option<AdapterMatrices>> {
        self.matrices(&join(attention, &self.name_of(attention, own)), own)
    }

    /// Returns the matrices of a module, by its full name, if it has some.
    pub(super) fn matrices(&self, module: &str, own: &AdaptableModule) -> Result<Option<AdapterMatrices>> {
        if let Some(name) = self.tensors.unsupported(module) {
            bail!("[{OP}] {name} is in the file, expected LoRA without DoRA (use_dora) and lora_bias")
        }
        if !self.is_adapted(module)? {
            return Ok(None);
        }
        let r = self.config.rank(module)?;
        let names = self.tensors.matrix_names(module);
        let name_of = |matrix: LoraMatrix| format!("{PREFIX}{module}.{}.weight", matrix.name());
        let (a, b) = match (names.a, names.b) {
            (Some(a), Some(b)) => (a, b),
            (None, None) => (name_of(LoraMatrix::A), name_of(LoraMatrix::B)),
            (Some(a), None) => return lost(&a.replace(".lora_A.", ".lora_B."), &a),
            (None, Some(b)) => return lost(&b.replace(".lora_B.", ".lora_A."), &b),
        };
        Ok(Some(AdapterMatrices {
            a: self.tensors.matrix(&a, LoraMatrix::A, (r, own.inputs))?,
            b: self.tensors.matrix(&b, LoraMatrix::B, (own.outputs, r))?,
            scaling: self.config.scaling(module)?,
            dropout: self.config.dropout(),
        }))
    }

    /// Returns the adapter's own value of a parameter of the model, by its full name: a trained bias, or a parameter of
    /// a saved module.
    pub(super) fn replacement(&self, name: &str, current: &Tensor, taken: Taken) -> Result<Option<Tensor>> {
        let Some((module, leaf)) = name.rsplit_once('.') else { return Ok(None) };
        if let Some(entry) = self.config.saved_by(module) {
            let is_mentioned =
                self.has_parameter(|other| is_parameter_of(other, |of| self.config.saved_by(of) == Some(entry)));
            let required = RequiredParameter { reason: format!("modules_to_save names {entry:?}"), is_mentioned };
            return self.tensors.replacement(name, current, false, Some(required));
        }
        let is_adapted = match self.tensors.is_new() {
            true => taken.is_linear && self.is_adapted(module)?,
            false => self.tensors.matrix_names(module).any().is_some(),
        };
        let reason = match self.config.bias() {
            AdapterBias::All => Some("bias is \"all\""),
            AdapterBias::LoraOnly if is_adapted => Some("bias is \"lora_only\""),
            AdapterBias::LoraOnly | AdapterBias::None => None,
        };
        // A buffer of the name `bias`, such as GPT-2's mask, is no bias.
        let reason = reason.filter(|_| leaf == "bias" && current.rank() == 1);
        if reason.is_none() && !taken.takes_all {
            return Ok(None);
        }
        let required = reason.map(|reason| RequiredParameter {
            reason: reason.to_string(),
            is_mentioned: self.has_parameter(|other| other.ends_with(".bias")),
        });
        self.tensors.replacement(name, current, is_adapted, required)
    }

    /// Returns whether the file has other values of parameters for which `is_wanted` is true.
    fn has_parameter(&self, is_wanted: impl Fn(&str) -> bool) -> bool {
        self.tensors.file.as_ref().is_some_and(|file| file.has_parameter(is_wanted))
    }

    /// Returns whether all parameters among the adapter's tensors are its own. In the state dict of a whole PEFT model,
    /// most are the model's.
    fn takes_all_parameters(&self, target: &Target) -> bool {
        match &self.tensors.file {
            Some(file) => !file.is_whole_model,
            None => !self.tensors.is_new() && !target.full_names().any(|full| self.tensors.has_base_weight(&full)),
        }
    }

    /// Returns whether the adapter has a parameter below an attention module.
    fn has_parameters_of(&self, target: &Target) -> bool {
        if self.tensors.file.is_some() {
            return self.has_parameter(|name| is_below(name, target.module));
        }
        let names = target.full_names().flat_map(|full| [format!("{full}.weight"), format!("{full}.bias")]);
        names.into_iter().any(|name| self.tensors.parameter_name(&name).is_some())
    }

    /// Returns `scaling · B A` of a linear layer (out, in), by its full name, if it has matrices.
    pub(super) fn delta(&self, module: &str, outputs: usize, inputs: usize) -> Result<Option<Tensor>> {
        if self.tensors.matrix_names(module).any().is_none() {
            // The matrix B of a new module is zero. A weight of two dimensions may be that of no linear layer.
            let has_none = self.tensors.is_new() || self.config.targets_all_linear() || !self.is_adapted(module)?;
            if has_none && self.tensors.unsupported(module).is_none() {
                return Ok(None);
            }
            if self.tensors.are_variables() {
                bail!(
                    "[{OP}] {PREFIX}{module}.{}.weight is missing, expected shape [{}, {inputs}] (layout PEFT)",
                    LoraMatrix::A.name(),
                    self.config.rank(module)?
                )
            }
        }
        let own = AdaptableModule { name: module.to_string(), other_name: None, outputs, inputs };
        match self.matrices(module, &own)? {
            Some(found) => Ok(Some((found.b.detach().matmul(&found.a.detach())? * found.scaling)?)),
            None => Ok(None),
        }
    }

    /// Returns `scaling · (B A)ᵀ` of an embedding (rows, width), by its full name, if it has matrices.
    pub(super) fn embedding_delta(&self, module: &str, rows: usize, width: usize) -> Result<Option<Tensor>> {
        let names = self.tensors.embedding_names(module);
        let (Some(a), Some(b)) = (names.a, names.b) else { return Ok(None) };
        let r = self.config.rank(module)?;
        let a = self.tensors.matrix(&a, LoraMatrix::A, (r, rows))?.detach();
        let b = self.tensors.matrix(&b, LoraMatrix::B, (width, r))?.detach();
        Ok(Some((a.t()?.matmul(&b.t()?)? * self.config.scaling(module)?)?))
    }
}

/// Returns whether a parameter, by its full name, is of a module for which `is_wanted` is true.
fn is_parameter_of(name: &str, is_wanted: impl Fn(&str) -> bool) -> bool {
    name.rsplit_once('.').is_some_and(|(module, _)| is_wanted(module))
}

/// Returns the error for a matrix that is missing next to another one.
///
/// # Errors
/// Always.
fn lost<T>(missing: &str, found: &str) -> Result<T> {
    bail!("[{OP}] {missing} is missing, the adapter has {found} alone")
}

/// Returns the error of an adapter that has another `what` than the adapters of other sequences of a batch, although
/// all sequences share it.
pub(super) fn shared_by_sequences(adapter: &str, what: &str) -> Result<()> {
    bail!(
        "[{OP}] the adapter {adapter:?} has another {what}, which sequences of a batch share, expected low-rank \
         matrices alone"
    )
}

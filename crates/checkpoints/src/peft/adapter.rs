//! An adapter: its options and its tensors, loaded onto layers and saved.

use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_nn::{VarBuilder, VarMap};
use safetensors::serialize_to_file;
use serde_json::Value;

use super::OP;
use super::config::{AdapterBias, AdapterConfig};
use super::tensors::{AdapterTensors, Matrix, add_variables};
use crate::files::Checkpoint;
use crate::hf;
use candle_attention_core::internal::{AdaptableModule, AdapterMatrices};
use candle_attention_core::{MultiHeadAttention, WeightLayout};

/// The file of the options of an adapter.
const CONFIG_FILE: &str = "adapter_config.json";

/// The file of the tensors of an adapter, and the older one.
const TENSOR_FILES: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];

/// A LoRA adapter of PEFT: its options and its tensors.
///
/// [The module](super) shows how an adapter is opened, trained, merged and saved.
#[derive(Clone)]
#[doc(alias = "lora")]
#[doc(alias = "PeftModel")]
pub struct Adapter {
    config: AdapterConfig,
    tensors: AdapterTensors,
}

impl std::fmt::Debug for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adapter").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Adapter {
    /// Opens the folder of an adapter for inference: `adapter_config.json`, with `adapter_model.safetensors` or
    /// `adapter_model.bin`.
    ///
    /// The matrices may be in another float type than the layer: `dtype`, in which they are multiplied.
    ///
    /// # Errors
    /// For a missing file, and as [`AdapterConfig::from_json`].
    pub fn open(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let (config, checkpoint) = read(folder.as_ref())?;
        Ok(Self::from_builder(config, checkpoint.var_builder(dtype, device)?))
    }

    /// Opens the folder of an adapter for training: adds its tensors to `vars` as variables, under PEFT's names.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_trainable(folder: impl AsRef<Path>, vars: &VarMap, dtype: DType, device: &Device) -> Result<Self> {
        let (config, checkpoint) = read(folder.as_ref())?;
        add_variables(&checkpoint, vars, dtype, device)?;
        Ok(Self::new(config, vars, dtype, device))
    }

    /// Creates an adapter for training, over variables with PEFT's names. Variables that are not there yet are added
    /// when the adapter is loaded onto a layer: A as `nn.Linear` draws its weight, B with zeros, biases and saved
    /// modules with the values of the layer.
    #[must_use]
    pub fn new(config: AdapterConfig, vars: &VarMap, dtype: DType, device: &Device) -> Self {
        Self { config, tensors: AdapterTensors::of_vars(vars, dtype, device) }
    }

    /// Creates an adapter over the tensors of a builder with PEFT's names, with the prefix `base_model.model.` and
    /// without, such as the state dict of a whole `PeftModel`.
    #[must_use]
    pub fn from_builder(config: AdapterConfig, vb: VarBuilder<'static>) -> Self {
        Self { config, tensors: AdapterTensors::of_builder(vb) }
    }

    /// Returns the options.
    #[must_use]
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Returns a copy of a layer with the adapter. `module` is the full name of the attention module in the model,
    /// and `layout` has the names of its projections.
    ///
    /// The layer's own weights are shared, and not tracked for gradients if they are plain tensors. Low-rank matrices
    /// of one packed module (`qkv_proj`, `c_attn`) apply to all projections in it. Several adapters of one layer are
    /// added up. A layer that the options exclude (`layers_to_transform`, `exclude_modules`, a regular expression) is
    /// returned without an adapter.
    ///
    /// The rows of the projections have to be in the order of the model that the adapter was trained on. GGUF files of
    /// Llama have another order.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, named with both shapes; for `target_modules` none of which is in the layout;
    /// and for a layout without linear layers for whole projections.
    pub fn load_onto(
        &self,
        layer: &MultiHeadAttention,
        layout: WeightLayout,
        module: &str,
    ) -> Result<MultiHeadAttention> {
        let names = layer.adaptable_modules(layout)?;
        let replaced = if self.config.replaces_parameters() {
            let replacement = |name: &str, current: &Tensor| self.replacement(&join(module, name), current);
            layer.with_replaced_parameters(layout, replacement)?
        } else {
            layer.clone()
        };
        let adapted = replaced.with_adapter(layout, |own| self.matrices(&join(module, &own.name), own))?;
        if let Some(targets) = self.config.plain_names()
            && !adapted.has_adapter()
        {
            let known: Vec<_> = names.iter().map(|own| own.name.as_str()).collect();
            bail!(
                "[{OP}] target_modules is {targets:?}, none of which is in {module:?} with {} (layout {layout})",
                known.join(", ")
            )
        }
        Ok(adapted)
    }

    /// Loads one layer's attention as [`hf::load_attention`] does, and the adapter onto it. `vb` is a builder at the
    /// root of the model.
    ///
    /// # Errors
    /// As [`hf::load_attention`] and [`load_onto`](Self::load_onto).
    pub fn load_attention(&self, json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
        let places = hf::attention_modules(json, layer, &vb)?;
        let attention = hf::load_attention(json, layer, vb)?;
        let has_tensors = |layout: WeightLayout, module: &str| -> Result<bool> {
            let modules = attention.adaptable_modules(layout)?;
            Ok(modules.iter().any(|own| self.tensors.name_of_matrix(&join(module, &own.name)).is_some()))
        };
        // An adapter may have been trained on the model without its head, or with one.
        for (layout, module) in &places {
            if has_tensors(*layout, module)? {
                return self.load_onto(&attention, *layout, module);
            }
        }
        match places.first() {
            Some((layout, module)) => self.load_onto(&attention, *layout, module),
            None => Ok(attention),
        }
    }

    /// Writes the adapter's variables and options to a folder, which PEFT reads: `adapter_model.safetensors` and
    /// `adapter_config.json`. The folder is made if it is not there.
    ///
    /// # Errors
    /// For an adapter without variables, and if a file cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        let tensors = self.tensors.to_save()?;
        let failed = |error: String| Error::msg(format!("[{OP}] cannot write to {}: {error}", folder.display()));
        std::fs::create_dir_all(folder).map_err(|error| failed(error.to_string()))?;
        let metadata = [("format".to_string(), "pt".to_string())].into();
        serialize_to_file(&tensors, Some(metadata), &folder.join(TENSOR_FILES[0]))
            .map_err(|error| failed(error.to_string()))?;
        let text = serde_json::to_string_pretty(&self.config.to_json()).map_err(|error| failed(error.to_string()))?;
        std::fs::write(folder.join(CONFIG_FILE), text + "\n").map_err(|error| failed(error.to_string()))
    }

    /// Returns whether a module, by its full name, has low-rank matrices.
    ///
    /// # Errors
    /// For a file and options that disagree, and for a regular expression that is not supported.
    fn is_adapted(&self, module: &str) -> Result<bool> {
        let found = self.tensors.name_of_matrix(module);
        match (self.config.is_target(module), found) {
            (Ok(true), _) => Ok(true),
            (Ok(false), Some(name)) => {
                bail!("[{OP}] {name} is in the file, but target_modules does not name {module}")
            }
            (Ok(false), None) => Ok(false),
            // PEFT has written matrices of the modules that it matched.
            (Err(_), Some(_)) => Ok(true),
            (Err(error), None) if self.tensors.makes_variables() => Err(error),
            (Err(_), None) => Ok(false),
        }
    }

    /// Returns the matrices of a module, by its full name, if it has some.
    fn matrices(&self, module: &str, own: &AdaptableModule) -> Result<Option<AdapterMatrices>> {
        if !self.is_adapted(module)? {
            return Ok(None);
        }
        let r = self.config.rank(module)?;
        Ok(Some(AdapterMatrices {
            a: self.tensors.matrix(module, Matrix::A, (r, own.inputs))?,
            b: self.tensors.matrix(module, Matrix::B, (own.outputs, r))?,
            scaling: self.config.scaling(module)?,
            dropout: self.config.dropout(),
        }))
    }

    /// Returns the adapter's own value of a parameter of the model, by its full name: a trained bias, or a parameter of
    /// a saved module.
    pub(super) fn replacement(&self, name: &str, current: &Tensor) -> Result<Option<Tensor>> {
        let Some((module, leaf)) = name.rsplit_once('.') else { return Ok(None) };
        if self.config.is_saved(module) {
            return self.tensors.replacement(name, current, false);
        }
        let is_trained = leaf == "bias" && self.config.bias() != AdapterBias::None;
        if !is_trained {
            return Ok(None);
        }
        let is_adapted = self.is_adapted(module)?;
        if !is_adapted && self.config.bias() == AdapterBias::LoraOnly {
            return Ok(None);
        }
        self.tensors.replacement(name, current, is_adapted)
    }

    /// Returns `scaling · B A` of a module (out, in), by its full name, if it has matrices.
    pub(super) fn delta(&self, module: &str, outputs: usize, inputs: usize) -> Result<Option<Tensor>> {
        if self.tensors.has_embedding(module) {
            bail!("[{OP}] {module} is an embedding with an adapter, which is not supported")
        }
        let own = AdaptableModule { name: module.to_string(), outputs, inputs };
        match self.matrices(module, &own)? {
            Some(found) => Ok(Some((found.b.detach().matmul(&found.a.detach())? * found.scaling)?)),
            None => Ok(None),
        }
    }
}

/// Reads the options of an adapter, and the names of its tensors.
fn read(folder: &Path) -> Result<(AdapterConfig, Checkpoint)> {
    let config_file = folder.join(CONFIG_FILE);
    let cannot_read = |error: String| Error::msg(format!("[{OP}] cannot read {}: {error}", config_file.display()));
    let text = std::fs::read_to_string(&config_file).map_err(|error| cannot_read(error.to_string()))?;
    let json = serde_json::from_str(&text).map_err(|error| cannot_read(error.to_string()))?;
    let config = AdapterConfig::from_json(&json)?;
    match TENSOR_FILES.iter().map(|name| folder.join(name)).find(|file| file.is_file()) {
        Some(tensors) => Ok((config, Checkpoint::open(tensors)?)),
        None => bail!("[{OP}] {} has none of {}", folder.display(), TENSOR_FILES.join(", ")),
    }
}

/// Returns the full name of a module or a parameter below another module.
fn join(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_string() } else { format!("{module}.{name}") }
}

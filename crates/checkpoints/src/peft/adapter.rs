//! An adapter: its options and its tensors, loaded onto layers and saved.

use std::path::Path;

use candle_core::{DType, Device, Error, Result, bail};
use candle_nn::{VarBuilder, VarMap};
use safetensors::serialize_to_file;

use super::OP;
use super::config::AdapterConfig;
use super::tensors::AdapterTensors;
use crate::files::Checkpoint;

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
    pub(super) config: AdapterConfig,
    pub(super) tensors: AdapterTensors,
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
    /// For a missing file, as [`AdapterConfig::from_json`], and for a file with a tensor that is not of LoRA (such as
    /// that of DoRA) or with a matrix A or B without the other.
    pub fn open(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let (config, checkpoint) = read(folder.as_ref())?;
        Ok(Self { config, tensors: AdapterTensors::of_file(&checkpoint, dtype, device)? })
    }

    /// Opens the folder of an adapter for training: adds its tensors to `vars` as variables, under PEFT's names.
    ///
    /// A tensor that layers ask for and that is missing in the file is an error, as with [`open`](Self::open). There is
    /// one exception: for modules that the options target and of which the file has no tensor in any layer, such as
    /// `k_proj` where its name was added to `target_modules`, new variables are made next to the file's in the same
    /// layer. A warning is logged then, and [`new_tensors`](Self::new_tensors) returns their names.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for a tensor that has two names in the file.
    pub fn open_trainable(folder: impl AsRef<Path>, vars: &VarMap, dtype: DType, device: &Device) -> Result<Self> {
        let (config, checkpoint) = read(folder.as_ref())?;
        Ok(Self { config, tensors: AdapterTensors::of_opened_vars(&checkpoint, vars, dtype, device)? })
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
    ///
    /// A builder cannot list its tensors, so that those that no layer asks for are not noticed: prefer
    /// [`open`](Self::open) for a folder.
    #[must_use]
    pub fn from_builder(config: AdapterConfig, vb: VarBuilder<'static>) -> Self {
        Self { config, tensors: AdapterTensors::of_builder(vb) }
    }

    /// Returns the options.
    #[must_use]
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Returns the tensors of the file that no layer and no builder of this adapter or of a copy has read, by name.
    ///
    /// An adapter of a whole model is loaded layer by layer. After all layers, this list is what was left out, such as
    /// the matrices of the MLP, which [`merged_builder`](Self::merged_builder) reads.
    ///
    /// # Errors
    /// For an adapter over a builder, and for a new one: the names are not known.
    pub fn unused_tensors(&self) -> Result<Vec<String>> {
        self.tensors.unused()
    }

    /// Checks that each tensor of the file was read by a layer or a builder of this adapter or of a copy.
    ///
    /// # Errors
    /// As [`unused_tensors`](Self::unused_tensors), and if there are some, with their number and the first names.
    pub fn check_all_used(&self) -> Result<()> {
        let unused = self.unused_tensors()?;
        if unused.is_empty() {
            return Ok(());
        }
        let first = unused.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
        bail!(
            "[{OP}] {} tensors of the file are not used: {first}{}",
            unused.len(),
            if unused.len() > 3 { ", .." } else { "" }
        )
    }

    /// Returns the variables that were made because the adapter did not have them, by name. For an adapter that was
    /// opened, these are modules that the options target and of which the file has no tensor in any layer.
    #[must_use]
    pub fn new_tensors(&self) -> Vec<String> {
        self.tensors.made()
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

//! The adapters of Jina's published checkpoints, one for each task. v3 has them among the tensors of the model:
//! low-rank matrices of every linear layer and of every embedding, by the names of PyTorch's `parametrize`. v4 has them
//! in a file of PEFT, under the names of the tasks. v3 in transformers' format has a folder of PEFT for each task.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_attention::peft::{Adapter, AdapterConfig};
use candle_attention::weights::Checkpoint;
use candle_core::{Context, DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use serde_json::{Value, json};

use super::fields::Fields;
use super::jina_names::{ByTransformersNames, missing, of_shape};
use crate::common::{EXAMPLE, read_json};

/// The place of a module's own weight, and that of its matrices, which are stacked over the tasks.
const ORIGINAL: &str = "parametrizations.weight.original";
const STACKED: &str = "parametrizations.weight.0";

/// The end of the names of embeddings. Their matrices are stored transposed.
const EMBEDDINGS: &str = "_embeddings";

/// The names of a matrix.
struct MatrixNames {
    /// The end of the name in PEFT's files.
    peft: &'static str,
    /// The last part of the name in the checkpoint.
    stored: &'static str,
    is_of_embedding: bool,
}

const MATRICES: [MatrixNames; 4] = [
    MatrixNames { peft: ".lora_A.weight", stored: "lora_A", is_of_embedding: false },
    MatrixNames { peft: ".lora_B.weight", stored: "lora_B", is_of_embedding: false },
    MatrixNames { peft: ".lora_embedding_A", stored: "lora_A", is_of_embedding: true },
    MatrixNames { peft: ".lora_embedding_B", stored: "lora_B", is_of_embedding: true },
];

/// The folder of the adapters of v4, below that of the checkpoint.
const FOLDER: &str = "adapters";

/// The files in a folder of adapters: the settings and the matrices.
const OPTIONS: &str = "adapter_config.json";
const FILE: &str = "adapter_model.safetensors";

/// Returns the files of the adapters that a task may have, below the folder of a checkpoint.
pub fn files(task: Option<&str>) -> Vec<String> {
    let mut files = Vec::new();
    for folder in [Some(FOLDER), task].into_iter().flatten() {
        files.extend([OPTIONS, FILE].map(|file| format!("{folder}/{file}")));
    }
    files
}

/// The adapters of a checkpoint, one for each task.
pub struct TaskAdapters {
    /// The names of the tasks, in the order of the matrices.
    tasks: Vec<String>,
    /// The text before each text of a task, by its name.
    instructions: Fields,
    config: AdapterConfig,
    source: Source,
}

/// The place of the matrices.
enum Source {
    /// The matrices are among the tensors of the model, for all tasks in one tensor.
    Stacked,
    /// The matrices are in a file of PEFT. The model is of no use without an adapter.
    File(Checkpoint),
    /// Each task has a folder, below this one.
    Folders(PathBuf),
}

impl TaskAdapters {
    /// Reads the adapters' settings in a `config.json` in a folder; `None` if it has none.
    pub fn read(config: &Value, folder: &Path) -> Result<Option<Self>> {
        let fields = Fields::of("config.json", config.clone())?;
        if !fields.get("lora_adaptations").is_null() {
            return Self::stacked(&fields).map(Some);
        }
        let adapters = folder.join(FOLDER);
        if fields.get("task_names").is_null() || !adapters.is_dir() {
            return Self::in_folders(folder);
        }
        let mut options = read_json(&adapters.join(OPTIONS))?;
        // An expression that names modules of images too. The modules of the text are known by their matrices.
        if let Some(object) = options.as_object_mut() {
            object.insert("target_modules".to_string(), "all-linear".into());
        }
        Ok(Some(Self {
            tasks: task_names(&fields, "task_names")?,
            instructions: Fields::of("config.json", json!({}))?,
            config: AdapterConfig::from_json(&options)?,
            source: Source::File(Checkpoint::open(adapters.join(FILE))?),
        }))
    }

    /// Finds folders with an adapter each; `None` if there are none.
    fn in_folders(folder: &Path) -> Result<Option<Self>> {
        let mut tasks = Vec::new();
        for entry in folder.read_dir()? {
            let entry = entry?;
            if entry.path().join(OPTIONS).is_file() {
                tasks.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        tasks.sort();
        let Some(first) = tasks.first() else { return Ok(None) };
        let config = AdapterConfig::from_json(&read_json(&folder.join(first).join(OPTIONS))?)?;
        let instructions = Fields::of("config.json", json!({}))?;
        Ok(Some(Self { tasks, instructions, config, source: Source::Folders(folder.to_path_buf()) }))
    }

    /// Reads the settings of adapters among the tensors of the model.
    fn stacked(fields: &Fields) -> Result<Self> {
        let tasks = task_names(fields, "lora_adaptations")?;
        let instructions = fields.section("task_instructions")?;
        instructions.only(&tasks.iter().map(String::as_str).collect::<Vec<_>>())?;
        let rank = fields.count("lora_rank", "columns")?.unwrap_or(4);
        let alpha = match fields.get("lora_alpha") {
            Value::Null => 1.0,
            alpha => alpha.as_f64().with_context(|| format!("[{EXAMPLE}] lora_alpha is {alpha}, expected a number"))?,
        };
        let config = AdapterConfig::from_json(&json!({
            "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear",
        }))?;
        Ok(Self { tasks, instructions, config, source: Source::Stacked })
    }

    /// Returns whether the weights for a task, or without one, are read as floats that may have an adapter in them.
    pub fn are_merged(&self, task: Option<&str>) -> bool {
        match self.source {
            Source::Stacked | Source::File(_) => true,
            Source::Folders(_) => task.is_some(),
        }
    }

    /// Returns the text before each text of a task, if there is one.
    pub fn instruction(&self, task: &str) -> Result<Option<&str>> {
        self.instructions.text(task)
    }

    /// Returns a builder of the model's weights with the adapter of a task in them, or without an adapter. `vb` is a
    /// builder at the root of the checkpoint.
    ///
    /// # Errors
    /// If there is no such task, and if there has to be one; the error lists the tasks.
    pub fn weights(&self, vb: &VarBuilder<'static>, task: Option<&str>) -> Result<VarBuilder<'static>> {
        let listed = self.tasks.join(", ");
        let Some(task) = task else {
            return match self.source {
                Source::Stacked => Ok(originals(vb)),
                Source::Folders(_) => Ok(vb.clone()),
                Source::File(_) => bail!("[{EXAMPLE}] the model needs an adapter, expected --task, one of {listed}"),
            };
        };
        let Some(index) = self.tasks.iter().position(|name| name == task) else {
            bail!("[{EXAMPLE}] there is no adapter for the task {task:?}, expected one of {listed}")
        };
        let (model, matrices) = match &self.source {
            Source::Stacked => {
                let own = Matrices { vb: vb.clone(), index, count: self.tasks.len() };
                (originals(vb), built(vb, own))
            }
            Source::File(file) => (vb.clone(), built(vb, NamedMatrices::of(file, task, vb)?)),
            Source::Folders(folder) => {
                let adapter = Adapter::open(folder.join(task), vb.dtype(), vb.device())?;
                if !ByTransformersNames::fits(vb) {
                    return Ok(adapter.merged_builder(vb.clone()));
                }
                return Ok(adapter.merged_builder(built(vb, ByTransformersNames { vb: vb.clone() })));
            }
        };
        Ok(Adapter::from_builder(self.config.clone(), matrices).merged_builder(model))
    }
}

/// Reads a list of the names of tasks.
fn task_names(fields: &Fields, key: &str) -> Result<Vec<String>> {
    let names = fields.get(key).as_array().into_iter().flatten().map(|name| name.as_str().map(str::to_string));
    match names.collect::<Option<Vec<_>>>() {
        Some(tasks) if !tasks.is_empty() => Ok(tasks),
        _ => fields.fail(key, "a list of the names of tasks"),
    }
}

/// Makes a builder of a backend with the type and the device of another builder.
fn built(vb: &VarBuilder<'static>, backend: impl SimpleBackend + 'static) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(backend), vb.dtype(), vb.device().clone())
}

/// Returns the weights of the model without an adapter, by the names that they have in other checkpoints. `vb` is a
/// builder at the root of the checkpoint.
fn originals(vb: &VarBuilder<'static>) -> VarBuilder<'static> {
    let stored = vb.clone();
    vb.clone().rename_f(move |name| match name.strip_suffix(".weight").map(|module| format!("{module}.{ORIGINAL}")) {
        Some(original) if stored.contains_tensor(&original) => original,
        _ => name.to_string(),
    })
}

/// The matrices of one task, by the names that PEFT has for them.
struct Matrices {
    vb: VarBuilder<'static>,
    /// The number of the task.
    index: usize,
    /// The number of tasks.
    count: usize,
}

impl Matrices {
    /// Returns the names of a matrix of the checkpoint and its full name there, by PEFT's name.
    fn stored(&self, name: &str) -> Option<(&'static MatrixNames, String)> {
        for names in &MATRICES {
            let Some(module) = name.strip_suffix(names.peft) else { continue };
            let stored = format!("{module}.{STACKED}.{}", names.stored);
            if module.ends_with(EMBEDDINGS) == names.is_of_embedding && self.vb.contains_tensor(&stored) {
                return Some((names, stored));
            }
        }
        None
    }
}

impl SimpleBackend for Matrices {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let what = format!("a matrix of task {} of {}", self.index, self.count);
        of_shape(self.get_unchecked(name, dtype, device)?, shape, &what)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let (names, stored) = self.stored(name).ok_or_else(|| missing(name))?;
        let all = self.vb.get_unchecked_dtype(&stored, dtype)?;
        if all.rank() != 3 || all.dim(0)? != self.count {
            bail!("[{EXAMPLE}] {stored} has shape {:?}, expected a matrix for each of {} tasks", all.dims(), self.count)
        }
        let own = all.get(self.index)?;
        let own = if names.is_of_embedding { own.t()?.contiguous()? } else { own };
        own.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.stored(name).is_some()
    }
}

/// The matrices of one task in a file of PEFT, for modules of the text, by names without the task.
struct NamedMatrices {
    vb: VarBuilder<'static>,
    /// The names in the file, by the names from the number of the layer on.
    names: HashMap<String, String>,
}

impl NamedMatrices {
    /// Finds the matrices of a task.
    ///
    /// # Errors
    /// If there are none.
    fn of(file: &Checkpoint, task: &str, model: &VarBuilder) -> Result<Self> {
        let mut names = HashMap::new();
        for (name, _) in file.shapes() {
            let own = name.strip_suffix(".weight").and_then(|module| module.strip_suffix(task));
            let Some(tail) = own.and_then(in_layers) else { continue };
            names.insert(format!("{tail}weight"), name.to_string());
        }
        if names.is_empty() {
            bail!("[{EXAMPLE}] {FOLDER}/{FILE} has no matrices of layers for the task {task:?}")
        }
        Ok(Self { vb: file.var_builder(model.dtype(), model.device())?, names })
    }

    /// Returns the name of a matrix in the file. Names with spaces are no tensors, but facts about them.
    fn stored(&self, name: &str) -> Option<&String> {
        if name.contains(' ') { None } else { self.names.get(in_layers(name)?) }
    }
}

/// Returns the part of a name from the number of the layer on, unless it is of images.
fn in_layers(name: &str) -> Option<&str> {
    let (before, tail) = name.split_once("layers.")?;
    if before.contains("visual") { None } else { Some(tail) }
}

impl SimpleBackend for NamedMatrices {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name).ok_or_else(|| missing(name))?;
        self.vb.get_with_hints_dtype(shape, stored, init, dtype)?.to_device(device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name).ok_or_else(|| missing(name))?;
        self.vb.get_unchecked_dtype(stored, dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.stored(name).is_some()
    }
}

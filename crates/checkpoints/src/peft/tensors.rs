//! The tensors of an adapter, by PEFT's names: from a file, or variables.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder, VarMap};

use super::OP;
use super::file::FileTensors;
use super::names::{DEFAULT_NAME, LoraMatrix, PREFIX, StoredName};
use crate::files::Checkpoint;
use candle_attention_modules::base::{LINEAR_WEIGHT, ParameterReader, has};

/// The names of tensors that were used or made.
type UsedNames = Arc<Mutex<BTreeSet<String>>>;

/// The tensors of an adapter.
#[derive(Clone)]
pub(super) struct AdapterTensors {
    vb: VarBuilder<'static>,
    /// The variables, if the adapter is trained.
    vars: Option<VarMap>,
    /// The names in the file, if the adapter was opened.
    pub file: Option<Arc<FileTensors>>,
    /// The tensors that layers and builders have read, by all copies of the adapter.
    used: UsedNames,
    /// The variables that the file does not have.
    made: UsedNames,
}

/// The names of a module's matrices, as far as they are there.
pub(super) struct MatrixNames {
    pub a: Option<String>,
    pub b: Option<String>,
}

impl MatrixNames {
    /// Returns the name of a matrix that is there.
    pub fn any(&self) -> Option<&String> {
        self.a.as_ref().or(self.b.as_ref())
    }
}

/// The adapter's own value of a parameter, where the options say that it has one.
pub(super) struct RequiredParameter {
    /// The option that says so.
    pub reason: String,
    /// Whether the file has other parameters for the same reason, so that this one is missing.
    pub is_mentioned: bool,
}

impl AdapterTensors {
    /// Returns the tensors of a builder at the root of an adapter's file.
    pub fn of_builder(vb: VarBuilder<'static>) -> Self {
        Self { vb, vars: None, file: None, used: UsedNames::default(), made: UsedNames::default() }
    }

    /// Returns the tensors of a file.
    ///
    /// # Errors
    /// For a tensor that is not of LoRA, and for a matrix without its other one.
    pub fn of_file(checkpoint: &Checkpoint, dtype: DType, device: &Device) -> Result<Self> {
        let file = FileTensors::new(checkpoint.shapes().map(|(name, _)| name.to_string()))?;
        Ok(Self { file: Some(Arc::new(file)), ..Self::of_builder(checkpoint.var_builder(dtype, device)?) })
    }

    /// Returns variables, which are made when a layer asks for them.
    pub fn of_vars(vars: &VarMap, dtype: DType, device: &Device) -> Self {
        Self { vars: Some(vars.clone()), ..Self::of_builder(VarBuilder::from_varmap(vars, dtype, device)) }
    }

    /// Adds the tensors of a file to variables, under the names in which PEFT writes them, and returns the variables.
    ///
    /// # Errors
    /// As [`of_file`](Self::of_file), and for a tensor that has two names in the file.
    pub fn of_opened_vars(checkpoint: &Checkpoint, vars: &VarMap, dtype: DType, device: &Device) -> Result<Self> {
        let stored = Self::of_file(checkpoint, dtype, device)?;
        let mut opened = BTreeMap::new();
        for (name, _) in checkpoint.shapes() {
            let usual = usual_name(name);
            let var = Var::from_tensor(&stored.vb.get_unchecked(name)?)?;
            if opened.insert(usual.clone(), var).is_some() {
                bail!("[{OP}] {name} is in the file, and so is {usual}, expected one name for each tensor")
            }
        }
        let file = FileTensors::new(opened.keys().cloned())?;
        vars.data().lock().unwrap_or_else(PoisonError::into_inner).extend(opened);
        Ok(Self { file: Some(Arc::new(file)), ..Self::of_vars(vars, dtype, device) })
    }

    /// Returns whether the adapter is new: all its tensors are variables that are made when a layer asks for them.
    pub fn is_new(&self) -> bool {
        self.vars.is_some() && self.file.is_none()
    }

    /// Returns whether tensors are variables.
    pub fn are_variables(&self) -> bool {
        self.vars.is_some()
    }

    fn has(&self, name: &str) -> bool {
        self.vb.contains_tensor(name) && has(&self.vb, name)
    }

    /// Returns the name under which a tensor of a module is there: with the prefix of the model or without, with the
    /// name of the adapter or without. `leaf` is the end of the name, which may be empty.
    fn find(&self, module: &str, part: &str, leaf: &str) -> Option<String> {
        for prefix in [PREFIX, ""] {
            for adapter in ["", DEFAULT_NAME] {
                let mut name = format!("{prefix}{module}.{part}");
                for end in [adapter, leaf] {
                    if !end.is_empty() {
                        name = format!("{name}.{end}");
                    }
                }
                if self.has(&name) {
                    return Some(name);
                }
            }
        }
        None
    }

    /// Returns the names of a module's matrices.
    pub fn matrix_names(&self, module: &str) -> MatrixNames {
        let find = |matrix: LoraMatrix| self.find(module, matrix.name(), "weight");
        MatrixNames { a: find(LoraMatrix::A), b: find(LoraMatrix::B) }
    }

    /// Returns the names of the matrices of an embedding.
    pub fn embedding_names(&self, module: &str) -> MatrixNames {
        let find = |matrix: LoraMatrix| self.find(module, matrix.embedding_name(), "");
        MatrixNames { a: find(LoraMatrix::A), b: find(LoraMatrix::B) }
    }

    /// Returns the name of a tensor of a module that belongs to an option of PEFT that is not supported. A file was
    /// checked when it was opened.
    pub fn unsupported(&self, module: &str) -> Option<String> {
        let parts = [("lora_magnitude_vector", ""), ("lora_magnitude_vector", "weight"), ("lora_B", "bias")];
        parts.iter().find_map(|(part, leaf)| self.find(module, part, leaf))
    }

    /// Returns whether the tensors are a state dict of a whole model, where a module has its own weight too.
    pub fn has_base_weight(&self, module: &str) -> bool {
        [PREFIX, ""].iter().any(|prefix| self.vb.contains_tensor(&format!("{prefix}{module}.base_layer.weight")))
    }

    /// Returns the name of the adapter's own value of a parameter of the model, by its full name, if it is there.
    pub fn parameter_name(&self, name: &str) -> Option<String> {
        let (module, leaf) = name.rsplit_once('.')?;
        let trained = format!("{module}.modules_to_save.{DEFAULT_NAME}.{leaf}");
        let adapted = format!("{module}.base_layer.{leaf}");
        let own = [adapted, trained, name.to_string()];
        let mut names: Vec<_> = own.iter().map(|own| format!("{PREFIX}{own}")).collect();
        // Variables without the prefix belong to the model.
        if self.vars.is_none() {
            names.extend(own);
        }
        names.into_iter().find(|candidate| self.vb.contains_tensor(candidate))
    }

    /// Returns a matrix of a module, under the name that it has or is to have.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, named with both shapes.
    pub fn matrix(&self, name: &str, matrix: LoraMatrix, shape: (usize, usize)) -> Result<Tensor> {
        let init = match matrix {
            // A begins as the weight of `nn.Linear`.
            LoraMatrix::A => LINEAR_WEIGHT,
            LoraMatrix::B => Init::Const(0.0),
        };
        if self.vars.is_some() && !self.has(name) {
            lock(&self.made).insert(name.to_string());
        }
        self.read(shape, name, init)
    }

    /// Reads a tensor, or makes the variable if it is trained and not there.
    fn read(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        lock(&self.used).insert(name.to_string());
        ParameterReader::new(OP, "PEFT", self.vb.clone())?.get(shape, name, init)
    }

    /// Returns the adapter's own value of a parameter, under the name that it has.
    ///
    /// # Errors
    /// For a tensor of another shape.
    pub fn parameter(&self, stored: &str, shape: &Shape) -> Result<Tensor> {
        self.read(shape.clone(), stored, Init::Const(0.0))
    }

    /// Returns the adapter's own value of a parameter, under the name that it has, in any shape.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn parameter_of_any_shape(&self, stored: &str) -> Result<Tensor> {
        lock(&self.used).insert(stored.to_string());
        match &self.vars {
            // A `VarMap` returns no tensor without its shape.
            Some(vars) => {
                let all = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
                let Some(var) = all.get(stored) else { bail!("[{OP}] {stored} is missing in the variables") };
                Ok(var.as_detached_tensor())
            }
            None => self.vb.get_unchecked(stored),
        }
    }

    /// Returns the adapter's own value of a parameter of the model, by its full name, if it has one. Where variables
    /// are trained, the variable of a required value is made from `current` if there is none.
    ///
    /// # Errors
    /// For a tensor of another shape than the parameter's, and for a required one that is not there.
    pub fn replacement(
        &self,
        name: &str,
        current: &Tensor,
        is_adapted: bool,
        required: Option<RequiredParameter>,
    ) -> Result<Option<Tensor>> {
        if let Some(found) = self.parameter_name(name) {
            return self.read(current.dims(), &found, Init::Const(0.0)).map(Some);
        }
        let Some(RequiredParameter { reason, is_mentioned }) = required else { return Ok(None) };
        let usual = match name.rsplit_once('.') {
            Some((module, leaf)) if is_adapted => format!("{PREFIX}{module}.base_layer.{leaf}"),
            _ => format!("{PREFIX}{name}"),
        };
        let Some(vars) = self.vars.as_ref().filter(|_| !is_mentioned) else {
            let other = self.file.as_ref().and_then(|file| file.parameter_like(name));
            let hint = other.map(|other| format!("; the file has {other}")).unwrap_or_default();
            bail!("[{OP}] {reason}, expected {usual} of shape {:?}, which is missing{hint}", current.dims())
        };
        let var = Var::from_tensor(&current.to_dtype(self.vb.dtype())?.to_device(self.vb.device())?.detach())?;
        vars.data().lock().unwrap_or_else(PoisonError::into_inner).insert(usual.clone(), var);
        lock(&self.made).insert(usual.clone());
        self.read(current.dims(), &usual, Init::Const(0.0)).map(Some)
    }

    /// Returns whether a tensor was read.
    pub fn is_used(&self, name: &str) -> bool {
        lock(&self.used).contains(name)
    }

    /// Returns the tensors of the file that nothing has read.
    ///
    /// # Errors
    /// For an adapter that was not opened from a file, whose names are not known.
    pub fn unused(&self) -> Result<Vec<String>> {
        let Some(file) = &self.file else {
            bail!("[{OP}] the names of the tensors are not known, expected an adapter that was opened from a file")
        };
        let used = lock(&self.used);
        let is_own = |stored: &StoredName| match stored {
            StoredName::Matrix { .. } | StoredName::Embedding { .. } => true,
            // Most are weights of the model in the state dict of a whole model.
            StoredName::Parameter { .. } | StoredName::Base => !file.is_whole_model,
        };
        let unused = file.all().filter(|(name, stored)| !used.contains(*name) && is_own(stored));
        Ok(unused.map(|(name, _)| name.to_string()).collect())
    }

    /// Returns the variables that were made, since the file does not have them.
    pub fn made(&self) -> Vec<String> {
        lock(&self.made).iter().cloned().collect()
    }

    /// Returns the tensors to save, by name.
    ///
    /// # Errors
    /// For an adapter that was read and not trained, and for no variables of an adapter.
    pub fn to_save(&self) -> Result<BTreeMap<String, Tensor>> {
        let Some(vars) = &self.vars else {
            bail!("[{OP}] the adapter was opened without variables and is unchanged, expected one over a `VarMap`")
        };
        let all = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        let own = all.iter().filter(|(name, _)| name.starts_with(PREFIX));
        let named: BTreeMap<_, _> = own.map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        if named.is_empty() {
            bail!("[{OP}] there are no variables of an adapter yet, expected a layer that the adapter was loaded onto")
        }
        Ok(named)
    }
}

fn lock(names: &UsedNames) -> MutexGuard<'_, BTreeSet<String>> {
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a name with the prefix of the model and without the name of the adapter.
fn usual_name(name: &str) -> String {
    let own = name.strip_prefix(PREFIX).unwrap_or(name);
    let mut usual = own.to_string();
    for matrix in [LoraMatrix::A, LoraMatrix::B] {
        usual = usual.replace(&format!(".{}.{DEFAULT_NAME}.", matrix.name()), &format!(".{}.", matrix.name()));
        let embedding = format!(".{}", matrix.embedding_name());
        if let Some(module) = usual.strip_suffix(&format!("{embedding}.{DEFAULT_NAME}")) {
            usual = format!("{module}{embedding}");
        }
    }
    format!("{PREFIX}{}", usual.replace(&format!(".modules_to_save.{DEFAULT_NAME}."), "."))
}

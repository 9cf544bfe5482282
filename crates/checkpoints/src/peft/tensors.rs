//! The tensors of an adapter, by PEFT's names: from a file, or variables.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder, VarMap};

use super::OP;
use crate::files::Checkpoint;
use candle_attention_modules::base::{LINEAR_WEIGHT, ParameterReader, has};

/// The prefix of the model's names in an adapter's files.
const PREFIX: &str = "base_model.model.";

/// PEFT's usual name of an adapter, which is not in the names of the adapter's own files.
const DEFAULT_NAME: &str = "default";

/// A low-rank matrix of a module.
#[derive(Debug, Clone, Copy)]
pub(super) enum Matrix {
    /// A, (r, in).
    A,
    /// B, (out, r).
    B,
}

impl Matrix {
    fn name(self) -> &'static str {
        match self {
            Self::A => "lora_A",
            Self::B => "lora_B",
        }
    }

    /// Returns the initialisation of a new adapter: that of `nn.Linear` for A, zeros for B.
    fn init(self) -> Init {
        match self {
            Self::A => LINEAR_WEIGHT,
            Self::B => Init::Const(0.0),
        }
    }
}

/// The tensors of an adapter.
#[derive(Clone)]
pub(super) struct AdapterTensors {
    vb: VarBuilder<'static>,
    /// The variables, if the adapter is trained.
    vars: Option<VarMap>,
}

impl AdapterTensors {
    /// Returns the tensors of a builder at the root of an adapter's file.
    pub fn of_builder(vb: VarBuilder<'static>) -> Self {
        Self { vb, vars: None }
    }

    /// Returns variables, which are made when a layer asks for them.
    pub fn of_vars(vars: &VarMap, dtype: DType, device: &Device) -> Self {
        Self { vb: VarBuilder::from_varmap(vars, dtype, device), vars: Some(vars.clone()) }
    }

    /// Returns whether missing tensors are made.
    pub fn makes_variables(&self) -> bool {
        self.vars.is_some()
    }

    /// Returns the name of a module's matrix, if it is there.
    fn find(&self, module: &str, matrix: Matrix) -> Option<String> {
        for prefix in [PREFIX, ""] {
            for end in ["weight".to_string(), format!("{DEFAULT_NAME}.weight")] {
                let name = format!("{prefix}{module}.{}.{end}", matrix.name());
                if has(&self.vb, &name) {
                    return Some(name);
                }
            }
        }
        None
    }

    /// Returns whether a module has embedding matrices.
    pub fn has_embedding(&self, module: &str) -> bool {
        [PREFIX, ""].iter().any(|prefix| has(&self.vb, &format!("{prefix}{module}.lora_embedding_A")))
    }

    /// Returns the name of a module's A, if it is there.
    pub fn name_of_matrix(&self, module: &str) -> Option<String> {
        self.find(module, Matrix::A)
    }

    /// Returns a matrix of a module.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, named with both shapes.
    pub fn matrix(&self, module: &str, matrix: Matrix, shape: (usize, usize)) -> Result<Tensor> {
        let usual = || format!("{PREFIX}{module}.{}.weight", matrix.name());
        let name = self.find(module, matrix).unwrap_or_else(usual);
        self.read(shape, &name, matrix.init())
    }

    /// Reads a tensor, or makes the variable if it is trained and not there.
    fn read(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        ParameterReader::new(OP, "PEFT", self.vb.clone())?.get(shape, name, init)
    }

    /// Returns the adapter's own value of a parameter of the model, such as a bias. `name` is its full name. Where
    /// variables are trained, the variable is made from `current`.
    ///
    /// # Errors
    /// For a tensor of another shape than the parameter's.
    pub fn replacement(&self, name: &str, current: &Tensor, is_adapted: bool) -> Result<Option<Tensor>> {
        let Some((module, leaf)) = name.rsplit_once('.') else { return Ok(None) };
        let adapted_name = format!("{PREFIX}{module}.base_layer.{leaf}");
        let plain_name = format!("{PREFIX}{name}");
        if let Some(vars) = &self.vars {
            let key = if is_adapted { adapted_name } else { plain_name };
            let mut all = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
            if !all.contains_key(&key) {
                all.insert(key.clone(), Var::from_tensor(&current.to_dtype(self.vb.dtype())?.detach())?);
            }
            drop(all);
            return self.read(current.dims(), &key, Init::Const(0.0)).map(Some);
        }
        let trained = format!("{module}.modules_to_save.{DEFAULT_NAME}.{leaf}");
        let names = [adapted_name, format!("{PREFIX}{trained}"), plain_name, trained];
        match names.iter().find(|candidate| self.vb.contains_tensor(candidate)) {
            Some(found) => self.read(current.dims(), found, Init::Const(0.0)).map(Some),
            None => Ok(None),
        }
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

/// Adds the tensors of an adapter's file to variables, under the names in which PEFT writes them.
///
/// # Errors
/// If a tensor cannot be read.
pub(super) fn add_variables(checkpoint: &Checkpoint, vars: &VarMap, dtype: DType, device: &Device) -> Result<()> {
    let vb = checkpoint.var_builder(dtype, device)?;
    for (name, _) in checkpoint.shapes() {
        let var = Var::from_tensor(&vb.get_unchecked(name)?)?;
        vars.data().lock().unwrap_or_else(PoisonError::into_inner).insert(usual_name(name), var);
    }
    Ok(())
}

/// Returns a name with the prefix of the model and without the name of the adapter.
fn usual_name(name: &str) -> String {
    let own = name.strip_prefix(PREFIX).unwrap_or(name);
    let mut usual = own.to_string();
    for matrix in [Matrix::A, Matrix::B] {
        usual = usual.replace(&format!(".{}.{DEFAULT_NAME}.", matrix.name()), &format!(".{}.", matrix.name()));
    }
    format!("{PREFIX}{}", usual.replace(&format!(".modules_to_save.{DEFAULT_NAME}."), "."))
}

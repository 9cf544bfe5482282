//! The parameters of a layer, listed once: what loading, freezing, saving and a process's share go by; and whether a
//! loss reaches every variable.

use std::collections::HashMap;
use std::path::Path;
use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{Error, Result, Tensor, bail};
use candle_nn::{Init, VarMap};

use super::{Source, root};

/// The heads that entries of a parameter belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heads {
    /// Of queries, outputs and gates: H of them.
    Query,
    /// Of keys and values: H_kv of them.
    Key,
}

/// A dimension of a parameter that heads divide: each has as many entries, one head after the other.
#[derive(Debug, Clone, Copy)]
pub struct HeadDim {
    /// Whose heads divide it.
    pub heads: Heads,
    /// Which dimension, from 0.
    pub dim: usize,
}

/// A parameter before it is read.
#[derive(Debug, Clone)]
pub struct Spec {
    /// The crate's own name for it.
    pub name: String,
    /// Of the whole layer, as stored.
    pub shape: Vec<usize>,
    /// How a new one begins.
    pub init: Init,
    /// `None` where each process has all of it.
    pub by_head: Option<HeadDim>,
    /// Where a file has it.
    pub stored: Stored,
}

/// Where a file has a parameter.
#[derive(Debug, Clone)]
pub enum Stored {
    /// Whole, under this name.
    Whole(String),
    /// Each entry of the first dimension by itself, `list.{i}.part`.
    List {
        /// The name of the list.
        list: String,
        /// What follows the number of an entry.
        part: &'static str,
    },
}

impl Spec {
    /// One that files have under the crate's own name, and each process whole.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        let name = name.into();
        Self { stored: Stored::Whole(name.clone()), name, shape: shape.into(), init, by_head: None }
    }

    /// One whose dimension `dim` is divided by heads.
    pub fn by_head(self, heads: Heads, dim: usize) -> Self {
        Self { by_head: Some(HeadDim { heads, dim }), ..self }
    }

    /// One that a file has in another place.
    pub fn stored(self, stored: Stored) -> Self {
        Self { stored, ..self }
    }

    fn load(&self, source: &Source) -> Result<Parameter> {
        let Stored::List { list, part } = &self.stored else { return Ok(source.read(self)?.into()) };
        let own = self.by_head.map_or(0..self.shape[0], |by_head| source.own_range(by_head.heads, self.shape[0]));
        let entry = |i: usize| source.pp(list).pp(i).get(&self.shape[1..], part, self.init)?.unsqueeze(0);
        let parameter = Parameter(own.map(entry).collect::<Result<_>>()?);
        if parameter.is_tracked() { Ok(parameter) } else { Ok(parameter.tensor()?.into()) }
    }
}

/// A parameter that was read: a tensor, or parts of it along its first dimension. Training may change them in place.
#[derive(Debug, Clone)]
pub struct Parameter(Vec<Tensor>);

impl From<Tensor> for Parameter {
    fn from(tensor: Tensor) -> Self {
        Self(vec![tensor])
    }
}

impl Parameter {
    /// What it holds now.
    pub fn tensor(&self) -> Result<Tensor> {
        if let [whole] = self.0.as_slice() { Ok(whole.clone()) } else { Tensor::cat(&self.0, 0) }
    }

    /// The tensor, or the first part of it.
    pub fn first(&self) -> &Tensor {
        &self.0[0]
    }

    /// Whether training may change it.
    pub fn is_tracked(&self) -> bool {
        self.0.iter().any(Tensor::track_op)
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        Ok(frozen(&self.tensor()?)?.into())
    }
}

/// Parameters by name, in the order in which they were listed.
#[derive(Debug, Clone, Default)]
pub struct ParameterList(Vec<(String, Parameter)>);

impl ParameterList {
    /// Reads each, or this process's part of it.
    ///
    /// # Errors
    /// For a missing or misshapen tensor.
    pub fn load(specs: &[Spec], source: &Source) -> Result<Self> {
        let read = |spec: &Spec| Ok((spec.name.clone(), spec.load(source)?));
        Ok(Self(specs.iter().map(read).collect::<Result<_>>()?))
    }

    /// The parameter of a name, if the layer has one.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, parameter)| parameter)
    }

    /// What a parameter holds now, if there is one of this name.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        self.get(name).map(Parameter::tensor).transpose()
    }

    /// What a parameter that was listed holds now.
    pub fn expect(&self, name: &str) -> Result<Tensor> {
        match self.tensor(name)? {
            Some(tensor) => Ok(tensor),
            None => bail!("[parameters] {name} is not among those that were listed"),
        }
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        let freeze = |(name, parameter): &(String, Parameter)| Ok((name.clone(), parameter.freeze()?));
        Ok(Self(self.0.iter().map(freeze).collect::<Result<_>>()?))
    }

    /// What each holds now, by name.
    pub fn named(&self) -> Result<Vec<(String, Tensor)>> {
        self.0.iter().map(|(name, parameter)| Ok((name.clone(), parameter.tensor()?))).collect()
    }
}

/// Writes tensors as a safetensors file.
///
/// # Errors
/// If it cannot be written.
pub fn save(named: Vec<(String, Tensor)>, path: &Path) -> Result<()> {
    let tensors: HashMap<_, _> = named.into_iter().collect();
    candle_core::safetensors::save(&tensors, path)
        .map_err(|error| Error::msg(format!("[save] cannot write {}: {}", path.display(), root(&error))))
}

/// What a tensor holds now, in memory of its own where a variable could change it.
pub fn frozen(tensor: &Tensor) -> Result<Tensor> {
    if tensor.track_op() { tensor.detach().copy() } else { Ok(tensor.clone()) }
}

/// The names of the variables that a loss gave no gradient, in alphabetical order: those that training would leave as
/// they are, in silence. Call it once, after the first `loss.backward()`, and expect nothing.
///
/// A variable is among them where the loss does not depend on it, and where an operation on the way has no backward
/// pass: `candle_nn::rms_norm`, `layer_norm` with a bias, `softmax_last_dim` and `rope` have none, so that nothing
/// before them learns. [`RmsNorm`](crate::norm::RmsNorm), [`LayerNorm`](crate::norm::LayerNorm) and this project's
/// attention have one. A gradient of zeros is a gradient.
///
/// ```
/// use candle_attention::{rms_norm, untrained};
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
///
/// fn names(norm: impl Fn(VarBuilder) -> Result<Box<dyn Module>>) -> Result<Vec<String>> {
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     let below = linear_no_bias(8, 8, vb.pp("below"))?;
///     let norm = norm(vb.pp("norm"))?;
///     let loss = norm.forward(&below.forward(&Tensor::randn(0f32, 1., (2, 8), &Device::Cpu)?)?)?.sum_all()?;
///     Ok(untrained(&loss.backward()?, &vars))
/// }
///
/// # fn main() -> Result<()> {
/// assert_eq!(names(|vb| Ok(Box::new(candle_nn::rms_norm(8, 1e-6, vb)?)))?, ["below.weight", "norm.weight"]);
/// assert!(names(|vb| Ok(Box::new(rms_norm(8, 1e-6, vb)?)))?.is_empty());
/// # Ok(()) }
/// ```
pub fn untrained(gradients: &GradStore, vars: &VarMap) -> Vec<String> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let without = vars.iter().filter(|(_, var)| gradients.get(var.as_tensor()).is_none());
    let mut names: Vec<_> = without.map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

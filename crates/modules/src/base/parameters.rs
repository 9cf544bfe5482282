//! The parameters of a layer, listed once: loading, freezing, saving and tensor parallelism go by this list.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{Error, Result, Tensor};
use candle_nn::{Linear, VarMap};

use super::query_heads::QueryHeadOrder;
use super::reader::{ParameterReader, root};
use super::shard::Share;
use super::spec::ParameterSpec;

/// Reads a parameter; `None` for one that the config does not ask for.
fn load(spec: &ParameterSpec, reader: &ParameterReader) -> Result<Option<Parameter>> {
    match spec.stored.split_once("{}") {
        Some((before, after)) => load_entries(spec, reader, |entry| format!("{before}{entry}{after}")),
        None => Ok(reader.read_requested(spec)?.map(Parameter::from)),
    }
}

/// Reads a parameter whose entries of the first dimension are separate tensors, under the names that `name` returns;
/// `None` for one that the config does not ask for.
fn load_entries(
    spec: &ParameterSpec,
    reader: &ParameterReader,
    name: impl Fn(usize) -> String,
) -> Result<Option<Parameter>> {
    let count = spec.shape[0];
    if let Some(why) = spec.refused {
        reader.refuse((0..count).map(name), why)?;
        return Ok(None);
    }
    let own = match spec.share {
        Some(Share::Heads { heads, dim: 0 }) => reader.own_range(heads, count),
        _ => 0..count,
    };
    let mut entries = Vec::new();
    for entry in own {
        entries.push(Parameter::from(reader.get(&spec.shape[1..], &name(entry), spec.init)?.unsqueeze(0)?));
    }
    let parameter: Parameter = entries.into_iter().collect();
    Ok(Some(if parameter.is_tracked() { parameter } else { parameter.tensor()?.into() }))
}

/// A parameter that was read: rows of tensors, one after the other. Training may change the tensors in place.
#[derive(Debug, Clone, Default)]
pub struct Parameter(Vec<Piece>);

/// Rows of a tensor (rows, ..) that is divided into `groups` of equal size: `range` of each group.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub tensor: Tensor,
    pub groups: usize,
    pub range: Range<usize>,
    /// The order of the query heads in these rows, where it is not this crate's.
    pub reordered: Option<Reordering>,
}

/// An order of query heads along a dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reordering {
    pub order: QueryHeadOrder,
    pub dim: usize,
}

impl From<Tensor> for Parameter {
    fn from(tensor: Tensor) -> Self {
        Self(vec![Piece { groups: 1, range: 0..tensor.dims()[0], tensor, reordered: None }])
    }
}

impl From<Piece> for Parameter {
    fn from(piece: Piece) -> Self {
        Self(vec![piece])
    }
}

/// Joins parameters one after the other.
impl FromIterator<Parameter> for Parameter {
    fn from_iter<I: IntoIterator<Item = Self>>(all: I) -> Self {
        Self(all.into_iter().flat_map(|parameter| parameter.0).collect())
    }
}

impl Piece {
    fn num_rows(&self) -> usize {
        self.groups * self.range.len()
    }

    /// Returns whether the rows of `next` follow these rows in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        let is_plain = |piece: &Self| piece.groups == 1 && piece.reordered.is_none();
        let is_adjacent = self.tensor.id() == next.tensor.id() && self.range.end == next.range.start;
        is_plain(self) && is_plain(next) && is_adjacent
    }

    /// Returns the rows, (len, ..): the tensor itself or a view of it where they are adjacent, or a copy.
    fn read(&self) -> Result<Tensor> {
        let rows = self.stored_rows()?;
        match self.reordered {
            Some(Reordering { order, dim }) => order.reorder_to_grouped(&rows, dim),
            None => Ok(rows),
        }
    }

    fn stored_rows(&self) -> Result<Tensor> {
        let rows = self.tensor.dims()[0];
        let columns = &self.tensor.dims()[1..];
        let start = self.range.start;
        let len = self.range.len();
        match self.groups {
            1 if len == rows => Ok(self.tensor.clone()),
            1 => self.tensor.narrow(0, start, len)?.contiguous(),
            groups => {
                let grouped = self.tensor.reshape([&[groups, rows / groups], columns].concat())?;
                grouped.narrow(1, start, len)?.contiguous()?.flatten(0, 1)
            }
        }
    }
}

impl Parameter {
    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.0.iter().map(Piece::num_rows).sum()
    }

    /// Returns some of the rows: a copy, unless they are all rows.
    pub fn narrow(self, own: Range<usize>) -> Result<Self> {
        if own.len() == self.num_rows() {
            return Ok(self);
        }
        Ok(self.tensor()?.narrow(0, own.start, own.len())?.force_contiguous()?.into())
    }

    /// Returns the current values: the tensor or a view of it where the rows are adjacent in one tensor, and a copy
    /// otherwise.
    pub fn tensor(&self) -> Result<Tensor> {
        let mut joined: Vec<Piece> = Vec::new();
        for piece in &self.0 {
            match joined.last_mut() {
                Some(last) if last.is_followed_by(piece) => last.range.end = piece.range.end,
                _ => joined.push(piece.clone()),
            }
        }
        let mut tensors = joined.iter().map(Piece::read).collect::<Result<Vec<_>>>()?;
        if tensors.len() == 1 { Ok(tensors.remove(0)) } else { Tensor::cat(&tensors, 0) }
    }

    /// Returns the tensor that has the first row.
    pub fn first(&self) -> &Tensor {
        &self.0[0].tensor
    }

    /// Returns whether training may change the parameter, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.0.iter().any(|piece| piece.tensor.track_op())
    }

    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        Ok(frozen(&self.tensor()?)?.into())
    }
}

/// The weight and perhaps the bias of a projection: rows of tensors of a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct WeightAndBias {
    /// The weight, (out, in); empty where there is no such projection.
    pub weight: Parameter,
    /// The bias, (out,).
    pub bias: Option<Parameter>,
}

impl WeightAndBias {
    /// Adds rows to the weight.
    pub fn push_weight(&mut self, rows: Parameter) {
        self.weight.0.extend(rows.0);
    }

    /// Adds rows to the bias.
    pub fn push_bias(&mut self, rows: Parameter) {
        self.bias.get_or_insert_default().0.extend(rows.0);
    }

    /// Returns whether training may change either, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.weight.is_tracked() || self.bias.as_ref().is_some_and(Parameter::is_tracked)
    }

    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { weight: self.weight.freeze()?, bias: self.bias.as_ref().map(Parameter::freeze).transpose()? })
    }

    /// Returns the current values of both.
    pub fn to_linear(&self) -> Result<Linear> {
        Ok(Linear::new(self.weight.tensor()?, self.bias.as_ref().map(Parameter::tensor).transpose()?))
    }

    /// Returns the rows of several projections of inputs of one width, one after the other.
    pub fn join(all: &[&Self]) -> Result<Self> {
        let bias = |own: &&Self| match &own.bias {
            Some(bias) => Ok(bias.clone()),
            // Adding zero changes no number.
            None => {
                let weight = own.weight.first();
                Ok(Tensor::zeros(own.weight.num_rows(), weight.dtype(), weight.device())?.into())
            }
        };
        let has_bias = all.iter().any(|own| own.bias.is_some());
        let bias = has_bias.then(|| all.iter().map(bias).collect::<Result<Parameter>>()).transpose()?;
        Ok(Self { weight: all.iter().map(|own| own.weight.clone()).collect(), bias })
    }
}

/// Parameters by name, in the order in which they were listed.
#[derive(Debug, Clone, Default)]
pub struct ParameterList(Vec<(String, Parameter)>);

impl ParameterList {
    /// Reads each parameter that the config asks for, or this rank's shard of it.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, and for one that the config does not ask for.
    pub fn load(specs: &[ParameterSpec], reader: &ParameterReader) -> Result<Self> {
        let mut parameters = Vec::new();
        for spec in specs {
            if let Some(parameter) = load(spec, reader)? {
                parameters.push((spec.name.clone(), parameter));
            }
        }
        Ok(Self(parameters))
    }

    /// Returns the parameter of this name, if the layer has one.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, parameter)| parameter)
    }

    /// Returns the current values of the parameter of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        self.get(name).map(Parameter::tensor).transpose()
    }

    /// Returns the current values of a parameter that was listed.
    ///
    /// # Errors
    /// If it was not listed.
    pub fn expect(&self, name: &str) -> Result<Tensor> {
        let missing = || Error::msg(format!("[parameters] {name} is not among those that were listed"));
        self.tensor(name)?.ok_or_else(missing)
    }

    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        let mut frozen = Vec::with_capacity(self.0.len());
        for (name, parameter) in &self.0 {
            frozen.push((name.clone(), parameter.freeze()?));
        }
        Ok(Self(frozen))
    }

    /// Returns the current values of all parameters, by name.
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

/// Returns the current values of a tensor: a copy where a variable could change it.
pub fn frozen(tensor: &Tensor) -> Result<Tensor> {
    if tensor.track_op() { tensor.detach().copy() } else { Ok(tensor.clone()) }
}

/// Returns the names of the variables without a gradient, in alphabetical order. An optimizer skips them without an
/// error. Call this function once, after the first `loss.backward()`, and expect no names.
///
/// A variable is among them where the loss does not depend on it, and where an operation on the way has no backward
/// pass: `candle_nn::rms_norm`, `layer_norm` with a bias, `softmax_last_dim` and `rope` have none, so that nothing
/// before them learns. [`RmsNorm`](crate::norm::RmsNorm), [`LayerNorm`](crate::norm::LayerNorm) and this project's
/// attention have one. A gradient of zeros is a gradient.
///
/// ```
/// use candle_attention::{rms_norm, variables_without_gradient};
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
///
/// fn names(norm: impl Fn(VarBuilder) -> Result<Box<dyn Module>>) -> Result<Vec<String>> {
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     let below = linear_no_bias(8, 8, vb.pp("below"))?;
///     let norm = norm(vb.pp("norm"))?;
///     let loss = norm.forward(&below.forward(&Tensor::randn(0f32, 1., (2, 8), &Device::Cpu)?)?)?.sum_all()?;
///     Ok(variables_without_gradient(&loss.backward()?, &vars))
/// }
///
/// # fn main() -> Result<()> {
/// assert_eq!(names(|vb| Ok(Box::new(candle_nn::rms_norm(8, 1e-6, vb)?)))?, ["below.weight", "norm.weight"]);
/// assert!(names(|vb| Ok(Box::new(rms_norm(8, 1e-6, vb)?)))?.is_empty());
/// # Ok(()) }
/// ```
pub fn variables_without_gradient(gradients: &GradStore, vars: &VarMap) -> Vec<String> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let without = vars.iter().filter(|(_, var)| gradients.get(var.as_tensor()).is_none());
    let mut names: Vec<_> = without.map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

/// Returns `tensor.narrow` along a dimension, also of an empty tensor. A view of an empty tensor may start past the end
/// of its buffer, where Candle's copies panic, so that it becomes a new tensor.
pub fn part(tensor: &Tensor, dim: usize, range: Range<usize>) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return tensor.narrow(dim, range.start, range.len());
    }
    let mut dims = tensor.dims().to_vec();
    dims[dim] = range.len();
    Tensor::zeros(dims, tensor.dtype(), tensor.device())
}

//! Parameters of a layer: rows of tensors, which training may change.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::{Linear, VarMap};

use super::quantized_weight::QuantizedWeight;
use super::query_heads::QueryHeadOrder;
use super::reader::root;

/// A parameter that was read: rows of tensors or of quantised weights, one after the other. Training may change the
/// tensors in place.
#[derive(Debug, Clone, Default)]
pub struct Parameter(Vec<Piece>);

/// Rows of a tensor (rows, ..) that is divided into `groups` of equal size: `range` of each group.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub stored: PieceStorage,
    pub groups: usize,
    pub range: Range<usize>,
    /// The order of the query heads in these rows, where it is not this crate's.
    pub reordered: Option<Reordering>,
    /// The dtype that the rows are read in.
    pub dtype: DType,
}

/// The tensor or the weight of a piece.
#[derive(Debug, Clone)]
pub(super) enum PieceStorage {
    Tensor(Tensor),
    /// A weight whose codes are multiplied as they are.
    Quantized {
        weight: Arc<QuantizedWeight>,
        /// An empty tensor (0, in) on the device and in the dtype of the numbers.
        empty: Tensor,
    },
}

impl PieceStorage {
    /// Returns whether training may change the numbers.
    fn is_tracked(&self) -> bool {
        match self {
            Self::Tensor(tensor) => tensor.track_op(),
            Self::Quantized { .. } => false,
        }
    }
}

/// An order of query heads along a dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reordering {
    pub order: QueryHeadOrder,
    pub dim: usize,
}

impl From<Tensor> for Parameter {
    fn from(tensor: Tensor) -> Self {
        let range = 0..tensor.dims()[0];
        let dtype = tensor.dtype();
        Self(vec![Piece { stored: PieceStorage::Tensor(tensor), groups: 1, range, reordered: None, dtype }])
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
        let (PieceStorage::Tensor(own), PieceStorage::Tensor(other)) = (&self.stored, &next.stored) else {
            return false;
        };
        let is_plain = |piece: &Self| piece.groups == 1 && piece.reordered.is_none();
        let is_adjacent = own.id() == other.id() && self.range.end == next.range.start;
        is_plain(self) && is_plain(next) && is_adjacent
    }

    /// Returns the rows, (len, ..): the tensor itself or a view of it where they are adjacent, or a copy.
    fn read(&self) -> Result<Tensor> {
        let rows = self.stored_rows()?.to_dtype(self.dtype)?;
        match self.reordered {
            Some(Reordering { order, dim }) => order.reorder_to_grouped(&rows, dim),
            None => Ok(rows),
        }
    }

    fn stored_rows(&self) -> Result<Tensor> {
        let tensor = match &self.stored {
            PieceStorage::Tensor(tensor) => tensor,
            PieceStorage::Quantized { weight, empty } => {
                return self.quantized_rows(weight)?.dequantize()?.to_device(empty.device());
            }
        };
        let rows = tensor.dims()[0];
        let columns = &tensor.dims()[1..];
        let start = self.range.start;
        let len = self.range.len();
        match self.groups {
            1 if len == rows => Ok(tensor.clone()),
            1 => tensor.narrow(0, start, len)?.contiguous(),
            groups => {
                let grouped = tensor.reshape([&[groups, rows / groups], columns].concat())?;
                grouped.narrow(1, start, len)?.contiguous()?.flatten(0, 1)
            }
        }
    }

    /// Returns these rows of a quantised weight: the weight itself where they are all rows, or a copy.
    fn quantized_rows(&self, weight: &Arc<QuantizedWeight>) -> Result<Arc<QuantizedWeight>> {
        if self.num_rows() == weight.outputs {
            return Ok(weight.clone());
        }
        let step = weight.outputs / self.groups;
        let ranges: Vec<_> =
            (0..self.groups).map(|group| group * step + self.range.start..group * step + self.range.end).collect();
        weight.rows(&ranges).map(Arc::new)
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
        if let Some(weight) = self.quantized()? {
            let rows = weight.rows(std::slice::from_ref(&own))?;
            return Self::of_quantized(Arc::new(rows), 1, 0..own.len(), self.first().device(), self.dtype());
        }
        Ok(self.tensor()?.narrow(0, own.start, own.len())?.force_contiguous()?.into())
    }

    /// Returns each row as a parameter: the tensors that have one row each, or views of one tensor.
    pub(super) fn rows(&self) -> Result<Vec<Self>> {
        if self.0.len() == self.num_rows() {
            return Ok(self.0.iter().cloned().map(Self::from).collect());
        }
        let tensor = self.tensor()?;
        (0..self.num_rows()).map(|row| Ok(Self::from(tensor.narrow(0, row, 1)?))).collect()
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

    /// Returns a parameter of rows of a quantised weight, which is divided into groups of rows: `range` of each group.
    pub(super) fn of_quantized(
        weight: Arc<QuantizedWeight>,
        groups: usize,
        range: Range<usize>,
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        let empty = Tensor::zeros((0, weight.inputs), dtype, device)?;
        let stored = PieceStorage::Quantized { weight, empty };
        Ok(Self::from(Piece { stored, groups, range, reordered: None, dtype }))
    }

    /// Returns whether some rows are those of a quantised weight.
    pub fn has_codes(&self) -> bool {
        self.0.iter().any(|piece| matches!(piece.stored, PieceStorage::Quantized { .. }))
    }

    /// Returns the rows as one quantised weight; `None` where rows are of tensors, or of weights in several formats.
    pub fn quantized(&self) -> Result<Option<Arc<QuantizedWeight>>> {
        let mut pieces = Vec::new();
        for piece in &self.0 {
            let PieceStorage::Quantized { weight, .. } = &piece.stored else { return Ok(None) };
            pieces.push(piece.quantized_rows(weight)?);
        }
        if let [only] = &pieces[..] {
            return Ok(Some(only.clone()));
        }
        Ok(QuantizedWeight::join(&Vec::from_iter(pieces.iter().map(Arc::as_ref))).map(Arc::new))
    }

    /// Returns the tensor that has the first row. It may be in another dtype than the [parameter](Self::dtype). For a
    /// quantised weight it is an empty tensor with the columns, the dtype and the device of the numbers.
    pub fn first(&self) -> &Tensor {
        match &self.0[0].stored {
            PieceStorage::Tensor(tensor) | PieceStorage::Quantized { empty: tensor, .. } => tensor,
        }
    }

    /// Returns the dtype in which the parameter is read.
    pub fn dtype(&self) -> DType {
        self.0[0].dtype
    }

    /// Returns the parameter in a dtype. A variable stays in its own dtype, and is converted whenever it is read, since
    /// training changes it in place.
    pub fn in_dtype(self, dtype: DType) -> Result<Self> {
        let mut pieces = Vec::new();
        for piece in self.0 {
            let stored = match &piece.stored {
                PieceStorage::Tensor(tensor) if !tensor.track_op() => PieceStorage::Tensor(tensor.to_dtype(dtype)?),
                other => other.clone(),
            };
            pieces.push(Piece { stored, dtype, ..piece });
        }
        Ok(Self(pieces))
    }

    /// Returns whether training may change the parameter, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.0.iter().any(|piece| piece.stored.is_tracked())
    }

    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        if self.has_codes() && !self.is_tracked() {
            return Ok(self.clone());
        }
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

    /// Returns a layer with the current values of the weight and the bias.
    pub fn to_linear(&self) -> Result<Linear> {
        Ok(Linear::new(self.weight.tensor()?, self.bias.as_ref().map(Parameter::tensor).transpose()?))
    }

    /// Returns the rows of several projections of inputs of one width, one after the other.
    pub fn join(all: &[&Self]) -> Result<Self> {
        let bias = |own: &&Self| match &own.bias {
            Some(bias) => Ok(bias.clone()),
            // Adding zero changes no number.
            None => Ok(Tensor::zeros(own.weight.num_rows(), own.weight.dtype(), own.weight.first().device())?.into()),
        };
        let has_bias = all.iter().any(|own| own.bias.is_some());
        let bias = has_bias.then(|| all.iter().map(bias).collect::<Result<Parameter>>()).transpose()?;
        Ok(Self { weight: all.iter().map(|own| own.weight.clone()).collect(), bias })
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
    // Not `copy`, which shares the memory on Metal.
    if tensor.track_op() { tensor.detach().force_contiguous() } else { Ok(tensor.clone()) }
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

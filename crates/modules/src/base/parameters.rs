//! The parameters of a layer, listed once: what loading, freezing, saving and a process's share go by; whether a loss
//! reaches every variable; and the shares themselves: some of a layer's heads, for tensor parallelism, and some of a
//! tensor's rows.

use std::collections::HashMap;
use std::ops::Range;
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
    /// Its name in a file; with `{}` for the number of an entry where a file has each entry of the first dimension by
    /// itself.
    pub stored: String,
}

impl Spec {
    /// One that files have under the crate's own name, and each process whole.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        let name = name.into();
        Self { stored: name.clone(), name, shape: shape.into(), init, by_head: None }
    }

    /// One whose dimension `dim` is divided by heads.
    pub fn by_head(self, heads: Heads, dim: usize) -> Self {
        Self { by_head: Some(HeadDim { heads, dim }), ..self }
    }

    /// One that a file has under another name.
    pub fn stored(self, stored: impl Into<String>) -> Self {
        Self { stored: stored.into(), ..self }
    }

    fn load(&self, source: &Source) -> Result<Parameter> {
        if !self.stored.contains("{}") {
            return Ok(source.read(self)?.into());
        }
        let own = self.by_head.map_or(0..self.shape[0], |by_head| source.own_range(by_head.heads, self.shape[0]));
        let name = |i: usize| self.stored.replace("{}", &i.to_string());
        let entry = |i: usize| source.get(&self.shape[1..], &name(i), self.init)?.unsqueeze(0);
        let parameter = own.map(|i| entry(i).map(Parameter::from)).collect::<Result<Parameter>>()?;
        if parameter.is_tracked() { Ok(parameter) } else { Ok(parameter.tensor()?.into()) }
    }
}

/// A parameter that was read: rows of tensors, one after the other. Training may change them in place.
#[derive(Debug, Clone, Default)]
pub struct Parameter(Vec<Piece>);

/// Rows of one tensor.
#[derive(Debug, Clone)]
struct Piece {
    tensor: Tensor,
    rows: Rows,
}

impl From<Tensor> for Parameter {
    fn from(tensor: Tensor) -> Self {
        let rows = Rows { groups: 1, range: 0..tensor.dims()[0] };
        Self::of(tensor, rows)
    }
}

/// One after the other.
impl FromIterator<Parameter> for Parameter {
    fn from_iter<I: IntoIterator<Item = Self>>(all: I) -> Self {
        Self(all.into_iter().flat_map(|parameter| parameter.0).collect())
    }
}

impl Piece {
    /// Whether the rows of `next` follow this piece's own in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.tensor.id() == next.tensor.id()
            && (self.rows.groups, next.rows.groups, self.rows.range.end) == (1, 1, next.rows.range.start)
    }
}

impl Parameter {
    /// Some of the rows of a tensor.
    pub fn of(tensor: Tensor, rows: Rows) -> Self {
        Self(vec![Piece { tensor, rows }])
    }

    /// More rows after these.
    pub fn extend(&mut self, more: Self) {
        self.0.extend(more.0);
    }

    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.0.iter().map(|piece| piece.rows.count()).sum()
    }

    /// A copy of some of the rows, unless these are all.
    pub fn narrow(self, own: Range<usize>) -> Result<Self> {
        if own.len() == self.count() {
            return Ok(self);
        }
        Ok(self.tensor()?.narrow(0, own.start, own.len())?.force_contiguous()?.into())
    }

    /// What it holds now: the tensor or a view of it where the rows lie side by side in one, and a copy otherwise.
    pub fn tensor(&self) -> Result<Tensor> {
        let mut joined: Vec<Piece> = Vec::new();
        for piece in &self.0 {
            match joined.last_mut() {
                Some(last) if last.is_followed_by(piece) => last.rows.range.end = piece.rows.range.end,
                _ => joined.push(piece.clone()),
            }
        }
        let mut tensors = joined.iter().map(|piece| piece.rows.of(&piece.tensor)).collect::<Result<Vec<_>>>()?;
        if tensors.len() == 1 { Ok(tensors.remove(0)) } else { Tensor::cat(&tensors, 0) }
    }

    /// The tensor that has the first of the rows.
    pub fn first(&self) -> &Tensor {
        &self.0[0].tensor
    }

    /// Whether training may change it, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.0.iter().any(|piece| piece.tensor.track_op())
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

/// The heads of one process of several that compute a layer together: the share of `rank` of `world_size`.
///
/// Key heads are divided in their order, as evenly as can be, each with all query heads that read it: nine query heads
/// over three key heads are six and three in two processes. Where there are more processes than key heads, several hold
/// a copy of one key head, and its query heads are divided among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadShard {
    rank: usize,
    world_size: usize,
}

impl HeadShard {
    /// That of a process alone: all heads.
    pub const WHOLE: Self = Self { rank: 0, world_size: 1 };

    /// The share of process `rank`, from 0 on.
    ///
    /// # Errors
    /// If `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size {
            bail!("[head_shard] rank is {rank}, expected less than the world size {world_size}")
        }
        Ok(Self { rank, world_size })
    }

    /// Which process this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The shares of all processes, in the order of their ranks.
    pub fn all(self) -> impl Iterator<Item = Self> {
        (0..self.world_size).map(move |rank| Self { rank, ..self })
    }

    /// This process's part of `len` entries that are divided in their order and as evenly as can be: inner columns of
    /// an MLP, a vocabulary. Candle's `Shard` of as many where these divide the entries.
    pub fn part_of(&self, len: usize) -> Range<usize> {
        ith_of(self.rank, len, self.world_size)
    }

    /// This process's part of `len` entries that `h` query heads or `h_kv` key heads divide equally; there are no fewer
    /// query heads than processes.
    #[doc(hidden)]
    pub fn range(&self, heads: Heads, [h, h_kv]: [usize; 2], len: usize) -> Range<usize> {
        let (n, group) = (self.world_size, h / h_kv);
        let (queries, keys) = if n <= h_kv {
            let keys = self.part_of(h_kv);
            (keys.start * group..keys.end * group, keys)
        } else {
            let key = self.rank * h_kv / n;
            let readers = ith_of(key, n, h_kv);
            let own = ith_of(self.rank - readers.start, group, readers.len());
            (key * group + own.start..key * group + own.end, key..key + 1)
        };
        let (own, width) = match heads {
            Heads::Query => (queries, len / h),
            Heads::Key => (keys, len / h_kv),
        };
        own.start * width..own.end * width
    }

    /// Whether no process before this one has its key heads.
    pub fn is_first_of_keys(self, h_kv: usize) -> bool {
        let key = |rank: usize| rank * h_kv / self.world_size;
        self.world_size <= h_kv || self.rank == 0 || key(self.rank) != key(self.rank - 1)
    }
}

/// The entries of `len` that belong to part `i` of `of`.
fn ith_of(i: usize, len: usize, of: usize) -> Range<usize> {
    (i * len).div_ceil(of)..((i + 1) * len).div_ceil(of)
}

/// Of the `groups` of equally many rows that a tensor (rows, ..) is divided into, `range` of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// The number of groups.
    pub groups: usize,
    /// Rows of each group, counted from its first.
    pub range: Range<usize>,
}

impl Rows {
    /// How many they are.
    pub fn count(&self) -> usize {
        self.groups * self.range.len()
    }

    /// The rows of a tensor, (len, ..): the tensor itself or a view of it where they lie side by side, or a copy.
    pub fn of(&self, tensor: &Tensor) -> Result<Tensor> {
        let Range { start, end } = self.range;
        let (rows, columns) = (tensor.dims()[0], &tensor.dims()[1..]);
        match self.groups {
            1 if end - start == rows => Ok(tensor.clone()),
            1 => tensor.narrow(0, start, end - start)?.contiguous(),
            groups => {
                let grouped = tensor.reshape([&[groups, rows / groups], columns].concat())?;
                grouped.narrow(1, start, end - start)?.contiguous()?.reshape([&[self.count()], columns].concat())
            }
        }
    }

    /// The inverse: for each of several rows of one tensor what they hold, (len, ..), to the whole tensor.
    pub fn join(parts: &[(Self, Tensor)]) -> Result<Tensor> {
        let grouped = parts
            .iter()
            .map(|(rows, part)| part.reshape([&[rows.groups, rows.range.len()], &part.dims()[1..]].concat()));
        Tensor::cat(&grouped.collect::<Result<Vec<_>>>()?, 1)?.flatten(0, 1)
    }
}

/// `tensor.narrow` along a dimension, which an empty tensor allows too: a view of one may start past the end of its
/// buffer, where Candle's copies panic, so that it becomes a new tensor.
pub fn part(tensor: &Tensor, dim: usize, range: Range<usize>) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return tensor.narrow(dim, range.start, range.len());
    }
    let mut dims = tensor.dims().to_vec();
    dims[dim] = range.len();
    Tensor::zeros(dims, tensor.dtype(), tensor.device())
}

//! The parameters of a layer, listed once: what loading, freezing, saving and a process's share go by; whether a loss
//! reaches every variable; and the shares themselves: some of a layer's heads, for tensor parallelism, and some of a
//! tensor's rows.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{Error, Result, Tensor, bail};
use candle_nn::{Init, Linear, VarMap};

use super::{Source, root};

/// The heads that entries of a parameter belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heads {
    /// Of queries, outputs and gates: H of them.
    Query,
    /// Of keys and values: H_kv of them.
    Key,
}

/// What a process of several has of a parameter that is not whole in each.
#[derive(Debug, Clone, Copy)]
pub enum Share {
    /// The entries of its heads along a dimension, counted from 0: each head has as many, one head after the other.
    Heads(Heads, usize),
    /// All of it in the first process and zeros in the others: it is added to the sum of what all processes give.
    Sum,
}

/// Why a file may not have a bias that its config does not mention.
pub const NO_BIAS: &str = "the config says there is no such bias";

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
    pub share: Option<Share>,
    /// Its name in a file; with `{}` for the number of an entry where a file has each entry of the first dimension by
    /// itself.
    pub stored: String,
    /// Why a file may not have it, where the config does not want it: left out, it would change the numbers.
    pub refused: Option<&'static str>,
}

impl Spec {
    /// One that files have under the crate's own name, and each process whole.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        let name = name.into();
        Self { stored: name.clone(), name, shape: shape.into(), init, share: None, refused: None }
    }

    /// One whose dimension `dim` is divided by heads.
    pub fn by_head(self, heads: Heads, dim: usize) -> Self {
        Self { share: Some(Share::Heads(heads, dim)), ..self }
    }

    /// One that a file has under another name.
    pub fn stored(self, stored: impl Into<String>) -> Self {
        Self { stored: stored.into(), ..self }
    }

    /// One that the config may not want; why a file that has it is refused then.
    pub fn only_if(self, is_wanted: bool, why: &'static str) -> Self {
        Self { refused: (!is_wanted).then_some(why), ..self }
    }

    /// `None` where the config does not want it.
    fn load(&self, source: &Source) -> Result<Option<Parameter>> {
        let Some((before, after)) = self.stored.split_once("{}") else {
            return Ok(source.read_wanted(self)?.map(Parameter::from));
        };
        let name = |i| format!("{before}{i}{after}");
        if let Some(why) = self.refused {
            return source.refuse((0..self.shape[0]).map(name), why).map(|()| None);
        }
        let names = match self.share {
            Some(Share::Heads(heads, 0)) => source.own_range(heads, self.shape[0]).map(name),
            _ => (0..self.shape[0]).map(name),
        };
        let entry = |name: String| source.get(&self.shape[1..], &name, self.init)?.unsqueeze(0).map(Parameter::from);
        let parameter = names.map(entry).collect::<Result<Parameter>>()?;
        Ok(Some(if parameter.is_tracked() { parameter } else { parameter.tensor()?.into() }))
    }
}

/// A tensor of a checkpoint that holds rows of several projections: of one after the other, or of all in turn in each
/// of several groups.
#[derive(Debug, Clone)]
pub struct Joint {
    /// The tensor. It has a share where no heads divide its rows, as in an output projection: of its weight the columns
    /// of heads, of its bias what belongs to a sum.
    pub spec: Spec,
    /// Whether its rows are stored as columns.
    pub is_transposed: bool,
    /// The number of groups.
    pub groups: usize,
    /// How many rows it has of each projection, those of all processes, and whose heads divide them.
    pub parts: Vec<(usize, Option<Heads>)>,
    /// The order of the query heads in it.
    pub query_heads: QueryHeadOrder,
}

/// The order in which a checkpoint stores the query heads of a layer with fewer key heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryHeadOrder {
    /// Those that read one key head stand together: query head h reads key head h / (H / H_kv), as in this crate.
    Grouped,
    /// Key heads take turns: query head h reads key head h % `num_kv_heads`.
    Cyclic {
        /// H.
        num_heads: usize,
        /// H_kv.
        num_kv_heads: usize,
    },
}

impl QueryHeadOrder {
    /// Returns the same heads along a dimension of a tensor as this crate orders them.
    fn to_grouped(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        match self {
            Self::Grouped => Ok(tensor.clone()),
            Self::Cyclic { num_heads, num_kv_heads } => {
                swap_blocks(tensor, dim, [num_heads / num_kv_heads, num_kv_heads])
            }
        }
    }

    /// Returns heads that this crate orders in the order of the checkpoint.
    fn from_grouped(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        match self {
            Self::Grouped => Ok(tensor.clone()),
            Self::Cyclic { num_heads, num_kv_heads } => {
                swap_blocks(tensor, dim, [num_kv_heads, num_heads / num_kv_heads])
            }
        }
    }
}

/// Divides a dimension into (outer, inner, rest), and returns it as (inner, outer, rest).
fn swap_blocks(tensor: &Tensor, dim: usize, [outer, inner]: [usize; 2]) -> Result<Tensor> {
    let dims = tensor.dims();
    let divided = [&dims[..dim], &[outer, inner, dims[dim] / (outer * inner)], &dims[dim + 1..]].concat();
    tensor.reshape(divided)?.transpose(dim, dim + 1)?.contiguous()?.reshape(dims)
}

impl Joint {
    /// Returns this process's rows of each projection, (rows, ..); none of a tensor that the config does not want. A
    /// tensor in groups, or with query heads in another order, is read whole.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, and for one that the config does not want.
    pub fn read(&self, source: &Source) -> Result<Vec<Parameter>> {
        let rows = |read: Tensor| if self.is_transposed { read.t() } else { Ok(read) };
        let is_grouped = self.query_heads == QueryHeadOrder::Grouped;
        let reads_parts =
            self.groups == 1 && self.spec.share.is_none() && is_grouped && source.shard != HeadShard::WHOLE;
        if self.spec.refused.is_some() {
            return source.read_wanted(&self.spec).map(|_| Vec::new());
        }
        if let Some(Share::Heads(heads, _)) = self.spec.share
            && !is_grouped
        {
            return Ok(vec![self.read_reordered_columns(heads, rows, source)?]);
        }
        let whole = if reads_parts { None } else { Some(rows(source.read(&self.spec)?)?) };
        let mut end = 0;
        let part = |&(len, heads): &(usize, Option<Heads>)| {
            end += len;
            let (at, own) = (end - len, heads.map_or(0..len, |heads| source.own_range(heads, len)));
            let Some(whole) = &whole else {
                let own = at + own.start..at + own.end;
                return rows(source.read_part(&self.spec, usize::from(self.is_transposed), own)?).map(Parameter::from);
            };
            let range = at / self.groups..end / self.groups;
            let reordered = (heads == Some(Heads::Query) && !is_grouped).then_some((self.query_heads, 0));
            Parameter(vec![Piece { tensor: whole.clone(), groups: self.groups, range, reordered }]).narrow(own)
        };
        self.parts.iter().map(part).collect()
    }

    /// Returns all rows of a tensor whose columns belong to heads, of this process's heads.
    fn read_reordered_columns(
        &self,
        heads: Heads,
        rows: impl Fn(Tensor) -> Result<Tensor>,
        source: &Source,
    ) -> Result<Parameter> {
        let whole = rows(source.read(&Spec { share: None, ..self.spec.clone() })?)?;
        let (count, width) = whole.dims2()?;
        let reordered = Some((self.query_heads, 1));
        let parameter = Parameter(vec![Piece { tensor: whole, groups: 1, range: 0..count, reordered }]);
        if source.shard == HeadShard::WHOLE {
            return Ok(parameter);
        }
        let own = source.own_range(heads, width);
        Ok(parameter.tensor()?.narrow(1, own.start, own.len())?.force_contiguous()?.into())
    }

    /// Returns the tensor of the rows of each projection: the inverse of [`read`](Self::read).
    ///
    /// # Errors
    /// For rows of another number than the tensor has.
    pub fn join(&self, parts: &[Tensor]) -> Result<Tensor> {
        let grouped = |(part, (_, heads)): (&Tensor, &(usize, Option<Heads>))| {
            let part = match (heads, self.spec.share) {
                (Some(Heads::Query), _) => self.query_heads.from_grouped(part, 0)?,
                (_, Some(Share::Heads(Heads::Query, _))) => self.query_heads.from_grouped(part, 1)?,
                _ => part.clone(),
            };
            let (rows, columns) = (part.dims()[0], &part.dims()[1..]);
            part.reshape([&[self.groups, rows / self.groups], columns].concat())
        };
        let parts = parts.iter().zip(&self.parts).map(grouped).collect::<Result<Vec<_>>>()?;
        let joined = Tensor::cat(&parts, 1)?.flatten(0, 1)?;
        if self.is_transposed { joined.t()?.contiguous() } else { joined.contiguous() }
    }
}

/// A parameter that was read: rows of tensors, one after the other. Training may change them in place.
#[derive(Debug, Clone, Default)]
pub struct Parameter(Vec<Piece>);

/// Of the `groups` of equally many rows that a tensor (rows, ..) is divided into, `range` of each.
#[derive(Debug, Clone)]
struct Piece {
    tensor: Tensor,
    groups: usize,
    range: Range<usize>,
    /// The order of the query heads along a dimension of these rows, where it is not this crate's.
    reordered: Option<(QueryHeadOrder, usize)>,
}

impl From<Tensor> for Parameter {
    fn from(tensor: Tensor) -> Self {
        Self(vec![Piece { groups: 1, range: 0..tensor.dims()[0], tensor, reordered: None }])
    }
}

/// One after the other.
impl FromIterator<Parameter> for Parameter {
    fn from_iter<I: IntoIterator<Item = Self>>(all: I) -> Self {
        Self(all.into_iter().flat_map(|parameter| parameter.0).collect())
    }
}

impl Piece {
    fn count(&self) -> usize {
        self.groups * self.range.len()
    }

    /// Whether the rows of `next` follow this piece's own in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        let follows = (self.groups, next.groups, self.range.end) == (1, 1, next.range.start);
        self.tensor.id() == next.tensor.id() && follows && self.reordered.is_none() && next.reordered.is_none()
    }

    /// The rows, (len, ..): the tensor itself or a view of it where they lie side by side, or a copy.
    fn read(&self) -> Result<Tensor> {
        let rows = self.stored_rows()?;
        match self.reordered {
            Some((order, dim)) => order.to_grouped(&rows, dim),
            None => Ok(rows),
        }
    }

    fn stored_rows(&self) -> Result<Tensor> {
        let (rows, columns) = (self.tensor.dims()[0], &self.tensor.dims()[1..]);
        let (start, len) = (self.range.start, self.range.len());
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
    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.0.iter().map(Piece::count).sum()
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
                Some(last) if last.is_followed_by(piece) => last.range.end = piece.range.end,
                _ => joined.push(piece.clone()),
            }
        }
        let mut tensors = joined.iter().map(Piece::read).collect::<Result<Vec<_>>>()?;
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

/// A projection's weight and perhaps a bias: rows of tensors, wherever a checkpoint keeps them.
#[derive(Debug, Clone, Default)]
pub struct WeightAndBias {
    /// (out, in); empty where there is no such projection.
    pub weight: Parameter,
    /// (out,).
    pub bias: Option<Parameter>,
}

impl WeightAndBias {
    /// More rows, of the weight or of the bias.
    pub fn push(&mut self, more: Parameter, is_bias: bool) {
        if is_bias { self.bias.get_or_insert_default() } else { &mut self.weight }.0.extend(more.0);
    }

    /// Whether training may change either, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.weight.is_tracked() || self.bias.as_ref().is_some_and(Parameter::is_tracked)
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { weight: self.weight.freeze()?, bias: self.bias.as_ref().map(Parameter::freeze).transpose()? })
    }

    /// What both hold now.
    pub fn to_linear(&self) -> Result<Linear> {
        Ok(Linear::new(self.weight.tensor()?, self.bias.as_ref().map(Parameter::tensor).transpose()?))
    }

    /// The rows of several projections of inputs of one width, one after the other.
    pub fn join(all: &[&Self]) -> Result<Self> {
        let bias = |own: &&Self| match &own.bias {
            Some(bias) => Ok(bias.clone()),
            // Adding zero changes no number.
            None => {
                let weight = own.weight.first();
                Ok(Tensor::zeros(own.weight.count(), weight.dtype(), weight.device())?.into())
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
    /// Reads each that is wanted, or this process's part of it.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, and for one that is not wanted.
    pub fn load(specs: &[Spec], source: &Source) -> Result<Self> {
        let read = |spec: &Spec| Ok(spec.load(source)?.map(|parameter| (spec.name.clone(), parameter)));
        Ok(Self(specs.iter().filter_map(|spec| read(spec).transpose()).collect::<Result<_>>()?))
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
        let missing = || Error::msg(format!("[parameters] {name} is not among those that were listed"));
        self.tensor(name)?.ok_or_else(missing)
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
    pub fn rank_range(&self, len: usize) -> Range<usize> {
        ith_of(self.rank, len, self.world_size)
    }

    /// This process's part of `len` entries that `h` query heads or `h_kv` key heads divide equally; there are no fewer
    /// query heads than processes.
    #[doc(hidden)]
    pub fn range(&self, heads: Heads, [h, h_kv]: [usize; 2], len: usize) -> Range<usize> {
        let (n, group) = (self.world_size, h / h_kv);
        let (queries, keys) = if n <= h_kv {
            let keys = self.rank_range(h_kv);
            (keys.start * group..keys.end * group, keys)
        } else {
            let key = self.first_key(h_kv);
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
        let before = Self { rank: self.rank.saturating_sub(1), ..self };
        self.world_size <= h_kv || self.rank == 0 || self.first_key(h_kv) != before.first_key(h_kv)
    }

    /// Returns the key head of this rank, where there are more ranks than key heads.
    fn first_key(&self, h_kv: usize) -> usize {
        (self.rank as u128 * h_kv as u128 / self.world_size as u128) as usize
    }
}

/// Returns the entries of `len` that belong to part `i` of `of`. The products do not overflow in u128.
fn ith_of(i: usize, len: usize, of: usize) -> Range<usize> {
    let start_of = |i: u128| (i * len as u128).div_ceil(of as u128) as usize;
    start_of(i as u128)..start_of(i as u128 + 1)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_any_world_size_divide_entries_in_their_order() -> Result<()> {
        let most = usize::MAX;
        for (rank, world_size, len, expected) in [
            (most - 2, most - 1, 7, 7..7),
            (0, most, 7, 0..1),
            (most - 1, most, most, most - 1..most),
            (1, 2, most, most / 2 + 1..most),
            (1, 3, most, most / 3..most / 3 * 2),
        ] {
            assert_eq!(HeadShard::new(rank, world_size)?.rank_range(len), expected, "{rank} of {world_size}");
        }
        for world_size in [1, 2, 3, 5, 8, 13] {
            let mut end = 0;
            for shard in HeadShard::new(0, world_size)?.all() {
                let own = shard.rank_range(8);
                assert_eq!(own.start, end, "{shard:?}");
                end = own.end;
            }
            assert_eq!(end, 8, "{world_size}");
        }
        assert_eq!(HeadShard::new(most - 2, most - 1)?.range(Heads::Key, [most - 1, 3], 3), 2..3);
        assert!(!HeadShard::new(most - 2, most - 1)?.is_first_of_keys(3));
        Ok(())
    }
}

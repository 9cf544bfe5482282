//! The weights of a model, or of the share that one of several processes has: some heads of each layer, some inner
//! columns of each MLP, and some rows of the vocabulary, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

use std::ops::{Deref, Range};
use std::rc::Rc;

use candle_attention::{HeadShard, PackedLinear};
use candle_core::{Context, DType, Result, Tensor, bail};
use candle_nn::var_builder::{Shard, ShardedVarBuilder};
use candle_nn::{Activation, Embedding, VarBuilder};

use super::family::GATED_MLPS;
use super::gguf::Gguf;
use super::mlp::Mlp;

/// The processes that compute a model together.
pub trait Processes {
    /// Which of them this is.
    fn shard(&self) -> HeadShard;

    /// The sum over all processes.
    fn sum(&self, own: &Tensor) -> Result<Tensor>;

    /// The tensors of all processes, which have one shape, in the order of their ranks.
    fn gather(&self, own: &Tensor) -> Result<Vec<Tensor>>;
}

/// Those that a part of a model shares its work with; none for a model in one process.
pub type Others = Option<Rc<dyn Processes>>;

/// A builder, and what is read instead: from a GGUF file, in the types that it has, and by one of several processes.
#[derive(Clone)]
pub struct Weights<'a> {
    pub vb: VarBuilder<'a>,
    pub gguf: Option<&'a Gguf>,
    pub share: Option<Share>,
}

/// Where one of at least two processes reads its share, and the others.
#[derive(Clone)]
pub struct Share {
    /// At the checkpoint's root; none of a GGUF file.
    pub vb: Option<ShardedVarBuilder<'static>>,
    pub processes: Rc<dyn Processes>,
}

/// A process's part of a dimension: of a GGUF file in whole blocks of any of its types where there are enough of them.
pub fn part_of(shard: HeadShard, len: usize, is_gguf: bool) -> Range<usize> {
    let fits = |unit: &usize| is_gguf && len.is_multiple_of(*unit) && len / unit >= shard.world_size();
    let unit = [256, 32].into_iter().find(fits).unwrap_or(1);
    let units = shard.rank_range(len / unit);
    units.start * unit..units.end * unit
}

/// What processes divide of a tensor.
#[derive(Clone, Copy)]
pub struct Divided {
    pub dim: usize,
    /// Entries that stay together.
    pub unit: usize,
    /// Part `i` of `n` equal ones that are divided each by itself.
    pub part: [usize; 2],
}

/// Of a weight (out, in) and its bias.
pub const OUTPUTS: Divided = Divided { dim: 0, unit: 1, part: [0, 1] };
/// The outputs of all processes are then to be added up; the first has the bias.
pub const INPUTS: Divided = Divided { dim: 1, ..OUTPUTS };

impl Divided {
    /// One half of the outputs, where two projections are one weight.
    pub fn half(self, i: usize) -> Self {
        Self { part: [i, 2], ..self }
    }
}

impl<'a> From<VarBuilder<'a>> for Weights<'a> {
    fn from(vb: VarBuilder<'a>) -> Self {
        Self { vb, gguf: None, share: None }
    }
}

/// For whole tensors.
impl<'a> Deref for Weights<'a> {
    type Target = VarBuilder<'a>;

    fn deref(&self) -> &Self::Target {
        &self.vb
    }
}

impl<'a> Weights<'a> {
    /// What is below a name.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), ..self.clone() }
    }

    /// What is below the first of these names that has one of the parts, or else everything.
    pub fn below(&self, names: &[&str], parts: &[&str]) -> Self {
        let mut places = names.iter().map(|name| self.pp(name));
        places.find(|place| place.first(parts).is_some()).unwrap_or_else(|| self.clone())
    }

    /// The first of these names below which there is a weight, which old checkpoints of BERT call gamma.
    pub fn first<'n>(&self, names: &[&'n str]) -> Option<&'n str> {
        let has = |name: &str, weight: &str| self.contains_tensor(&format!("{name}.{weight}"));
        names.iter().copied().find(|name| has(name, "weight") || has(name, "gamma"))
    }

    /// The same, which has to be there.
    pub fn named<'n>(&self, names: &[&'n str]) -> Result<&'n str> {
        let missing = || format!("[checkpoint] there is no weight below any of {}", names.join(", "));
        self.first(names).with_context(missing)
    }

    /// A table with a row for each token, position or the like.
    pub fn table(&self, name: &str) -> Result<Embedding> {
        let table = self.pp(name).get_unchecked("weight")?;
        let width = table.dim(1)?;
        Ok(Embedding::new(table, width))
    }

    /// Which of several processes this is.
    pub fn shard(&self) -> Option<HeadShard> {
        self.share.as_ref().map(|share| share.processes.shard())
    }

    pub fn processes(&self) -> Others {
        self.share.as_ref().map(|share| share.processes.clone())
    }

    /// A weight (out, in), and the bias if the checkpoint has one; both whole unless divided.
    pub fn linear(&self, divided: impl Into<Option<Divided>>) -> Result<PackedLinear> {
        match self.gguf {
            Some(gguf) => gguf.linear(&self.prefix(), self.shard(), divided.into()),
            None => self.linear_of(divided.into(), false),
        }
    }

    /// The same of a weight that may be stored as (in, out).
    pub fn linear_of(&self, divided: Option<Divided>, is_transposed: bool) -> Result<PackedLinear> {
        let stored = |of: Divided| if is_transposed { Divided { dim: 1 - of.dim, ..of } } else { of };
        let weight = match divided {
            Some(of) => self.own("weight", stored(of))?,
            None => self.get_unchecked("weight")?,
        };
        let weight = if is_transposed { weight.t()? } else { weight };
        let bias = match divided {
            _ if !self.contains_tensor("bias") => None,
            Some(of) if of.dim == 0 => Some(self.own("bias", of)?),
            Some(_) if !self.is_first() => None,
            _ => Some(self.get(weight.dim(0)?, "bias")?),
        };
        PackedLinear::new(&weight, bias.as_ref())
    }

    /// The names of gate, up and down, if there is an MLP with a gate.
    pub fn gated_names(&self) -> Option<[&'static str; 3]> {
        GATED_MLPS.into_iter().find(|names| self.first(&names[2..]).is_some())
    }

    /// An MLP with a gate. Gate and up may be halves of one weight.
    pub fn gated_mlp(&self, activation: Activation) -> Result<Mlp> {
        let [gate, up, down] = self.gated_names().unwrap_or(GATED_MLPS[0]);
        let joint = if self.gguf.is_some() || gate == up { up } else { "gate_up_proj" };
        let is_joint = gate == up || self.first(&[gate]).is_none() && self.first(&[joint]).is_some();
        let [gate, up] = match is_joint {
            true => [0, 1].map(|half| self.pp(joint).linear(OUTPUTS.half(half))),
            false => [gate, up].map(|name| self.pp(name).linear(OUTPUTS)),
        };
        let activation = if activation == Activation::Swiglu { Activation::Silu } else { activation };
        Mlp::gated([gate?, up?, self.pp(down).linear(INPUTS)?], activation)
    }

    /// Whether this process is the one that adds what counts once.
    pub fn is_first(&self) -> bool {
        self.shard().is_none_or(|shard| shard.rank() == 0)
    }

    /// This process's share of a dimension of a tensor, all of it in one process.
    pub fn own(&self, name: &str, of: Divided) -> Result<Tensor> {
        self.own_in(self.dtype(), name, of)
    }

    /// The same in another dtype than that of the weights.
    pub fn own_in(&self, dtype: DType, name: &str, of: Divided) -> Result<Tensor> {
        let Divided { dim, unit, part: [i, parts] } = of;
        if let Some(Share { vb: Some(vb), processes }) = &self.share
            && unit == 1
        {
            let (rank, n) = (processes.shard().rank(), processes.shard().world_size());
            let shard = Shard { dim, rank: i * n + rank, world_size: parts * n };
            // Candle reads equal shares; others are cut out of the whole.
            if let Ok(own) = vb.get_with_hints_dtype((), &format!("{}.{name}", self.prefix()), shard, dtype) {
                return Ok(own);
            }
        }
        let whole = self.get_unchecked_dtype(name, dtype)?;
        let len = whole.dim(dim)? / parts;
        let Some(shard) = self.shard() else { return whole.narrow(dim, i * len, len) };
        if len / unit < shard.world_size() {
            bail!(
                "[causal_lm] {}.{name} has {} units of {unit}, expected one for each of {} processes",
                self.prefix(),
                len / unit,
                shard.world_size()
            )
        }
        let own = shard.rank_range(len / unit);
        whole.narrow(dim, i * len + own.start * unit, own.len() * unit)?.force_contiguous()
    }
}

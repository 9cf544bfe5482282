//! The weights of a model, or the shard of one rank: some heads of each layer, some inner columns of each MLP, and some
//! rows of the vocabulary, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

use std::ops::{Deref, Range};
use std::rc::Rc;

use candle_attention::{HeadShard, PackedLinear, QuantizedWeight};
use candle_core::{Context, DType, Result, Tensor, bail};
use candle_nn::var_builder::{Shard, ShardedVarBuilder};
use candle_nn::{Activation, Embedding, VarBuilder};

use super::family::{GATED_MLPS, GatedNames};
use super::gguf::Gguf;
use super::gpt_oss::Clamp;
use super::mlp::Mlp;

/// The ranks that compute a model together.
pub trait Ranks {
    /// Returns the shard of this rank.
    fn shard(&self) -> HeadShard;

    /// Returns the sum over all ranks.
    fn sum(&self, own: &Tensor) -> Result<Tensor>;

    /// Returns the tensors of all ranks in their order. The tensors have one shape.
    fn gather(&self, own: &Tensor) -> Result<Vec<Tensor>>;
}

/// The ranks that compute a model together; `None` for a model on one rank.
pub type OtherRanks = Option<Rc<dyn Ranks>>;

/// A builder of weights, which are read from elsewhere in two cases: from a GGUF file in its quantised types, and from
/// safetensors in shards.
#[derive(Clone)]
pub struct Weights<'a> {
    pub vb: VarBuilder<'a>,
    pub gguf: Option<&'a Gguf>,
    pub shards: Option<Shards>,
}

/// The reader of shards, for one of at least two ranks.
#[derive(Clone)]
pub struct Shards {
    /// At the checkpoint's root; `None` for a GGUF file.
    pub vb: Option<ShardedVarBuilder<'static>>,
    pub ranks: Rc<dyn Ranks>,
}

/// Returns the range of a dimension in a shard. In a GGUF file it consists of whole quantised blocks if there are
/// enough of them.
pub fn shard_range(shard: HeadShard, len: usize, is_gguf: bool) -> Range<usize> {
    let fits = |unit: &usize| is_gguf && len.is_multiple_of(*unit) && len / unit >= shard.world_size();
    let unit = [256, 32].into_iter().find(fits).unwrap_or(1);
    let units = shard.rank_range(len / unit);
    units.start * unit..units.end * unit
}

/// The dimension of a tensor that is sharded.
#[derive(Clone, Copy)]
pub struct Sharding {
    pub dim: usize,
    /// The number of entries that stay together.
    pub unit: usize,
    /// The part of the dimension to shard.
    pub part: Part,
}

/// One of several equal parts of a dimension.
#[derive(Clone, Copy)]
pub struct Part {
    pub index: usize,
    pub count: usize,
}

/// The outputs of a weight (out, in) and of its bias.
pub const OUTPUTS: Sharding = Sharding { dim: 0, unit: 1, part: Part { index: 0, count: 1 } };
/// The inputs of a weight (out, in). The results of all ranks have to be summed; the first rank has the bias.
pub const INPUTS: Sharding = Sharding { dim: 1, ..OUTPUTS };

impl Sharding {
    /// Shards one half of the dimension, for two projections in one weight.
    pub fn half(self, index: usize) -> Self {
        Self { part: Part { index, count: 2 }, ..self }
    }
}

impl<'a> From<VarBuilder<'a>> for Weights<'a> {
    fn from(vb: VarBuilder<'a>) -> Self {
        Self { vb, gguf: None, shards: None }
    }
}

/// Reads whole tensors.
impl<'a> Deref for Weights<'a> {
    type Target = VarBuilder<'a>;

    fn deref(&self) -> &Self::Target {
        &self.vb
    }
}

impl<'a> Weights<'a> {
    /// Returns the weights below a name.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), ..self.clone() }
    }

    /// Returns the weights below the first of `names` that has one of `parts`, or else all weights.
    pub fn below(&self, names: &[&str], parts: &[&str]) -> Self {
        for name in names {
            let weights = self.pp(name);
            if weights.first(parts).is_some() {
                return weights;
            }
        }
        self.clone()
    }

    /// Returns the first of `names` that has a weight, which old checkpoints of BERT call gamma.
    pub fn first<'n>(&self, names: &[&'n str]) -> Option<&'n str> {
        let has = |name: &str, weight: &str| self.contains_tensor(&format!("{name}.{weight}"));
        names.iter().copied().find(|name| has(name, "weight") || has(name, "gamma"))
    }

    /// Returns the first of `names` that has a weight.
    ///
    /// # Errors
    /// If none has a weight.
    pub fn named<'n>(&self, names: &[&'n str]) -> Result<&'n str> {
        let missing = || format!("[checkpoint] there is no weight below any of {}", names.join(", "));
        self.first(names).with_context(missing)
    }

    /// Loads a table with a row for each token or position.
    pub fn table(&self, name: &str) -> Result<Embedding> {
        let table = self.pp(name).get_unchecked("weight")?;
        let width = table.dim(1)?;
        Ok(Embedding::new(table, width))
    }

    /// Returns the rank of this process among several.
    pub fn shard(&self) -> Option<HeadShard> {
        self.shards.as_ref().map(|shards| shards.ranks.shard())
    }

    pub fn ranks(&self) -> OtherRanks {
        self.shards.as_ref().map(|shards| shards.ranks.clone())
    }

    /// Loads a weight (out, in), and the bias if the checkpoint has one; both whole unless they are sharded.
    pub fn linear(&self, sharding: impl Into<Option<Sharding>>) -> Result<PackedLinear> {
        match self.gguf {
            Some(gguf) => gguf.linear(&self.prefix(), self.shard(), sharding.into()),
            None => self.linear_stored(sharding.into(), false),
        }
    }

    /// Loads a weight (out, in) that is never quantised here, such as that of a router, and the bias if the checkpoint
    /// has one.
    pub fn plain_linear(&self) -> Result<PackedLinear> {
        let weight = self.get_unchecked("weight")?;
        PackedLinear::new(&weight, self.bias(weight.dim(0)?, None)?.as_ref())
    }

    /// Loads a weight like [`linear`](Self::linear) that may be stored as (in, out).
    pub fn linear_stored(&self, sharding: Option<Sharding>, is_transposed: bool) -> Result<PackedLinear> {
        if let Some(codes) = self.codes(sharding)? {
            let bias = self.bias(codes.outputs, sharding)?;
            return PackedLinear::from_quantized_on(&codes, bias.as_ref(), self.dtype(), self.device());
        }
        let stored = match sharding {
            Some(of) if is_transposed => self.sharded("weight", Sharding { dim: 1 - of.dim, ..of })?,
            Some(of) => self.sharded("weight", of)?,
            None => self.get_unchecked("weight")?,
        };
        let weight = if is_transposed { stored.t()? } else { stored };
        let bias = self.bias(weight.dim(0)?, sharding)?;
        PackedLinear::new(&weight, bias.as_ref())
    }

    /// Loads the bias of a weight with `outputs` outputs, if the checkpoint has one.
    fn bias(&self, outputs: usize, sharding: Option<Sharding>) -> Result<Option<Tensor>> {
        match sharding {
            _ if !self.contains_tensor("bias") => Ok(None),
            Some(of) if of.dim == 0 => self.sharded("bias", of).map(Some),
            Some(_) if !self.is_first() => Ok(None),
            _ => self.get(outputs, "bias").map(Some),
        }
    }

    /// Loads a quantised weight (out, in), or this process's shard of it; `None` if the checkpoint has floats.
    fn codes(&self, sharding: Option<Sharding>) -> Result<Option<QuantizedWeight>> {
        let Some(weight) = QuantizedWeight::of_builder(&self.vb, "weight")? else { return Ok(None) };
        let Some(of) = sharding else { return Ok(Some(weight)) };
        let len = if of.dim == 0 { weight.outputs } else { weight.inputs };
        let own = self.shard_of("weight", len, of)?;
        if own.len() == len {
            return Ok(Some(weight));
        }
        if of.dim == 0 { weight.rows(&[own]).map(Some) } else { weight.columns(own).map(Some) }
    }

    /// Returns the names of gate, up and down, if there is an MLP with a gate.
    pub fn gated_names(&self) -> Option<GatedNames> {
        GATED_MLPS.into_iter().find(|names| self.first(&[names.down]).is_some())
    }

    /// Loads an MLP with a gate, which may be clamped. Gate and up may be halves of one weight.
    pub fn gated_mlp(&self, activation: Activation, clamp: Option<Clamp>) -> Result<Mlp> {
        let names = self.gated_names().unwrap_or(GATED_MLPS[0]);
        let joint = if self.gguf.is_some() || names.gate == names.up { names.up } else { "gate_up_proj" };
        // GTE's published checkpoints have the gate after up.
        let swapped = "up_gate_proj";
        let is_swapped = self.gguf.is_none() && self.first(&[swapped]).is_some();
        let is_joint = names.gate == names.up || self.first(&[names.gate]).is_none() && self.first(&[joint]).is_some();
        let (gate, up) = if is_swapped {
            let weight = self.pp(swapped);
            (weight.linear(OUTPUTS.half(1))?, weight.linear(OUTPUTS.half(0))?)
        } else if is_joint {
            let weight = self.pp(joint);
            (weight.linear(OUTPUTS.half(0))?, weight.linear(OUTPUTS.half(1))?)
        } else {
            (self.pp(names.gate).linear(OUTPUTS)?, self.pp(names.up).linear(OUTPUTS)?)
        };
        let down = self.pp(names.down).linear(INPUTS)?;
        let gate_activation = if activation == Activation::Swiglu { Activation::Silu } else { activation };
        Mlp::gated(gate, up, down, gate_activation, clamp)
    }

    /// Returns whether this process adds the terms that count once, such as biases.
    pub fn is_first(&self) -> bool {
        self.shard().is_none_or(|shard| shard.rank() == 0)
    }

    /// Loads this process's shard of a tensor, all of it in one process.
    pub fn sharded(&self, name: &str, of: Sharding) -> Result<Tensor> {
        self.sharded_in(self.dtype(), name, of)
    }

    /// Loads a shard like [`sharded`](Self::sharded), in another dtype than that of the weights.
    pub fn sharded_in(&self, dtype: DType, name: &str, of: Sharding) -> Result<Tensor> {
        let Sharding { dim, unit, part } = of;
        if let Some(Shards { vb: Some(vb), ranks }) = &self.shards
            && unit == 1
        {
            let rank = ranks.shard().rank();
            let n = ranks.shard().world_size();
            let shard = Shard { dim, rank: part.index * n + rank, world_size: part.count * n };
            // Candle reads equal shards; others are cut out of the whole tensor.
            if let Ok(own) = vb.get_with_hints_dtype((), &format!("{}.{name}", self.prefix()), shard, dtype) {
                return Ok(own);
            }
        }
        let whole = self.get_unchecked_dtype(name, dtype)?;
        let own = self.shard_of(name, whole.dim(dim)?, of)?;
        let entries = whole.narrow(dim, own.start, own.len())?;
        if self.shards.is_some() { entries.force_contiguous() } else { Ok(entries) }
    }

    /// Returns this process's range of a dimension of a tensor.
    fn shard_of(&self, name: &str, whole: usize, of: Sharding) -> Result<Range<usize>> {
        let Sharding { unit, part, .. } = of;
        let len = whole / part.count;
        let start = part.index * len;
        let Some(shard) = self.shard() else { return Ok(start..start + len) };
        if len / unit < shard.world_size() {
            bail!(
                "[causal_lm] {}.{name} has {} units of {unit}, expected at least one for each of {} shards",
                self.prefix(),
                len / unit,
                shard.world_size()
            )
        }
        let units = shard.rank_range(len / unit);
        Ok(start + units.start * unit..start + units.end * unit)
    }
}

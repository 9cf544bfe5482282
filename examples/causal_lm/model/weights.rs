//! The weights of a model, or of the share that one of several processes has: some heads of each layer, some inner
//! columns of each MLP, and some rows of the vocabulary, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

use std::ops::Deref;
use std::rc::Rc;

use candle_attention::{HeadShard, PackedLinear};
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::{Shard, ShardedVarBuilder};

/// The processes that compute a model together.
pub trait Processes {
    /// Which of them this is.
    fn shard(&self) -> HeadShard;

    /// The sum over all processes.
    fn sum(&self, own: &Tensor) -> Result<Tensor>;

    /// The tensors (.., N) of all processes side by side, (.., N of all).
    fn concat(&self, own: &Tensor) -> Result<Tensor>;
}

/// Those that a part of a model shares its work with; none for a model in one process.
pub type Others = Option<Rc<dyn Processes>>;

/// A builder, and what one of several processes reads instead.
#[derive(Clone)]
pub struct Weights<'a> {
    vb: VarBuilder<'a>,
    share: Option<Share>,
}

/// Where a process reads its share, and the others.
#[derive(Clone)]
pub struct Share {
    /// At the checkpoint's root.
    pub vb: ShardedVarBuilder<'static>,
    pub processes: Rc<dyn Processes>,
}

/// Which dimension of a weight (out, in) is divided among processes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Divided {
    Not,
    Outputs,
    /// The outputs of all processes are then to be added up; the first has the bias.
    Inputs,
}

impl<'a> From<VarBuilder<'a>> for Weights<'a> {
    fn from(vb: VarBuilder<'a>) -> Self {
        Self { vb, share: None }
    }
}

/// For whole tensors.
impl<'a> Deref for Weights<'a> {
    type Target = VarBuilder<'a>;

    fn deref(&self) -> &Self::Target {
        &self.vb
    }
}

impl Weights<'_> {
    /// The same, of which this process reads a share only.
    pub fn shared(self, share: Share) -> Self {
        Self { share: Some(share), ..self }
    }

    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), share: self.share.clone() }
    }

    pub fn share(&self) -> Option<&Share> {
        self.share.as_ref()
    }

    pub fn processes(&self) -> Others {
        self.share.as_ref().map(|share| share.processes.clone())
    }

    /// A weight (out, in), and the bias if the checkpoint has one.
    pub fn linear(&self, divided: Divided) -> Result<PackedLinear> {
        let weight = match divided {
            Divided::Not => self.get_unchecked("weight")?,
            Divided::Outputs => self.part("weight", 0, [0, 1])?,
            Divided::Inputs => self.part("weight", 1, [0, 1])?,
        };
        self.with_bias(&weight, divided)
    }

    /// The same of a weight that is stored as (in, out).
    pub fn transposed_linear(&self, divided: Divided) -> Result<PackedLinear> {
        let weight = match divided {
            Divided::Not => self.get_unchecked("weight")?,
            Divided::Outputs => self.part("weight", 1, [0, 1])?,
            Divided::Inputs => self.part("weight", 0, [0, 1])?,
        };
        self.with_bias(&weight.t()?, divided)
    }

    /// One of several projections whose outputs are one weight, as many of each.
    pub fn joint_linear(&self, at: [usize; 2]) -> Result<PackedLinear> {
        let bias = self.contains_tensor("bias").then(|| self.part("bias", 0, at)).transpose()?;
        PackedLinear::new(&self.part("weight", 0, at)?, bias.as_ref())
    }

    fn with_bias(&self, weight: &Tensor, divided: Divided) -> Result<PackedLinear> {
        let is_first = self.share().is_none_or(|share| share.processes.shard().rank() == 0);
        let bias = match divided {
            _ if !self.contains_tensor("bias") => None,
            Divided::Not => Some(self.get(weight.dim(0)?, "bias")?),
            Divided::Outputs => Some(self.part("bias", 0, [0, 1])?),
            Divided::Inputs if is_first => Some(self.get(weight.dim(0)?, "bias")?),
            Divided::Inputs => None,
        };
        PackedLinear::new(weight, bias.as_ref())
    }

    /// This process's share of part `i` of `of` of a tensor's dimension, all of it in one process.
    fn part(&self, name: &str, dim: usize, [i, of]: [usize; 2]) -> Result<Tensor> {
        let shard = self.share().map(|share| share.processes.shard()).filter(|shard| shard.world_size() > 1);
        let (Some(Share { vb, .. }), Some(shard)) = (&self.share, shard) else {
            let whole = self.get_unchecked(name)?;
            let len = whole.dim(dim)? / of;
            return whole.narrow(dim, i * len, len);
        };
        let (rank, n) = (shard.rank(), shard.world_size());
        let shard = Shard { dim, rank: i * n + rank, world_size: of * n };
        vb.get_with_hints((), &format!("{}.{name}", self.prefix()), shard)
    }
}

//! A block: attention and an MLP, each with its norms and a residual.

use candle_attention::{
    AttentionCacheConfig, AttentionInput, AttentionStatistics, MultiHeadAttention, MultiHeadLatentAttention,
    RopeConfig, RotaryEmbedding, StatisticsOptions, hf, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_plus_one,
};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::experts::Experts;
use super::family::{Family, MlpKind, NormKind};
use super::mlp::{Between, LLAMA_MLP, Mlp};
use super::size;
use super::weights::{Divided, Others, Weights};

/// That of the family, with gradients.
pub type Norm = Box<dyn Module>;

pub fn optional(norm: &Option<Norm>, xs: &Tensor) -> Result<Tensor> {
    norm.as_ref().map_or_else(|| Ok(xs.clone()), |norm| norm.forward(xs))
}

#[allow(clippy::large_enum_variant, reason = "a model has one for each block")]
pub enum Attention {
    MultiHead(MultiHeadAttention),
    Latent(MultiHeadLatentAttention),
}

impl Attention {
    /// The layer with the rotary tables of an earlier one that has the same, or with its own, which are then among
    /// `tables`.
    fn sharing(self, tables: &mut Vec<RotaryEmbedding>) -> Result<Self> {
        let Some((rope, width)) = self.rope() else { return Ok(self) };
        let known = tables.iter().find(|table| table.config() == rope && table.head_dim() == width).cloned();
        let table = match known {
            Some(table) => table,
            None => {
                tables.push(RotaryEmbedding::new(rope, width)?);
                tables[tables.len() - 1].clone()
            }
        };
        Ok(match self {
            Self::MultiHead(attention) => Self::MultiHead(attention.with_rotary(table)?),
            Self::Latent(attention) => Self::Latent(attention.with_rotary(table)?),
        })
    }

    /// Rotary positions, and the width of the heads that they rotate.
    pub fn rope(&self) -> Option<(&RopeConfig, usize)> {
        match self {
            Self::MultiHead(attention) => attention.config().rope().map(|rope| (rope, attention.config().head_dim())),
            Self::Latent(attention) => Some((attention.config().rope(), attention.config().rope_head_dim())),
        }
    }

    pub fn cache_config(&self) -> AttentionCacheConfig {
        match self {
            Self::MultiHead(attention) => AttentionCacheConfig::for_layer(attention.config()),
            Self::Latent(_) => AttentionCacheConfig::new(),
        }
    }

    pub fn forward(&self, input: AttentionInput) -> Result<Tensor> {
        match self {
            Self::MultiHead(attention) => attention.forward_with(input),
            Self::Latent(attention) => attention.forward_with(input),
        }
    }

    pub fn forward_with_statistics(
        &self,
        input: AttentionInput,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        match self {
            Self::MultiHead(attention) => attention.forward_with_statistics(input, wanted),
            Self::Latent(attention) => attention.forward_with_statistics(input, wanted),
        }
    }

    pub fn num_heads(&self) -> usize {
        match self {
            Self::MultiHead(attention) => attention.config().num_heads(),
            Self::Latent(attention) => attention.config().num_heads(),
        }
    }
}

/// What follows attention.
#[allow(clippy::large_enum_variant, reason = "a model has one for each block")]
enum FeedForward {
    Mlp(Mlp),
    Experts(Experts),
}

impl FeedForward {
    /// Plus a residual, if there is one.
    fn forward(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        match (self, residual) {
            (Self::Mlp(mlp), Some(residual)) => mlp.forward_with_residual(xs, residual),
            (Self::Mlp(mlp), None) => mlp.forward(xs),
            (Self::Experts(experts), Some(residual)) => residual + experts.forward(xs)?,
            (Self::Experts(experts), None) => experts.forward(xs),
        }
    }
}

/// What the blocks of a model are loaded from.
pub struct Loader<'a> {
    pub family: Family,
    pub json: &'a Value,
    /// At the checkpoint's root.
    pub weights: Weights<'a>,
    /// The tables of rotary positions so far; layers that have the same share them.
    pub tables: Vec<RotaryEmbedding>,
    /// E.
    pub width: usize,
}

impl Loader<'_> {
    pub fn norm(&self, vb: VarBuilder) -> Result<Norm> {
        const EPSILONS: [&str; 4] = ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"];
        let given = EPSILONS.iter().find_map(|key| self.json[*key].as_f64());
        let (width, eps) = (self.width, |default: f64| given.unwrap_or(default));
        Ok(match self.family.norm {
            NormKind::Rms(default) => Box::new(rms_norm(width, eps(default), vb)?),
            NormKind::RmsPlusOne(default) => Box::new(rms_norm_plus_one(width, eps(default), vb)?),
            NormKind::Layer(default) if vb.contains_tensor("bias") => Box::new(layer_norm(width, eps(default), vb)?),
            NormKind::Layer(default) => Box::new(layer_norm_no_bias(width, eps(default), vb)?),
        })
    }

    /// A layer's block from a builder at its prefix.
    pub fn block(&mut self, layer: usize, at: Weights) -> Result<Block> {
        let (share, shard) = (self.weights.share.as_ref(), self.weights.shard());
        let is_latent = size(self.json, "kv_lora_rank").is_some();
        let attention = match (self.weights.gguf, shard.zip(share.and_then(|share| share.vb.as_ref()))) {
            (Some(gguf), _) => Attention::MultiHead(gguf.attention(layer, shard)?),
            (None, Some((shard, vb))) if is_latent => {
                Attention::Latent(hf::load_latent_attention_shard(self.json, layer, shard, vb)?)
            }
            (None, Some((shard, vb))) => Attention::MultiHead(hf::load_attention_shard(self.json, layer, shard, vb)?),
            (None, None) if is_latent => {
                Attention::Latent(hf::load_latent_attention(self.json, layer, self.weights.root())?)
            }
            (None, None) => Attention::MultiHead(hf::load_attention(self.json, layer, self.weights.root())?),
        };
        let attention = attention.sharing(&mut self.tables)?;
        let norm = |name: Option<&str>| name.map(|name| self.norm(VarBuilder::pp(&at, name))).transpose();
        let [before_attention, after_attention, before_mlp, after_mlp] = self.family.norms;
        Ok(Block {
            before_attention: norm(before_attention)?,
            attention,
            after_attention: norm(after_attention)?,
            before_mlp: norm(before_mlp)?,
            mlp: self.mlp(layer, &at)?,
            after_mlp: norm(after_mlp)?,
            parallel: self.family.parallel,
            residual_scale: self.json["residual_multiplier"].as_f64().unwrap_or(1.0),
            others: self.weights.processes(),
        })
    }

    fn mlp(&self, layer: usize, vb: &Weights) -> Result<FeedForward> {
        let activation = self.family.activation(self.json)?;
        let plain = Between::Plain(activation);
        let up = |name: &str| vb.pp(name).linear(Divided::Outputs);
        let down = |name: &str| vb.pp(name).linear(Divided::Inputs);
        Ok(FeedForward::Mlp(match self.family.mlp {
            MlpKind::Plain(first, second) => Mlp::new(up(first)?, plain, down(second)?)?,
            MlpKind::Conv1d(up, down) => {
                let up = vb.pp(up).transposed_linear(Divided::Outputs)?;
                Mlp::new(up, plain, vb.pp(down).transposed_linear(Divided::Inputs)?)?
            }
            MlpKind::Experts(load, dense_layers)
                if layer >= size(self.json, "first_k_dense_replace").unwrap_or(dense_layers) =>
            {
                return Ok(FeedForward::Experts(load(self.json, vb, activation)?));
            }
            MlpKind::Ffn if vb.contains_tensor("ffn_gate.weight") => {
                Mlp::gated([up("ffn_gate")?, up("ffn_up")?, down("ffn_down")?], activation)?
            }
            MlpKind::Ffn => {
                let up = vb.pp("ffn_up").linear(Divided::JointOutputs)?;
                Mlp::new(up, Between::Gated(activation), down("ffn_down")?)?
            }
            MlpKind::Gated | MlpKind::Experts(..) => Mlp::read_gated(&vb.pp("mlp"), LLAMA_MLP, activation)?,
        }))
    }
}

pub struct Block {
    pub before_attention: Option<Norm>,
    pub attention: Attention,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: FeedForward,
    after_mlp: Option<Norm>,
    parallel: bool,
    residual_scale: f64,
    others: Others,
}

impl Block {
    /// Attention is `attend` of the layer and its input.
    pub fn forward(
        &self,
        xs: &Tensor,
        attend: impl FnOnce(&Attention, AttentionInput) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let normed = optional(&self.before_attention, xs)?;
        let mut input = AttentionInput::new(&normed);
        let is_plain = self.after_attention.is_none() && self.residual_scale == 1.0;
        // In the sum over several processes it counts once.
        let adds_residual = self.others.as_ref().is_none_or(|others| others.shard().rank() == 0);
        if is_plain && adds_residual {
            input = input.with_residual(xs);
        }
        let over_processes = |own: &Tensor| self.sum(own.clone());
        let attended = self.sum(attend(&self.attention, input.with_sum(&over_processes))?)?;
        let sum = if is_plain { attended } else { self.add(xs, optional(&self.after_attention, &attended)?)? };
        let mlp_input = match (&self.before_mlp, self.parallel) {
            (None, true) => normed,
            (norm, true) => optional(norm, xs)?,
            (norm, false) => optional(norm, &sum)?,
        };
        if self.after_mlp.is_none() && self.residual_scale == 1.0 {
            return self.sum(self.mlp.forward(&mlp_input, adds_residual.then_some(&sum))?);
        }
        self.add(&sum, optional(&self.after_mlp, &self.sum(self.mlp.forward(&mlp_input, None)?)?)?)
    }

    /// Over all processes.
    fn sum(&self, own: Tensor) -> Result<Tensor> {
        self.others.as_ref().map_or(Ok(own.clone()), |others| others.sum(&own))
    }

    fn add(&self, xs: &Tensor, branch: Tensor) -> Result<Tensor> {
        if self.residual_scale == 1.0 { xs + branch } else { xs + (branch * self.residual_scale)? }
    }
}

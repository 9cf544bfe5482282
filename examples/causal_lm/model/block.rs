//! A block: attention and an MLP, each with its norms and a residual.

use candle_attention::{RotaryEmbedding, hf, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_plus_one};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::attention::{Attention, Input};
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
        let attention = self.attention(layer)?.sharing(&mut self.tables)?;
        let norm = |name: Option<&'static str>| {
            let name = name.map(|name| at.first(&self.family.names_of(name)).unwrap_or(name));
            name.map(|name| self.norm(VarBuilder::pp(&at, name))).transpose()
        };
        let [before_attention, after_attention, before_mlp, after_mlp] =
            if attention.is_linear() { self.family.linear_norms } else { self.family.norms };
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

    /// Of the kind that the config says.
    fn attention(&self, layer: usize) -> Result<Attention> {
        let (share, shard) = (self.weights.share.as_ref(), self.weights.shard());
        let (json, root) = (self.json, self.weights.root());
        let shared = shard.zip(share.and_then(|share| share.vb.as_ref()));
        if let Some(gguf) = self.weights.gguf {
            return gguf.attention(layer, shard).map(Attention::MultiHead);
        }
        let is_latent = size(json, "kv_lora_rank").is_some();
        Ok(match shared {
            _ if hf::is_linear_attention(json, layer)? => Attention::Linear(match shared {
                Some((shard, vb)) => hf::load_linear_attention_shard(json, layer, shard, vb)?,
                None => hf::load_linear_attention(json, layer, root)?,
            }),
            Some((shard, vb)) if is_latent => {
                Attention::Latent(hf::load_latent_attention_shard(json, layer, shard, vb)?)
            }
            Some((shard, vb)) => Attention::MultiHead(hf::load_attention_shard(json, layer, shard, vb)?),
            None if is_latent => Attention::Latent(hf::load_latent_attention(json, layer, root)?),
            None => Attention::MultiHead(hf::load_attention(json, layer, root)?),
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
            MlpKind::Experts(load, dense_layers) if has_experts(self.json, layer, dense_layers) => {
                return Ok(FeedForward::Experts(load(self.json, vb, activation)?));
            }
            // As transformers saves Kimi Linear's.
            MlpKind::Experts(..) if vb.contains_tensor("block_sparse_moe.down_proj.weight") => {
                Mlp::read_gated(&vb.pp("block_sparse_moe"), LLAMA_MLP, activation)?
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

/// Whether a layer has experts, where so many layers at the beginning have none unless the config says how many.
fn has_experts(json: &Value, layer: usize, dense_layers: usize) -> bool {
    let is_dense = |layers: &Vec<Value>| layers.contains(&layer.into());
    match json["mlp_layer_types"][layer].as_str() {
        Some(kind) => kind == "sparse",
        None => {
            layer >= size(json, "first_k_dense_replace").unwrap_or(dense_layers)
                && (layer + 1).is_multiple_of(size(json, "decoder_sparse_step").unwrap_or(1))
                && size(json, "num_experts") != Some(0)
                && !json["mlp_only_layers"].as_array().is_some_and(is_dense)
        }
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
    pub fn forward(&self, xs: &Tensor, attend: impl FnOnce(&Attention, Input) -> Result<Tensor>) -> Result<Tensor> {
        let normed = optional(&self.before_attention, xs)?;
        let is_plain = self.after_attention.is_none() && self.residual_scale == 1.0;
        // In the sum over several processes it counts once.
        let adds_residual = self.others.as_ref().is_none_or(|others| others.shard().rank() == 0);
        let over_processes = |own: &Tensor| self.sum(own.clone());
        let input = Input::new(&normed, (is_plain && adds_residual).then_some(xs), &over_processes);
        let attended = self.sum(attend(&self.attention, input)?)?;
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

//! A block: attention and an MLP, each with its norms and a residual.

use candle_attention::{
    PackedLinear, RelativeBias, RmsNorm, RotaryEmbedding, hf, layer_norm, layer_norm_no_bias, rms_norm,
    rms_norm_plus_one,
};
use candle_core::{Error, Module, Result, Tensor, bail};
use candle_nn::{Activation, VarBuilder, ops, seq};
use serde_json::Value;

use super::attention::{Attention, Input, LastChoice};
use super::family::{Family, GATED_MLPS, MlpKind, Names, NormKind, PLAIN_MLPS, PRE_NORMS, PlainNames, size};
use super::gguf_experts;
use super::hyper_connections::{HyperConnection, StreamSum};
use super::mlp::{Experts, MODULES, Mixture, Mlp, ROUTERS};
use super::router::TokenIds;
use super::weights::{INPUTS, OUTPUTS, OtherRanks, Weights};

/// A norm of the family, with gradients.
pub type Norm = Box<dyn Module>;

/// A norm whose output passes a gate, which is an MLP of that output (A.X K2).
struct GatedNorm {
    norm: RmsNorm,
    down: PackedLinear,
    up: PackedLinear,
}

impl GatedNorm {
    /// Loads the MLP of the gate, as published or as transformers names it.
    fn load(norm: RmsNorm, weights: &Weights) -> Result<Self> {
        let linear = |names: &[&str]| weights.pp(weights.named(names)?).plain_linear();
        Ok(Self { norm, down: linear(&["W_down", "mlp.fc1"])?, up: linear(&["W_up", "mlp.fc2"])? })
    }
}

impl Module for GatedNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(xs)?;
        let gate = self.up.forward(&self.down.forward(&normed)?.silu()?)?;
        normed * ops::sigmoid(&gate)?
    }
}

/// Applies a norm, if there is one.
pub fn optional(norm: &Option<Norm>, xs: &Tensor) -> Result<Tensor> {
    norm.as_ref().map_or_else(|| Ok(xs.clone()), |norm| norm.forward(xs))
}

/// The module after attention, an MLP or experts, which adds a residual if there is one.
type FeedForward = Box<dyn Fn(&Tensor, Option<&Tensor>) -> Result<Tensor>>;

/// A loader of the blocks of a model.
pub struct Loader<'a> {
    model: &'static str,
    pub family: Family,
    json: &'a Value,
    /// At the checkpoint's root.
    weights: Weights<'a>,
    /// E.
    pub width: usize,
    /// The relative bias that layers share.
    bias: Option<RelativeBias>,
    /// The rotary tables that layers share.
    tables: Vec<RotaryEmbedding>,
    /// The keys that the last layer with an indexer chose, if some layers attend to the keys that others chose.
    choice: Option<LastChoice>,
    /// The ids of a call's tokens, from which some experts follow.
    pub ids: TokenIds,
}

impl<'a> Loader<'a> {
    /// Makes a loader; `model` is the name in its errors.
    pub fn new(model: &'static str, family: Family, json: &'a Value, weights: Weights<'a>, width: usize) -> Self {
        let mut configs = (0..).map_while(|layer| hf::latent_attention_config(json, layer).ok());
        let choice = configs.any(|config| config.shared_choice()).then(LastChoice::default);
        let ids = TokenIds::default();
        Self { model, family, json, weights, width, bias: None, tables: Vec::new(), choice, ids }
    }

    /// Loads the sum of the streams after the last block, if the residual is several streams.
    pub fn streams(&self, model: &Weights) -> Result<Option<StreamSum>> {
        if self.family.has_streams { StreamSum::load(self.json, model, self.width).map(Some) } else { Ok(None) }
    }

    /// Loads the first norm found in `names`.
    pub fn norm(&self, weights: &Weights, names: &[&str]) -> Result<Option<Norm>> {
        match weights.first(names) {
            Some(name) => Ok(Some(self.norm_at(weights, name)?)),
            None => Ok(None),
        }
    }

    /// Loads the norm of this name.
    pub fn norm_at(&self, weights: &Weights, name: &str) -> Result<Norm> {
        const EPSILONS: [&str; 5] =
            ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"];
        let vb = VarBuilder::pp(weights, name);
        let given = EPSILONS.iter().find_map(|key| self.json[*key].as_f64());
        let width = self.width;
        let eps = |default: f64| given.unwrap_or(default);
        // Old checkpoints of BERT call a norm's bias beta.
        let has_bias = self.family.needs_biases || vb.contains_tensor("bias") || vb.contains_tensor("beta");
        Ok(match self.family.norm {
            // The layer scale that DINOv2 has instead of norms after attention and MLP.
            _ if vb.contains_tensor("lambda1") => {
                let scale = vb.get(width, "lambda1")?;
                Box::new(move |xs: &Tensor| xs.broadcast_mul(&scale))
            }
            NormKind::Rms(default) if name.ends_with(".norm") => {
                let norm = rms_norm(width, eps(default), vb)?;
                Box::new(GatedNorm::load(norm, &weights.pp(name.trim_end_matches(".norm")))?)
            }
            NormKind::Rms(default) => Box::new(rms_norm(width, eps(default), vb)?),
            NormKind::RmsPlusOne(default) => Box::new(rms_norm_plus_one(width, eps(default), vb)?),
            NormKind::Layer(default) if has_bias => Box::new(layer_norm(width, eps(default), vb)?),
            NormKind::Layer(default) => Box::new(layer_norm_no_bias(width, eps(default), vb)?),
        })
    }

    /// Loads a layer's block from weights at its prefix.
    pub fn block(&mut self, layer: usize, at: Weights) -> Result<Block> {
        let attention = match self.attention(layer)?.sharing(&mut self.tables)? {
            Attention::MultiHead(attention) if attention.config().relative_bias().is_some() => {
                let bias = match self.bias.take() {
                    Some(bias) => bias,
                    None => hf::load_relative_bias(self.json, self.weights.root())?,
                };
                Attention::MultiHead(attention.with_relative_bias(self.bias.insert(bias).clone())?)
            }
            attention => attention,
        };
        // A norm that is missing is an error that has the first of its names.
        let norm = |names: Names| match at.first(names).or(names.first().copied()) {
            Some(name) => self.norm_at(&at, name).map(Some),
            None => Ok(None),
        };
        let family = self.family;
        let norms = if attention.is_linear() && at.gguf.is_none() { PRE_NORMS } else { family.norms };
        let mut streams = None;
        if family.has_streams {
            let connection = |module: &str| HyperConnection::load(self.json, &at, module, self.width);
            streams = Some(Connections { attention: connection("attn")?, mlp: connection("ffn")? });
        }
        Ok(Block {
            family,
            streams,
            before_attention: if layer == 0 && !family.first_attention_norm {
                None
            } else {
                norm(norms.before_attention)?
            },
            attention,
            after_attention: norm(norms.after_attention)?,
            before_mlp: norm(norms.before_mlp)?,
            mlp: self.mlp(&at)?,
            after_mlp: norm(norms.after_mlp)?,
            residual_scale: self.json["residual_multiplier"].as_f64().unwrap_or(1.0),
            others: self.weights.ranks(),
        })
    }

    /// Loads the attention of the kind in the config.
    fn attention(&self, layer: usize) -> Result<Attention> {
        let json = self.json;
        let root = self.weights.root();
        let shard = self.weights.shard();
        if let Some(gguf) = self.weights.gguf {
            return gguf.attention(json, layer, shard);
        }
        let is_linear = hf::is_linear_attention(json, layer)?;
        let is_latent = size(json, "kv_lora_rank").is_some();
        if self.family.has_compressed_keys {
            if shard.is_some() {
                bail!("[{}] attention to compressed keys has no shards, expected one rank", self.model)
            }
            return hf::load_compressed_key_attention(json, layer, root).map(Attention::Compressed);
        }
        Ok(match shard {
            Some(own) if is_linear => Attention::Linear(hf::load_linear_attention_shard(json, layer, own, &root)?),
            Some(own) if is_latent => {
                Attention::Latent(hf::load_latent_attention_shard(json, layer, own, &root)?, self.choice.clone())
            }
            Some(own) => Attention::MultiHead(hf::load_attention_shard(json, layer, own, &root)?),
            None if is_linear => Attention::Linear(hf::load_linear_attention(json, layer, root)?),
            None if is_latent => Attention::Latent(hf::load_latent_attention(json, layer, root)?, self.choice.clone()),
            None => Attention::MultiHead(hf::load_attention(json, layer, root)?),
        })
    }

    /// Loads the MLP or the experts of a block.
    fn mlp(&self, at: &Weights) -> Result<FeedForward> {
        let linear = |name: &str, sharding| {
            if self.family.needs_biases && !at.contains_tensor(&format!("{name}.bias")) {
                bail!("[{}] {}.{name}.bias is missing, expected a bias of the MLP", self.model, at.prefix())
            }
            match self.family.mlp {
                MlpKind::Conv1d => at.pp(name).linear_stored(Some(sharding), true),
                _ => at.pp(name).linear(sharding),
            }
        };
        let mixed = at.below(MODULES, ROUTERS);
        if let (MlpKind::Experts(mixture), Some(gguf)) = (&self.family.mlp, at.gguf)
            && at.contains_tensor(gguf_experts::ROUTER)
        {
            let experts = gguf_experts::read(mixture, self.json, gguf, at, self.activation()?)?;
            return Ok(Box::new(move |xs, residual| experts.forward(xs, residual)));
        }
        let mlp = match &self.family.mlp {
            MlpKind::Experts(mixture) if mixed.first(ROUTERS).is_some() => {
                let experts = Experts::read(mixture, self.json, &mixed, self.activation()?, &self.ids)?;
                return Ok(Box::new(move |xs, residual| experts.forward(xs, residual)));
            }
            kind @ (MlpKind::Experts(Mixture { gates_others: true, .. }) | MlpKind::Gated) => {
                let clamp = match kind {
                    MlpKind::Experts(mixture) => mixture.clamp(self.json),
                    _ => None,
                };
                at.below(MODULES, &GATED_MLPS.map(|names| names.down)).gated_mlp(self.activation()?, clamp)?
            }
            MlpKind::Experts(_) | MlpKind::Plain | MlpKind::Conv1d => {
                let is_there = |names: &PlainNames| at.first(&[names.up, names.down]).is_some();
                let names = PLAIN_MLPS.into_iter().find(is_there).unwrap_or(PLAIN_MLPS[0]);
                let up = linear(names.up, OUTPUTS)?;
                let down = linear(names.down, INPUTS)?;
                match self.family.activation_name(self.json) {
                    "quick_gelu" => Mlp::new(seq().add(up).add_fn(|xs| xs * ops::sigmoid(&(xs * 1.702)?)?), down),
                    _ => Mlp::plain(up, down, self.activation()?),
                }
            }
        };
        Ok(Box::new(move |xs, residual| mlp.forward(xs, residual)))
    }

    /// Returns the activation of MLPs.
    fn activation(&self) -> Result<Activation> {
        let name = self.family.activation_name(self.json);
        let unknown = |_| Error::Msg(format!("[{}] the activation {name:?} is not one of Candle's", self.model));
        serde_json::from_value(name.into()).map_err(unknown)
    }
}

/// A block of a model.
pub struct Block {
    family: Family,
    pub before_attention: Option<Norm>,
    pub attention: Attention,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: FeedForward,
    after_mlp: Option<Norm>,
    residual_scale: f64,
    /// The connections of attention and of the MLP with the streams of a residual, if it is several streams.
    streams: Option<Connections>,
    others: OtherRanks,
}

/// The connections of a block with the streams of a residual.
struct Connections {
    attention: HyperConnection,
    mlp: HyperConnection,
}

impl Block {
    /// Returns the input of attention for the input of the block.
    pub fn attention_input(&self, xs: &Tensor) -> Result<Tensor> {
        match &self.streams {
            Some(streams) => optional(&self.before_attention, &streams.attention.read(xs)?.input),
            None => optional(&self.before_attention, xs),
        }
    }

    /// Computes the block over streams (B, T, N, E).
    fn forward_streams(
        &self,
        xs: &Tensor,
        streams: &Connections,
        attend: impl FnOnce(&Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let of_attention = streams.attention.read(xs)?;
        let normed = optional(&self.before_attention, &of_attention.input)?;
        let over_processes = |own: &Tensor| self.sum(own.clone());
        let attended = attend(&self.attention, self.attention.input(&normed, None, &over_processes))?;
        let of_mlp = streams.mlp.read(&of_attention.with(&attended)?)?;
        of_mlp.with(&(self.mlp)(&optional(&self.before_mlp, &of_mlp.input)?, None)?)
    }

    /// Computes the block; `attend` computes its attention, given the layer and its input.
    pub fn forward(&self, xs: &Tensor, attend: impl FnOnce(&Attention, Input) -> Result<Tensor>) -> Result<Tensor> {
        if let Some(streams) = &self.streams {
            return self.forward_streams(xs, streams, attend);
        }
        let normed = optional(&self.before_attention, xs)?;
        let over_processes = |own: &Tensor| self.sum(own.clone());
        let sum = self.add(xs, &self.after_attention, |residual| {
            attend(&self.attention, self.attention.input(&normed, residual, &over_processes))
        })?;
        let mlp_input = match (&self.before_mlp, self.family.parallel) {
            (None, true) => normed,
            (norm, true) => optional(norm, xs)?,
            (norm, false) => optional(norm, &sum)?,
        };
        self.add(&sum, &self.after_mlp, |residual| (self.mlp)(&mlp_input, residual))
    }

    /// Adds the output of `branch` to a residual. If `branch` is given the residual, it adds it itself, within its last
    /// product.
    fn add(
        &self,
        xs: &Tensor,
        norm: &Option<Norm>,
        branch: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if self.residual_scale == 1.0 && (norm.is_none() || self.family.norms_residuals) {
            // In the sum over several ranks the residual counts once.
            let is_first = self.others.as_ref().is_none_or(|others| others.shard().rank() == 0);
            return optional(norm, &self.sum(branch(is_first.then_some(xs))?)?);
        }
        let added = optional(norm, &self.sum(branch(None)?)?)?;
        if self.residual_scale == 1.0 { xs + added } else { xs + (added * self.residual_scale)? }
    }

    /// Returns the sum over all ranks.
    fn sum(&self, own: Tensor) -> Result<Tensor> {
        self.others.as_ref().map_or(Ok(own.clone()), |others| others.sum(&own))
    }
}

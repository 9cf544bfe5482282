//! A block: attention and an MLP, each with its norms and a residual.

use candle_attention::{
    RelativeBias, RotaryEmbedding, hf, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_plus_one,
};
use candle_core::{Error, Module, Result, Tensor, bail};
use candle_nn::{Activation, VarBuilder, ops, seq};
use serde_json::Value;

use super::attention::{Attention, Input};
use super::family::{Family, GATED_MLPS, MlpKind, NormKind, PLAIN_MLPS, PRE_NORMS, size};
use super::mlp::{Experts, MODULES, Mlp, ROUTERS};
use super::weights::{INPUTS, OUTPUTS, Others, Weights};

/// That of the family, with gradients.
pub type Norm = Box<dyn Module>;

pub fn optional(norm: &Option<Norm>, xs: &Tensor) -> Result<Tensor> {
    norm.as_ref().map_or_else(|| Ok(xs.clone()), |norm| norm.forward(xs))
}

/// What follows attention: an MLP or experts, plus a residual, if there is one.
type FeedForward = Box<dyn Fn(&Tensor, Option<&Tensor>) -> Result<Tensor>>;

/// What the blocks of a model are loaded from.
pub struct Loader<'a> {
    model: &'static str,
    pub family: Family,
    json: &'a Value,
    /// At the checkpoint's root.
    weights: Weights<'a>,
    /// E.
    pub width: usize,
    /// What layers share: a relative bias, and the tables of rotary positions so far.
    bias: Option<RelativeBias>,
    tables: Vec<RotaryEmbedding>,
}

impl<'a> Loader<'a> {
    /// For a model of this name.
    pub fn new(model: &'static str, family: Family, json: &'a Value, weights: Weights<'a>, width: usize) -> Self {
        Self { model, family, json, weights, width, bias: None, tables: Vec::new() }
    }

    /// That of the first of these names, if there is one.
    pub fn norm(&self, weights: &Weights, names: &[&str]) -> Result<Option<Norm>> {
        weights.first(names).map(|name| self.norm_at(weights, name)).transpose()
    }

    pub fn norm_at(&self, weights: &Weights, name: &str) -> Result<Norm> {
        let vb = VarBuilder::pp(weights, name);
        const EPSILONS: [&str; 5] =
            ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"];
        let given = EPSILONS.iter().find_map(|key| self.json[*key].as_f64());
        let (width, eps) = (self.width, |default: f64| given.unwrap_or(default));
        // Old checkpoints of BERT call it beta.
        let has_bias = self.family.needs_biases || ["bias", "beta"].iter().any(|name| vb.contains_tensor(name));
        Ok(match self.family.norm {
            // What DINOv2 has in the place of norms after attention and MLP.
            _ if vb.contains_tensor("lambda1") => {
                let scale = vb.get(width, "lambda1")?;
                Box::new(move |xs: &Tensor| xs.broadcast_mul(&scale))
            }
            NormKind::Rms(default) => Box::new(rms_norm(width, eps(default), vb)?),
            NormKind::RmsPlusOne(default) => Box::new(rms_norm_plus_one(width, eps(default), vb)?),
            NormKind::Layer(default) if has_bias => Box::new(layer_norm(width, eps(default), vb)?),
            NormKind::Layer(default) => Box::new(layer_norm_no_bias(width, eps(default), vb)?),
        })
    }

    /// A layer's block from a builder at its prefix.
    pub fn block(&mut self, layer: usize, at: Weights) -> Result<Block> {
        let attention = match self.attention(layer)?.sharing(&mut self.tables)? {
            Attention::MultiHead(attention) if attention.config().relative_bias().is_some() => {
                let first = || hf::load_relative_bias(self.json, self.weights.root());
                let bias = self.bias.take().map_or_else(first, Ok)?;
                Attention::MultiHead(attention.with_relative_bias(self.bias.insert(bias).clone())?)
            }
            attention => attention,
        };
        let norm = |names: &'static [&'static str]| {
            let name = at.first(names).or(names.first().copied());
            name.map(|name| self.norm_at(&at, name)).transpose()
        };
        let family = self.family;
        let norms = if attention.is_linear() { PRE_NORMS } else { family.norms };
        Ok(Block {
            family,
            before_attention: if layer == 0 && !family.first_attention_norm { None } else { norm(norms[0])? },
            attention,
            after_attention: norm(norms[1])?,
            before_mlp: norm(norms[2])?,
            mlp: self.mlp(&at)?,
            after_mlp: norm(norms[3])?,
            residual_scale: self.json["residual_multiplier"].as_f64().unwrap_or(1.0),
            others: self.weights.processes(),
        })
    }

    /// Of the kind that the config says.
    fn attention(&self, layer: usize) -> Result<Attention> {
        let (json, root, shard) = (self.json, self.weights.root(), self.weights.shard());
        if let Some(gguf) = self.weights.gguf {
            return gguf.attention(layer, shard).map(Attention::MultiHead);
        }
        let shared = shard.zip(self.weights.share.as_ref().and_then(|share| share.vb.as_ref()));
        let (is_linear, is_latent) = (hf::is_linear_attention(json, layer)?, size(json, "kv_lora_rank").is_some());
        Ok(match shared {
            Some((own, vb)) if is_linear => Attention::Linear(hf::load_linear_attention_shard(json, layer, own, vb)?),
            Some((own, vb)) if is_latent => Attention::Latent(hf::load_latent_attention_shard(json, layer, own, vb)?),
            Some((own, vb)) => Attention::MultiHead(hf::load_attention_shard(json, layer, own, vb)?),
            None if is_linear => Attention::Linear(hf::load_linear_attention(json, layer, root)?),
            None if is_latent => Attention::Latent(hf::load_latent_attention(json, layer, root)?),
            None => Attention::MultiHead(hf::load_attention(json, layer, root)?),
        })
    }

    fn mlp(&self, at: &Weights) -> Result<FeedForward> {
        let linear = |name: &str, divided| {
            if self.family.needs_biases && !at.contains_tensor(&format!("{name}.bias")) {
                bail!("[{}] {}.{name}.bias is missing, expected a bias of the MLP", self.model, at.prefix())
            }
            match self.family.mlp {
                MlpKind::Conv1d => at.pp(name).linear_of(Some(divided), true),
                _ => at.pp(name).linear(divided),
            }
        };
        let mixed = at.below(MODULES, ROUTERS);
        let mlp = match &self.family.mlp {
            MlpKind::Experts(mixture) if mixed.first(ROUTERS).is_some() => {
                let experts = Experts::read(mixture, self.json, &mixed, self.activation()?)?;
                return Ok(Box::new(move |xs, residual| experts.forward(xs, residual)));
            }
            MlpKind::Experts(_) | MlpKind::Gated => {
                let place = at.below(MODULES, &GATED_MLPS.map(|[.., down]| down));
                place.gated_mlp(self.activation()?)?
            }
            MlpKind::Plain | MlpKind::Conv1d => {
                let names = PLAIN_MLPS.into_iter().find(|names| at.first(names).is_some());
                let [up, down] = names.unwrap_or(PLAIN_MLPS[0]);
                let (up, down) = (linear(up, OUTPUTS)?, linear(down, INPUTS)?);
                match self.family.activation_name(self.json) {
                    "quick_gelu" => Mlp::new(seq().add(up).add_fn(|xs| xs * ops::sigmoid(&(xs * 1.702)?)?), down),
                    _ => Mlp::plain([up, down], self.activation()?),
                }
            }
        };
        Ok(Box::new(move |xs, residual| mlp.forward(xs, residual)))
    }

    /// Of MLPs.
    fn activation(&self) -> Result<Activation> {
        let name = self.family.activation_name(self.json);
        let unknown = |_| Error::Msg(format!("[{}] the activation {name:?} is not one of Candle's", self.model));
        serde_json::from_value(name.into()).map_err(unknown)
    }
}

pub struct Block {
    family: Family,
    pub before_attention: Option<Norm>,
    pub attention: Attention,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: FeedForward,
    after_mlp: Option<Norm>,
    residual_scale: f64,
    others: Others,
}

impl Block {
    /// Attention is `attend` of the layer and its input.
    pub fn forward(&self, xs: &Tensor, attend: impl FnOnce(&Attention, Input) -> Result<Tensor>) -> Result<Tensor> {
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

    /// A residual plus what `branch` gives, which adds it by itself where it gets it.
    fn add(
        &self,
        xs: &Tensor,
        norm: &Option<Norm>,
        branch: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if self.residual_scale == 1.0 && (norm.is_none() || self.family.behind_residuals) {
            // In the sum over several processes it counts once.
            let is_first = self.others.as_ref().is_none_or(|others| others.shard().rank() == 0);
            return optional(norm, &self.sum(branch(is_first.then_some(xs))?)?);
        }
        let added = optional(norm, &self.sum(branch(None)?)?)?;
        if self.residual_scale == 1.0 { xs + added } else { xs + (added * self.residual_scale)? }
    }

    /// Over all processes.
    fn sum(&self, own: Tensor) -> Result<Tensor> {
        self.others.as_ref().map_or(Ok(own.clone()), |others| others.sum(&own))
    }
}

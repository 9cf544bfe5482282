//! The MLP of a block, and mixtures of experts, which are MLPs: a router gives each token a few, and each of them a
//! weight.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{D, DType, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Activation, ops, seq};
use serde_json::Value;

use super::family::required;
use super::gpt_oss;
use super::weights::{Divided, INPUTS, OUTPUTS, Weights};

pub struct Mlp {
    /// What comes before `down`, with its activation.
    up: Box<dyn Module>,
    down: PackedLinear,
}

impl Mlp {
    /// `down(up(x))`.
    pub fn new(up: impl Module + 'static, down: PackedLinear) -> Self {
        Self { up: Box::new(up), down }
    }

    /// `down(activation(up(x)))`.
    pub fn plain([up, down]: [PackedLinear; 2], activation: Activation) -> Self {
        match up.clone().with_activation(activation) {
            Ok(up) => Self::new(up, down),
            // One that does not run within the product.
            Err(_) => Self::new(seq().add(up).add(activation), down),
        }
    }

    /// `down(activation(gate(x)) * up(x))`.
    pub fn gated([gate, up, down]: [PackedLinear; 3], activation: Activation) -> Result<Self> {
        Ok(Self::new(PackedGatedLinear::new(gate, up, activation)?, down))
    }

    /// Plus a residual, if there is one.
    pub fn forward(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let hidden = self.up.forward(xs)?;
        match residual {
            Some(residual) => self.down.forward_with_residual(&hidden, residual),
            None => self.down.forward(&hidden),
        }
    }
}

/// The modules that have router and experts, below a block. A block without a router has a single MLP there.
pub const MODULES: &[&str] = &["mlp", "block_sparse_moe"];
pub const ROUTERS: &[&str] = &["router", "gate"];
/// What every token goes through as well, with a weight of 1 unless there is a gate that gives one.
const SHARED: [&str; 2] = ["shared_expert", "shared_experts"];

/// What differs between families of mixtures, and neither the names in a checkpoint nor its config say.
#[derive(Clone, Copy)]
pub struct Mixture {
    /// Whether the weights of a token are divided by their sum, unless the config says no.
    pub normalizes: bool,
    /// What weights are multiplied by, unless the config says.
    pub scale: f64,
}

pub struct Experts {
    router: Router,
    experts: Vec<Mlp>,
    shared: Option<Mlp>,
    shared_gate: Option<PackedLinear>,
}

struct Router {
    linear: PackedLinear,
    /// Added to the scores where experts are compared, and not to their weights. Scores are then sigmoids, otherwise a
    /// softmax.
    correction: Option<Vec<f32>>,
    groups: Option<Groups>,
    /// Experts of a token.
    chosen: usize,
    /// Whether the weights of a token are divided by their sum.
    normalized: bool,
    /// What weights are multiplied by.
    scale: f64,
}

/// The experts of a token are those of a few groups only, the ones whose `best` highest scores have the largest sums.
struct Groups {
    /// Experts of a group.
    size: usize,
    /// Groups of a token.
    chosen: usize,
    best: usize,
}

impl Experts {
    /// Those of a layer, from weights at the module's prefix: as many as the router has scores.
    pub fn read(mixture: &Mixture, json: &Value, weights: &Weights, activation: Activation) -> Result<Self> {
        let router = Router::read(mixture, json, &weights.pp(weights.named(ROUTERS)?))?;
        let (all, count) = (weights.pp("experts"), router.linear.out_dim());
        let experts = if all.contains_tensor("gate_up_proj_bias") {
            gpt_oss::experts(json, &all, count)?
        } else if all.contains_tensor("gate_up_proj") {
            stacked_experts(&all, count, activation)?
        } else {
            let expert = |expert| all.pp(expert).gated_mlp(activation);
            (0..count).map(expert).collect::<Result<_>>()?
        };
        let shared = SHARED.map(|name| weights.pp(name)).into_iter().find(|shared| shared.gated_names().is_some());
        let shared_gate = weights.first(&["shared_expert_gate"]).map(|name| weights.pp(name).linear(None));
        Ok(Self {
            router,
            experts,
            shared: shared.map(|shared| shared.gated_mlp(activation)).transpose()?,
            shared_gate: shared_gate.transpose()?,
        })
    }

    /// Tokens (.., E) to (.., E), plus a residual, if there is one.
    pub fn forward(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let tokens = xs.flatten_to(D::Minus2)?;
        let scores = self.router.scores(&tokens)?;
        // The tokens of each expert, and a 1 where it is one of a token's.
        let mut routes = vec![Vec::new(); self.experts.len()];
        let mut chosen = vec![0f32; scores.elem_count()];
        for (token, scores) in scores.to_vec2()?.iter().enumerate() {
            for expert in self.router.route(scores) {
                routes[expert].push(token as u32);
                chosen[token * routes.len() + expert] = 1.0;
            }
        }
        let chosen = Tensor::from_vec(chosen, scores.shape(), xs.device())?;
        let weights = self.router.weights(&(scores * chosen)?)?.to_dtype(xs.dtype())?;
        let mut ys = match &self.shared {
            Some(shared) => shared.forward(&tokens, None)?,
            None => tokens.zeros_like()?,
        };
        if let Some(gate) = &self.shared_gate {
            ys = ys.broadcast_mul(&ops::sigmoid(&gate.forward(&tokens)?)?)?;
        }
        for (i, rows) in routes.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let rows = Tensor::new(rows, xs.device())?;
            let weights = weights.index_select(&rows, 0)?.narrow(1, i, 1)?;
            let own = self.experts[i].forward(&tokens.index_select(&rows, 0)?, None)?.broadcast_mul(&weights)?;
            ys = ys.index_add(&rows, &own, 0)?;
        }
        let ys = ys.reshape(xs.shape())?;
        residual.map_or(Ok(ys.clone()), |residual| residual + ys)
    }
}

impl Router {
    fn read(mixture: &Mixture, json: &Value, weights: &Weights) -> Result<Self> {
        // The names of fields that come first are Kimi Linear's.
        if let Some(other) = json["moe_router_activation_func"].as_str().filter(|&name| name != "sigmoid") {
            bail!("[causal_lm] moe_router_activation_func is {other:?}, expected \"sigmoid\"")
        }
        let linear = weights.linear(None)?;
        let (experts, corrected) = (linear.out_dim(), weights.contains_tensor("e_score_correction_bias"));
        let correction =
            || weights.get_unchecked_dtype("e_score_correction_bias", DType::F32)?.reshape(experts)?.to_vec1();
        let groups = match json["topk_method"].as_str().unwrap_or("greedy") {
            _ if corrected => Some(Groups::read(json, experts, 2)?),
            "greedy" => None,
            "group_limited_greedy" => Some(Groups::read(json, experts, 1)?),
            other => bail!("[causal_lm] topk_method is {other:?}, expected \"greedy\" or \"group_limited_greedy\""),
        };
        let normalizes = ["moe_renormalize", "norm_topk_prob"].iter().find_map(|name| json[*name].as_bool());
        Ok(Self {
            linear,
            correction: corrected.then(correction).transpose()?,
            groups,
            chosen: required(json, &["num_experts_per_token", "num_experts_per_tok"])?,
            normalized: mixture.normalizes && normalizes.unwrap_or(true),
            scale: json["routed_scaling_factor"].as_f64().unwrap_or(mixture.scale),
        })
    }

    /// The scores (N, experts) of tokens (N, E), in f32, with gradients.
    fn scores(&self, tokens: &Tensor) -> Result<Tensor> {
        let dtype = if tokens.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let logits = self.linear.forward(&tokens.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
        if self.correction.is_some() { ops::sigmoid(&logits) } else { ops::softmax(&logits, D::Minus1) }
    }

    /// The weights (N, experts) of scores that are 0 but for the experts of a token.
    fn weights(&self, scores: &Tensor) -> Result<Tensor> {
        match self.normalized {
            true => scores.broadcast_div(&scores.sum_keepdim(1)?)? * self.scale,
            false => scores * self.scale,
        }
    }

    /// The experts of a token with these scores.
    fn route(&self, scores: &[f32]) -> Vec<usize> {
        let ranks: Vec<f32> = match &self.correction {
            Some(correction) => scores.iter().zip(correction).map(|(score, correction)| score + correction).collect(),
            None => scores.to_vec(),
        };
        let mut experts = by_rank(&ranks);
        if let Some(groups) = &self.groups {
            let of_group = |ranks: &[f32]| by_rank(ranks).into_iter().take(groups.best).map(|i| ranks[i]).sum();
            let sums: Vec<f32> = ranks.chunks(groups.size).map(of_group).collect();
            let kept = &by_rank(&sums)[..groups.chosen.min(sums.len())];
            experts.retain(|expert| kept.contains(&(expert / groups.size)));
        }
        experts.truncate(self.chosen);
        experts
    }
}

impl Groups {
    fn read(json: &Value, experts: usize, best: usize) -> Result<Self> {
        let groups = required(json, &["num_expert_group", "n_group"])?;
        if groups == 0 || !experts.is_multiple_of(groups) {
            bail!("[causal_lm] n_group is {groups}, expected a divisor of n_routed_experts, {experts}")
        }
        Ok(Self { size: experts / groups, chosen: required(json, &["topk_group"])?, best })
    }
}

/// Experts of Qwen whose weights are one tensor (experts, out, in), the rows of gate before those of up.
fn stacked_experts(all: &Weights, count: usize, activation: Activation) -> Result<Vec<Mlp>> {
    let own = |name, of: Divided| all.own(name, Divided { dim: 1 + of.dim, ..of });
    let [gate, up] = [0, 1].map(|half| own("gate_up_proj", OUTPUTS.half(half)));
    let weights = [gate?, up?, own("down_proj", INPUTS)?];
    let expert = |expert| {
        let [gate, up, down] = weights.each_ref().map(|all| PackedLinear::new(&all.i(expert)?, None));
        Mlp::gated([gate?, up?, down?], activation)
    };
    (0..count).map(expert).collect()
}

/// Indices in the order of their numbers, the largest first.
fn by_rank(ranks: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    order
}

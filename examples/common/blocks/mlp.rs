//! The MLP of a block, and mixtures of experts, which are MLPs: a router chooses a few experts for each token, and
//! their weights.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{D, DType, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Activation, ops, seq};
use serde_json::Value;

use super::family::{required, size};
use super::gpt_oss::{self, Clamp};
use super::nomic;
use super::weights::{INPUTS, OUTPUTS, Sharding, Weights};

/// The MLP of a block.
pub struct Mlp {
    /// The modules before `down`, with their activation.
    up: Box<dyn Module>,
    down: PackedLinear,
}

impl Mlp {
    /// Makes `down(up(x))`.
    pub fn new(up: impl Module + 'static, down: PackedLinear) -> Self {
        Self { up: Box::new(up), down }
    }

    /// Makes `down(activation(up(x)))`.
    pub fn plain(up: PackedLinear, down: PackedLinear, activation: Activation) -> Self {
        match up.clone().with_activation(activation) {
            Ok(activated) => Self::new(activated, down),
            // The product cannot apply this activation.
            Err(_) => Self::new(seq().add(up).add(activation), down),
        }
    }

    /// Makes `down(activation(gate(x)) * up(x))`, or the MLP of a clamped gate.
    pub fn gated(
        gate: PackedLinear,
        up: PackedLinear,
        down: PackedLinear,
        activation: Activation,
        clamp: Option<Clamp>,
    ) -> Result<Self> {
        Ok(match clamp {
            Some(clamp) => clamp.mlp(gate, up, down),
            None => Self::new(PackedGatedLinear::new(gate, up, activation)?, down),
        })
    }

    /// Computes the MLP, plus a residual if there is one.
    pub fn forward(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let hidden = self.up.forward(xs)?;
        match residual {
            Some(residual) => self.down.forward_with_residual(&hidden, residual),
            None => self.down.forward(&hidden),
        }
    }
}

/// The modules that have router and experts, below a block. A block without a router has a single MLP there.
pub const MODULES: &[&str] = &["mlp", "block_sparse_moe", "feed_forward"];
pub const ROUTERS: &[&str] = &["router", "gate", "router.layer"];
/// The term that is added to the scores of experts to compare them.
const CORRECTION: &str = "e_score_correction_bias";
/// The names of the expert that every token has, whose weight is 1 unless there is a gate.
const SHARED: [&str; 2] = ["shared_expert", "shared_experts"];

/// The properties of a family of mixtures that neither the names in a checkpoint nor its config tell.
#[derive(Clone, Copy)]
pub struct Mixture {
    /// Whether the weights of a token are divided by their sum; the config can turn it off.
    pub normalizes: bool,
    /// The factor on weights, if the config has none.
    pub scale: f64,
    /// Whether the MLP of a layer without experts has a gate.
    pub gates_others: bool,
    /// Whether experts whose scores have a correction are in groups.
    pub has_groups: bool,
    /// Whether the gates of experts and MLPs are clamped.
    pub is_clamped: bool,
}

impl Mixture {
    /// Returns the bounds of gates, if they are clamped.
    pub fn clamp(&self, json: &Value) -> Option<Clamp> {
        self.is_clamped.then(|| Clamp::of(json))
    }
}

/// A mixture of experts.
pub struct Experts {
    pub router: Router,
    pub experts: Vec<Mlp>,
    /// The expert that every token has.
    pub shared: Option<Mlp>,
    pub shared_gate: Option<PackedLinear>,
    /// A term that is added to the output of each token, (E,).
    pub bias: Option<Tensor>,
}

/// The choice of experts for a token.
pub struct Router {
    linear: PackedLinear,
    /// A term that is added to the scores to compare experts, and not to their weights. With it scores are sigmoids,
    /// without it a softmax.
    correction: Option<Vec<f32>>,
    groups: Option<Groups>,
    /// The number of experts of a token.
    chosen: usize,
    /// Whether the weights of a token are divided by their sum.
    normalized: bool,
    /// The factor on weights.
    scale: f64,
}

/// A restriction of a token's experts to a few groups, those whose `best` highest scores have the largest sums.
struct Groups {
    /// The number of experts of a group.
    size: usize,
    /// The number of groups of a token.
    chosen: usize,
    best: usize,
}

impl Experts {
    /// Loads the experts of a layer from weights at the module's prefix, one for each score of the router.
    pub fn read(mixture: &Mixture, json: &Value, weights: &Weights, activation: Activation) -> Result<Self> {
        let router = Router::read(mixture, json, weights)?;
        let clamp = mixture.clamp(json);
        let all = weights.pp("experts");
        let count = router.linear.out_dim();
        if let Some(other) = size(json, "num_experts").filter(|&other| other != count) {
            bail!("[causal_lm] num_experts is {other}, but the router has {count} scores")
        }
        let experts = if nomic::are_here(&all) {
            nomic::experts(&all, count, activation)?
        } else if all.contains_tensor("gate_up_proj_bias") {
            gpt_oss::experts(json, &all, count)?
        } else if all.contains_tensor("gate_up_proj") {
            stacked_experts(&all, count, activation, clamp)?
        } else {
            let expert = |expert| all.pp(expert).gated_mlp(activation, clamp);
            (0..count).map(expert).collect::<Result<_>>()?
        };
        let mut shared = None;
        if let Some(at) = SHARED.map(|name| weights.pp(name)).into_iter().find(|at| at.gated_names().is_some()) {
            shared = Some(at.gated_mlp(activation, clamp)?);
        }
        let mut shared_gate = None;
        if let Some(name) = weights.first(&["shared_expert_gate"]) {
            shared_gate = Some(weights.pp(name).plain_linear()?);
        }
        let bias = if all.contains_tensor("bias") { Some(all.get_unchecked("bias")?) } else { None };
        Ok(Self { router, experts, shared, shared_gate, bias })
    }

    /// Computes tokens (.., E) to (.., E), plus a residual if there is one.
    pub fn forward(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let tokens = xs.flatten_to(D::Minus2)?;
        let scores = self.router.scores(&tokens)?;
        // The tokens of each expert, and (N, experts) with a 1 for each expert of a token.
        let mut routes = vec![Vec::new(); self.experts.len()];
        let mut chosen = vec![0f32; scores.elem_count()];
        for (token, row) in scores.to_vec2()?.iter().enumerate() {
            for expert in self.router.route(row) {
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
            let row_weights = weights.index_select(&rows, 0)?.narrow(1, i, 1)?;
            let own = self.experts[i].forward(&tokens.index_select(&rows, 0)?, None)?;
            ys = ys.index_add(&rows, &own.broadcast_mul(&row_weights)?, 0)?;
        }
        if let Some(bias) = &self.bias {
            ys = ys.broadcast_add(bias)?;
        }
        ys = ys.reshape(xs.shape())?;
        match residual {
            Some(residual) => residual + ys,
            None => Ok(ys),
        }
    }
}

impl Router {
    /// Loads the router of the experts at `module`. Its correction is next to its weight, or next to the router.
    fn read(mixture: &Mixture, json: &Value, module: &Weights) -> Result<Self> {
        let weights = module.pp(module.named(ROUTERS)?);
        let linear = weights.plain_linear()?;
        let mut correction = None;
        if let Some(at) = [&weights, module].into_iter().find(|at| at.contains_tensor(CORRECTION)) {
            let bias = at.get_unchecked_dtype(CORRECTION, DType::F32)?;
            correction = Some(bias.reshape(linear.out_dim())?.to_vec1()?);
        }
        Self::new(mixture, json, linear, correction)
    }

    /// Makes a router from its weight and its correction.
    pub fn new(mixture: &Mixture, json: &Value, linear: PackedLinear, correction: Option<Vec<f32>>) -> Result<Self> {
        // The first name of each field is Kimi Linear's.
        if let Some(other) = json["moe_router_activation_func"].as_str().filter(|&name| name != "sigmoid") {
            bail!("[causal_lm] moe_router_activation_func is {other:?}, expected \"sigmoid\"")
        }
        let experts = linear.out_dim();
        let groups = match json["topk_method"].as_str().unwrap_or("greedy") {
            _ if correction.is_some() => {
                // A.X K2 writes null for experts without groups.
                let has_groups = mixture.has_groups && !json.get("n_group").is_some_and(Value::is_null);
                if has_groups { Some(Groups::read(json, experts, 2)?) } else { None }
            }
            "greedy" => None,
            "group_limited_greedy" => Some(Groups::read(json, experts, 1)?),
            other => bail!("[causal_lm] topk_method is {other:?}, expected \"greedy\" or \"group_limited_greedy\""),
        };
        let normalizes = ["moe_renormalize", "norm_topk_prob"].iter().find_map(|name| json[*name].as_bool());
        Ok(Self {
            linear,
            correction,
            groups,
            chosen: required(json, &["num_experts_per_token", "num_experts_per_tok", "moe_top_k"])?,
            normalized: mixture.normalizes && normalizes.unwrap_or(true),
            scale: json["routed_scaling_factor"].as_f64().unwrap_or(mixture.scale),
        })
    }

    /// Returns the scores (N, experts) of tokens (N, E), in f32, with gradients.
    fn scores(&self, tokens: &Tensor) -> Result<Tensor> {
        let dtype = if tokens.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let logits = self.linear.forward(&tokens.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
        if self.correction.is_some() { ops::sigmoid(&logits) } else { ops::softmax(&logits, D::Minus1) }
    }

    /// Returns the weights (N, experts) of scores that are 0 except for the experts of a token.
    fn weights(&self, scores: &Tensor) -> Result<Tensor> {
        if self.normalized { scores.broadcast_div(&scores.sum_keepdim(1)?)? * self.scale } else { scores * self.scale }
    }

    /// Returns the experts of a token with these scores.
    fn route(&self, scores: &[f32]) -> Vec<usize> {
        let ranks: Vec<f32> = match &self.correction {
            Some(correction) => scores.iter().zip(correction).map(|(score, correction)| score + correction).collect(),
            None => scores.to_vec(),
        };
        let mut experts = by_rank(&ranks);
        if let Some(groups) = &self.groups {
            let best_of = |group: &[f32]| by_rank(group).into_iter().take(groups.best).map(|i| group[i]).sum();
            let sums: Vec<f32> = ranks.chunks(groups.size).map(best_of).collect();
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

/// Loads experts whose weights are one tensor (experts, out, in), the rows of gate before the rows of up.
fn stacked_experts(all: &Weights, count: usize, activation: Activation, clamp: Option<Clamp>) -> Result<Vec<Mlp>> {
    let stacked = |name, of: Sharding| all.sharded(name, Sharding { dim: 1 + of.dim, ..of });
    let gates = stacked("gate_up_proj", OUTPUTS.half(0))?;
    let ups = stacked("gate_up_proj", OUTPUTS.half(1))?;
    let downs = stacked("down_proj", INPUTS)?;
    let mut experts = Vec::with_capacity(count);
    for i in 0..count {
        let linear = |weights: &Tensor| PackedLinear::new(&weights.i(i)?, None);
        experts.push(Mlp::gated(linear(&gates)?, linear(&ups)?, linear(&downs)?, activation, clamp)?);
    }
    Ok(experts)
}

/// Returns the indices in the order of their numbers, the largest first.
fn by_rank(ranks: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    order
}

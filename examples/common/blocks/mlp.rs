//! The MLP of a block, and mixtures of experts, which are MLPs: a [`Router`] chooses a few experts for each token, and
//! their weights.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{D, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Activation, ops, seq};
use serde_json::Value;

use super::family::size;
use super::gpt_oss::{self, Clamp};
use super::nomic;
use super::router::{Router, TokenIds};
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
pub const MODULES: &[&str] = &["mlp", "block_sparse_moe", "feed_forward", "ffn"];
pub const ROUTERS: &[&str] = &["router", "gate", "router.layer"];
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
    /// Whether the bias of the router's projection is the correction.
    pub corrects_by_bias: bool,
    /// The default bounds of the gates of experts and MLPs, if they are clamped.
    pub clamp: Option<Clamp>,
}

impl Mixture {
    /// Returns the bounds of gates, if they are clamped.
    pub fn clamp(&self, json: &Value) -> Option<Clamp> {
        self.clamp.map(|clamp| clamp.of(json))
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

impl Experts {
    /// Loads the experts of a layer from weights at the module's prefix, one for each score of the router.
    pub fn read(
        mixture: &Mixture,
        json: &Value,
        weights: &Weights,
        activation: Activation,
        ids: &TokenIds,
    ) -> Result<Self> {
        let router = Router::read(mixture, json, weights, ids)?;
        let clamp = mixture.clamp(json);
        let all = weights.pp("experts");
        let count = router.count();
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
        for (token, experts) in self.router.route(&scores.to_vec2()?)?.into_iter().enumerate() {
            for expert in experts {
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

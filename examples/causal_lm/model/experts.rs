//! Mixtures of experts: a router gives each token a few MLPs, and each of them a weight.

use candle_attention::PackedLinear;
use candle_core::{D, DType, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Activation, Linear, ops};
use serde_json::Value;

use super::mlp::{Between, LLAMA_MLP, Mlp};
use super::weights::{Dimension, Divided, Weights};
use super::{mxfp4, required};

pub struct Experts {
    router: Router,
    experts: Vec<Mlp>,
    shared: Option<Shared>,
}

/// What every token goes through as well, with a weight of 1, or with the sigmoid of a gate.
struct Shared {
    mlp: Mlp,
    gate: Option<PackedLinear>,
}

struct Router {
    linear: PackedLinear,
    /// Of logits.
    scores: fn(&Tensor) -> Result<Tensor>,
    /// Added to the scores where experts are compared, and not to their weights.
    correction: Option<Vec<f32>>,
    groups: Option<Groups>,
    /// Experts of a token.
    chosen: usize,
    /// Whether the weights of a token are divided by their sum.
    normalized: bool,
    /// What weights are multiplied by.
    scale: f32,
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
    pub fn mixtral(json: &Value, vb: &Weights, activation: Activation) -> Result<Self> {
        let vb = vb.pp("block_sparse_moe");
        let experts = (0..required(json, "num_local_experts")?)
            .map(|expert| Mlp::read_gated(&vb.pp("experts").pp(expert), ["w1", "w3", "w2"], activation));
        Self::new(Router::softmax(json, &vb.pp("gate"))?, experts.collect::<Result<_>>()?, None)
    }

    /// Qwen's since Qwen3-Next: beside a shared expert with a gate, each with weights of its own or all as one tensor.
    pub fn qwen(json: &Value, vb: &Weights, activation: Activation) -> Result<Self> {
        let (vb, all) = (vb.pp("mlp"), vb.pp("mlp.experts"));
        let normalized = json["norm_topk_prob"].as_bool().unwrap_or(true);
        let router = Router { normalized, ..Router::softmax(json, &vb.pp("gate"))? };
        let count = 0..required(json, "num_experts")?;
        let experts = if all.contains_tensor("gate_up_proj") {
            let half = |i| all.own("gate_up_proj", Dimension { part: [i, 2], ..Dimension::new(1) });
            let weights = [half(0)?, half(1)?, all.own("down_proj", Dimension::new(2))?];
            let expert = |expert| {
                let [gate, up, down] = weights.each_ref().map(|all| PackedLinear::new(&all.i(expert)?, None));
                Mlp::gated([gate?, up?, down?], activation)
            };
            count.map(expert).collect::<Result<_>>()?
        } else {
            count.map(|expert| Mlp::read_gated(&all.pp(expert), LLAMA_MLP, activation)).collect::<Result<_>>()?
        };
        let shared = Shared {
            mlp: Mlp::read_gated(&vb.pp("shared_expert"), LLAMA_MLP, activation)?,
            gate: Some(vb.pp("shared_expert_gate").linear(Divided::Not)?),
        };
        Self::new(router, experts, Some(shared))
    }

    pub fn deepseek_v2(json: &Value, vb: &Weights, activation: Activation) -> Result<Self> {
        let gate = vb.pp("mlp.gate");
        let groups = match json["topk_method"].as_str().unwrap_or("greedy") {
            "greedy" => None,
            "group_limited_greedy" => Some(Groups::read(json, 1)?),
            other => bail!("[causal_lm] topk_method is {other:?}, expected \"greedy\" or \"group_limited_greedy\""),
        };
        let scale = json["routed_scaling_factor"].as_f64().unwrap_or(1.0) as f32;
        let router = Router { groups, normalized: false, scale, ..Router::softmax(json, &gate)? };
        Self::deepseek(json, &vb.pp("mlp"), LLAMA_MLP, activation, router)
    }

    pub fn deepseek_v3(json: &Value, vb: &Weights, activation: Activation) -> Result<Self> {
        Self::deepseek_v3_below(json, &vb.pp("mlp"), LLAMA_MLP, activation)
    }

    /// DeepSeek V3's with names of its own, in the config as well.
    pub fn kimi(json: &Value, vb: &Weights, activation: Activation) -> Result<Self> {
        const FIELDS: [(&str, &str); 4] = [
            ("num_experts", "n_routed_experts"),
            ("num_experts_per_token", "num_experts_per_tok"),
            ("num_expert_group", "n_group"),
            ("moe_renormalize", "norm_topk_prob"),
        ];
        if let Some(other) = json["moe_router_activation_func"].as_str().filter(|&name| name != "sigmoid") {
            bail!("[causal_lm] moe_router_activation_func is {other:?}, expected \"sigmoid\"")
        }
        let mut json = json.clone();
        for (own, usual) in FIELDS {
            if let Some(value) = json.get(own).cloned() {
                json[usual] = value;
            }
        }
        Self::deepseek_v3_below(&json, &vb.pp("block_sparse_moe"), ["w1", "w3", "w2"], activation)
    }

    fn deepseek_v3_below(json: &Value, vb: &Weights, names: [&str; 3], activation: Activation) -> Result<Self> {
        let gate = vb.pp("gate");
        let correction = gate.get_unchecked_dtype("e_score_correction_bias", DType::F32)?.to_vec1()?;
        let router = Router {
            scores: ops::sigmoid,
            correction: Some(correction),
            groups: Some(Groups::read(json, 2)?),
            normalized: json["norm_topk_prob"].as_bool().unwrap_or(true),
            scale: json["routed_scaling_factor"].as_f64().unwrap_or(2.5) as f32,
            ..Router::softmax(json, &gate)?
        };
        Self::deepseek(json, vb, names, activation, router)
    }

    fn deepseek(json: &Value, vb: &Weights, names: [&str; 3], activation: Activation, router: Router) -> Result<Self> {
        let experts = (0..required(json, "n_routed_experts")?)
            .map(|expert| Mlp::read_gated(&vb.pp("experts").pp(expert), names, activation));
        let shared = Mlp::read_gated(&vb.pp("shared_experts"), LLAMA_MLP, activation)?;
        Self::new(router, experts.collect::<Result<_>>()?, Some(Shared { mlp: shared, gate: None }))
    }

    /// Experts that are one tensor, stored as (in, out), with the columns of gate and up in turn.
    pub fn gpt_oss(json: &Value, vb: &Weights, _: Activation) -> Result<Self> {
        let number = |key: &str, default| json[key].as_f64().unwrap_or(default);
        let between = Between::Clamped { alpha: number("swiglu_alpha", 1.702), limit: number("swiglu_limit", 7.0) };
        let (router, vb) = (Router::softmax(json, &vb.pp("mlp.router"))?, vb.pp("mlp.experts"));
        let up = PackedExperts::read(&vb, "gate_up_proj", Divided::Outputs)?;
        let down = PackedExperts::read(&vb, "down_proj", Divided::Inputs)?;
        let expert = |expert: usize| {
            let (up, down) = (up.linear(expert)?, down.linear(expert)?);
            // The rows of gate, and then those of up.
            let split = |rows: &Tensor| {
                let (outputs, dims) = (rows.dim(0)?, &rows.dims()[1..]);
                rows.reshape([&[outputs / 2, 2], dims].concat())?.transpose(0, 1)?.contiguous()?.reshape(rows.shape())
            };
            let up = PackedLinear::new(&split(up.weight())?, up.bias().map(split).transpose()?.as_ref())?;
            Mlp::new(up, between, PackedLinear::from_linear(&down)?)
        };
        let experts = (0..required(json, "num_local_experts")?).map(expert);
        Self::new(router, experts.collect::<Result<_>>()?, None)
    }

    fn new(router: Router, experts: Vec<Mlp>, shared: Option<Shared>) -> Result<Self> {
        router.check(experts.len())?;
        Ok(Self { router, experts, shared })
    }
}

impl Module for Shared {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let ys = self.mlp.forward(tokens)?;
        let Some(gate) = &self.gate else { return Ok(ys) };
        ys.broadcast_mul(&ops::sigmoid(&gate.forward(tokens)?)?)
    }
}

impl Module for Experts {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
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
            Some(shared) => shared.forward(&tokens)?,
            None => tokens.zeros_like()?,
        };
        for (i, rows) in routes.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let rows = Tensor::new(rows, xs.device())?;
            let weights = weights.index_select(&rows, 0)?.narrow(1, i, 1)?;
            let own = self.experts[i].forward(&tokens.index_select(&rows, 0)?)?.broadcast_mul(&weights)?;
            ys = ys.index_add(&rows, &own, 0)?;
        }
        ys.reshape(xs.shape())
    }
}

impl Router {
    /// A router whose weights are the softmax of the highest scores.
    fn softmax(json: &Value, vb: &Weights) -> Result<Self> {
        Ok(Self {
            linear: vb.linear(Divided::Not)?,
            scores: |logits| ops::softmax(logits, D::Minus1),
            correction: None,
            groups: None,
            chosen: required(json, "num_experts_per_tok")?,
            normalized: true,
            scale: 1.0,
        })
    }

    fn check(&self, experts: usize) -> Result<()> {
        let corrected = self.correction.as_ref().map_or(experts, Vec::len);
        if self.linear.out_dim() != experts || corrected != experts {
            bail!(
                "[causal_lm] the router has {} scores and corrects {corrected}, expected {experts}",
                self.linear.out_dim()
            )
        }
        let of_groups =
            self.groups.as_ref().map_or(experts, |groups| groups.size.saturating_mul(groups.chosen).min(experts));
        if self.chosen > of_groups {
            bail!("[causal_lm] num_experts_per_tok is {}, expected at most {of_groups}", self.chosen)
        }
        Ok(())
    }

    /// The scores (N, experts) of tokens (N, E), in f32, with gradients.
    fn scores(&self, tokens: &Tensor) -> Result<Tensor> {
        let dtype = if tokens.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        (self.scores)(&self.linear.forward(&tokens.to_dtype(dtype)?)?.to_dtype(DType::F32)?)
    }

    /// The weights (N, experts) of scores that are 0 but for the experts of a token.
    fn weights(&self, scores: &Tensor) -> Result<Tensor> {
        match self.normalized {
            true => scores.broadcast_div(&scores.sum_keepdim(1)?)? * f64::from(self.scale),
            false => scores * f64::from(self.scale),
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
    fn read(json: &Value, best: usize) -> Result<Self> {
        let (experts, groups) = (required(json, "n_routed_experts")?, required(json, "n_group")?);
        if groups == 0 || !experts.is_multiple_of(groups) {
            bail!("[causal_lm] n_group is {groups}, expected a divisor of n_routed_experts, {experts}")
        }
        Ok(Self { size: experts / groups, chosen: required(json, "topk_group")?, best })
    }
}

/// The weights of all experts of GPT-OSS as one tensor, and their biases (experts, out).
struct PackedExperts {
    weights: PackedWeights,
    biases: Tensor,
}

enum PackedWeights {
    /// (experts, in, out).
    Plain(Tensor),
    /// As published: (experts, out, blocks of a row, 16) and a scale for each block.
    Mxfp4 { blocks: Tensor, scales: Tensor },
}

impl PackedExperts {
    /// Those of this process, of which outputs go in pairs of gate and up, and of MXFP4 in as many as a block has
    /// inputs in the next weight.
    fn read(vb: &Weights, name: &str, divided: Divided) -> Result<Self> {
        let blocks = format!("{name}_blocks");
        let is_mxfp4 = vb.contains_tensor(&blocks);
        let (outputs, inputs) = if is_mxfp4 { (1, 2) } else { (2, 1) };
        let unit = if is_mxfp4 { 2 * mxfp4::BLOCK } else { 2 };
        let of = match divided {
            Divided::Inputs => Dimension::new(inputs),
            _ => Dimension { unit, ..Dimension::new(outputs) },
        };
        let weights = if is_mxfp4 {
            let bytes = |name: &str| vb.own(name, Dimension { dtype: Some(DType::U8), ..of });
            PackedWeights::Mxfp4 { blocks: bytes(&blocks)?, scales: bytes(&format!("{name}_scales"))? }
        } else {
            PackedWeights::Plain(vb.own(name, of)?)
        };
        let bias = format!("{name}_bias");
        let biases = match divided {
            Divided::Inputs if vb.is_first() => vb.get_unchecked(&bias)?,
            Divided::Inputs => vb.get_unchecked(&bias)?.zeros_like()?,
            _ => vb.own(&bias, Dimension { unit, ..Dimension::new(1) })?,
        };
        Ok(Self { weights, biases })
    }

    fn linear(&self, expert: usize) -> Result<Linear> {
        let bias = self.biases.i(expert)?;
        let weight = match &self.weights {
            PackedWeights::Plain(weights) => weights.i(expert)?.t()?.contiguous()?,
            PackedWeights::Mxfp4 { blocks, scales } => mxfp4::dequantize(&blocks.i(expert)?, &scales.i(expert)?)?
                .to_dtype(bias.dtype())?
                .to_device(bias.device())?,
        };
        Ok(Linear::new(weight, Some(bias)))
    }
}

/// Indices in the order of their numbers, the largest first.
fn by_rank(ranks: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    order
}

//! The router of a mixture of experts: the scores of experts, and the choice of a few of them for each token, by the
//! scores or by the token's id.

use std::cell::RefCell;
use std::rc::Rc;

use candle_attention::PackedLinear;
use candle_core::{D, DType, Module, Result, Tensor, bail};
use candle_nn::ops;
use serde_json::Value;

use super::family::required;
use super::mlp::{Mixture, ROUTERS};
use super::weights::Weights;

/// The term that is added to the scores of experts to compare them.
const CORRECTION: &str = "e_score_correction_bias";
/// The table of the experts of each token.
const EXPERTS_BY_ID: &str = "tid2eid";

/// The scores of experts for their logits.
enum Scoring {
    Softmax,
    Sigmoid,
    /// The root of `ln(1 + exp(x))`.
    RootOfSoftplus,
}

/// The choice of experts for a token.
pub struct Router {
    linear: PackedLinear,
    scoring: Scoring,
    /// A term that is added to the scores to compare experts, and not to their weights.
    correction: Option<Vec<f32>>,
    /// The experts of each token, if they follow from its id.
    by_id: Option<ExpertsById>,
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

impl Router {
    /// Loads the router of the experts at `module`. Its correction is next to its weight, or next to the router.
    pub fn read(mixture: &Mixture, json: &Value, module: &Weights, ids: &TokenIds) -> Result<Self> {
        let weights = module.pp(module.named(ROUTERS)?);
        let name = if mixture.corrects_by_bias { "bias" } else { CORRECTION };
        let linear = if mixture.corrects_by_bias {
            PackedLinear::new(&weights.get_unchecked("weight")?, None)?
        } else {
            weights.plain_linear()?
        };
        let mut correction = None;
        if let Some(at) = [&weights, module].into_iter().find(|at| at.contains_tensor(name)) {
            let bias = at.get_unchecked_dtype(name, DType::F32)?;
            correction = Some(bias.reshape(linear.out_dim())?.to_vec1()?);
        }
        let mut router = Self::new(mixture, json, linear, correction)?;
        if weights.contains_tensor(EXPERTS_BY_ID) {
            let table = weights.get_unchecked_dtype(EXPERTS_BY_ID, DType::I64)?;
            router.by_id = Some(ExpertsById::read(&table, router.count(), ids)?);
        }
        Ok(router)
    }

    /// Makes a router from its weight and its correction. Unless the config names another function, scores with a
    /// correction are sigmoids, and scores without one a softmax.
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
            scoring: match json["scoring_func"].as_str() {
                Some("sqrtsoftplus") => Scoring::RootOfSoftplus,
                _ if correction.is_some() => Scoring::Sigmoid,
                _ => Scoring::Softmax,
            },
            correction,
            by_id: None,
            groups,
            chosen: required(json, &["num_experts_per_token", "num_experts_per_tok", "moe_top_k"])?,
            normalized: mixture.normalizes && normalizes.unwrap_or(true),
            scale: json["routed_scaling_factor"].as_f64().unwrap_or(mixture.scale),
        })
    }

    /// Returns the number of experts.
    pub fn count(&self) -> usize {
        self.linear.out_dim()
    }

    /// Returns the scores (N, experts) of tokens (N, E), in f32, with gradients.
    pub fn scores(&self, tokens: &Tensor) -> Result<Tensor> {
        let dtype = if tokens.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let logits = self.linear.forward(&tokens.to_dtype(dtype)?)?.to_dtype(DType::F32)?;
        match self.scoring {
            Scoring::Softmax => ops::softmax(&logits, D::Minus1),
            Scoring::Sigmoid => ops::sigmoid(&logits),
            // max(x, 0) + ln(1 + exp(-|x|)), whose exp is never large.
            Scoring::RootOfSoftplus => (logits.relu()? + (logits.abs()?.neg()?.exp()? + 1.0)?.log()?)?.sqrt(),
        }
    }

    /// Returns the weights (N, experts) of scores that are 0 except for the experts of a token.
    pub fn weights(&self, scores: &Tensor) -> Result<Tensor> {
        if self.normalized { scores.broadcast_div(&scores.sum_keepdim(1)?)? * self.scale } else { scores * self.scale }
    }

    /// Returns the experts of each token of the call, given the scores of each.
    pub fn route(&self, scores: &[Vec<f32>]) -> Result<Vec<Vec<usize>>> {
        match &self.by_id {
            Some(by_id) => by_id.of_call(scores.len()),
            None => Ok(scores.iter().map(|own| self.best(own)).collect()),
        }
    }

    /// Returns the experts of a token with these scores.
    fn best(&self, scores: &[f32]) -> Vec<usize> {
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

/// The ids of the tokens of a call, which the routers of a model share.
#[derive(Clone, Default)]
pub struct TokenIds(Rc<RefCell<IdsOfCall>>);

#[derive(Default)]
struct IdsOfCall {
    /// Whether a router reads them.
    are_read: bool,
    /// B · T, row by row.
    ids: Vec<u32>,
}

impl TokenIds {
    /// Keeps the ids of a call, if a router reads them.
    pub fn note(&self, ids: &Tensor) -> Result<()> {
        let mut own = self.0.borrow_mut();
        if own.are_read {
            own.ids = ids.flatten_all()?.to_vec1()?;
        }
        Ok(())
    }
}

/// The experts of each token of the vocabulary, where they do not follow from scores.
struct ExpertsById {
    /// (V, experts of a token), row by row.
    experts: Vec<usize>,
    /// The number of experts of a token.
    width: usize,
    ids: TokenIds,
}

impl ExpertsById {
    /// Reads a table (V, experts of a token) of `count` experts.
    fn read(table: &Tensor, count: usize, ids: &TokenIds) -> Result<Self> {
        let (tokens, width) = table.dims2()?;
        let mut experts = Vec::with_capacity(tokens * width);
        for (token, row) in table.to_vec2::<i64>()?.iter().enumerate() {
            for (i, &expert) in row.iter().enumerate() {
                if !(0..count as i64).contains(&expert) || row[..i].contains(&expert) {
                    bail!(
                        "[causal_lm] the table of experts has {row:?} for token {token}, expected different ones of \
                         {count} experts"
                    )
                }
                experts.push(expert as usize);
            }
        }
        ids.0.borrow_mut().are_read = true;
        Ok(Self { experts, width, ids: ids.clone() })
    }

    /// Returns the experts of each of the call's tokens.
    fn of_call(&self, tokens: usize) -> Result<Vec<Vec<usize>>> {
        let call = self.ids.0.borrow();
        if call.ids.len() != tokens {
            bail!("[causal_lm] the experts of {tokens} tokens follow from their ids, found {} ids", call.ids.len())
        }
        let mut all = Vec::with_capacity(tokens);
        for &id in &call.ids {
            let first = id as usize * self.width;
            match self.experts.get(first..first + self.width) {
                Some(own) => all.push(own.to_vec()),
                None => bail!("[causal_lm] token {id} has no row in the table of experts"),
            }
        }
        Ok(all)
    }
}

/// Returns the indices in the order of their numbers, the largest first.
fn by_rank(ranks: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    order
}

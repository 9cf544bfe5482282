//! The experts of GGUF files: a tensor (experts, out, in) for each projection, of which experts are loaded one by one.

use candle_attention::PackedLinear;
use candle_core::{DType, Result};
use candle_nn::Activation;
use serde_json::Value;

use super::gguf::Gguf;
use super::gpt_oss::Clamp;
use super::mlp::{Experts, Mixture, Mlp};
use super::router::Router;
use super::weights::{INPUTS, OUTPUTS, Sharding, Weights};

/// The weight of the router, below a block.
pub const ROUTER: &str = "ffn_gate_inp.weight";

/// Loads router and experts of a block from weights at its prefix.
pub fn read(mixture: &Mixture, json: &Value, gguf: &Gguf, at: &Weights, activation: Activation) -> Result<Experts> {
    let linear = at.pp("ffn_gate_inp").linear(None)?;
    let count = linear.out_dim();
    let mut correction = None;
    if at.contains_tensor("exp_probs_b.bias") {
        correction = Some(at.get_unchecked_dtype("exp_probs_b.bias", DType::F32)?.reshape(count)?.to_vec1()?);
    }
    // Only the experts of GPT-OSS have biases.
    let clamp = at.contains_tensor("ffn_down_exps.bias").then(|| Clamp::GPT_OSS.of(json));
    let own = |part: &str, index: usize, sharding: Sharding| -> Result<PackedLinear> {
        gguf.expert(&format!("{}.{part}", at.prefix()), index, at.shard(), sharding)
    };
    // Some files have the rows of gate before the rows of up in one tensor.
    let is_joint = at.contains_tensor("ffn_gate_up_exps.weight");
    let mut experts = Vec::with_capacity(count);
    for index in 0..count {
        let (gate, up) = if is_joint {
            (own("ffn_gate_up_exps", index, OUTPUTS.half(0))?, own("ffn_gate_up_exps", index, OUTPUTS.half(1))?)
        } else {
            (own("ffn_gate_exps", index, OUTPUTS)?, own("ffn_up_exps", index, OUTPUTS)?)
        };
        let down = own("ffn_down_exps", index, INPUTS)?;
        experts.push(Mlp::gated(gate, up, down, activation, clamp)?);
    }
    let mut shared = None;
    if at.contains_tensor("ffn_down_shexp.weight") {
        let gate = at.pp("ffn_gate_shexp").linear(OUTPUTS)?;
        let up = at.pp("ffn_up_shexp").linear(OUTPUTS)?;
        shared = Some(Mlp::gated(gate, up, at.pp("ffn_down_shexp").linear(INPUTS)?, activation, None)?);
    }
    let mut shared_gate = None;
    if at.contains_tensor("ffn_gate_inp_shexp.weight") {
        shared_gate = Some(at.pp("ffn_gate_inp_shexp").linear(None)?);
    }
    Ok(Experts { router: Router::new(mixture, json, linear, correction)?, experts, shared, shared_gate, bias: None })
}

//! Latent attention: its config, its tensors, its inputs, and the caches that it shares with other layers.

use std::collections::HashMap;

use candle_attention::{
    AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig as Config, RopeAxes, RopeAxisLayout, RopeConfig, RopeStyle, RotaryEmbedding,
};
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::{CPU, Case, of, zeros};

const MOST: usize = u32::MAX as usize;

fn base() -> Config {
    Config::new(6, 2).with_q_lora_rank(3).with_kv_lora_rank(5).with_nope_head_dim(4).with_rope_head_dim(2)
}

fn layer(cfg: &Config) -> Result<MultiHeadLatentAttention> {
    MultiHeadLatentAttention::new(cfg, VarBuilder::zeros(DType::F32, &CPU))
}

fn config(cfg: Config) -> Result<()> {
    layer(&cfg).map(drop)
}

pub const CONFIGS: &[Case] = cases! {
    "no width" => config(Config::new(0, 2)),
    "no heads" => config(Config::new(6, 0)),
    "axes" => {
        let axes = RopeAxes::new(vec![1, 1], RopeAxisLayout::Sections);
        config(base().with_rope_head_dim(4).with_rope(RopeConfig::new(10_000.0).with_axes(axes)))
    },
    "no rank of queries" => config(base().with_q_lora_rank(0)),
    "no rank of keys" => config(base().with_kv_lora_rank(0)),
    "no part without positions" => config(base().with_nope_head_dim(0)),
    "values beyond u32" => config(base().with_value_head_dim(MOST + 1)),
    "heads beyond u32" => config(base().with_nope_head_dim(MOST)),
    "no probability" => config(base().with_dropout(1.5)),
    "a negative eps" => config(base().with_norm_eps(-1.0)),
    "an infinite scale" => config(base().with_scale(f64::INFINITY)),
    "half a pair" => config(base().with_rope_head_dim(3)),
};

/// The tensors of a layer with biases for another config, one of them left out.
fn load(cfg: &Config, left_out: &str) -> Result<()> {
    let variables = VarMap::new();
    let whole = base().with_bias(true);
    MultiHeadLatentAttention::new(&whole, VarBuilder::from_varmap(&variables, DType::F32, &CPU).pp("attention"))?;
    let variables = variables.data().lock().expect("one thread");
    assert!(left_out.is_empty() || variables.contains_key(left_out));
    let kept = variables.iter().filter(|(name, _)| *name != left_out);
    let kept: HashMap<_, _> = kept.map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_tensors(kept, DType::F32, &CPU).pp("attention")).map(drop)
}

fn without(name: &str) -> Result<()> {
    load(&base().with_bias(true), name)
}

pub const TENSORS: &[Case] = cases! {
    "no q_a_proj" => without("attention.q_a_proj.weight"),
    "no q_a_layernorm" => without("attention.q_a_layernorm.weight"),
    "no q_b_proj" => without("attention.q_b_proj.weight"),
    "no bias of kv_a_proj" => without("attention.kv_a_proj_with_mqa.bias"),
    "no kv_a_layernorm" => without("attention.kv_a_layernorm.weight"),
    "no kv_b_proj" => without("attention.kv_b_proj.weight"),
    "no bias of o_proj" => without("attention.o_proj.bias"),
    "another rank" => load(&base().with_bias(true).with_kv_lora_rank(4), ""),
    "surplus biases" => load(&base(), ""),
    "weights of integers" => MultiHeadLatentAttention::new(&base(), VarBuilder::zeros(DType::U8, &CPU)),
};

fn forward(xs: Tensor) -> Result<()> {
    layer(&base())?.forward(&xs).map(drop)
}

fn call(change: impl FnOnce(AttentionInput) -> AttentionInput) -> Result<()> {
    layer(&base())?.forward_with(change(AttentionInput::new(&zeros((2, 3, 6))))).map(drop)
}

/// A layer whose cache holds latents of another.
fn with_cache(forward: impl FnOnce(AttentionInput) -> Result<Tensor>) -> Result<()> {
    let (xs, mut cache) = (zeros((2, 3, 6)), AttentionCache::default());
    layer(&base())?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    let outcome = forward(AttentionInput::new(&xs).with_cache(&mut cache)).map(drop);
    assert_eq!(cache.lens(), [3, 3]);
    outcome
}

pub const INPUTS: &[Case] = cases! {
    "another width" => forward(zeros((2, 3, 5))),
    "another width without a batch" => forward(zeros((3, 7))),
    "one dimension" => forward(zeros(6)),
    "four dimensions" => forward(zeros((1, 1, 2, 6))),
    "another dtype" => forward(of(DType::F64, (2, 3, 6))),
    "keys and values" => {
        let xs = zeros((2, 3, 6));
        layer(&base())?.forward_with(AttentionInput::new(&xs).with_key_value(&xs, &xs))
    },
    "positions of keys" =>
        layer(&base())?.forward_with(AttentionInput::new(&zeros((2, 3, 6))).with_key_positions(&of(DType::U32, 3))),
    "positions on axes" =>
        layer(&base())?.forward_with(AttentionInput::new(&zeros((2, 3, 6))).with_axis_positions(&zeros((2, 3)))),
    "lengths without a cache" => call(|input| input.with_valid_lens(&[1, 2])),
    "too few positions" =>
        layer(&base())?.forward_with(AttentionInput::new(&zeros((2, 3, 6))).with_positions(&of(DType::U32, 2))),
    "tables of other heads" => {
        let rope = RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved);
        layer(&base())?.with_rotary(RotaryEmbedding::new(&rope, 4)?)
    },
    "a cache of other latents" =>
        with_cache(|input| layer(&base().with_kv_lora_rank(3).with_rope_head_dim(4))?.forward_with(input)),
    "variables with a cache" => {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
        let trained = MultiHeadLatentAttention::new(&base(), vb)?;
        trained.forward_with(AttentionInput::new(&zeros((2, 3, 6))).with_cache(&mut AttentionCache::default()))
    },
    "a cache of latents for heads" => {
        let cfg = MultiHeadAttentionConfig::new(6, 2).with_num_kv_heads(1).with_head_dim(7).with_value_head_dim(5);
        let other = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))?;
        with_cache(|input| other.forward_with(input))
    },
};

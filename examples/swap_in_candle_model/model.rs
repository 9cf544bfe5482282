//! A small decoder in the style of Candle models, with any attention.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};

pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub max_positions: usize,
    pub rope_theta: f64,
    pub rms_norm_eps: f64,
}

/// The attention of a block, implemented by `before.rs` and `after.rs`.
pub trait SelfAttention: Sized {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self>;

    /// Computes (B, T, E) of hidden states (B, T, E). Positions continue those of earlier calls.
    fn forward(&mut self, xs: &Tensor) -> Result<Tensor>;

    fn clear_kv_cache(&mut self);
}

struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate_proj: linear_no_bias(cfg.hidden_size, cfg.intermediate_size, vb.pp("gate_proj"))?,
            up_proj: linear_no_bias(cfg.hidden_size, cfg.intermediate_size, vb.pp("up_proj"))?,
            down_proj: linear_no_bias(cfg.intermediate_size, cfg.hidden_size, vb.pp("down_proj"))?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let gate = xs.apply(&self.gate_proj)?.silu()?;
        (gate * xs.apply(&self.up_proj)?)?.apply(&self.down_proj)
    }
}

struct Block<A> {
    input_layernorm: RmsNorm,
    self_attn: A,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl<A: SelfAttention> Block<A> {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let norm = |name| rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: A::new(cfg, vb.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(cfg, vb.pp("mlp"))?,
        })
    }

    fn forward(&mut self, xs: &Tensor) -> Result<Tensor> {
        let xs = (xs + self.self_attn.forward(&xs.apply(&self.input_layernorm)?)?)?;
        &xs + xs.apply(&self.post_attention_layernorm)?.apply(&self.mlp)?
    }
}

/// A causal language model with any attention.
pub struct Model<A> {
    embed_tokens: Embedding,
    layers: Vec<Block<A>>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl<A: SelfAttention> Model<A> {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let inner = vb.pp("model");
        let block = |layer| Block::new(cfg, inner.pp("layers").pp(layer));
        Ok(Self {
            embed_tokens: embedding(cfg.vocab_size, cfg.hidden_size, inner.pp("embed_tokens"))?,
            layers: (0..cfg.num_layers).map(block).collect::<Result<_>>()?,
            norm: rms_norm(cfg.hidden_size, cfg.rms_norm_eps, inner.pp("norm"))?,
            lm_head: linear_no_bias(cfg.hidden_size, cfg.vocab_size, vb.pp("lm_head"))?,
        })
    }

    /// Computes logits (B, T, V) of token ids (B, T). Positions continue those of earlier calls.
    pub fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let mut xs = ids.apply(&self.embed_tokens)?;
        for layer in &mut self.layers {
            xs = layer.forward(&xs)?;
        }
        xs.apply(&self.norm)?.apply(&self.lm_head)
    }

    pub fn clear_kv_cache(&mut self) {
        for layer in &mut self.layers {
            layer.self_attn.clear_kv_cache();
        }
    }
}

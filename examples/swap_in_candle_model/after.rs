//! The attention of `before.rs` as one layer of this crate, with the same names in the checkpoint.

use candle_attention::{AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig};
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::model::{Config, SelfAttention};

pub struct Attention {
    layer: MultiHeadAttention,
    kv_cache: AttentionCache,
}

impl SelfAttention for Attention {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let cfg = MultiHeadAttentionConfig::new(cfg.hidden_size, cfg.num_heads)
            .with_num_kv_heads(cfg.num_kv_heads)
            .with_context_length(cfg.max_positions)
            .with_rope(RopeConfig::new(cfg.rope_theta))
            .with_causal(true);
        Ok(Self { layer: MultiHeadAttention::new(&cfg, vb)?, kv_cache: AttentionCache::default() })
    }

    fn forward(&mut self, xs: &Tensor) -> Result<Tensor> {
        self.layer.forward_with(AttentionInput::new(xs).with_cache(&mut self.kv_cache))
    }

    fn clear_kv_cache(&mut self) {
        self.kv_cache.reset();
    }
}

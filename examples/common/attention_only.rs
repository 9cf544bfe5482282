//! A transformer of attention layers alone: what `induction_heads` trains and `tokenize_attend` shows.
#![allow(dead_code, reason = "each program uses a part")]

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{AttentionInput, LayerNorm, MultiHeadAttention, MultiHeadAttentionConfig, layer_norm_no_bias};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear_no_bias};
use serde::{Deserialize, Serialize};

/// What `config.json` says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AttentionOnlyConfig {
    pub vocab_size: usize,
    pub num_layers: usize,
    /// Of every layer.
    pub layer: MultiHeadAttentionConfig,
}

/// Tokens to the logits of the tokens that follow: an embedding, blocks, a norm and a head.
pub struct AttentionOnly {
    embedding: EmbeddingLayer,
    pub blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// `xs + attention(norm(xs))`.
pub struct Block {
    norm: LayerNorm,
    pub attention: MultiHeadAttention,
}

impl AttentionOnly {
    pub fn new(cfg: &AttentionOnlyConfig, vb: VarBuilder) -> Result<Self> {
        let width = cfg.layer.embed_dim();
        let norm = |vb| layer_norm_no_bias(width, 1e-5, vb);
        let block = |n| {
            let vb = vb.pp("layers").pp(n);
            let attention = MultiHeadAttention::new(&cfg.layer, vb.pp("self_attn"))?;
            Ok(Block { norm: norm(vb.pp("norm"))?, attention })
        };
        Ok(Self {
            embedding: EmbeddingLayer::new(&EmbeddingConfig::new(cfg.vocab_size, width), vb.clone())?,
            blocks: (0..cfg.num_layers).map(block).collect::<Result<_>>()?,
            norm: norm(vb.pp("norm"))?,
            head: linear_no_bias(width, cfg.vocab_size, vb.pp("lm_head"))?,
        })
    }

    /// Ids (B, T) to logits (B, T, V).
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let attend = |attention: &MultiHeadAttention, input: AttentionInput| attention.forward_with(input);
        self.head.forward(&self.norm.forward(&self.through_blocks(ids, self.blocks.len(), attend)?)?)
    }

    /// Ids (B, T) to hidden states (B, T, E) after so many blocks, where `attend` gives the output of a layer for an
    /// input.
    pub fn through_blocks(
        &self,
        ids: &Tensor,
        blocks: usize,
        mut attend: impl FnMut(&MultiHeadAttention, AttentionInput) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.blocks[..blocks].iter().try_fold(self.embedding.forward(ids)?, |xs, block| {
            attend(&block.attention, AttentionInput::new(&block.norm.forward(&xs)?).with_residual(&xs))
        })
    }

    /// What the attention of a layer gets (B, T, E) for ids (B, T).
    pub fn attention_input(&self, ids: &Tensor, layer: usize) -> Result<Tensor> {
        let xs = self.through_blocks(ids, layer, |attention, input| attention.forward_with(input))?;
        self.blocks[layer].norm.forward(&xs)
    }

    /// What the last layer attends to: weights (B, H, T, T).
    pub fn attention_weights(&self, ids: &Tensor) -> Result<Tensor> {
        let last = self.blocks.len() - 1;
        let input = self.attention_input(ids, last)?;
        Ok(self.blocks[last].attention.forward_with_weights(AttentionInput::new(&input))?.weights)
    }
}

//! A transformer of attention layers alone, which `induction_heads` trains and `tokenize_attend` shows.
#![allow(dead_code, reason = "each program uses a part")]

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{AttentionInput, LayerNorm, MultiHeadAttention, MultiHeadAttentionConfig, layer_norm_no_bias};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear_no_bias};
use serde::{Deserialize, Serialize};

/// The `config.json` of the model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AttentionOnlyConfig {
    pub vocab_size: usize,
    pub num_layers: usize,
    /// The config of every layer.
    pub layer: MultiHeadAttentionConfig,
}

/// A model from tokens to the logits of the next tokens: an embedding, blocks, a norm and a head.
pub struct AttentionOnly {
    embedding: EmbeddingLayer,
    pub blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// A block, `xs + attention(norm(xs))`.
pub struct Block {
    norm: LayerNorm,
    pub attention: MultiHeadAttention,
}

impl AttentionOnly {
    pub fn new(cfg: &AttentionOnlyConfig, vb: VarBuilder) -> Result<Self> {
        let width = cfg.layer.embed_dim();
        let norm = |source| layer_norm_no_bias(width, 1e-5, source);
        let block = |n| {
            let at = vb.pp("layers").pp(n);
            Ok(Block {
                norm: norm(at.pp("norm"))?,
                attention: MultiHeadAttention::new(&cfg.layer, at.pp("self_attn"))?,
            })
        };
        Ok(Self {
            embedding: EmbeddingLayer::new(&EmbeddingConfig::new(cfg.vocab_size, width), vb.clone())?,
            blocks: (0..cfg.num_layers).map(block).collect::<Result<_>>()?,
            norm: norm(vb.pp("norm"))?,
            head: linear_no_bias(width, cfg.vocab_size, vb.pp("lm_head"))?,
        })
    }

    /// Computes logits (B, T, V) of ids (B, T).
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let attend = |attention: &MultiHeadAttention, input: AttentionInput| attention.forward_with(input);
        self.head.forward(&self.norm.forward(&self.through_blocks(ids, self.blocks.len(), attend)?)?)
    }

    /// Computes hidden states (B, T, E) of ids (B, T) after the first `blocks` blocks. `attend` computes the output of
    /// a layer, given its input.
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

    /// Returns the input (B, T, E) of a layer's attention for ids (B, T).
    pub fn attention_input(&self, ids: &Tensor, layer: usize) -> Result<Tensor> {
        let xs = self.through_blocks(ids, layer, |attention, input| attention.forward_with(input))?;
        self.blocks[layer].norm.forward(&xs)
    }

    /// Returns the attention weights (B, H, T, T) of the last layer.
    pub fn attention_weights(&self, ids: &Tensor) -> Result<Tensor> {
        let last = self.blocks.len() - 1;
        let input = self.attention_input(ids, last)?;
        Ok(self.blocks[last].attention.forward_with_weights(AttentionInput::new(&input))?.weights)
    }
}

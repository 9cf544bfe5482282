//! Blocks of attention and an MLP, of decoders and of encoders.
//!
//! Attention is `hf::load_attention`, `hf::load_latent_attention` or `hf::load_linear_attention`: projections, rotary
//! positions, norms of queries and keys, windows, grouped heads and the cache are the layer's. What is left of a block
//! is here, and [`Family`](family::Family) has the differences between families. Biases are those of the checkpoint.
#![allow(dead_code, reason = "each program uses a part")]

pub mod attention;
mod block;
pub mod family;
pub mod gguf;
mod gpt_oss;
mod mlp;
pub mod weights;

use candle_attention::{AttentionMask, MultiHeadAttention};
use candle_core::{Result, Tensor, bail};

use attention::{Attention, Input};
use block::Block;
pub use block::{Loader, Norm, optional};
use weights::Weights;

/// The blocks of a model, one after the other.
pub struct Blocks {
    blocks: Vec<Block>,
    /// E.
    pub width: usize,
}

impl Blocks {
    /// So many, which have numbers below the first of these names where there are blocks; `loaded` is told of every
    /// one.
    pub fn load(
        loader: &mut Loader,
        layers: usize,
        inner: &Weights,
        names: &[&str],
        mut loaded: impl FnMut(usize, usize),
    ) -> Result<Self> {
        let norms = loader.family.norms.concat();
        let mut places = names.iter().map(|name| inner.pp(name));
        let Some(at) = places.find(|at| at.pp(0).first(&norms).is_some()) else {
            bail!("[checkpoint] there is no {} in any of {}", norms.join(" or "), names.join(", "))
        };
        let mut blocks = Vec::with_capacity(layers);
        for layer in 0..layers {
            blocks.push(loader.block(layer, at.pp(layer))?);
            loaded(layer + 1, layers);
        }
        Ok(Self { blocks, width: loader.width })
    }

    /// Embeddings to hidden states, both (B, T, E), where `attend` gives the output of a layer, by its number, for an
    /// input.
    pub fn forward(
        &self,
        mut xs: Tensor,
        mut attend: impl FnMut(usize, &Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        for (layer, block) in self.blocks.iter().enumerate() {
            xs = block.forward(&xs, |attention, input| attend(layer, attention, input))?;
        }
        Ok(xs)
    }

    /// What the attention of a layer gets for embeddings, both (B, T, E), without a cache; the mask hides padding.
    pub fn attention_input(&self, mut xs: Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        for block in &self.blocks[..layer] {
            xs = block.forward(&xs, |attention, input| attention.forward(input.with_mask(mask)))?;
        }
        optional(&self.blocks[layer].before_attention, &xs)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The attention of each layer.
    pub fn attentions(&self) -> impl Iterator<Item = &Attention> {
        self.blocks.iter().map(|block| &block.attention)
    }

    /// That of one layer, if it is multi-head attention.
    pub fn attention(&self, layer: usize) -> Option<&MultiHeadAttention> {
        if let Attention::MultiHead(attention) = self.attentions().nth(layer)? { Some(attention) } else { None }
    }

    /// How many layers have attention weights, and how many heads the first of them has.
    pub fn layers_and_heads(&self) -> [usize; 2] {
        let with_weights = || self.attentions().filter(|attention| !attention.is_linear());
        [with_weights().count(), with_weights().next().map_or(0, Attention::num_heads)]
    }
}

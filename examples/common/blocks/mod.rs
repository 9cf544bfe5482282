//! Blocks of attention and an MLP, of decoders and of encoders.
//!
//! Attention is `hf::load_attention`, `hf::load_latent_attention`, `hf::load_compressed_key_attention` or
//! `hf::load_linear_attention`: projections, rotary positions, norms of queries and keys, windows, grouped heads and
//! the cache are part of the layer. The other parts of a block are here; [`Family`](family::Family) has the differences
//! between families. Biases are loaded if the checkpoint has them.
#![allow(dead_code, reason = "each program uses a part")]

pub mod attention;
mod block;
pub mod family;
pub mod gguf;
mod gguf_experts;
mod gpt_oss;
mod hyper_connections;
mod mlp;
mod nomic;
mod router;
pub mod weights;

use candle_attention::{AttentionMask, MultiHeadAttention, RopeConfig};
use candle_core::{Result, Tensor, bail};

use attention::{Attention, Input};
use block::Block;
pub use block::{Loader, Norm, optional};
use hyper_connections::StreamSum;
use router::TokenIds;
use weights::Weights;

/// The blocks of a model, one after the other.
pub struct Blocks {
    blocks: Vec<Block>,
    /// The sum of the streams after the last block, if the residual is several streams.
    streams: Option<StreamSum>,
    /// The ids of a call's tokens, from which some experts follow.
    ids: TokenIds,
    /// The width E of hidden states.
    pub width: usize,
}

impl Blocks {
    /// Loads `layers` blocks from the first prefix in `names` that has blocks; `loaded` is called after every block.
    pub fn load(
        loader: &mut Loader,
        layers: usize,
        inner: &Weights,
        names: &[&str],
        mut loaded: impl FnMut(usize, usize),
    ) -> Result<Self> {
        let norms = loader.family.norms.all();
        let mut prefixes = names.iter().map(|name| inner.pp(name));
        let Some(at) = prefixes.find(|at| at.pp(0).first(&norms).is_some()) else {
            bail!("[checkpoint] there is no {} in any of {}", norms.join(" or "), names.join(", "))
        };
        let mut blocks = Vec::with_capacity(layers);
        for layer in 0..layers {
            blocks.push(loader.block(layer, at.pp(layer))?);
            loaded(layer + 1, layers);
        }
        Ok(Self { blocks, streams: loader.streams(inner)?, ids: loader.ids.clone(), width: loader.width })
    }

    /// Keeps the ids of the tokens of the next call, from which some experts follow.
    pub fn note_ids(&self, ids: &Tensor) -> Result<()> {
        self.ids.note(ids)
    }

    /// Computes hidden states of embeddings, both (B, T, E). `attend` computes the output of a layer, given its number
    /// and its input.
    pub fn forward(
        &self,
        mut xs: Tensor,
        mut attend: impl FnMut(usize, &Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(streams) = &self.streams {
            xs = streams.spread(&xs)?;
        }
        for (layer, block) in self.blocks.iter().enumerate() {
            xs = block.forward(&xs, |attention, input| attend(layer, attention, input))?;
        }
        match &self.streams {
            Some(streams) => streams.forward(&xs),
            None => Ok(xs),
        }
    }

    /// Returns the input of a layer's attention for embeddings, both (B, T, E), without a cache; the mask is that of
    /// the padding.
    pub fn attention_input(&self, mut xs: Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        if let Some(streams) = &self.streams {
            xs = streams.spread(&xs)?;
        }
        for block in &self.blocks[..layer] {
            xs = block.forward(&xs, |attention, input| attention.forward(input.with_mask(mask)))?;
        }
        self.blocks[layer].attention_input(&xs)
    }

    /// Returns whether the residual is several streams.
    pub fn has_streams(&self) -> bool {
        self.streams.is_some()
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the attention of each layer.
    pub fn attentions(&self) -> impl Iterator<Item = &Attention> {
        self.blocks.iter().map(|block| &block.attention)
    }

    /// Returns the attention of one layer, if it is multi-head attention.
    pub fn attention(&self, layer: usize) -> Option<&MultiHeadAttention> {
        match self.attentions().nth(layer)? {
            Attention::MultiHead(attention) => Some(attention),
            Attention::Latent(..) | Attention::Compressed(_) | Attention::Linear(_) => None,
        }
    }

    /// Returns the rotary configs of the layers that have one.
    pub fn ropes(&self) -> impl Iterator<Item = &RopeConfig> {
        self.attentions().filter_map(|attention| attention.rope().map(|(rope, _)| rope))
    }

    /// Returns whether a call that reaches `len` positions rotates by other frequencies than one that reached
    /// `earlier`.
    pub fn frequencies_differ(&self, earlier: usize, len: usize) -> bool {
        self.ropes().any(|rope| rope.frequencies_differ(earlier, len))
    }

    /// Returns the layers of softmax attention.
    pub fn softmax_attentions(&self) -> impl Iterator<Item = &Attention> {
        self.attentions().filter(|attention| !attention.is_linear())
    }

    /// Returns the number of heads of the first layer of softmax attention.
    pub fn num_heads(&self) -> usize {
        self.softmax_attentions().next().map_or(0, Attention::num_heads)
    }
}

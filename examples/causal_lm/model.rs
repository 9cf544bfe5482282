//! A decoder: embedding, blocks of attention and MLP, norm, head.
//!
//! The blocks are in `common/blocks/`, with the differences between families in its `family.rs`. The names of
//! parameters around the blocks are found in the checkpoint.
#![allow(dead_code, unused_imports, reason = "each program uses a part")]

#[path = "../common/blocks/mod.rs"]
#[allow(clippy::duplicate_mod, reason = "a program may have an encoder and a decoder")]
mod blocks;

use std::ops::Range;

use candle_attention::{
    AttentionCacheConfig, AttentionMask, KvPoolConfig, PackedLinear, PageTable, PagedTokens, RopeConfig, RopeScaling,
};
use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_nn::Embedding;
use serde_json::Value;

use attention::{Attention, Cache, Input, Pool};
use blocks::family::{Family, LAYERS, LogitScaling, required, size, text_config, ties_embeddings};
pub use blocks::{Blocks, attention, gguf, weights};
use blocks::{Loader, Norm, optional};
use weights::{OUTPUTS, OtherRanks, Weights, shard_range};

/// The names that families have for the base model, its embeddings, its blocks, its last norm, and its head; the last
/// name of each list is llama.cpp's. A checkpoint has one of each.
const BASES: &[&str] = &["model", "transformer", "gpt_neox", "model.decoder", "decoder", "model.language_model"];
const EMBEDDINGS: &[&str] =
    &["embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embed", "token_embd"];
const POSITIONS: &[&str] = &["wpe", "embed_positions", "position_embd"];
const EMBEDDING_NORMS: &[&str] = &["word_embeddings_layernorm", "token_embd_norm"];
const BLOCKS: &[&str] = &["layers", "h", "blocks", "blk"];
const LAST_NORMS: &[&str] = &["norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "output_norm"];
const HEADS: &[&str] = &["lm_head", "embed_out", "head", "output"];

/// The part of the vocabulary whose embeddings and logits this process stores.
struct Vocabulary {
    size: usize,
    own: Range<usize>,
    others: OtherRanks,
    is_gguf: bool,
}

impl Vocabulary {
    fn new(size: usize, others: OtherRanks, is_gguf: bool) -> Self {
        let own = others.as_ref().map_or(0..size, |others| shard_range(others.shard(), size, is_gguf));
        Self { size, own, others, is_gguf }
    }

    /// Gathers the logits (.., V) of all ranks, given the shard of this rank.
    fn gather(&self, own: Tensor) -> Result<Tensor> {
        let Some(others) = &self.others else { return Ok(own) };
        let shard_len = |shard| shard_range(shard, self.size, self.is_gguf).len();
        let lens: Vec<usize> = others.shard().all().map(shard_len).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        // All ranks gather tensors of one shape.
        let padded = others.gather(&own.pad_with_zeros(D::Minus1, 0, longest - self.own.len())?)?;
        let logits = padded.iter().zip(lens).map(|(padded, len)| padded.narrow(D::Minus1, 0, len));
        Tensor::cat(&logits.collect::<Result<Vec<_>>>()?, D::Minus1)
    }

    /// Returns the embeddings of ids (B, T) from a weight that has the rows of this process's tokens.
    fn embed(&self, weight: &PackedLinear, ids: &Tensor) -> Result<Tensor> {
        let Some(others) = &self.others else { return weight.weight_rows(ids) };
        // The first row, with a factor of 0, takes the place of the rows of other ranks.
        let mut factors = Vec::new();
        let mut rows = Vec::new();
        for id in ids.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|id| id as usize) {
            if id >= self.size {
                bail!("[causal_lm] token {id} is not one of the vocabulary of {}", self.size)
            }
            let is_own = self.own.contains(&id);
            factors.push(f32::from(is_own));
            rows.push(if is_own { (id - self.own.start) as u32 } else { 0 });
        }
        let xs = weight.weight_rows(&Tensor::from_vec(rows, ids.shape(), &Device::Cpu)?)?;
        let factors = Tensor::from_vec(factors, ids.shape(), xs.device())?.unsqueeze(2)?.to_dtype(xs.dtype())?;
        others.sum(&xs.broadcast_mul(&factors)?)
    }
}

/// A causal language model.
pub struct CausalLm {
    vocabulary: Vocabulary,
    embedding: PackedLinear,
    /// The dtype of activations.
    dtype: DType,
    embedding_norm: Option<Norm>,
    /// Learned positions, and the row of position 0.
    positions: Option<Embedding>,
    first_position: usize,
    embedding_scale: f64,
    pub blocks: Blocks,
    norm: Norm,
    head: PackedLinear,
    scaling: LogitScaling,
}

impl CausalLm {
    /// Loads a model from a `config.json` and weights at the checkpoint's root; `loaded` is called after every block.
    pub fn load<'a>(whole: &Value, weights: impl Into<Weights<'a>>, loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let json = text_config(whole);
        let weights = weights.into();
        let mut family = Family::of(json)?;
        if let Some(gguf) = weights.gguf {
            family = family.in_gguf(gguf.has_experts())?;
        }
        // A base model without a head has no prefix.
        let inner = weights.below(BASES, EMBEDDINGS);
        let (embedding, head) = embedding_and_head(whole, &weights, &inner)?;
        let vocab_size = match weights.gguf {
            Some(gguf) => gguf.vocabulary(),
            None => size(json, "vocab_size"),
        };
        let vocabulary = Vocabulary::new(vocab_size.unwrap_or(1), weights.ranks(), weights.gguf.is_some());
        let dtype = weights.dtype();
        let width = head.in_dim();
        let mut loader = Loader::new("causal_lm", family, json, weights, width);
        let blocks = Blocks::load(&mut loader, required(json, LAYERS)?, &inner, BLOCKS, loaded)?;
        let mut positions = None;
        if let Some(name) = inner.first(POSITIONS) {
            positions = Some(inner.table(name)?);
        }
        Ok(Self {
            vocabulary,
            embedding,
            dtype,
            embedding_norm: loader.norm(&inner, EMBEDDING_NORMS)?,
            positions,
            // The first two rows of OPT's positions are padding.
            first_position: if inner.first(&["embed_positions"]).is_some() { 2 } else { 0 },
            embedding_scale: family.embedding_scale(json, width, dtype)?,
            blocks,
            norm: loader.norm_at(&inner, inner.named(LAST_NORMS)?)?,
            head,
            scaling: LogitScaling::of(&family, json),
        })
    }

    /// Returns the first rotary scaling whose frequencies depend on the number of positions, if a layer has one.
    pub fn length_dependent_scaling(&self) -> Option<&RopeScaling> {
        let mut scalings = self.blocks.ropes().map(RopeConfig::scaling);
        scalings.find(|scaling| matches!(scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. }))
    }

    /// Returns whether a call that reaches `len` positions rotates by other frequencies than one that reached
    /// `earlier`.
    pub fn frequencies_differ(&self, earlier: usize, len: usize) -> bool {
        self.blocks.frequencies_differ(earlier, len)
    }

    /// Returns whether caches of `cached` positions have to be computed again before a call that reaches `len`
    /// positions, which is so where LongRoPE changes its factors. With dynamic scaling cached keys stay as they are:
    /// the frequencies differ in every call, and transformers keeps the keys too.
    pub fn cached_keys_expire(&self, cached: usize, len: usize) -> bool {
        let mut long = self.blocks.ropes().filter(|rope| matches!(rope.scaling(), RopeScaling::LongRope { .. }));
        long.any(|rope| rope.frequencies_differ(cached, len))
    }

    pub fn device(&self) -> &Device {
        self.head.device()
    }

    /// Returns the dtype of activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of tokens that have an embedding in this process.
    pub fn vocab_size(&self) -> usize {
        self.embedding.out_dim()
    }

    /// Returns the number of learned positions, if the model has some.
    pub fn max_positions(&self) -> Result<Option<usize>> {
        let Some(learned) = &self.positions else { return Ok(None) };
        Ok(Some(learned.embeddings().dim(0)?.saturating_sub(self.first_position)))
    }

    /// Makes an empty cache for each block. `config` can change the config of each cache of keys and values.
    pub fn caches(&self, config: impl Fn(AttentionCacheConfig) -> AttentionCacheConfig) -> Result<Vec<Cache>> {
        self.blocks.attentions().map(|attention| attention.cache(&config)).collect()
    }

    /// Computes hidden states (B, T, E) of token ids (B, T), of which each sequence has `lens` valid ones (all T unless
    /// given). Positions continue those of the caches.
    pub fn forward(&self, ids: &Tensor, lens: Option<&[usize]>, caches: &mut [Cache]) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let mut before = caches.first().map(Cache::lens).unwrap_or_default();
        before.resize(b, 0);
        let lens = lens.map_or_else(|| vec![t; b], <[usize]>::to_vec);
        let longest = before.iter().zip(&lens).map(|(before, len)| before + len).max();
        let positions: Vec<_> = before.iter().flat_map(|&before| before..before + t).collect();
        let xs = self.embed(ids, &positions, longest.unwrap_or(0))?;
        self.through_blocks(xs, |layer, attention, input| {
            attention.forward(input.with_cache(&mut caches[layer])?.with_valid_lens(&lens))
        })
    }

    /// Makes a pool for each block. `config` can change the config of each pool of keys and values.
    pub fn pools(&self, table: &PageTable, config: impl Fn(KvPoolConfig) -> KvPoolConfig) -> Result<Vec<Pool>> {
        let attentions = self.blocks.attentions().enumerate();
        attentions.map(|(layer, attention)| attention.pool(layer, table, self.device(), &config)).collect()
    }

    /// Returns whether a block has linear attention, whose state follows from all tokens before.
    pub fn has_states(&self) -> bool {
        self.blocks.attentions().any(Attention::is_linear)
    }

    /// Returns the longest window of the blocks; `None` if a block attends to all tokens, or none has a window.
    pub fn window(&self) -> Option<usize> {
        let mut longest = 0;
        for attention in self.blocks.attentions() {
            longest = longest.max(attention.window()?);
        }
        (longest > 0).then_some(longest)
    }

    /// Computes hidden states (total, E) of the packed token ids of a step, whose keys and values, or states, are
    /// stored in a pool for each block.
    pub fn forward_paged(&self, ids: &[u32], step: &PagedTokens, pools: &[Pool]) -> Result<Tensor> {
        let positions: Vec<_> = step.positions().into_iter().map(|position| position as usize).collect();
        let longest = positions.iter().max().map_or(0, |&last| last + 1);
        let xs = self.embed(&Tensor::new(ids, &Device::Cpu)?, &positions, longest)?;
        self.through_blocks(xs, |layer, attention, input| attention.forward(input.with_pages(&pools[layer], step)?))
    }

    /// Embeds ids (B, T) at these positions, B·T, as (B, T, E), or packed ids (total,) as (total, E). `longest` is the
    /// length of the longest sequence; padding may be at larger positions.
    pub fn embed(&self, ids: &Tensor, positions: &[usize], longest: usize) -> Result<Tensor> {
        self.blocks.note_ids(ids)?;
        let mut xs = self.vocabulary.embed(&self.embedding, ids)?.to_dtype(self.dtype)?;
        if self.embedding_scale != 1.0 {
            xs = (xs * self.embedding_scale)?;
        }
        xs = optional(&self.embedding_norm, &xs)?;
        let (Some(learned), first) = (&self.positions, self.first_position) else { return Ok(xs) };
        let last = learned.embeddings().dim(0)?.saturating_sub(1 + first);
        if longest > last + 1 {
            bail!("[causal_lm] {longest} positions are more than the model's {}", last + 1)
        }
        let rows: Vec<_> = positions.iter().map(|&position| (first + position.min(last)) as u32).collect();
        xs + learned.forward(&Tensor::from_vec(rows, ids.shape(), self.device())?)?
    }

    /// Returns the input (B, T, E) of a layer's attention for ids (B, T) without a cache; the mask is that of the
    /// padding.
    pub fn attention_input(&self, ids: &Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let xs = self.embed(ids, &(0..b * t).map(|i| i % t).collect::<Vec<_>>(), t)?;
        self.blocks.attention_input(xs, mask, layer)
    }

    /// Computes hidden states (B, T, E) of embeddings. `attend` computes the output of a layer, given its number and
    /// its input.
    pub fn through_blocks(
        &self,
        xs: Tensor,
        attend: impl FnMut(usize, &Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.norm.forward(&self.blocks.forward(xs, attend)?)
    }

    /// Computes logits (.., V) in f32 of hidden states (.., E).
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.scaling.forward(self.vocabulary.gather(self.head.forward(hidden)?.to_dtype(DType::F32)?)?)
    }

    /// Computes the logits (B, V) after the last token of each sequence.
    pub fn next_logits(&self, ids: &Tensor, lens: &[usize], caches: &mut [Cache]) -> Result<Tensor> {
        let hidden = self.forward(ids, Some(lens), caches)?;
        let last = lens.iter().enumerate().map(|(sequence, &len)| hidden.i((sequence, len.saturating_sub(1))));
        self.logits(&Tensor::stack(&last.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

/// Loads the embedding and the head, which is the embedding again if the config ties them. `weights` are at the root of
/// the checkpoint, `inner` at the base model.
fn embedding_and_head(json: &Value, weights: &Weights, inner: &Weights) -> Result<(PackedLinear, PackedLinear)> {
    let table = inner.pp(inner.named(EMBEDDINGS)?);
    if ties_embeddings(json).unwrap_or(weights.first(HEADS).is_none()) {
        let embedding = table.linear(OUTPUTS)?;
        return Ok((embedding.clone(), embedding));
    }
    let head = weights.pp(weights.named(HEADS)?).linear(OUTPUTS)?;
    Ok((table.linear(OUTPUTS)?, head))
}

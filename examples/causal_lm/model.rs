//! A decoder: embedding, blocks of attention and MLP, norm, head.
//!
//! The blocks are those of `common/blocks/`, and its `family.rs` has the differences between families. Names around the
//! blocks and learned positions are those of the checkpoint.
#![allow(dead_code, reason = "each program uses a part")]

#[path = "../common/blocks/mod.rs"]
#[allow(clippy::duplicate_mod, reason = "a program may have an encoder and a decoder")]
mod blocks;

use std::ops::Range;

use candle_attention::{AttentionCacheConfig, AttentionMask, PackedLinear, RopeConfig, RopeScaling};
use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_nn::Embedding;
use serde_json::Value;

use attention::{Attention, Cache, Input};
use blocks::family::{Family, LAYERS, required, size};
pub use blocks::{Blocks, attention, gguf, weights};
use blocks::{Loader, Norm, optional};
use gguf::Gguf;
use weights::{OUTPUTS, Others, Weights, part_of};

/// The names that families have for the base model, its embeddings, its blocks and its last norm, and for the head;
/// the last are llama.cpp's. A checkpoint has one of each.
const BASES: &[&str] = &["model", "transformer", "gpt_neox", "model.decoder", "decoder", "model.language_model"];
const EMBEDDINGS: &[&str] = &["embed_tokens", "wte", "word_embeddings", "embed_in", "token_embd"];
const POSITIONS: &[&str] = &["wpe", "embed_positions", "position_embd"];
const EMBEDDING_NORMS: &[&str] = &["word_embeddings_layernorm", "token_embd_norm"];
const BLOCKS: &[&str] = &["layers", "h", "blocks", "blk"];
const LAST_NORMS: &[&str] = &["norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "output_norm"];
const HEADS: &[&str] = &["lm_head", "embed_out", "output"];

/// The tokens whose embeddings and logits a process has.
struct Vocabulary {
    size: usize,
    own: Range<usize>,
    others: Others,
    is_gguf: bool,
}

impl Vocabulary {
    fn new(size: usize, others: Others, is_gguf: bool) -> Self {
        let own = others.as_ref().map_or(0..size, |others| part_of(others.shard(), size, is_gguf));
        Self { size, own, others, is_gguf }
    }

    /// The logits (.., V) of all processes, from those of this one.
    fn gather(&self, own: Tensor) -> Result<Tensor> {
        let Some(others) = &self.others else { return Ok(own) };
        let shards =
            others.shard().all().map(|shard| part_of(shard, self.size, self.is_gguf).len()).collect::<Vec<_>>();
        let most = shards.iter().copied().max().unwrap_or(0);
        let all = others.gather(&own.pad_with_zeros(D::Minus1, 0, most - self.own.len())?)?;
        let all = all.iter().zip(shards).map(|(logits, len)| logits.narrow(D::Minus1, 0, len));
        Tensor::cat(&all.collect::<Result<Vec<_>>>()?, D::Minus1)
    }

    /// The embeddings of ids (B, T), which are rows of a weight with those of this process's tokens.
    fn embed(&self, weight: &PackedLinear, ids: &Tensor) -> Result<Tensor> {
        let Some(others) = &self.others else { return weight.weight_rows(ids) };
        let (mut own, mut rows) = (Vec::new(), Vec::new());
        for id in ids.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|id| id as usize) {
            if id >= self.size {
                bail!("[causal_lm] token {id} is not one of the vocabulary of {}", self.size)
            }
            own.push(if self.own.contains(&id) { 1f32 } else { 0.0 });
            rows.push(if self.own.contains(&id) { (id - self.own.start) as u32 } else { 0 });
        }
        let xs = weight.weight_rows(&Tensor::from_vec(rows, ids.shape(), ids.device())?)?;
        let own = Tensor::from_vec(own, ids.shape(), ids.device())?.unsqueeze(2)?.to_dtype(xs.dtype())?;
        others.sum(&xs.broadcast_mul(&own)?)
    }
}

/// A causal language model.
pub struct CausalLm {
    vocabulary: Vocabulary,
    embedding: PackedLinear,
    /// Of activations.
    dtype: DType,
    embedding_norm: Option<Norm>,
    /// Learned ones, and the row of position 0.
    positions: Option<Embedding>,
    first_position: usize,
    embedding_scale: f64,
    pub blocks: Blocks,
    norm: Norm,
    head: PackedLinear,
    logit_scale: f64,
    logit_softcap: Option<f64>,
}

impl CausalLm {
    /// From a `config.json` and weights at the checkpoint's root; `loaded` is told of every block.
    pub fn load<'a>(whole: &Value, weights: impl Into<Weights<'a>>, loaded: impl FnMut(usize, usize)) -> Result<Self> {
        // A model that sees as well keeps the text's config apart.
        let json = whole.get("text_config").filter(|text| text.is_object()).unwrap_or(whole);
        let weights = weights.into();
        let gguf = weights.gguf;
        let family = if gguf.is_some() { Family::of(json)?.in_gguf()? } else { Family::of(json)? };
        let number = |key: &str| json[key].as_f64();
        // A base model without a head has no prefix.
        let inner = weights.below(BASES, EMBEDDINGS);
        let (embed, norm) = (inner.named(EMBEDDINGS)?, inner.named(LAST_NORMS)?);
        let head_name = weights.first(HEADS);
        let ties = [whole, json].into_iter().find_map(|json| json["tie_word_embeddings"].as_bool());
        let (dtype, ties) = (weights.dtype(), ties.unwrap_or(head_name.is_none()));
        let head_at = if ties { inner.pp(embed) } else { weights.pp(weights.named(HEADS)?) };
        let words = gguf.map_or_else(|| size(json, "vocab_size"), Gguf::vocabulary).unwrap_or(1);
        let vocabulary = Vocabulary::new(words, weights.processes(), gguf.is_some());
        let head = head_at.linear(OUTPUTS)?;
        let width = head.in_dim();
        let embedding = if ties { head.clone() } else { inner.pp(embed).linear(OUTPUTS)? };
        // The first two of OPT's are padding.
        let first_position = if inner.first(&["embed_positions"]).is_some() { 2 } else { 0 };
        let mut loader = Loader::new("causal_lm", family, json, weights, width);
        let layers = required(json, LAYERS)?;
        let blocks = Blocks::load(&mut loader, layers, &inner, BLOCKS, loaded)?;
        let embedding_scale = if loader.family.scales_embedding {
            // In the dtype of the embeddings, as Gemma rounds it.
            let scale = Tensor::new((width as f64).sqrt(), &Device::Cpu)?.to_dtype(dtype)?;
            scale.to_dtype(DType::F64)?.to_scalar()?
        } else {
            number("embedding_multiplier").unwrap_or(1.0)
        };
        Ok(Self {
            vocabulary,
            embedding,
            dtype,
            embedding_norm: loader.norm(&inner, EMBEDDING_NORMS)?,
            positions: inner.first(POSITIONS).map(|name| inner.table(name)).transpose()?,
            first_position,
            embedding_scale,
            blocks,
            norm: loader.norm_at(&inner, norm)?,
            head,
            logit_scale: match loader.family.logit_scale {
                1.0 => 1.0 / number("logits_scaling").unwrap_or(1.0),
                default => number("logit_scale").unwrap_or(default),
            },
            logit_softcap: number("final_logit_softcapping"),
        })
    }

    /// Returns the rotary configs of the layers that have one.
    fn ropes(&self) -> impl Iterator<Item = &RopeConfig> {
        self.blocks.attentions().filter_map(|attention| attention.rope().map(|(rope, _)| rope))
    }

    /// Returns the first rotary scaling whose frequencies depend on the number of positions, if a layer has one.
    pub fn length_dependent_scaling(&self) -> Option<&RopeScaling> {
        let mut scalings = self.ropes().map(RopeConfig::scaling);
        scalings.find(|scaling| matches!(scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. }))
    }

    /// Returns whether a call that reaches `len` positions rotates by other frequencies than one that reached `earlier`.
    pub fn frequencies_differ(&self, earlier: usize, len: usize) -> bool {
        self.ropes().any(|rope| rope.frequencies_differ(earlier, len))
    }

    /// Returns whether caches of `cached` positions have to be computed again before a call that reaches `len`
    /// positions, which is so where LongRoPE changes its factors. With dynamic scaling cached keys stay as they are:
    /// the frequencies differ in every call, and transformers keeps the keys too.
    pub fn cached_keys_expire(&self, cached: usize, len: usize) -> bool {
        let mut long = self.ropes().filter(|rope| matches!(rope.scaling(), RopeScaling::LongRope { .. }));
        long.any(|rope| rope.frequencies_differ(cached, len))
    }

    pub fn device(&self) -> &Device {
        self.head.device()
    }

    /// A cache for each block: `config` is told the own of each that keeps keys and values.
    pub fn caches(&self, config: impl Fn(AttentionCacheConfig) -> AttentionCacheConfig) -> Result<Vec<Cache>> {
        self.blocks.attentions().map(|attention| attention.cache(&config)).collect()
    }

    /// Token ids (B, T), of which each sequence has `lens` (all T unless given), to hidden states (B, T, E). Positions
    /// go on from what the caches hold.
    pub fn forward(&self, ids: &Tensor, lens: Option<&[usize]>, caches: &mut [Cache]) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let before = caches.first().map(Cache::lens).filter(|lens| !lens.is_empty()).unwrap_or(vec![0; b]);
        let lens = lens.map_or_else(|| vec![t; b], <[usize]>::to_vec);
        let longest = before.iter().zip(&lens).map(|(before, len)| before + len).max();
        let positions: Vec<_> = before.iter().flat_map(|&before| before..before + t).collect();
        let xs = self.embed(ids, &positions, longest.unwrap_or(0))?;
        self.through_blocks(xs, |layer, attention, input| {
            attention.forward(input.with_cache(&mut caches[layer])?.with_valid_lens(&lens))
        })
    }

    /// The embeddings (B, T, E) of ids (B, T), which stand at these positions, B·T, of sequences of at most `longest`;
    /// padding may stand beyond.
    pub fn embed(&self, ids: &Tensor, positions: &[usize], longest: usize) -> Result<Tensor> {
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
        xs + learned.forward(&Tensor::from_vec(rows, ids.shape(), ids.device())?)?
    }

    /// What the attention of a layer gets (B, T, E) for ids (B, T) without a cache; the mask hides padding.
    pub fn attention_input(&self, ids: &Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let xs = self.embed(ids, &(0..b * t).map(|i| i % t).collect::<Vec<_>>(), t)?;
        self.blocks.attention_input(xs, mask, layer)
    }

    /// Embeddings to hidden states (B, T, E), where `attend` gives the output of a layer, by its number, for an input.
    pub fn through_blocks(
        &self,
        xs: Tensor,
        attend: impl FnMut(usize, &Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.norm.forward(&self.blocks.forward(xs, attend)?)
    }

    /// Hidden states (.., E) to logits (.., V) in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let mut logits = self.vocabulary.gather(self.head.forward(hidden)?.to_dtype(DType::F32)?)?;
        if self.logit_scale != 1.0 {
            logits = (logits * self.logit_scale)?;
        }
        match self.logit_softcap {
            Some(softcap) => (logits / softcap)?.tanh()? * softcap,
            None => Ok(logits),
        }
    }

    /// The logits (B, V) that follow the last token of each sequence.
    pub fn next_logits(&self, ids: &Tensor, lens: &[usize], caches: &mut [Cache]) -> Result<Tensor> {
        let hidden = self.forward(ids, Some(lens), caches)?;
        let last = lens.iter().enumerate().map(|(sequence, &len)| hidden.i((sequence, len.saturating_sub(1))));
        self.logits(&Tensor::stack(&last.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

//! A decoder: embedding, blocks of attention and MLP, norm, head.
//!
//! Attention is `hf::load_attention` or `hf::load_latent_attention`: projections, rotary positions, norms of queries
//! and keys, windows, grouped heads and the cache are the layer's. What is left of a model is here, and [`Family`] has
//! the differences between families. Biases are those that the checkpoint has.

mod block;
mod experts;
mod family;
mod mlp;
mod mxfp4;

use candle_attention::{AttentionCache, AttentionCacheConfig, MultiHeadAttention, PackedLinear, RopeScaling};
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Embedding, VarBuilder};
use serde_json::Value;

use block::{Block, Loader, Norm, optional};
use family::Family;
use mlp::load_linear;

/// A GGUF file, whose weights keep their types.
pub trait GgufWeights {
    fn attention(&self, layer: usize) -> Result<MultiHeadAttention>;

    fn linear(&self, name: &str) -> Result<PackedLinear>;
}

/// The embeddings of tokens.
enum TokenEmbedding {
    Table(Embedding),
    /// The rows of a weight: the head's, or one of a file that keeps its type.
    Weight(PackedLinear),
}

impl Module for TokenEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            Self::Table(table) => table.forward(ids),
            Self::Weight(weight) => weight.weight_rows(ids),
        }
    }
}

/// A causal language model.
pub struct CausalLm {
    embedding: TokenEmbedding,
    /// Of activations.
    dtype: DType,
    embedding_norm: Option<Norm>,
    /// Learned positions, and the row of position 0.
    positions: Option<(Embedding, usize)>,
    embedding_scale: f64,
    blocks: Vec<Block>,
    norm: Norm,
    head: PackedLinear,
    logit_scale: f64,
    logit_softcap: Option<f64>,
}

impl CausalLm {
    /// From a `config.json` and a builder at the checkpoint's root; `loaded` is told of every block. The builder of a
    /// GGUF file, which is `gguf` then, has llama.cpp's names.
    pub fn load(
        json: &Value,
        vb: VarBuilder,
        gguf: Option<&dyn GgufWeights>,
        mut loaded: impl FnMut(usize, usize),
    ) -> Result<Self> {
        // A model that sees as well keeps the text's config apart.
        let json = json.get("text_config").filter(|text| text.is_object()).unwrap_or(json);
        let family = if gguf.is_some() { Family::of(json)?.in_gguf()? } else { Family::of(json)? };
        let Some(layers) = ["num_hidden_layers", "n_layer", "n_layers"].iter().find_map(|key| size(json, key)) else {
            bail!("[causal_lm] config.json has no number of layers")
        };
        let number = |key: &str| json[key].as_f64();
        let eps = ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"];
        let eps = eps.iter().find_map(|key| number(key)).unwrap_or(family.eps);
        let [base, embed, block, norm] = family.names;
        // A base model without a head has no prefix; OPT's keeps its second part.
        let bare = base.split_once('.').map_or(vb.clone(), |(_, rest)| vb.pp(rest));
        let inner = [vb.pp(base), bare].into_iter().find(|vb| vb.pp(embed).contains_tensor("weight"));
        let Some(inner) = inner else { bail!("[causal_lm] the checkpoint has no {base}.{embed}.weight") };

        let (dtype, ties) = (vb.dtype(), json["tie_word_embeddings"].as_bool().unwrap_or(family.ties_embedding));
        let head = load_linear(gguf, &if ties { inner.pp(embed) } else { vb.pp(family.head) })?;
        let width = head.in_dim();
        let table =
            |name: &str| Ok::<_, candle_core::Error>(Embedding::new(inner.pp(name).get_unchecked("weight")?, width));
        let embedding = match gguf {
            _ if ties => TokenEmbedding::Weight(head.clone()),
            Some(_) => TokenEmbedding::Weight(load_linear(gguf, &inner.pp(embed))?),
            None => TokenEmbedding::Table(table(embed)?),
        };
        let positions = match family.positions {
            Some((name, first)) => Some((table(name)?, first)),
            None => None,
        };
        let mut loader = Loader { family, json, vb, gguf, tables: Vec::new(), width, eps };
        let mut blocks = Vec::with_capacity(layers);
        for layer in 0..layers {
            blocks.push(loader.block(layer, inner.pp(block).pp(layer))?);
            loaded(layer + 1, layers);
        }
        let embedding_scale = if loader.family.scales_embedding {
            // In the dtype of the embeddings, as Gemma rounds it.
            let scale = Tensor::new((width as f64).sqrt(), &Device::Cpu)?.to_dtype(dtype)?;
            scale.to_dtype(DType::F64)?.to_scalar()?
        } else {
            number("embedding_multiplier").unwrap_or(1.0)
        };
        Ok(Self {
            embedding,
            dtype,
            embedding_norm: loader.family.embedding_norm.map(|name| loader.norm(inner.pp(name))).transpose()?,
            positions,
            embedding_scale,
            blocks,
            norm: loader.norm(inner.pp(norm))?,
            head,
            logit_scale: match loader.family.logit_scale {
                1.0 => 1.0 / number("logits_scaling").unwrap_or(1.0),
                default => number("logit_scale").unwrap_or(default),
            },
            logit_softcap: number("final_logit_softcapping"),
        })
    }

    /// The original context of a scaling whose frequencies change beyond it, and the scaling's name.
    pub fn original_context(&self) -> Option<(usize, &'static str)> {
        self.blocks.iter().find_map(|block| match *block.attention.rope()?.0.scaling() {
            RopeScaling::Dynamic { original_context, .. } => Some((original_context, "dynamic")),
            RopeScaling::LongRope { original_context, .. } => Some((original_context, "longrope")),
            _ => None,
        })
    }

    /// A cache for each block: `config` is told the block's own.
    pub fn caches(&self, config: impl Fn(AttentionCacheConfig) -> AttentionCacheConfig) -> Result<Vec<AttentionCache>> {
        self.blocks.iter().map(|block| AttentionCache::new(&config(block.attention.cache_config()))).collect()
    }

    /// Token ids (B, T), of which each sequence has `lens` (all T unless given), to hidden states (B, T, E). Positions
    /// go on from what the caches hold.
    pub fn forward(&self, ids: &Tensor, lens: Option<&[usize]>, caches: &mut [AttentionCache]) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let mut xs = self.embedding.forward(ids)?.to_dtype(self.dtype)?;
        if self.embedding_scale != 1.0 {
            xs = (xs * self.embedding_scale)?;
        }
        xs = optional(&self.embedding_norm, &xs)?;
        if let Some((positions, first)) = &self.positions {
            let before = caches.first().map(AttentionCache::lens).filter(|lens| !lens.is_empty()).unwrap_or(vec![0; b]);
            let last = positions.embeddings().dim(0)?.saturating_sub(1 + first);
            let at = before
                .iter()
                .flat_map(|&before| (before..before + t).map(|position| (first + position.min(last)) as u32));
            let longest = before.iter().enumerate().map(|(i, before)| before + lens.map_or(t, |lens| lens[i])).max();
            if longest > Some(last + 1) {
                bail!("[causal_lm] {} positions are more than the model's {}", longest.unwrap_or(0), last + 1)
            }
            let at = Tensor::from_vec(at.collect::<Vec<_>>(), (b, t), ids.device())?;
            xs = (xs + positions.forward(&at)?)?;
        }
        for (block, cache) in self.blocks.iter().zip(caches) {
            xs = block.forward(&xs, lens, cache)?;
        }
        self.norm.forward(&xs)
    }

    /// Hidden states (.., E) to logits (.., V) in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let mut logits = self.head.forward(hidden)?.to_dtype(DType::F32)?;
        if self.logit_scale != 1.0 {
            logits = (logits * self.logit_scale)?;
        }
        match self.logit_softcap {
            Some(softcap) => (logits / softcap)?.tanh()? * softcap,
            None => Ok(logits),
        }
    }

    /// The logits (B, V) that follow the last token of each sequence.
    pub fn next_logits(&self, ids: &Tensor, lens: &[usize], caches: &mut [AttentionCache]) -> Result<Tensor> {
        let hidden = self.forward(ids, Some(lens), caches)?;
        let last = lens.iter().enumerate().map(|(sequence, &len)| hidden.i((sequence, len.saturating_sub(1))));
        self.logits(&Tensor::stack(&last.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

fn size(json: &Value, key: &str) -> Option<usize> {
    json[key].as_u64().and_then(|size| usize::try_from(size).ok())
}

fn required(json: &Value, key: &str) -> Result<usize> {
    let Some(size) = size(json, key) else { bail!("[causal_lm] config.json has no size {key}") };
    Ok(size)
}

//! Encoders of BERT's family on this crate's attention layer, in one file to copy.
//!
//! Attention is `hf::load_attention`, whatever the architecture: its names, biases, rotary positions and bands come
//! from `config.json`. What remains of a model is its embeddings, its norms and its MLP, and that is what stands here.
#![allow(dead_code, reason = "each program uses a part")]

use candle_attention::text::EmbeddingLayer;
use candle_attention::{
    AttentionInput, AttentionMask, LayerNorm, MultiHeadAttention, PackedGatedLinear, PackedLinear, PackedSequences, hf,
    layer_norm, packed_linear_b,
};
use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{Activation, Embedding, LayerNormConfig, VarBuilder, seq};
use serde_json::Value;

/// Where architectures differ outside of attention: the names of their parts, and what they do without.
#[derive(Clone, Copy)]
struct Family {
    /// What may stand before all names: that of the model below a head, or nothing.
    prefixes: &'static [&'static str],
    words: &'static str,
    positions: Option<&'static str>,
    /// Learned positions are counted from the number after the padding token's id.
    counts_from_padding: bool,
    segments: Option<&'static str>,
    embedding_norm: &'static str,
    blocks: &'static str,
    attention_norm: &'static str,
    mlp: MlpNames,
    mlp_norm: &'static str,
    /// Of the norm behind all blocks. Then the norms of a block stand before attention and MLP, else behind the
    /// residuals.
    last_norm: Option<&'static str>,
    has_norm_bias: bool,
    has_mlp_bias: bool,
}

#[derive(Clone, Copy)]
enum MlpNames {
    /// `down(activation(up(x)))`.
    Plain { up: &'static str, down: &'static str },
    /// `down(activation(gate(x)) · up(x))`.
    Gated { gate: &'static str, up: &'static str, down: &'static str },
    /// The same, the rows of the gate and those of `up` as one weight.
    Joint { gate_up: &'static str, down: &'static str },
}

const BERT: Family = Family {
    prefixes: &["bert.", "roberta.", ""],
    words: "embeddings.word_embeddings",
    positions: Some("embeddings.position_embeddings"),
    counts_from_padding: false,
    segments: Some("embeddings.token_type_embeddings"),
    embedding_norm: "embeddings.LayerNorm",
    blocks: "encoder.layer",
    attention_norm: "attention.output.LayerNorm",
    mlp: MlpNames::Plain { up: "intermediate.dense", down: "output.dense" },
    mlp_norm: "output.LayerNorm",
    last_norm: None,
    has_norm_bias: true,
    has_mlp_bias: true,
};

const DISTILBERT: Family = Family {
    prefixes: &["distilbert.", ""],
    segments: None,
    blocks: "transformer.layer",
    attention_norm: "sa_layer_norm",
    mlp: MlpNames::Plain { up: "ffn.lin1", down: "ffn.lin2" },
    mlp_norm: "output_layer_norm",
    ..BERT
};

const MPNET: Family = Family {
    prefixes: &["mpnet.", ""],
    counts_from_padding: true,
    segments: None,
    attention_norm: "attention.LayerNorm",
    ..BERT
};

/// By the names of transformers' modules.
const NOMIC_BERT: Family = Family {
    prefixes: &["nomic_bert.", "bert.", ""],
    positions: None,
    blocks: "layers",
    attention_norm: "post_attention_layernorm",
    mlp: MlpNames::Gated { gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj" },
    mlp_norm: "post_mlp_layernorm",
    has_mlp_bias: false,
    ..BERT
};

/// As it was published, and as transformers saves it.
const PUBLISHED_NOMIC_BERT: Family = Family {
    embedding_norm: "emb_ln",
    blocks: "encoder.layers",
    attention_norm: "norm1",
    mlp: MlpNames::Gated { gate: "mlp.fc12", up: "mlp.fc11", down: "mlp.fc2" },
    mlp_norm: "norm2",
    ..NOMIC_BERT
};

const MODERNBERT: Family = Family {
    prefixes: &["model.", ""],
    words: "embeddings.tok_embeddings",
    positions: None,
    segments: None,
    embedding_norm: "embeddings.norm",
    blocks: "layers",
    attention_norm: "attn_norm",
    mlp: MlpNames::Joint { gate_up: "mlp.Wi", down: "mlp.Wo" },
    mlp_norm: "mlp_norm",
    last_norm: Some("final_norm"),
    ..BERT
};

impl Family {
    fn of(json: &Value) -> Result<Vec<Self>> {
        let flag = |key: &str| json[key].as_bool().unwrap_or(false);
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "bert" => vec![BERT],
            "roberta" | "xlm-roberta" => vec![Self { counts_from_padding: true, ..BERT }],
            "mpnet" => vec![MPNET],
            "distilbert" => vec![DISTILBERT],
            "nomic_bert" => {
                let other = ["prenorm", "use_rms_norm", "parallel_block", "mlp_fc1_bias", "mlp_fc2_bias"];
                if let Some(key) = other.into_iter().find(|key| flag(key)) {
                    bail!("[encoder] {key} is true, which is not supported, expected false")
                }
                vec![NOMIC_BERT, PUBLISHED_NOMIC_BERT]
            }
            "modernbert" => {
                vec![Self { has_norm_bias: flag("norm_bias"), has_mlp_bias: flag("mlp_bias"), ..MODERNBERT }]
            }
            other => {
                bail!(
                    "[encoder] model_type is {other:?}, expected one of bert, distilbert, modernbert, mpnet, nomic_bert, \
                     roberta, xlm-roberta"
                )
            }
        })
    }

    /// The family and the builder whose names the checkpoint has.
    fn find<'a>(json: &Value, vb: &VarBuilder<'a>) -> Result<(Self, VarBuilder<'a>)> {
        let families = Self::of(json)?;
        let mut looked = Vec::new();
        for family in &families {
            for prefix in family.prefixes {
                let vb = if prefix.is_empty() { vb.clone() } else { vb.pp(prefix.trim_end_matches('.')) };
                // The norm too, since it tells spellings apart; old checkpoints call its weight gamma.
                let norm = ["weight", "gamma"].map(|name| format!("{}.{name}", family.embedding_norm));
                let words = format!("{}.weight", family.words);
                if vb.contains_tensor(&words) && norm.iter().any(|name| vb.contains_tensor(name)) {
                    return Ok((*family, vb));
                }
                looked.push(format!("{prefix}{words} with {prefix}{}", norm[0]));
            }
        }
        bail!("[encoder] no embeddings in the checkpoint, looked for {}", looked.join(", "))
    }
}

struct Mlp {
    /// `activation(up(x))`, or `activation(gate(x)) · up(x)`.
    up: Box<dyn Module>,
    down: PackedLinear,
}

impl Mlp {
    fn load(family: &Family, json: &Value, width: usize, vb: &VarBuilder) -> Result<Self> {
        let inner = size(json, &["intermediate_size", "hidden_dim", "n_inner"])?;
        let names = ["hidden_act", "hidden_activation", "activation", "activation_function"];
        let name = names.iter().find_map(|key| json[*key].as_str()).unwrap_or("gelu");
        let is_gated = !matches!(family.mlp, MlpNames::Plain { .. });
        let kind = if is_gated && name == "swiglu" { "silu" } else { name };
        let Ok(activation) = serde_json::from_value::<Activation>(kind.into()) else {
            bail!("[encoder] the activation {name:?} is not one of Candle's")
        };
        let linear = |name: &str, (i, o): (usize, usize)| packed_linear_b(i, o, family.has_mlp_bias, vb.pp(name));
        let gated = |gate, up| Ok::<_, candle_core::Error>(Box::new(PackedGatedLinear::new(gate, up, activation)?));
        let (up, down): (Box<dyn Module>, _) = match family.mlp {
            MlpNames::Plain { up, down } => {
                let up = linear(up, (width, inner))?;
                match up.clone().with_activation(activation) {
                    Ok(up) => (Box::new(up), down),
                    Err(_) => (Box::new(seq().add(up).add(activation)), down),
                }
            }
            MlpNames::Joint { gate_up, down } => {
                let vb = vb.pp(gate_up);
                let weight = vb.get((2 * inner, width), "weight")?;
                let bias = family.has_mlp_bias.then(|| vb.get(2 * inner, "bias")).transpose()?;
                let half = |start| {
                    let bias = bias.as_ref().map(|bias| bias.narrow(0, start, inner)).transpose()?;
                    PackedLinear::new(&weight.narrow(0, start, inner)?, bias.as_ref())
                };
                (gated(half(0)?, half(inner)?)?, down)
            }
            MlpNames::Gated { gate, up, down } => {
                (gated(linear(gate, (width, inner))?, linear(up, (width, inner))?)?, down)
            }
        };
        Ok(Self { up, down: linear(down, (inner, width))? })
    }

    fn forward_with_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.down.forward_with_residual(&self.up.forward(xs)?, residual)
    }
}

struct Block {
    attention: MultiHeadAttention,
    /// ModernBERT's first block has none: the embeddings' norm stands right before it.
    attention_norm: Option<LayerNorm>,
    mlp: Mlp,
    mlp_norm: LayerNorm,
    norms_first: bool,
}

impl Block {
    /// What attention gets.
    fn attention_input(&self, xs: &Tensor) -> Result<Tensor> {
        if self.norms_first { optional(&self.attention_norm, xs) } else { Ok(xs.clone()) }
    }

    /// Attention is `attend` of the layer and its input.
    fn forward(
        &self,
        xs: &Tensor,
        attend: impl FnOnce(&MultiHeadAttention, AttentionInput) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let input = self.attention_input(xs)?;
        let xs = attend(&self.attention, AttentionInput::new(&input).with_residual(xs))?;
        if self.norms_first {
            return self.mlp.forward_with_residual(&self.mlp_norm.forward(&xs)?, &xs);
        }
        let xs = optional(&self.attention_norm, &xs)?;
        self.mlp_norm.forward(&self.mlp.forward_with_residual(&xs, &xs)?)
    }
}

/// A table of learned positions.
struct Positions {
    table: Embedding,
    /// The padding token, where positions are counted from the number after it and only over other tokens.
    padding: Option<u32>,
}

impl Positions {
    fn most(&self) -> Result<usize> {
        Ok(self.table.embeddings().dim(0)?.saturating_sub(self.padding.map_or(0, |padding| padding as usize + 1)))
    }

    /// Of the tokens of each text, one text after the other: (total, E).
    fn of(&self, texts: &[&[u32]]) -> Result<Tensor> {
        let mut positions = Vec::with_capacity(texts.iter().map(|ids| ids.len()).sum());
        for ids in texts {
            if ids.len() > self.most()? {
                bail!("[encoder] {} tokens are more than the model's {} positions", ids.len(), self.most()?)
            }
            let Some(padding) = self.padding else {
                positions.extend(0..ids.len() as u32);
                continue;
            };
            let mut last = padding;
            positions.extend(ids.iter().map(|&id| {
                last += u32::from(id != padding);
                if id == padding { padding } else { last }
            }));
        }
        self.table.forward(&Tensor::new(positions, self.table.embeddings().device())?)
    }
}

/// An encoder: token ids to a hidden state of each.
pub struct Encoder {
    /// Which refuses ids that it has no row for.
    words: EmbeddingLayer,
    positions: Option<Positions>,
    /// Of the texts that one input may have: a token of a single text is in segment 0.
    segments: Option<Embedding>,
    embedding_norm: LayerNorm,
    blocks: Vec<Block>,
    last_norm: Option<LayerNorm>,
    max_tokens: Option<usize>,
}

impl Encoder {
    /// From a `config.json` and a builder at the checkpoint's root; `loaded` is told of every block.
    ///
    /// # Errors
    /// For an architecture that is not here, a field or an activation that is not supported, and a tensor that is
    /// missing.
    pub fn load(json: &Value, vb: VarBuilder, mut loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let (family, inner) = Family::find(json, &vb)?;
        let width = size(json, &["hidden_size", "dim", "n_embd"])?;
        let layers = size(json, &["num_hidden_layers", "n_layers", "n_layer"])?;
        let number = |key: &&str| json[*key].as_f64();
        let eps = ["layer_norm_eps", "norm_eps", "layer_norm_epsilon"].iter().find_map(number);
        let config = LayerNormConfig {
            eps: eps.unwrap_or(if family.last_norm.is_some() { 1e-5 } else { 1e-12 }),
            affine: family.has_norm_bias,
            ..LayerNormConfig::default()
        };
        let norm = |vb: VarBuilder| layer_norm(width, config, vb);
        let table = |name: &str, keys: &[&str]| {
            Ok::<_, candle_core::Error>(Embedding::new(
                inner.pp(name).get((size(json, keys)?, width), "weight")?,
                width,
            ))
        };
        let most = ["max_position_embeddings", "n_positions"];
        let positions = match family.positions {
            Some(name) => {
                let padding = family.counts_from_padding.then(|| json["pad_token_id"].as_u64().unwrap_or(1));
                let Ok(padding) = padding.map(u32::try_from).transpose() else {
                    bail!("[encoder] pad_token_id {} is no token id", json["pad_token_id"])
                };
                Some(Positions { table: table(name, &most)?, padding })
            }
            None => None,
        };
        let segments = match family.segments {
            Some(name) if json["type_vocab_size"] != 0 => Some(table(name, &["type_vocab_size"])?),
            _ => None,
        };
        let bias = match hf::attention_config(json, 0)?.relative_bias() {
            Some(_) => Some(hf::load_relative_bias(json, vb.clone())?),
            None => None,
        };
        let mut blocks = Vec::with_capacity(layers);
        for layer in 0..layers {
            let at = inner.pp(family.blocks).pp(layer);
            let is_bare = family.last_norm.is_some() && layer == 0;
            let attention = hf::load_attention(json, layer, vb.clone())?;
            blocks.push(Block {
                attention: match &bias {
                    Some(bias) => attention.with_relative_bias(bias.clone())?,
                    None => attention,
                },
                attention_norm: if is_bare { None } else { Some(norm(at.pp(family.attention_norm))?) },
                mlp: Mlp::load(&family, json, width, &at)?,
                mlp_norm: norm(at.pp(family.mlp_norm))?,
                norms_first: family.last_norm.is_some(),
            });
            loaded(layer + 1, layers);
        }
        let max_tokens = match &positions {
            Some(positions) => Some(positions.most()?),
            None => size(json, &most).ok(),
        };
        Ok(Self {
            words: EmbeddingLayer::from_embedding(table(family.words, &["vocab_size"])?)?,
            positions,
            segments,
            embedding_norm: norm(inner.pp(family.embedding_norm))?,
            blocks,
            last_norm: family.last_norm.map(|name| norm(inner.pp(name))).transpose()?,
            max_tokens,
        })
    }

    /// Whether the model of a `config.json` is one of these.
    pub fn is_one(json: &Value) -> bool {
        Family::of(json).is_ok()
    }

    /// The attention of a layer.
    pub fn attention(&self, layer: usize) -> Option<&MultiHeadAttention> {
        self.blocks.get(layer).map(|block| &block.attention)
    }

    /// What the attention of a layer gets (B, T, E) for ids (B, T); the mask hides padding.
    pub fn attention_input(&self, ids: &Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        let texts = ids.to_vec2::<u32>()?;
        let xs = self.embed(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>(), &[])?;
        let mut xs = xs.reshape((ids.dim(0)?, ids.dim(1)?, ()))?;
        for block in &self.blocks[..layer] {
            xs = block.forward(&xs, |attention, input| attention.forward_with(input.with_mask(mask)))?;
        }
        self.blocks[layer].attention_input(&xs)
    }

    /// The number of blocks, and the width E.
    pub fn size(&self) -> Result<(usize, usize)> {
        Ok((self.blocks.len(), self.words.embeddings().dim(1)?))
    }

    /// The most tokens of a text that the config has positions for.
    pub fn max_tokens(&self) -> Option<usize> {
        self.max_tokens
    }

    /// The tokens of each text to their hidden states (total, E), one text after the other: there is no padding.
    pub fn forward(&self, texts: &[&[u32]]) -> Result<Tensor> {
        self.forward_in_segments(texts, &[])
    }

    /// [`forward`](Self::forward) of texts whose tokens are in these segments (total,), or all in the first if empty.
    pub fn forward_in_segments(&self, texts: &[&[u32]], segments: &[u32]) -> Result<Tensor> {
        self.through_blocks(texts, segments, |attention, input| attention.forward_with(input))
    }

    /// The same, where `attend` gives the output of a layer for an input.
    pub fn through_blocks(
        &self,
        texts: &[&[u32]],
        segments: &[u32],
        mut attend: impl FnMut(&MultiHeadAttention, AttentionInput) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let lens: Vec<_> = texts.iter().map(|ids| ids.len()).collect();
        let sequences = PackedSequences::from_lens(&lens, &lens)?;
        let mut xs = self.embed(texts, segments)?;
        for block in &self.blocks {
            xs = block.forward(&xs, |attention, input| attend(attention, input.with_packed(&sequences)))?;
        }
        optional(&self.last_norm, &xs)
    }

    /// The input (total, E) of the first block.
    fn embed(&self, texts: &[&[u32]], segments: &[u32]) -> Result<Tensor> {
        let mut xs = self.words.forward(&Tensor::new(texts.concat(), self.words.embeddings().device())?)?;
        if let Some(positions) = &self.positions {
            xs = (xs + positions.of(texts)?)?;
        }
        if let Some(table) = &self.segments {
            let (vectors, count) = (table.embeddings(), table.embeddings().dim(0)?);
            if let Some(other) = segments.iter().find(|&&segment| segment as usize >= count) {
                bail!("[encoder] a token is in segment {other}, expected one of {count}")
            }
            xs = match segments.iter().all(|&segment| segment == 0) {
                true => xs.broadcast_add(&vectors.get(0)?)?,
                false => (xs + table.forward(&Tensor::new(segments, vectors.device())?)?)?,
            };
        }
        self.embedding_norm.forward(&xs)
    }
}

fn optional(norm: &Option<LayerNorm>, xs: &Tensor) -> Result<Tensor> {
    norm.as_ref().map_or_else(|| Ok(xs.clone()), |norm| norm.forward(xs))
}

/// The first of the fields that is a number above 0.
fn size(json: &Value, keys: &[&str]) -> Result<usize> {
    let size = keys.iter().find_map(|key| json[*key].as_u64()).and_then(|size| usize::try_from(size).ok());
    match size {
        Some(size) if size > 0 => Ok(size),
        _ => bail!("[encoder] config.json has no {}, or it is no number above 0", keys.join(" or ")),
    }
}

//! Encoders of BERT's family on this crate's attention layer: embeddings, blocks of attention and MLP, norms.
//!
//! The blocks are those of `common/blocks/`. What remains of a model is its embeddings, and that is what stands here.
#![allow(dead_code, reason = "each program uses a part")]

#[path = "../common/blocks/mod.rs"]
#[allow(clippy::duplicate_mod, reason = "a program may have an encoder and a decoder")]
mod blocks;

use candle_attention::text::EmbeddingLayer;
use candle_attention::{AttentionMask, PackedSequences};
use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{Embedding, VarBuilder, embedding};
use serde_json::Value;

use blocks::attention::{Attention, Input};
use blocks::family::{Family, LLAMA, LLAMA_MLP, MlpKind, NormKind};
use blocks::weights::Weights;
use blocks::{Blocks, Loader, Norm, optional};

/// Where architectures differ: the names of their parts, and what they do without.
#[derive(Clone, Copy)]
struct Architecture {
    /// What may stand before all names: that of the model below a head, or nothing.
    prefixes: &'static [&'static str],
    words: &'static str,
    positions: Option<&'static str>,
    /// Learned positions are counted from the number after the padding token's id.
    counts_from_padding: bool,
    segments: Option<&'static str>,
    embedding_norm: &'static str,
    blocks: &'static str,
    block: Family,
    /// Of the norm behind all blocks.
    last_norm: Option<&'static str>,
}

const BERT: Architecture = Architecture {
    prefixes: &["bert.", "roberta.", ""],
    words: "embeddings.word_embeddings",
    positions: Some("embeddings.position_embeddings"),
    counts_from_padding: false,
    segments: Some("embeddings.token_type_embeddings"),
    embedding_norm: "embeddings.LayerNorm",
    blocks: "encoder.layer",
    block: Family {
        norms: [&[], &["attention.output.LayerNorm"], &[], &["output.LayerNorm"]],
        behind_residuals: true,
        norm: NormKind::Layer(1e-12),
        needs_biases: true,
        mlp: MlpKind::Plain(["intermediate.dense", "output.dense"]),
        activation: "gelu",
        ..LLAMA
    },
    last_norm: None,
};

impl Architecture {
    /// Those that a `config.json` may mean: two for one whose checkpoints have two spellings.
    fn of(json: &Value) -> Result<Vec<Self>> {
        let flag = |key: &str| json[key].as_bool().unwrap_or(false);
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "bert" => vec![BERT],
            "roberta" | "xlm-roberta" => vec![Self { counts_from_padding: true, ..BERT }],
            "mpnet" => vec![Self {
                prefixes: &["mpnet.", ""],
                counts_from_padding: true,
                segments: None,
                block: Family { norms: [&[], &["attention.LayerNorm"], &[], &["output.LayerNorm"]], ..BERT.block },
                ..BERT
            }],
            "distilbert" => vec![Self {
                prefixes: &["distilbert.", ""],
                segments: None,
                blocks: "transformer.layer",
                block: Family {
                    norms: [&[], &["sa_layer_norm"], &[], &["output_layer_norm"]],
                    mlp: MlpKind::Plain(["ffn.lin1", "ffn.lin2"]),
                    ..BERT.block
                },
                ..BERT
            }],
            "nomic_bert" => {
                let other = ["prenorm", "use_rms_norm", "parallel_block", "mlp_fc1_bias", "mlp_fc2_bias"];
                if let Some(key) = other.into_iter().find(|key| flag(key)) {
                    bail!("[encoder] {key} is true, which is not supported, expected false")
                }
                let modules = Self {
                    prefixes: &["nomic_bert.", "bert.", ""],
                    positions: None,
                    blocks: "layers",
                    block: Family {
                        norms: [&[], &["post_attention_layernorm"], &[], &["post_mlp_layernorm"]],
                        mlp: MlpKind::Gated("mlp", LLAMA_MLP),
                        ..BERT.block
                    },
                    ..BERT
                };
                let published = Self {
                    embedding_norm: "emb_ln",
                    blocks: "encoder.layers",
                    block: Family {
                        norms: [&[], &["norm1"], &[], &["norm2"]],
                        mlp: MlpKind::Gated("mlp", ["fc12", "fc11", "fc2"]),
                        ..BERT.block
                    },
                    ..modules
                };
                vec![modules, published]
            }
            "modernbert" => vec![Self {
                prefixes: &["model.", ""],
                words: "embeddings.tok_embeddings",
                positions: None,
                segments: None,
                embedding_norm: "embeddings.norm",
                blocks: "layers",
                block: Family {
                    norms: [&["attn_norm"], &[], &["mlp_norm"], &[]],
                    behind_residuals: false,
                    // The embeddings' norm stands right before it.
                    first_attention_norm: false,
                    norm: NormKind::Layer(1e-5),
                    needs_biases: false,
                    mlp: MlpKind::Gated("mlp", ["Wi", "Wi", "Wo"]),
                    ..BERT.block
                },
                last_norm: Some("final_norm"),
                ..BERT
            }],
            other => {
                bail!(
                    "[encoder] model_type is {other:?}, expected one of bert, distilbert, modernbert, mpnet, nomic_bert, \
                     roberta, xlm-roberta"
                )
            }
        })
    }

    /// The architecture and the weights whose names the checkpoint has.
    fn find<'a>(json: &Value, weights: &Weights<'a>) -> Result<(Self, Weights<'a>)> {
        let mut looked = Vec::new();
        for architecture in Self::of(json)? {
            for prefix in architecture.prefixes {
                let weights = weights.pp(prefix.trim_end_matches('.'));
                // The norm too, since it tells spellings apart; old checkpoints call its weight gamma.
                let norm = ["weight", "gamma"].map(|name| format!("{}.{name}", architecture.embedding_norm));
                let words = format!("{}.weight", architecture.words);
                if weights.contains_tensor(&words) && norm.iter().any(|name| weights.contains_tensor(name)) {
                    return Ok((architecture, weights));
                }
                looked.push(format!("{prefix}{words} with {prefix}{}", norm[0]));
            }
        }
        bail!("[encoder] no embeddings in the checkpoint, looked for {}", looked.join(", "))
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
    embedding_norm: Norm,
    pub blocks: Blocks,
    last_norm: Option<Norm>,
    max_tokens: Option<usize>,
}

impl Encoder {
    /// From a `config.json` and a builder at the checkpoint's root; `loaded` is told of every block.
    ///
    /// # Errors
    /// For an architecture that is not here, a field or an activation that is not supported, and a tensor that is
    /// missing.
    pub fn load(json: &Value, vb: VarBuilder, loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let weights = Weights::from(vb);
        let (own, inner) = Architecture::find(json, &weights)?;
        let width = size(json, &["hidden_size", "dim", "n_embd"])?;
        let mut loader = Loader::new("encoder", own.block, json, weights, width);
        loader.inner_width = Some(size(json, &["intermediate_size", "hidden_dim", "n_inner"])?);
        let layers = size(json, &["num_hidden_layers", "n_layers", "n_layer"])?;
        let blocks = Blocks::load(&mut loader, layers, &inner.pp(own.blocks), loaded)?;
        let norm = |name: &str| loader.norm(VarBuilder::pp(&inner, name));
        let table = |name: &str, keys: &[&str]| embedding(size(json, keys)?, width, VarBuilder::pp(&inner, name));
        let most = ["max_position_embeddings", "n_positions"];
        let positions = match own.positions {
            Some(name) => {
                let padding = own.counts_from_padding.then(|| json["pad_token_id"].as_u64().unwrap_or(1));
                let Ok(padding) = padding.map(u32::try_from).transpose() else {
                    bail!("[encoder] pad_token_id {} is no token id", json["pad_token_id"])
                };
                Some(Positions { table: table(name, &most)?, padding })
            }
            None => None,
        };
        let max_tokens = match &positions {
            Some(positions) => Some(positions.most()?),
            None => size(json, &most).ok(),
        };
        let segments = match own.segments {
            Some(name) if json["type_vocab_size"] != 0 => Some(table(name, &["type_vocab_size"])?),
            _ => None,
        };
        Ok(Self {
            words: EmbeddingLayer::from_embedding(table(own.words, &["vocab_size"])?)?,
            positions,
            segments,
            embedding_norm: norm(own.embedding_norm)?,
            last_norm: own.last_norm.map(norm).transpose()?,
            blocks,
            max_tokens,
        })
    }

    /// Whether the model of a `config.json` is one of these.
    pub fn is_one(json: &Value) -> bool {
        Architecture::of(json).is_ok()
    }

    /// What the attention of a layer gets (B, T, E) for ids (B, T); the mask hides padding.
    pub fn attention_input(&self, ids: &Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        let texts = ids.to_vec2::<u32>()?;
        let xs = self.embed(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>(), &[])?;
        self.blocks.attention_input(xs.reshape((ids.dim(0)?, ids.dim(1)?, ()))?, mask, layer)
    }

    /// The number of blocks, and the width E.
    pub fn size(&self) -> Result<(usize, usize)> {
        Ok((self.blocks.attentions().count(), self.words.embeddings().dim(1)?))
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
        self.through_blocks(texts, segments, |attention, input| attention.forward(input))
    }

    /// The same, where `attend` gives the output of a layer for an input.
    pub fn through_blocks(
        &self,
        texts: &[&[u32]],
        segments: &[u32],
        mut attend: impl FnMut(&Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let lens: Vec<_> = texts.iter().map(|ids| ids.len()).collect();
        let sequences = PackedSequences::from_lens(&lens, &lens)?;
        let xs = self.blocks.forward(self.embed(texts, segments)?, |_, attention, input| {
            attend(attention, Input::Softmax(input.softmax()?.with_packed(&sequences)))
        })?;
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

/// The first of the fields that is a number above 0.
fn size(json: &Value, keys: &[&str]) -> Result<usize> {
    let size = keys.iter().find_map(|key| json[*key].as_u64()).and_then(|size| usize::try_from(size).ok());
    match size {
        Some(size) if size > 0 => Ok(size),
        _ => bail!("[encoder] config.json has no {}, or it is no number above 0", keys.join(" or ")),
    }
}

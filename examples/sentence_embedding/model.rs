//! Encoders of texts on this crate's attention layer: embeddings, blocks of attention and MLP, norms. They are BERT's
//! family, and decoders without their heads, whose hidden states are the output.
//!
//! The blocks are in `common/blocks/`; this file adds the embeddings.
#![allow(dead_code, reason = "each program uses a part")]

#[path = "../common/blocks/mod.rs"]
#[allow(clippy::duplicate_mod, reason = "a program may have an encoder and a decoder")]
mod blocks;
#[path = "../common/published.rs"]
#[allow(clippy::duplicate_mod, reason = "as the blocks")]
mod published;

use candle_attention::text::EmbeddingLayer;
use candle_attention::{AttentionMask, PackedSequences};
use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{Embedding, VarBuilder};
use serde_json::Value;

use blocks::attention::{Attention, Input};
use blocks::{Blocks, Loader, Norm, optional};
pub use blocks::{family, weights};
use family::{Family, LAYERS, LLAMA, MlpKind, NOMIC, NormKind, Norms, required, size, text_config};
use published::{has_experts, known_as};
use weights::Weights;

/// The names that architectures have for the model below a head, its embeddings and their norm, and its blocks. A
/// checkpoint has one of each.
const BASES: &[&str] = &[
    "bert",
    "roberta",
    "mpnet",
    "distilbert",
    "nomic_bert",
    "deberta",
    "gte",
    "new",
    "model",
    "model.language_model",
    "language_model.model",
    "language_model",
];
const WORDS: &[&str] = &["embeddings.word_embeddings", "embeddings.tok_embeddings", "embed_tokens"];
const EMBEDDING_NORMS: &[&str] = &["embeddings.LayerNorm", "embeddings.norm", "emb_ln"];
const BLOCKS: &[&str] = &["encoder.layer", "transformer.layer", "layers", "encoder.layers"];

/// The norm after the last block, of ModernBERT and of decoders.
const LAST_NORMS: &[&str] = &["final_norm", "norm"];

/// The encoders that are known.
const ENCODERS: &[&str] = &[
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "eurobert",
    "gte",
    published::JINA_V3,
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
    published::GTE,
];
/// Encoders whose positions are counted from the number after the padding token's.
const COUNTED_FROM_PADDING: &[&str] = &["camembert", "mpnet", "roberta", "xlm-roberta"];
/// Encoders whose positions are not in the embeddings.
const WITHOUT_POSITIONS: &[&str] = &["eurobert", "gte", published::JINA_V3, "modernbert", "nomic_bert"];

/// Norms after attention and MLP, with the names of BERT, MPNet, DistilBERT, and Nomic and GTE in transformers and as
/// published.
const BERT: Family = Family {
    norms: Norms::after(
        &[
            "attention.output.LayerNorm",
            "attention.LayerNorm",
            "sa_layer_norm",
            "post_attention_layernorm",
            "norm1",
            "attn_ln",
        ],
        &["output.LayerNorm", "output_layer_norm", "post_mlp_layernorm", "norm2", "mlp_ln"],
    ),
    norms_residuals: true,
    norm: NormKind::Layer(1e-12),
    needs_biases: true,
    mlp: MlpKind::Plain,
    activation: "gelu",
    ..LLAMA
};

/// Returns the family of an encoder's `config.json`; `None` for other models.
fn encoder_family(json: &Value) -> Result<Option<Family>> {
    let model_type = json["model_type"].as_str().unwrap_or_default();
    if !ENCODERS.contains(&model_type) {
        return Ok(None);
    }
    Ok(Some(match model_type {
        "nomic_bert" if has_experts(json) => Family { mlp: MlpKind::Experts(NOMIC), ..BERT },
        "nomic_bert" => Family { mlp: MlpKind::Gated, ..BERT },
        "gte" | published::GTE => Family { mlp: MlpKind::Gated, ..BERT },
        "eurobert" => Family { norm: NormKind::Rms(1e-5), ..LLAMA },
        "modernbert" => Family {
            norms: Norms::before(&["attn_norm"], &["mlp_norm"]),
            // The norm of the embeddings is right before it.
            first_attention_norm: false,
            norm: NormKind::Layer(1e-5),
            activation: BERT.activation,
            ..LLAMA
        },
        "deberta-v2" => {
            if size(json, "conv_kernel_size").is_some_and(|size| size > 0) {
                bail!("[encoder] conv_kernel_size is {}, expected no convolution", json["conv_kernel_size"])
            }
            Family { norm: NormKind::Layer(1e-7), ..BERT }
        }
        _ => BERT,
    }))
}

/// Returns the family of the `config.json` of a model that is no encoder.
fn decoder_family(json: &Value) -> Result<Family> {
    // The text of Qwen2.5-VL, whose axes of rotary positions have one position each in a text.
    if json["model_type"] == "qwen2_5_vl_text" {
        return Ok(LLAMA);
    }
    let Ok(family) = Family::of(json) else {
        bail!(
            "[encoder] model_type is {}, expected one of {}, or a decoder that causal_lm runs",
            json["model_type"],
            ENCODERS.join(", ")
        )
    };
    Ok(family)
}

/// An encoder: token ids to a hidden state of each.
pub struct Encoder {
    /// The embeddings of words. Embedding layers refuse ids that they have no row for.
    words: EmbeddingLayer,
    /// The factor on the embeddings of words.
    scale: f64,
    positions: Option<Embedding>,
    /// The padding token, if positions are counted from the number after it and only over other tokens.
    padding: Option<u32>,
    /// The embeddings of segments, the texts that one input may have: a token of a single text is in segment 0.
    segments: Option<EmbeddingLayer>,
    embedding_norm: Option<Norm>,
    pub blocks: Blocks,
    last_norm: Option<Norm>,
    /// Whether texts are concatenated without padding. Relative positions by content need texts of one length.
    packs: bool,
    /// The most tokens of a text that the model has positions for.
    pub max_tokens: Option<usize>,
}

impl Encoder {
    /// Loads a model from a `config.json` and a builder at the checkpoint's root; `loaded` is called after every block.
    ///
    /// # Errors
    /// If the architecture, a field or an activation is not supported, or a tensor is missing.
    pub fn load(json: &Value, vb: VarBuilder, loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let json = &known_as(text_config(json))?;
        let encoder = encoder_family(json)?;
        let is_decoder = encoder.is_none();
        let family = match encoder {
            Some(family) => family,
            None => decoder_family(json)?,
        };
        let weights = Weights::from(vb);
        let inner = weights.below(BASES, WORDS);
        let words = EmbeddingLayer::from_embedding(inner.table(inner.named(WORDS)?)?)?;
        let dtype = words.embeddings().dtype();
        let width = words.embed_dim();
        let mut loader = Loader::new("encoder", family, json, weights, width);
        let blocks = Blocks::load(&mut loader, required(json, LAYERS)?, &inner, BLOCKS, loaded)?;
        let model_type = json["model_type"].as_str().unwrap_or_default();
        let mut segments = None;
        if size(json, "type_vocab_size").is_some_and(|n| n > 0) {
            segments = Some(EmbeddingLayer::from_embedding(inner.table("embeddings.token_type_embeddings")?)?);
        }
        let counts_from_padding = COUNTED_FROM_PADDING.contains(&model_type);
        let padding = counts_from_padding.then(|| padding_token(json));
        let is_relative = model_type == "deberta-v2" && json["position_biased_input"] == false;
        let (positions, max_tokens);
        if is_decoder || is_relative || WITHOUT_POSITIONS.contains(&model_type) {
            if let Some(name) = inner.first(&["embed_positions", "wpe"]) {
                bail!("[encoder] a decoder has {name}, learned positions, which is not supported, expected none")
            }
            positions = None;
            max_tokens = size(json, "max_position_embeddings").or(size(json, "n_positions"));
        } else {
            let table = inner.table("embeddings.position_embeddings")?;
            let first = padding.map_or(0, |padding| padding + 1);
            max_tokens = Some(table.embeddings().dim(0)?.saturating_sub(first));
            positions = Some(table);
        }
        let embedding_norm = match inner.first(EMBEDDING_NORMS) {
            None if is_decoder || model_type == "eurobert" => None,
            _ => Some(loader.norm_at(&inner, inner.named(EMBEDDING_NORMS)?)?),
        };
        let last_norm = match is_decoder {
            true => Some(loader.norm_at(&inner, inner.named(LAST_NORMS)?)?),
            false => loader.norm(&inner, LAST_NORMS)?,
        };
        if blocks.has_streams() {
            bail!(
                "[encoder] model_type is {}, whose residual is several streams, expected one stream",
                json["model_type"]
            )
        }
        Ok(Self {
            words,
            scale: family.embedding_scale(json, width, dtype)?,
            positions,
            padding: padding.map(|padding| padding as u32),
            segments,
            embedding_norm,
            last_norm,
            packs: blocks.attention(0).is_none_or(|first| first.config().content_positions().is_none()),
            blocks,
            max_tokens,
        })
    }

    /// Returns whether the model of a `config.json` is an encoder, and no decoder.
    pub fn is_one(json: &Value) -> bool {
        matches!(encoder_family(json), Ok(Some(_)))
    }

    /// Returns the number of texts that one input may have, each in one segment.
    pub fn num_segments(&self) -> usize {
        self.segments.as_ref().map_or(1, EmbeddingLayer::vocab_size)
    }

    /// Returns the table of the embeddings of words (V, E).
    pub fn word_embeddings(&self) -> &Tensor {
        self.words.embeddings()
    }

    /// Returns the input (B, T, E) of a layer's attention for ids (B, T); the mask is that of the padding.
    pub fn attention_input(&self, ids: &Tensor, mask: &AttentionMask, layer: usize) -> Result<Tensor> {
        let texts = ids.to_vec2::<u32>()?;
        let xs = self.embed(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>(), &[])?;
        self.blocks.attention_input(xs.reshape((ids.dim(0)?, ids.dim(1)?, ()))?, mask, layer)
    }

    /// Computes the hidden states (total, E) of the tokens of texts, concatenated without padding.
    pub fn forward(&self, texts: &[&[u32]]) -> Result<Tensor> {
        self.through_blocks(texts, &[], |attention, input| attention.forward(input))
    }

    /// Computes the hidden states (T, E) of a text whose tokens attend to its first `attended` ones.
    pub fn forward_attended(&self, text: &[u32], attended: usize) -> Result<Tensor> {
        let xs = self.embed(&[text], &[])?.unsqueeze(0)?;
        let mask = AttentionMask::none().with_valid_lens(vec![attended]);
        let ys = self.blocks.forward(xs, |_, attention, input| attention.forward(input.with_mask(&mask)))?;
        optional(&self.last_norm, &ys.squeeze(0)?)
    }

    /// Computes hidden states as [`forward`](Self::forward), of tokens in these `segments` (total,), or all in the
    /// first if empty. `attend` computes the output of a layer, given its input.
    pub fn through_blocks(
        &self,
        texts: &[&[u32]],
        segments: &[u32],
        mut attend: impl FnMut(&Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        // Longer texts in one batch would all have the frequencies of the longest.
        if self.packs && !texts.iter().any(|text| self.blocks.frequencies_differ(1, text.len())) {
            let lens: Vec<_> = texts.iter().map(|ids| ids.len()).collect();
            let sequences = PackedSequences::from_lens(&lens, &lens)?;
            let xs = self.blocks.forward(self.embed(texts, segments)?, |_, attention, input| {
                attend(attention, Input::Softmax(input.softmax()?.with_packed(&sequences)))
            })?;
            return optional(&self.last_norm, &xs);
        }
        // Texts of one length that follow each other are a batch (B, T, E).
        let mut outputs = Vec::new();
        let mut start = 0;
        for group in texts.chunk_by(|text, next| text.len() == next.len()) {
            let total = group.iter().map(|ids| ids.len()).sum::<usize>();
            let own = segments.get(start..start + total).unwrap_or(&[]);
            let xs = self.embed(group, own)?.reshape((group.len(), group[0].len(), ()))?;
            let ys = self.blocks.forward(xs, |_, attention, input| attend(attention, input))?;
            outputs.push(ys.reshape((total, ()))?);
            start += total;
        }
        optional(&self.last_norm, &Tensor::cat(&outputs, 0)?)
    }

    /// Computes the input (total, E) of the first block.
    fn embed(&self, texts: &[&[u32]], segments: &[u32]) -> Result<Tensor> {
        let mut xs = self.words.forward(&Tensor::new(texts.concat(), self.words.embeddings().device())?)?;
        if self.scale != 1.0 {
            xs = (xs * self.scale)?;
        }
        if let (Some(table), Some(most)) = (&self.positions, self.max_tokens) {
            if let Some(text) = texts.iter().find(|text| text.len() > most) {
                bail!("[encoder] {} tokens are more than the model's {most} positions", text.len())
            }
            let positions: Vec<_> = texts.iter().flat_map(|text| self.positions_of(text)).collect();
            xs = (xs + table.forward(&Tensor::new(positions, table.embeddings().device())?)?)?;
        }
        xs = match &self.segments {
            Some(table) if segments.is_empty() => xs.broadcast_add(&table.embeddings().get(0)?)?,
            Some(table) => (xs + table.forward(&Tensor::new(segments, table.embeddings().device())?)?)?,
            None => xs,
        };
        optional(&self.embedding_norm, &xs)
    }

    /// Returns the rows of learned positions for the tokens of a text.
    fn positions_of(&self, text: &[u32]) -> Vec<u32> {
        let Some(padding) = self.padding else { return (0..text.len() as u32).collect() };
        let mut last = padding;
        let position = |&id: &u32| {
            last += u32::from(id != padding);
            if id == padding { padding } else { last }
        };
        text.iter().map(position).collect()
    }
}

/// Returns the padding token after whose number positions are counted.
fn padding_token(json: &Value) -> usize {
    // MPNet has a fixed one.
    if json["model_type"] == "mpnet" { 1 } else { size(json, "pad_token_id").unwrap_or(1) }
}

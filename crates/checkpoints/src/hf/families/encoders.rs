//! Encoders of text.

use super::{DECODER, ENCODER, HEADS, HIDDEN, LAYERS, MODEL, MODERNBERT_ROPE, QKV_PROJ, TEXT_MODEL, WQKV, layer_norm};
use crate::hf::family::{Bias, BiasPlace, Family, Heads, Mask, ModuleNames, Rotary, at};
use crate::hf::fields::Aliases;
use crate::hf::rope::rope;
use crate::hf::rules::{modernbert_side, sliding};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{QkNormKind, QkNormScope, RelativeBiasConfig, WeightLayout};

const NOMIC: &[&str] = &["nomic_bert.", "bert.", ""];
const WQKV_WO: WeightLayout = WeightLayout::Packed(PackedNaming::WqkvWo, QkvOrder::ByPart);

/// BERT's names below a prefix.
const fn bert(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "encoder.layer.{}.attention", WeightLayout::Bert)
}

#[rustfmt::skip]
const BERT: Family = Family {
    model_type: "bert", modules: &[bert(&["bert.", ""])], dropout: ("attention_probs_dropout_prob", 0.1),
    mask: Mask::CausalIf("is_decoder"),
    // Relative positions between queries and keys, which older versions of transformers had.
    only: &[("position_embedding_type", "\"absolute\"")], ..ENCODER
};
#[rustfmt::skip]
const ROBERTA: Family = Family { model_type: "roberta", modules: &[bert(&["roberta.", ""])], ..BERT };
/// The text of a model of texts and images.
#[rustfmt::skip]
const BESIDE_IMAGES: Family = Family { modules: &[bert(TEXT_MODEL)], ..BERT };
#[rustfmt::skip]
const XLM: Family = Family {
    model_type: "xlm", names: ["n_layers", "emb_dim", "n_heads"], sizes: [12, 2048, 16],
    modules: &[at(&["transformer.", ""], "attentions.{}", WeightLayout::DistilBert)],
    dropout: ("attention_dropout", 0.1), mask: Mask::CausalIf("causal"), ..ENCODER
};
/// The names of the published checkpoints, which are older than the family in transformers.
#[rustfmt::skip]
const NOMIC_ALIASES: Aliases = &[
    ("n_layer", LAYERS), ("n_embd", HIDDEN), ("n_head", HEADS), ("n_positions", "max_position_embeddings"),
    ("attn_pdrop", "attention_probs_dropout_prob"), ("rotary_emb_base", "rope_theta"),
];

#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "albert", sizes: [12, 4096, 64],
        modules: &[at(
            &["albert.", ""], "encoder.albert_layer_groups.0.albert_layers.0.attention", WeightLayout::Albert,
        )],
        dropout: ("attention_probs_dropout_prob", 0.0), mask: Mask::Encoder,
        only: &[
            ("position_embedding_type", "\"absolute\""), ("num_hidden_groups", "1"), ("inner_group_num", "1"),
        ],
        ..BERT
    },
    Family { model_type: "align_text_model", ..BESIDE_IMAGES },
    Family {
        model_type: "altclip_text_model", sizes: [24, 1024, 16],
        modules: &[
            at(&["text_model.roberta.", "roberta.", ""], "encoder.layers.{}.attention", WeightLayout::Bert),
            bert(&["text_model.roberta.", "roberta.", ""]),
        ],
        dropout: ("attention_probs_dropout_prob", 0.0), ..BERT
    },
    BERT,
    Family { model_type: "bert-generation", sizes: [24, 1024, 16], ..BERT },
    Family { model_type: "bridgetower_text_model", ..BESIDE_IMAGES },
    Family { model_type: "camembert", ..ROBERTA },
    Family { model_type: "chinese_clip_text_model", ..BESIDE_IMAGES },
    Family { model_type: "clap_text_model", ..BESIDE_IMAGES },
    Family { model_type: "data2vec-text", modules: &[bert(&["data2vec_text.", ""])], ..BERT },
    Family {
        model_type: "distilbert", names: ["n_layers", "dim", "n_heads"], sizes: [6, 768, 12],
        modules: &[at(&["distilbert.", ""], "transformer.layer.{}.attention", WeightLayout::DistilBert)],
        dropout: ("attention_dropout", 0.1), ..ENCODER
    },
    Family {
        model_type: "dpr",
        modules: &[bert(&[
            "question_encoder.bert_model.", "ctx_encoder.bert_model.", "span_predictor.encoder.bert_model.",
        ])],
        ..BERT
    },
    Family {
        model_type: "esmc", sizes: [80, 2560, 40], bias: Bias::AllIf("attention_bias", false),
        modules: &[at(&["esmc.", "model.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        dropout: ("attention_dropout", 0.0), rope: Rotary::All(rope(10_000.0, 2048)),
        qk_norm: Some(layer_norm(None, QkNormKind::LayerNoBias, QkNormScope::Projection)), ..ENCODER
    },
    Family {
        model_type: "esm", modules: &[bert(&["esm.", ""])],
        rope: Rotary::If(|fields, _| Ok(fields.get("position_embedding_type").is_some_and(|kind| *kind == "rotary")),
            rope(10_000.0, 1026)),
        only: &[], adjust: |fields, _, cfg| match fields.optional::<&str>("position_embedding_type")? {
            None | Some("absolute" | "rotary") => Ok(cfg),
            Some(other) => {
                fields.fail(format!("position_embedding_type is {other:?}, expected \"absolute\" or \"rotary\""))
            }
        },
        ..BERT
    },
    Family { model_type: "electra", sizes: [12, 256, 4], modules: &[bert(&["electra.", ""])], ..BERT },
    Family { model_type: "ernie", modules: &[bert(&["ernie.", ""])], ..BERT },
    Family {
        model_type: "eurobert", sizes: [12, 768, 12], bias: Bias::AllIf("attention_bias", false),
        rope: Rotary::All(rope(10_000.0, 8192)), mask: Mask::Encoder, ..DECODER
    },
    Family { model_type: "flaubert", ..XLM },
    Family {
        model_type: "gte", modules: &[
            at(&["gte.", "new.", ""], "encoder.layer.{}.attention", QKV_PROJ),
            at(&["gte.", ""], "layers.{}.self_attn", WeightLayout::Canonical),
        ],
        dropout: ("attention_probs_dropout_prob", 0.0), rope: Rotary::All(rope(160_000.0, 8192)), ..ENCODER
    },
    Family {
        model_type: "jina_embeddings_v3", sizes: [24, 1024, 16],
        modules: &[
            at(&["roberta.", ""], "encoder.layers.{}.mixer", WQKV),
            at(&["roberta.", ""], "layers.{}.self_attn", WeightLayout::Canonical),
        ],
        dropout: ("attention_probs_dropout_prob", 0.1), rope: Rotary::All(rope(20_000.0, 8194)), ..ENCODER
    },
    Family { model_type: "layoutlm", modules: &[bert(&["layoutlm.", ""])], ..BERT },
    Family { model_type: "markuplm", modules: &[bert(&["markuplm.", ""])], ..BERT },
    Family { model_type: "megatron-bert", sizes: [24, 1024, 16], ..BERT },
    Family {
        model_type: "modernbert", sizes: [22, 768, 12], modules: &[at(MODEL, "layers.{}.attn", WQKV_WO)],
        bias: Bias::AllIf("attention_bias", false), dropout: ("attention_dropout", 0.0),
        rope: MODERNBERT_ROPE,
        window: modernbert_side, ..ENCODER
    },
    // Queries and keys are made from a narrower input than values.
    Family {
        model_type: "mobilebert", names: [LAYERS, "intra_bottleneck_size", HEADS], usual_names: false,
        sizes: [24, 128, 4], modules: &[bert(&["mobilebert.", ""])], mask: Mask::Encoder,
        only: &[("use_bottleneck", "true")],
        adjust: |fields, _, cfg| Ok(match fields.flag("use_bottleneck_attention", false)? {
            true => cfg,
            false => cfg.with_value_size(fields.get_or(HIDDEN, 512)?),
        }),
        ..BERT
    },
    Family {
        model_type: "mpnet",
        modules: &[at(&["mpnet.", ""], "encoder.layer.{}.attention.attn", WeightLayout::T5)],
        dropout: ("attention_probs_dropout_prob", 0.1), bias_place: BiasPlace::Module("encoder"),
        adjust: |fields, _, cfg| {
            let buckets = fields.get_or("relative_attention_num_buckets", 32)?;
            Ok(cfg.with_relative_bias(RelativeBiasConfig::new(true).with_num_buckets(buckets)))
        },
        ..ENCODER
    },
    Family {
        model_type: "nomic_bert", aliases: NOMIC_ALIASES,
        // As published, and by the names of transformers' own module.
        modules: &[
            at(NOMIC, "encoder.layers.{}.attn", WQKV), at(NOMIC, "layers.{}.self_attn", WeightLayout::Canonical),
        ],
        heads: Heads::Grouped(None, None), bias: Bias::None, dropout: ("attention_probs_dropout_prob", 0.0),
        rope: Rotary::All(rope(1000.0, 2048)),
        only: &[
            ("causal", "false"), ("qkv_proj_bias", "false"),
            ("rotary_emb_interleaved", "false"), ("rotary_emb_fraction", "1"),
            ("rotary_emb_scale_base", "null"), ("rotary_scaling_factor", "null"),
        ],
        adjust: |fields, _, cfg| fields.agrees("num_key_value_heads", cfg.num_heads()).map(|()| cfg), ..ENCODER
    },
    Family {
        model_type: "rembert", sizes: [32, 1152, 18], modules: &[bert(&["rembert.", ""])],
        dropout: ("attention_probs_dropout_prob", 0.0), ..BERT
    },
    ROBERTA,
    Family { model_type: "roberta-prelayernorm", modules: &[bert(&["roberta_prelayernorm.", ""])], ..BERT },
    Family { model_type: "roc_bert", modules: &[bert(&["roc_bert.", ""])], ..BERT },
    Family {
        model_type: "roformer", modules: &[bert(&["roformer.", ""])],
        rope: Rotary::All(rope(10_000.0, 1536).interleaved()),
        only: &[("position_embedding_type", "\"absolute\""), ("rotary_value", "false")], ..BERT
    },
    Family { model_type: "splinter", modules: &[bert(&["splinter.", ""])], mask: Mask::Encoder, ..BERT },
    Family { model_type: "tapas", modules: &[bert(&["tapas.", ""])], mask: Mask::Encoder, ..BERT },
    Family { model_type: "visual_bert", modules: &[bert(&["visual_bert.", ""])], mask: Mask::Encoder, ..BERT },
    Family {
        model_type: "ultrabert", sizes: [32, 4096, 32], heads: Heads::Grouped(None, None),
        modules: &[at(&["ultrabert.", "model.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        bias: Bias::AllIf("attention_bias", false), dropout: ("attention_dropout", 0.0),
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 32_768), full: rope(2_560_000.0, 32_768), scales_windowed: true,
        },
        window: |fields, layer| sliding(fields, layer, !(layer + 1).is_multiple_of(3), Some(128)),
        only: &[("attention_windows", "null")], ..ENCODER
    },
    XLM,
    Family { model_type: "xlm-roberta", ..ROBERTA },
    Family { model_type: "xlm-roberta-xl", sizes: [36, 2560, 32], ..ROBERTA },
    Family { model_type: "xmod", ..ROBERTA },
];

//! Encoders of text, and those whose scores have terms by distance.

use super::{ENCODER, HEADS, HIDDEN, LAYERS, LLAMA, MODEL, MODERNBERT_ROPE, MODERNBERT_WINDOWED_ROPE};
use super::{QKV_PROJ, TEXT_MODEL, WQKV, layer_norm};
use crate::hf::family::{Bias, Family, Heads, Mask, Number, SharedPlace};
use crate::hf::fields::Aliases;
use crate::hf::positions::{Deberta, Positions};
use crate::hf::rope::{Rotated, rope};
use crate::hf::rules;
use crate::hf::windows::{self, Pattern::*, Window};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{QkNormKind, QkNormScope, WeightLayout};

const NOMIC: &[&str] = &["nomic_bert.", "bert.", ""];
const WQKV_WO: WeightLayout = WeightLayout::Packed(PackedNaming::WqkvWo, QkvOrder::ByPart);

const BLOCKS: &str = "encoder.layer.{}.attention";

// Relative positions between queries and keys, which older versions of transformers had.
const BERT: Family = ENCODER.of("bert").at(&["bert.", ""], BLOCKS, WeightLayout::Bert)
    .dropout(Number("attention_probs_dropout_prob", 0.1)).mask(Mask::CausalIf("is_decoder"))
    .only(&[("position_embedding_type", "\"absolute\"")]);
const ROBERTA: Family = BERT.of("roberta").below(&["roberta.", ""]);
/// The text of a model of texts and images.
const BESIDE_IMAGES: Family = BERT.below(TEXT_MODEL);
const XLM: Family = ENCODER.of("xlm").names(["n_layers", "emb_dim", "n_heads"]).sizes([12, 2048, 16])
    .at(&["transformer.", ""], "attentions.{}", WeightLayout::DistilBert).dropout(Number("attention_dropout", 0.1))
    .mask(Mask::CausalIf("causal"));
/// The names of the published checkpoints, which are older than the family in transformers.
const NOMIC_ALIASES: Aliases = &[
    ("n_layer", LAYERS),
    ("n_embd", HIDDEN),
    ("n_head", HEADS),
    ("n_positions", "max_position_embeddings"),
    ("attn_pdrop", "attention_probs_dropout_prob"),
    ("rotary_emb_base", "rope_theta"),
];

pub(super) const ROWS: &[Family] = &[
    BERT.of("albert").sizes([12, 4096, 64])
        .at(&["albert.", ""], "encoder.albert_layer_groups.0.albert_layers.0.attention", WeightLayout::Albert)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).mask(Mask::Encoder)
        .only(&[("position_embedding_type", "\"absolute\""), ("num_hidden_groups", "1"), ("inner_group_num", "1")]),
    BESIDE_IMAGES.of("align_text_model"),
    BERT.of("altclip_text_model").sizes([24, 1024, 16])
        .at(&["text_model.roberta.", "roberta.", ""], "encoder.layers.{}.attention", WeightLayout::Bert)
        .or_at(&["text_model.roberta.", "roberta.", ""], BLOCKS, WeightLayout::Bert)
        .dropout(Number("attention_probs_dropout_prob", 0.0)),
    BERT,
    BERT.of("bert-generation").sizes([24, 1024, 16]),
    BESIDE_IMAGES.of("bridgetower_text_model"),
    ROBERTA.of("camembert"),
    BESIDE_IMAGES.of("chinese_clip_text_model"),
    BESIDE_IMAGES.of("clap_text_model"),
    BERT.of("data2vec-text").below(&["data2vec_text.", ""]),
    ENCODER.of("distilbert").names(["n_layers", "dim", "n_heads"]).sizes([6, 768, 12])
        .at(&["distilbert.", ""], "transformer.layer.{}.attention", WeightLayout::DistilBert)
        .dropout(Number("attention_dropout", 0.1)),
    BERT.of("dpr")
        .below(&["question_encoder.bert_model.", "ctx_encoder.bert_model.", "span_predictor.encoder.bert_model."]),
    ENCODER.of("esmc").sizes([80, 2560, 40]).bias(Bias::AllIf("attention_bias", false)).below(&["esmc.", "model.", ""])
        .dropout(Number("attention_dropout", 0.0)).rope(rope(10_000.0, 2048))
        .qk_norm(layer_norm(QkNormKind::LayerNoBias, QkNormScope::Projection)),
    BERT.of("esm").below(&["esm.", ""])
        .rope(rope(10_000.0, 1026).layers(Rotated::IfText("position_embedding_type", "rotary"))).only(&[])
        .rules(&[rules::esm_positions]),
    BERT.of("electra").sizes([12, 256, 4]).below(&["electra.", ""]),
    BERT.of("ernie").below(&["ernie.", ""]),
    LLAMA.of("eurobert").sizes([12, 768, 12]).rope(rope(10_000.0, 8192)).mask(Mask::Encoder),
    XLM.of("flaubert"),
    ENCODER.of("gte").at(&["gte.", "new.", ""], BLOCKS, QKV_PROJ)
        .or_at(&["gte.", ""], "layers.{}.self_attn", WeightLayout::Canonical)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).rope(rope(160_000.0, 8192)),
    ENCODER.of("jina_embeddings_v3").sizes([24, 1024, 16]).at(&["roberta.", ""], "encoder.layers.{}.mixer", WQKV)
        .or_at(&["roberta.", ""], "layers.{}.self_attn", WeightLayout::Canonical)
        .dropout(Number("attention_probs_dropout_prob", 0.1)).rope(rope(20_000.0, 8194)),
    BERT.of("layoutlm").below(&["layoutlm.", ""]),
    BERT.of("markuplm").below(&["markuplm.", ""]),
    BERT.of("megatron-bert").sizes([24, 1024, 16]),
    ENCODER.of("modernbert").sizes([22, 768, 12]).at(MODEL, "layers.{}.attn", WQKV_WO)
        .bias(Bias::AllIf("attention_bias", false)).dropout(Number("attention_dropout", 0.0)).rope(MODERNBERT_ROPE)
        .windowed_rope(MODERNBERT_WINDOWED_ROPE).window(Window::By(windows::modernbert)),
    // Queries and keys are made from a narrower input than values.
    BERT.of("mobilebert").names([LAYERS, "intra_bottleneck_size", HEADS]).usual_names(false).sizes([24, 128, 4])
        .below(&["mobilebert.", ""]).mask(Mask::Encoder).only(&[("use_bottleneck", "true")])
        .rules(&[rules::mobilebert_values]),
    ENCODER.of("mpnet").at(&["mpnet.", ""], "encoder.layer.{}.attention.attn", WeightLayout::T5)
        .dropout(Number("attention_probs_dropout_prob", 0.1)).shared_place(SharedPlace::Module("encoder"))
        .positions(Positions::MpNet),
    // As published, and by the names of transformers' own module.
    ENCODER.of("nomic_bert").aliases(NOMIC_ALIASES).at(NOMIC, "encoder.layers.{}.attn", WQKV)
        .or_at(NOMIC, "layers.{}.self_attn", WeightLayout::Canonical).heads(Heads::Grouped(None, None))
        .bias(Bias::None).dropout(Number("attention_probs_dropout_prob", 0.0)).rope(rope(1000.0, 2048))
        .only(&[
            ("causal", "false"), ("qkv_proj_bias", "false"), ("rotary_emb_interleaved", "false"),
            ("rotary_emb_fraction", "1"), ("rotary_emb_scale_base", "null"), ("rotary_scaling_factor", "null"),
        ])
        .rules(&[rules::equal_heads]),
    BERT.of("rembert").sizes([32, 1152, 18]).below(&["rembert.", ""])
        .dropout(Number("attention_probs_dropout_prob", 0.0)),
    ROBERTA,
    BERT.of("roberta-prelayernorm").below(&["roberta_prelayernorm.", ""]),
    BERT.of("roc_bert").below(&["roc_bert.", ""]),
    BERT.of("roformer").below(&["roformer.", ""]).rope(rope(10_000.0, 1536).interleaved())
        .only(&[("position_embedding_type", "\"absolute\""), ("rotary_value", "false")]),
    BERT.of("splinter").below(&["splinter.", ""]).mask(Mask::Encoder),
    BERT.of("tapas").below(&["tapas.", ""]).mask(Mask::Encoder),
    BERT.of("visual_bert").below(&["visual_bert.", ""]).mask(Mask::Encoder),
    ENCODER.of("ultrabert").sizes([32, 4096, 32]).heads(Heads::Grouped(None, None))
        .below(&["ultrabert.", "model.", ""]).bias(Bias::AllIf("attention_bias", false))
        .dropout(Number("attention_dropout", 0.0)).rope(rope(2_560_000.0, 32_768))
        .windowed_rope(rope(10_000.0, 32_768).shares_scaling(true)).window(Window::Layers(ButLastOf(3), Some(128)))
        .only(&[("attention_windows", "null")]),
    XLM,
    ROBERTA.of("xlm-roberta"),
    ROBERTA.of("xlm-roberta-xl").sizes([36, 2560, 32]),
    ROBERTA.of("xmod"),
];

const WAV2VEC2_CONFORMER: Family = ENCODER.of("wav2vec2-conformer")
    .at(&["wav2vec2_conformer.", ""], "encoder.layers.{}.self_attn", WeightLayout::Espnet)
    .dropout(Number("attention_dropout", 0.1)).positions(Positions::Conformer("relative"));
const FASTSPEECH2: Family = ENCODER.of("fastspeech2_conformer")
    .names(["encoder_layers", "hidden_size", "encoder_num_attention_heads"]).usual_names(false).sizes([4, 384, 2])
    .dropout(Number("encoder_attention_dropout_rate", 0.2))
    .at(&["encoder.", "model.encoder."], "conformer_layers.{}.self_attn", WeightLayout::Espnet)
    .positions(Positions::TransformerXl);
const FASTSPEECH2_DECODER: Family = FASTSPEECH2.names(["decoder_layers", "hidden_size", "decoder_num_attention_heads"])
    .below(&["decoder.", "model.decoder."]).rules(&[rules::fastspeech_decoder_dropout]);

const DEBERTA: Deberta = Deberta { is_relative: false, buckets: None, shares_projections: false, norms: false };
const SEW_D: Deberta = Deberta { is_relative: true, buckets: Some(256), shares_projections: true, norms: true };

/// Encoders whose scores have terms by distance and content: conformers, and DeBERTa.
pub(super) const BY_DISTANCE: &[Family] = &[
    ENCODER.of("deberta-v2").sizes([24, 1536, 24]).dropout(Number("attention_probs_dropout_prob", 0.1))
        .at(&["deberta.", ""], "encoder.layer.{}.attention", WeightLayout::Deberta)
        .shared_place(SharedPlace::Module("encoder")).positions(Positions::Disentangled(DEBERTA)),
    FASTSPEECH2.decoder(&FASTSPEECH2_DECODER),
    ENCODER.of("parakeet_encoder").sizes([24, 1024, 8]).bias(Bias::AllIf("attention_bias", true))
        .dropout(Number("attention_dropout", 0.1)).below(&["encoder.", "", "model.encoder."])
        .positions(Positions::TransformerXl),
    ENCODER.of("sew-d").dropout(Number("attention_dropout", 0.1))
        .at(&["sew_d.", ""], "encoder.encoder.layer.{}.attention", WeightLayout::Deberta)
        .shared_place(SharedPlace::Module("encoder.encoder")).positions(Positions::Disentangled(SEW_D)),
    WAV2VEC2_CONFORMER.of("wav2vec2-bert").sizes([24, 1024, 16]).below(&["wav2vec2_bert.", ""])
        .dropout(Number("attention_dropout", 0.0)).positions(Positions::Conformer("relative_key")),
    WAV2VEC2_CONFORMER,
];

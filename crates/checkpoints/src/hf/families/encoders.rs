//! Encoders of text, encoders whose scores depend on distances, models with an encoder and a decoder, and decoders that
//! attend to the outputs of an encoder of another model.

use super::{DECODER, DECODER_LAYERS, ENCODER, HEADS, HIDDEN, LAYERS, LLAMA, MODEL, MODERNBERT_ROPE};
use super::{MODERNBERT_WINDOWED_ROPE, QKV_PROJ, TEXT_MODEL, WQKV, layer_norm};
use super::{Bias, Family, Heads, Mask, Number, Scale, SharedPlace, Sizes};
use crate::hf::fields::Aliases;
use crate::hf::positions::{Deberta, Positions};
use crate::hf::rope::{Ntk, Rotated, rope};
use crate::hf::rules;
use crate::hf::shapes;
use crate::hf::windows::{self, Pattern::*, Window};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_modules::norm::{QkNormKind, QkNormScope};
use candle_attention_core::WeightLayout;

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
const XLM: Family = ENCODER.of("xlm").layers_from("n_layers").width_from("emb_dim").query_heads_from("n_heads")
    .layers(12).width(2048).query_heads(16)
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
    BERT.of("albert").layers(12).width(4096).query_heads(64)
        .at(&["albert.", ""], "encoder.albert_layer_groups.0.albert_layers.0.attention", WeightLayout::Albert)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).mask(Mask::Encoder)
        .only(&[("position_embedding_type", "\"absolute\""), ("num_hidden_groups", "1"), ("inner_group_num", "1")]),
    BESIDE_IMAGES.of("align_text_model"),
    BERT.of("altclip_text_model").layers(24).width(1024).query_heads(16)
        .at(&["text_model.roberta.", "roberta.", ""], "encoder.layers.{}.attention", WeightLayout::Bert)
        .or_at(&["text_model.roberta.", "roberta.", ""], BLOCKS, WeightLayout::Bert)
        .dropout(Number("attention_probs_dropout_prob", 0.0)),
    BERT,
    BERT.of("bert-generation").layers(24).width(1024).query_heads(16),
    BESIDE_IMAGES.of("bridgetower_text_model"),
    // Whether it is causal is said by the call.
    BESIDE_IMAGES.of("blip_text_model").query_heads(8)
        .below(&["text_decoder.bert.", "text_encoder.", "bert.", ""]).mask(Mask::Encoder)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).cross(
            &BERT.at(&["text_decoder.bert.", "text_encoder.", "bert.", ""], "encoder.layer.{}.crossattention",
                WeightLayout::Bert).mask(Mask::Encoder).rules(&[shapes::encoder_width]),
        ),
    ROBERTA.of("camembert"),
    BESIDE_IMAGES.of("chinese_clip_text_model"),
    BESIDE_IMAGES.of("clap_text_model"),
    BERT.of("data2vec-text").below(&["data2vec_text.", ""]),
    ENCODER.of("distilbert").layers_from("n_layers").width_from("dim").query_heads_from("n_heads").layers(6).width(768)
        .query_heads(12)
        .at(&["distilbert.", ""], "transformer.layer.{}.attention", WeightLayout::DistilBert)
        .dropout(Number("attention_dropout", 0.1)),
    BERT.of("dpr")
        .below(&["question_encoder.bert_model.", "ctx_encoder.bert_model.", "span_predictor.encoder.bert_model."]),
    ENCODER.of("esmc").layers(80).width(2560).query_heads(40).bias(Bias::AllIf("attention_bias", false))
        .below(&["esmc.", "model.", ""])
        .dropout(Number("attention_dropout", 0.0)).rope(rope(10_000.0, 2048))
        .qk_norm(layer_norm(QkNormKind::LayerNoBias, QkNormScope::Projection)),
    BERT.of("esm").below(&["esm.", ""])
        .rope(rope(10_000.0, 1026).layers(Rotated::IfText("position_embedding_type", "rotary"))).only(&[])
        .rules(&[rules::esm_positions]),
    BERT.of("electra").layers(12).width(256).query_heads(4).below(&["electra.", ""]),
    BERT.of("ernie").below(&["ernie.", ""]),
    LLAMA.of("eurobert").layers(12).width(768).query_heads(12).rope(rope(10_000.0, 8192)).mask(Mask::Encoder),
    XLM.of("flaubert"),
    // The mask of an image before a text is the caller's.
    BERT.of("git").layers(6).below(&["git.", ""]).mask(Mask::Encoder),
    ENCODER.of("gte").at(&["gte.", "new.", ""], BLOCKS, QKV_PROJ)
        .or_at(&["gte.", ""], "layers.{}.self_attn", WeightLayout::Canonical)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).rope(rope(160_000.0, 8192).ntk(Ntk::Factor)),
    ENCODER.of("jina_embeddings_v3").layers(24).width(1024).query_heads(16)
        .at(&["roberta.", ""], "encoder.layers.{}.mixer", WQKV)
        .or_at(&["roberta.", ""], "layers.{}.self_attn", WeightLayout::Canonical)
        .dropout(Number("attention_probs_dropout_prob", 0.1)).rope(rope(20_000.0, 8194)),
    // Of weights that are not quantised.
    BERT.of("ibert").below(&["ibert.", ""]).mask(Mask::Encoder)
        .only(&[("position_embedding_type", "\"absolute\""), ("quant_mode", "false")]),
    BERT.of("layoutlm").below(&["layoutlm.", ""]),
    BERT.of("markuplm").below(&["markuplm.", ""]),
    BERT.of("megatron-bert").layers(24).width(1024).query_heads(16),
    ENCODER.of("modernbert").layers(22).width(768).query_heads(12).at(MODEL, "layers.{}.attn", WQKV_WO)
        .bias(Bias::AllIf("attention_bias", false)).dropout(Number("attention_dropout", 0.0)).rope(MODERNBERT_ROPE)
        .windowed_rope(MODERNBERT_WINDOWED_ROPE).window(Window::By(windows::modernbert)),
    // Queries and keys are made from a narrower input than values.
    BERT.of("mobilebert").layers_from(LAYERS).width_from("intra_bottleneck_size").query_heads_from(HEADS)
        .usual_names(false).layers(24).width(128).query_heads(4)
        .below(&["mobilebert.", ""]).mask(Mask::Encoder).only(&[("use_bottleneck", "true")])
        .rules(&[shapes::mobilebert_values]),
    ENCODER.of("mpnet").at(&["mpnet.", ""], "encoder.layer.{}.attention.attn", WeightLayout::T5)
        .dropout(Number("attention_probs_dropout_prob", 0.1)).shared_place(SharedPlace::Module("encoder"))
        .positions(Positions::MpNet),
    // As published, and by the names of transformers' own module.
    ENCODER.of("nomic_bert").aliases(NOMIC_ALIASES).at(NOMIC, "encoder.layers.{}.attn", WQKV)
        .or_at(NOMIC, "layers.{}.self_attn", WeightLayout::Canonical).heads(Heads::Grouped(None, None))
        .bias(Bias::AllIf("qkv_proj_bias", false)).dropout(Number("attention_probs_dropout_prob", 0.0))
        .rope(rope(1000.0, 2048))
        .only(&[
            ("causal", "false"), ("rotary_emb_interleaved", "false"), ("rotary_emb_fraction", "1"),
            ("rotary_emb_scale_base", "null"),
        ])
        .rules(&[shapes::equal_heads, rules::nomic_scaling]),
    BERT.of("rembert").layers(32).width(1152).query_heads(18).below(&["rembert.", ""])
        .dropout(Number("attention_probs_dropout_prob", 0.0)),
    ROBERTA,
    BERT.of("roberta-prelayernorm").below(&["roberta_prelayernorm.", ""]),
    BERT.of("roc_bert").below(&["roc_bert.", ""]),
    BERT.of("roformer").below(&["roformer.", ""]).rope(rope(10_000.0, 1536).interleaved())
        .only(&[("position_embedding_type", "\"absolute\""), ("rotary_value", "false")]),
    BERT.of("splinter").below(&["splinter.", ""]).mask(Mask::Encoder),
    BERT.of("tapas").below(&["tapas.", ""]).mask(Mask::Encoder),
    ENCODER.of("tvp").at(&["model.", ""], "encoder.layer.{}.attention", WeightLayout::Albert)
        .dropout(Number("attention_probs_dropout_prob", 0.1)),
    BERT.of("visual_bert").below(&["visual_bert.", ""]).mask(Mask::Encoder),
    ENCODER.of("ultrabert").layers(32).width(4096).query_heads(32).heads(Heads::Grouped(None, None))
        .below(&["ultrabert.", "model.", ""]).bias(Bias::AllIf("attention_bias", false))
        .dropout(Number("attention_dropout", 0.0)).rope(rope(2_560_000.0, 32_768))
        .windowed_rope(rope(10_000.0, 32_768).shares_scaling(true)).window(Window::Layers(ButLastOf(3), Some(128)))
        .only(&[("attention_windows", "null")]),
    XLM,
    ROBERTA.of("xlm-roberta"),
    ROBERTA.of("xlm-roberta-xl").layers(36).width(2560).query_heads(32),
    ROBERTA.of("xmod"),
];

const WAV2VEC2_CONFORMER: Family = ENCODER.of("wav2vec2-conformer")
    .at(&["wav2vec2_conformer.", ""], "encoder.layers.{}.self_attn", WeightLayout::Espnet)
    .dropout(Number("attention_dropout", 0.1)).positions(Positions::Conformer("relative"));
const FASTSPEECH2: Family = ENCODER.of("fastspeech2_conformer")
    .layers_from("encoder_layers").width_from("hidden_size").query_heads_from("encoder_num_attention_heads")
    .usual_names(false).layers(4).width(384).query_heads(2)
    .dropout(Number("encoder_attention_dropout_rate", 0.2))
    .at(&["encoder.", "model.encoder."], "conformer_layers.{}.self_attn", WeightLayout::Espnet)
    .positions(Positions::TransformerXl);
const FASTSPEECH2_DECODER: Family = FASTSPEECH2.layers_from("decoder_layers").width_from("hidden_size")
    .query_heads_from("decoder_num_attention_heads")
    .below(&["decoder.", "model.decoder."]).rules(&[rules::fastspeech_decoder_dropout]);

const DEBERTA: Deberta = Deberta { is_relative: false, buckets: None, shares_projections: false, norms: false };
const SEW_D: Deberta = Deberta { is_relative: true, buckets: Some(256), shares_projections: true, norms: true };

/// Encoders whose scores have terms by distance and content: conformers, and DeBERTa.
pub(super) const BY_DISTANCE: &[Family] = &[
    ENCODER.of("deberta-v2").layers(24).width(1536).query_heads(24).dropout(Number("attention_probs_dropout_prob", 0.1))
        .at(&["deberta.", ""], "encoder.layer.{}.attention", WeightLayout::Deberta)
        .shared_place(SharedPlace::Module("encoder")).positions(Positions::Disentangled(DEBERTA)),
    FASTSPEECH2.decoder(&FASTSPEECH2_DECODER),
    ENCODER.of("parakeet_encoder").layers(24).width(1024).query_heads(8).bias(Bias::AllIf("attention_bias", true))
        .dropout(Number("attention_dropout", 0.1)).below(&["encoder.", "", "model.encoder."])
        .positions(Positions::TransformerXl),
    ENCODER.of("sew-d").dropout(Number("attention_dropout", 0.1))
        .at(&["sew_d.", ""], "encoder.encoder.layer.{}.attention", WeightLayout::Deberta)
        .shared_place(SharedPlace::Module("encoder.encoder")).positions(Positions::Disentangled(SEW_D)),
    WAV2VEC2_CONFORMER.of("wav2vec2-bert").layers(24).width(1024).query_heads(16).below(&["wav2vec2_bert.", ""])
        .dropout(Number("attention_dropout", 0.0)).positions(Positions::Conformer("relative_key")),
    WAV2VEC2_CONFORMER,
];

/// The prefixes of parameter names: of a model with a head, and of one without.
const BASE: &[&str] = &["model.", ""];
/// The prefixes of parameter names: of a model by itself or with its decoder, and of a model below a classifier.
const T5_PREFIXES: &[&str] = &["", "transformer."];
const TROCR: &[&str] = &["model.", "decoder.model.", ""];
const PP_FORMULANET: &[&str] = &["model.decoder.", "decoder.", "head.decoder.", ""];
const DROPOUT: Number = Number("attention_dropout", 0.1);

const BART_ENCODER: Family = ENCODER.layers_from("encoder_layers").width_from("d_model")
    .query_heads_from("encoder_attention_heads").at(BASE, "encoder.layers.{}.self_attn", WeightLayout::Opt);
const BART: Family = BART_ENCODER.decoder(&BART_DECODER).cross(&BART_CROSS);
const BART_DECODER: Family = ENCODER.layers_from("decoder_layers").width_from("d_model")
    .query_heads_from("decoder_attention_heads").usual_names(false)
    .aliases(&[("hidden_size", "d_model")]).at(BASE, "decoder.layers.{}.self_attn", WeightLayout::Opt)
    .mask(Mask::Causal);
const BART_CROSS: Family = BART_DECODER.at(BASE, "decoder.layers.{}.encoder_attn", WeightLayout::Opt)
    .mask(Mask::Encoder);
/// The decoder is not causal. Positions are added to the inputs of queries and keys, and not of values.
const DETR: Family = BART.decoder(&BART_DECODER.mask(Mask::Encoder));

const MOONSHINE: Family = ENCODER.of("moonshine").layers(6).width(288).query_heads(8)
    .layers_from("encoder_num_hidden_layers").width_from("hidden_size").query_heads_from("encoder_num_attention_heads")
    .usual_names(false)
    .at(BASE, "encoder.layers.{}.self_attn", WeightLayout::Canonical).heads(Heads::Same("encoder_num_key_value_heads"))
    .bias(Bias::QkvIf("attention_bias", false)).rope(rope(10_000.0, 512).partial(0.9).interleaved());
const MOONSHINE_DECODER: Family = MOONSHINE
    .layers_from("decoder_num_hidden_layers").width_from("hidden_size").query_heads_from("decoder_num_attention_heads")
    .at(BASE, "decoder.layers.{}.self_attn", WeightLayout::Canonical).heads(Heads::Same("decoder_num_key_value_heads"))
    .mask(Mask::Causal);
const MOONSHINE_CROSS: Family = Family { rope: None, ..MOONSHINE_DECODER }
    .at(BASE, "decoder.layers.{}.encoder_attn", WeightLayout::Canonical).mask(Mask::Encoder);

const T5: Family = DECODER.layers_from("num_layers").width_from("d_model").query_heads_from("num_heads")
    .aliases(&[("head_dim", "d_kv")])
    .at(T5_PREFIXES, "encoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)
    .heads(Heads::Same("num_key_value_heads")).dropout(Number("dropout_rate", 0.1)).mask(Mask::Encoder)
    .scale(Scale::Fixed(1.0)).positions(Positions::Relative { bidirectional: true }).only(&[("is_decoder", "false")])
    .rules(&[shapes::t5_heads]).decoder(&T5_DECODER).cross(&T5_CROSS);
const T5_CROSS: Family = DECODER.layers_from(DECODER_LAYERS).width_from("d_model").query_heads_from("num_heads")
    .usual_names(false)
    .aliases(&[("head_dim", "d_kv"), ("hidden_size", "d_model"), ("num_attention_heads", "num_heads")])
    .at(T5_PREFIXES, "decoder.block.{}.layer.1.EncDecAttention", WeightLayout::T5)
    .heads(Heads::Same("num_key_value_heads")).mask(Mask::Encoder).scale(Scale::Fixed(1.0))
    .only(&[("is_decoder", "false")]).rules(&[shapes::t5_heads]);
const T5_DECODER: Family = T5_CROSS.at(T5_PREFIXES, "decoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)
    .mask(Mask::Causal).positions(Positions::Relative { bidirectional: false });

const MASKFORMER: &[&str] = &["model.transformer_module.", "transformer_module."];
const PIX2STRUCT: &[&str] = &["decoder.", ""];
const PIX2STRUCT_TEXT: Family = PIX2STRUCT_CROSS.of("pix2struct_text_model").layers(12).width(768).query_heads(12)
    .dropout(Number("dropout_rate", 0.1)).mask(Mask::Causal)
    .at(PIX2STRUCT, "layer.{}.self_attention.attention", WeightLayout::Pix2Struct)
    .positions(Positions::Relative { bidirectional: false }).only(&[("is_decoder", "true")]).cross(&PIX2STRUCT_CROSS);
const PIX2STRUCT_CROSS: Family = DECODER.layers_from("num_layers").width_from(HIDDEN).query_heads_from("num_heads")
    .aliases(&[("head_dim", "d_kv")]).heads(Heads::Same("num_key_value_heads")).scale(Scale::Fixed(1.0))
    .at(PIX2STRUCT, "layer.{}.encoder_decoder_attention.attention", WeightLayout::Pix2Struct)
    .mask(Mask::Encoder).rules(&[shapes::t5_heads]);

/// Prompts, which are additional keys, are not supported.
const NO_PROMPT: &[(&str, &str)] = &[("use_prompt", "false")];

pub(super) const WITH_DECODERS: &[Family] = &[
    BART.of("bart").layers(12).width(1024).query_heads(16),
    BART.of("blenderbot").layers(2).width(2560).query_heads(32)
        .default_decoder_sizes(Sizes { layers: 24, embed_dim: 2560, num_heads: 32 }),
    BART.of("blenderbot-small").layers(8).width(512).query_heads(16),
    // Their encoders.
    BART_ENCODER.of("conditional_detr").layers(6).width(256).query_heads(8),
    BART_ENCODER.of("dab-detr").width_from(HIDDEN).layers(6).width(256).query_heads(8),
    DETR.of("detr").layers(6).width(256).query_heads(8),
    BART.of("fsmt").layers(12).width(1024).query_heads(16),
    BART.of("m2m_100").layers(12).width(1024).query_heads(16).dropout(DROPOUT),
    BART.of("marian").layers(12).width(1024).query_heads(16),
    BART_DECODER.of("maskformer").section("decoder_config").layers(6).width(256).query_heads(8).mask(Mask::Encoder)
        .at(MASKFORMER, "decoder.layers.{}.self_attn", WeightLayout::Opt)
        .cross(
            &BART_CROSS.section("decoder_config").at(MASKFORMER, "decoder.layers.{}.encoder_attn", WeightLayout::Opt),
        ),
    BART.of("mbart").layers(12).width(1024).query_heads(16),
    MOONSHINE.decoder(&MOONSHINE_DECODER).cross(&MOONSHINE_CROSS),
    T5.of("mt5").layers(8).width(512).query_heads(6),
    BART.of("mvp").layers(12).width(1024).query_heads(16).only(NO_PROMPT).decoder(&BART_DECODER.only(NO_PROMPT))
        .cross(&BART_CROSS.only(NO_PROMPT)),
    BART.of("nllb-moe").layers(12).width(1024).query_heads(16).dropout(DROPOUT)
        .cross(&BART_CROSS.at(BASE, "decoder.layers.{}.cross_attention", WeightLayout::Opt)),
    BART.of("pegasus").layers(12).width(1024).query_heads(16),
    PIX2STRUCT_TEXT,
    BART.of("plbart").layers(6).width(768).query_heads(12).dropout(DROPOUT),
    T5.of("pop2piano").layers(6).width(512).query_heads(8),
    BART_DECODER.of("pp_formulanet_text").layers(8).width(512).query_heads(16)
        .at(PP_FORMULANET, "layers.{}.self_attn", WeightLayout::Opt)
        .cross(&BART_CROSS.at(PP_FORMULANET, "layers.{}.encoder_attn", WeightLayout::Opt)),
    BART.of("speech_to_text").layers(12).width(256).query_heads(4)
        .default_decoder_sizes(Sizes { layers: 6, embed_dim: 256, num_heads: 4 }),
    T5.of("switch_transformers").layers(12).width(768).query_heads(12),
    T5.of("t5").layers(6).width(512).query_heads(8),
    DETR.of("table-transformer").layers(6).width(256).query_heads(8),
    BART_DECODER.of("trocr").layers(12).width(1024).query_heads(16).usual_names(true).aliases(&[]).below(TROCR)
        .cross(&BART_CROSS.usual_names(true).aliases(&[]).below(TROCR).rules(&[shapes::trocr_cross])),
    T5.of("umt5").layers(8).width(512).query_heads(6).shared_place(SharedPlace::EachLayer)
        .decoder(&T5_DECODER.shared_place(SharedPlace::EachLayer)),
    BART.of("whisper").layers(4).width(384).query_heads(6).bias(Bias::AllButKey)
        .decoder(&BART_DECODER.bias(Bias::AllButKey))
        .cross(&BART_CROSS.bias(Bias::AllButKey)),
];

//! Encoders whose scores have terms by distance and content: conformers, and DeBERTa.

use candle_core::Result;
use serde_json::Value;

use super::ENCODER;
use crate::hf::family::{Bias, BiasPlace, Family, ModuleNames, at};
use crate::hf::fields::Fields;
use candle_attention_core::{ContentPositions, DisentangledConfig, MultiHeadAttentionConfig, WeightLayout};

/// A conformer's names in transformers below a prefix.
const fn conformer(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "encoder.layers.{}.self_attn", WeightLayout::Espnet)
}

/// `position_embeddings_type`.
fn of_kind(fields: &Fields, default: &str, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    let positions = match fields.nullable("position_embeddings_type", Some(default))? {
        None => return Ok(cfg),
        Some("relative") => ContentPositions::TransformerXl,
        Some("relative_key") => {
            let side = |name, default| fields.get_or::<f64>(name, default).map(|size| size as usize);
            ContentPositions::Clipped {
                left: side("left_max_position_embeddings", 64.0)?,
                right: side("right_max_position_embeddings", 8.0)?,
            }
        }
        Some(other) => {
            return fields.fail(format!(
                "position_embeddings_type is {other:?}, which is not supported, expected \"relative\" or \
                 \"relative_key\""
            ));
        }
    };
    Ok(cfg.with_content_positions(positions))
}

/// Numbers that are -1 where there is none.
fn positive(fields: &Fields, name: &str) -> Result<Option<usize>> {
    Ok(fields.nullable::<f64>(name, None)?.filter(|number| *number >= 1.0).map(|number| number as usize))
}

/// DeBERTa's kinds of terms, as a list or in one text.
fn has_term(fields: &Fields, term: &str, default: bool) -> bool {
    match fields.get("pos_att_type") {
        Some(Value::String(text)) => text.to_lowercase().split('|').any(|kind| kind.trim() == term),
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == term),
        _ => default && !fields.has("pos_att_type"),
    }
}

/// What a row says of DeBERTa's fields where they are left out.
struct DebertaDefaults {
    is_relative: bool,
    buckets: Option<usize>,
    shares: bool,
    norms: bool,
}

fn deberta(
    fields: &Fields,
    defaults: DebertaDefaults,
    cfg: MultiHeadAttentionConfig,
) -> Result<MultiHeadAttentionConfig> {
    let is_relative = defaults.is_relative;
    let [by_query, by_key] = ["c2p", "p2c"].map(|term| has_term(fields, term, is_relative));
    fields.agrees("attention_head_size", cfg.head_dim())?;
    let buckets = if fields.has("position_buckets") { positive(fields, "position_buckets")? } else { defaults.buckets };
    let max_distance = match positive(fields, "max_relative_positions")? {
        Some(most) => most,
        None => fields.get_or("max_position_embeddings", 512)?,
    };
    let norm = match fields.nullable("norm_rel_ebd", Some(if defaults.norms { "layer_norm" } else { "none" }))? {
        Some(kinds) if kinds.to_lowercase().split('|').any(|kind| kind.trim() == "layer_norm") => {
            Some(fields.get_or("layer_norm_eps", 1e-7)?)
        }
        _ => None,
    };
    let positions = DisentangledConfig::new(max_distance).with_terms(by_query, by_key);
    let positions = positions.with_shared_projections(fields.flag("share_att_key", defaults.shares)?);
    // Without relative positions the scale is still that of all terms.
    let terms = cfg.head_dim() as f64 * positions.num_terms() as f64;
    let cfg = cfg.with_scale(1.0 / terms.sqrt());
    if !fields.flag("relative_attention", is_relative)? {
        return Ok(cfg);
    }
    let positions = buckets.map_or(positions.clone(), |buckets| positions.with_num_buckets(buckets));
    let positions = norm.map_or(positions.clone(), |eps| positions.with_layer_norm(eps));
    Ok(cfg.with_content_positions(ContentPositions::Disentangled(positions)))
}

#[rustfmt::skip]
const WAV2VEC2_CONFORMER: Family = Family {
    model_type: "wav2vec2-conformer", modules: &[conformer(&["wav2vec2_conformer.", ""])],
    dropout: ("attention_dropout", 0.1), adjust: |fields, _, cfg| of_kind(fields, "relative", cfg), ..ENCODER
};
#[rustfmt::skip]
const FASTSPEECH2: Family = Family {
    model_type: "fastspeech2_conformer", names: ["encoder_layers", "hidden_size", "encoder_num_attention_heads"],
    usual_names: false, sizes: [4, 384, 2], dropout: ("encoder_attention_dropout_rate", 0.2),
    modules: &[at(&["encoder.", "model.encoder."], "conformer_layers.{}.self_attn", WeightLayout::Espnet)],
    adjust: |_, _, cfg| Ok(cfg.with_content_positions(ContentPositions::TransformerXl)), ..ENCODER
};

#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "deberta-v2", sizes: [24, 1536, 24], dropout: ("attention_probs_dropout_prob", 0.1),
        modules: &[at(&["deberta.", ""], "encoder.layer.{}.attention", WeightLayout::Deberta)],
        bias_place: BiasPlace::Module("encoder"),
        adjust: |fields, _, cfg| {
            let defaults = DebertaDefaults { is_relative: false, buckets: None, shares: false, norms: false };
            deberta(fields, defaults, cfg)
        },
        ..ENCODER
    },
    Family {
        decoder: Some(&Family {
            names: ["decoder_layers", "hidden_size", "decoder_num_attention_heads"],
            dropout: ("decoder_attention_dropout_rate", 0.2),
            modules: &[at(&["decoder.", "model.decoder."], "conformer_layers.{}.self_attn", WeightLayout::Espnet)],
            ..FASTSPEECH2
        }),
        ..FASTSPEECH2
    },
    Family {
        model_type: "parakeet_encoder", sizes: [24, 1024, 8], bias: Bias::AllIf("attention_bias", true),
        dropout: ("attention_dropout", 0.1),
        modules: &[at(&["encoder.", "", "model.encoder."], "layers.{}.self_attn", WeightLayout::Canonical)],
        adjust: |_, _, cfg| Ok(cfg.with_content_positions(ContentPositions::TransformerXl)), ..ENCODER
    },
    Family {
        model_type: "sew-d", dropout: ("attention_dropout", 0.1),
        modules: &[at(&["sew_d.", ""], "encoder.encoder.layer.{}.attention", WeightLayout::Deberta)],
        bias_place: BiasPlace::Module("encoder.encoder"),
        adjust: |fields, _, cfg| {
            let defaults = DebertaDefaults { is_relative: true, buckets: Some(256), shares: true, norms: true };
            deberta(fields, defaults, cfg)
        },
        ..ENCODER
    },
    Family {
        model_type: "wav2vec2-bert", sizes: [24, 1024, 16], modules: &[conformer(&["wav2vec2_bert.", ""])],
        dropout: ("attention_dropout", 0.0),
        adjust: |fields, _, cfg| of_kind(fields, "relative_key", cfg), ..WAV2VEC2_CONFORMER
    },
    WAV2VEC2_CONFORMER,
];

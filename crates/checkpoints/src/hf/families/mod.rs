//! The table of model families. One that needs nothing new is one row: its fields and defaults are those of its
//! configuration class in transformers, and a column that a row leaves out is as in the row it extends.

mod axes;
mod decoders;
mod distances;
mod encoder_decoders;
mod encoders;
mod gated;
mod gemma;
mod gpt;
mod hybrid;
mod images_and_sound;
mod latent;
mod swin;
mod windows;

use super::family::{Bias, BiasPlace, Family, Heads, Mask, Norm, Rotary, at};
use super::rope::rope;
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{QkNormKind, QkNormScope, WeightLayout};

const LAYERS: &str = "num_hidden_layers";
pub(super) const HIDDEN: &str = "hidden_size";
pub(super) const HEADS: &str = "num_attention_heads";
/// The usual names of the number of layers, of `embed_dim` and of `num_heads`.
pub(super) const SIZE_NAMES: [&str; 3] = [LAYERS, HIDDEN, HEADS];
/// T5's name of the number of its decoder's layers.
pub(super) const DECODER_LAYERS: &str = "num_decoder_layers";

/// The base model below a head, by itself, and beside images.
const MODEL: &[&str] = &["model.", "", "model.language_model.", "language_model.model.", "model.text_model."];
/// The text of a model of texts and images.
const TEXT_MODEL: &[&str] = &["text_model.", ""];

const QKV_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProj, QkvOrder::ByPart);
const WQKV: WeightLayout = WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart);

/// ModernBERT's, as an encoder and as a decoder.
const MODERNBERT_ROPE: Rotary = Rotary::ByKind {
    windowed: rope(10_000.0, 8192).theta_from("local_rope_theta"),
    full: rope(160_000.0, 8192).theta_from("global_rope_theta"),
    scales_windowed: true,
};

/// Every row.
pub(super) fn families() -> impl Iterator<Item = &'static Family> {
    let decoders = [decoders::ROWS, gated::ROWS, gemma::ROWS, gpt::ROWS, hybrid::ROWS, latent::ROWS];
    let others = [
        encoders::ROWS,
        axes::ROWS,
        images_and_sound::ROWS,
        windows::ROWS,
        swin::ROWS,
        distances::ROWS,
        encoder_decoders::ROWS,
    ];
    decoders.into_iter().chain(others).flatten()
}

/// Grouped heads without positions or biases, causal: what most decoders begin with.
#[rustfmt::skip]
const DECODER: Family = Family {
    model_type: "", names: SIZE_NAMES, usual_names: true, sizes: [32, 4096, 32], stages: None,
    aliases: &[], section: None,
    modules: &[at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)],
    heads: Heads::Grouped(None, None), head_dim_follows: false, dropout: ("attention_dropout", 0.0), bias: Bias::None,
    key_bias: None, rope: Rotary::None, qk_norm: None, window: |_, _| Ok(None), mask: Mask::Causal, scale: None,
    only: &[], bias_place: BiasPlace::FirstLayer, kv_layer: |_, _| Ok(None), adjust: |_, _, cfg| Ok(cfg),
    decoder: None, cross: None, latent: None,
};
/// A key head for each query head, biases, all keys: what most encoders begin with.
#[rustfmt::skip]
const ENCODER: Family =
    Family { sizes: [12, 768, 12], heads: Heads::Equal, bias: Bias::All, mask: Mask::Encoder, ..DECODER };

const fn rms_norm(scope: QkNormScope, eps: f64) -> Norm {
    Norm { flag: None, kind: QkNormKind::Rms, scope, eps: ("rms_norm_eps", eps) }
}

const fn layer_norm(flag: Option<&'static str>, kind: QkNormKind, scope: QkNormScope) -> Norm {
    Norm { flag, kind, scope, eps: ("layer_norm_eps", 1e-5) }
}

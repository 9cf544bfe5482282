//! The table of model families. One that needs nothing new is one row: its fields and defaults are those of its
//! configuration class in transformers, and a column that a row leaves out is as in the row it extends. Its files are
//! laid out by hand, as a table is.

#[rustfmt::skip]
mod decoders;
#[rustfmt::skip]
mod encoders;
#[rustfmt::skip]
mod gpt;
#[rustfmt::skip]
mod images_and_sound;

use super::family::{Bias, Family, Heads, Mask, Norm, Number};
use super::rope::{Rope, rope};
use candle_attention_core::WeightLayout;
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_modules::norm::{QkNormKind, QkNormScope};

const LAYERS: &str = "num_hidden_layers";
pub(super) const HIDDEN: &str = "hidden_size";
pub(super) const HEADS: &str = "num_attention_heads";
/// The usual names of the number of layers, of `embed_dim` and of `num_heads`.
pub(super) const SIZE_NAMES: [&str; 3] = [LAYERS, HIDDEN, HEADS];
/// T5's name of the number of its decoder's layers.
pub(super) const DECODER_LAYERS: &str = "num_decoder_layers";
/// How many layers stand between those that see all keys.
const PATTERN: &str = "sliding_window_pattern";

/// The base model below a head, by itself, and beside images.
pub(super) const MODEL: &[&str] =
    &["model.", "", "model.language_model.", "language_model.model.", "model.text_model."];
/// The text of a model of texts and images.
const TEXT_MODEL: &[&str] = &["text_model.", ""];

const QKV: WeightLayout = WeightLayout::Packed(PackedNaming::Qkv, QkvOrder::ByPart);
const QKV_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProj, QkvOrder::ByPart);
const WQKV: WeightLayout = WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart);

/// ModernBERT's, as an encoder and as a decoder.
const MODERNBERT_ROPE: Rope = rope(160_000.0, 8192).theta(Number("global_rope_theta", 160_000.0));
const MODERNBERT_WINDOWED_ROPE: Rope =
    rope(10_000.0, 8192).theta(Number("local_rope_theta", 10_000.0)).shares_scaling(true);

/// Every row.
pub(super) fn families() -> impl Iterator<Item = &'static Family> {
    let decoders = [
        decoders::ROWS,
        decoders::GATED,
        decoders::HYBRID,
        decoders::LINEAR,
        decoders::LATENT,
        decoders::GEMMAS,
        gpt::ROWS,
    ];
    let others = [
        encoders::ROWS,
        encoders::BY_DISTANCE,
        images_and_sound::ON_AXES,
        images_and_sound::ROWS,
        images_and_sound::IN_WINDOWS,
        images_and_sound::IN_STAGES,
        encoders::WITH_DECODERS,
    ];
    decoders.into_iter().chain(others).flatten()
}

const DECODER: Family = Family::DECODER;
const LLAMA: Family = DECODER.of("llama").bias(Bias::AllIf("attention_bias", false)).rope(rope(10_000.0, 2048));
/// A key head for each query head, biases, all keys: what most encoders begin with.
const ENCODER: Family = DECODER.sizes([12, 768, 12]).heads(Heads::Equal).bias(Bias::All).mask(Mask::Encoder);

const fn rms_per_head(eps: f64) -> Norm {
    Norm::RMS_PER_HEAD.eps(Number("rms_norm_eps", eps))
}

const fn layer_norm(kind: QkNormKind, scope: QkNormScope) -> Norm {
    Norm::RMS_PER_HEAD.kind(kind).scope(scope).eps(Number("layer_norm_eps", 1e-5))
}

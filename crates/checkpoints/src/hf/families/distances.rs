//! Encoders whose scores have terms by distance and content: conformers, and DeBERTa.

use super::ENCODER;
use crate::hf::family::{Bias, Family, Number, SharedPlace};
use crate::hf::positions::{Deberta, Positions};
use crate::hf::rules;
use candle_attention_core::WeightLayout;

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

pub(super) const ROWS: &[Family] = &[
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

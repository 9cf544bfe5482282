//! Gemma, whose later layers differ in width and read keys and values of earlier ones.

use super::{LLAMA, PATTERN, rms_per_head};
use crate::hf::family::{Family, Mask, Number, Scale};
use crate::hf::rope::{Rope, rope};
use crate::hf::rules;
use crate::hf::windows::{Pattern::*, Window};
use candle_attention_core::QkNormKind;

/// As transformers saves the text beside images, as Gemma 3 was published, and without a head.
const BELOW_IMAGES: &[&str] = &["model.language_model.", "language_model.model.", "language_model."];
/// Wide heads of which a quarter of the pairs rotates.
const PROPORTIONAL: Rope =
    rope(1e6, 131_072).default_parameters(r#"{"rope_type": "proportional", "partial_rotary_factor": 0.25}"#);

// What it does depends on the implementation of attention that transformers uses: some keep the causal mask.
const GEMMA: Family = LLAMA.of("gemma").sizes([28, 3072, 16]).grouped(16, 256).rope(rope(10_000.0, 8192))
    .only(&[("use_bidirectional_attention", "false")]);
const GEMMA2: Family = GEMMA.of("gemma2").sizes([26, 2304, 8]).grouped(4, 256)
    .window(Window::Layers(FirstOf(2), Some(4096))).scale(Scale::RootOf(Number("query_pre_attn_scalar", 256.0)))
    .rules(&[rules::softcapped]);
const GEMMA3_TEXT: Family = GEMMA2.of("gemma3_text").rope(rope(1e6, 131_072))
    .windowed_rope(rope(10_000.0, 131_072).theta(Number("rope_local_base_freq", 10_000.0)))
    .qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsPlusOne))
    .window(Window::Layers(ButLastBy(PATTERN, 6), Some(4096))).mask(Mask::CausalOrBidirectional)
    .only(&[("model_type", "\"gemma3_text\""), ("attn_logit_softcapping", "null")]).rules(&[]);
const GEMMA3N: Family = LLAMA.of("gemma3n_text").sizes([35, 2048, 8]).grouped(2, 256).rope(rope(1e6, 32_768))
    .windowed_rope(rope(10_000.0, 32_768).theta(Number("rope_local_base_freq", 10_000.0))).qk_norm(rms_per_head(1e-6))
    .window(Window::Layers(ButLastOf(5), Some(512))).scale(Scale::Fixed(1.0)).value_norm(true).kv_shared_layers(15);
const GEMMA4: Family = GEMMA3N.of("gemma4_text").sizes([30, 2304, 8]).grouped(4, 256).rope(PROPORTIONAL)
    .windowed_rope(rope(10_000.0, 131_072)).window(Window::NeverLast(ButLastOf(6), 512))
    .mask(Mask::CausalOrBidirectional).kv_shared_layers(0).rules(&[rules::gemma4_full]);
const GEMMA4_UNIFIED: Family = GEMMA4.of("gemma4_unified_text").window(Window::NeverLast(ButLastOf(6), 1024));
/// Each layer has keys and values of its own.
const UNSHARED: Family = Family { kv_shared_layers: None, ..GEMMA4 };

/// In alphabetical order.
pub(super) const ROWS: &[Family] = &[
    // Its encoder.
    UNSHARED.of("diffusion_gemma_text").below(&["model.encoder.language_model.", "encoder.language_model.", ""])
        .rules(&[rules::diffusion_gemma_full]),
    UNSHARED.of("embedding_gemma2_text").sizes([24, 512, 4]).grouped(2, 256).rope(rope(1e6, 262_144))
        .windowed_rope(rope(10_000.0, 262_144)).window(Window::Layers(ButLastOf(6), Some(512))).mask(Mask::Encoder)
        .rules(&[rules::embedding_gemma_full]),
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT.of("gemma3").section("text_config").below(BELOW_IMAGES),
    GEMMA3_TEXT,
    GEMMA3N.of("gemma3n").section("text_config").below(BELOW_IMAGES),
    GEMMA3N,
    GEMMA4.of("gemma4").section("text_config").below(BELOW_IMAGES),
    GEMMA4,
    GEMMA4_UNIFIED.of("gemma4_unified").section("text_config").below(BELOW_IMAGES),
    GEMMA4_UNIFIED,
    GEMMA2.of("vaultgemma"),
];

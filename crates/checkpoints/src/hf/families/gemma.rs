//! Gemma, whose later layers differ in width and read keys and values of earlier ones.

use candle_core::Result;

use super::{DECODER, LAYERS, rms_norm};
use crate::hf::family::{Bias, Family, Heads, Mask, ModuleNames, Norm, Rotary, at};
use crate::hf::fields::Fields;
use crate::hf::rope::{Rope, rope};
use crate::hf::rules::{all_but_each, sliding, softcapped};
use candle_attention_core::{KvSource, MultiHeadAttentionConfig, QkNormKind, QkNormScope, RopeScaling, WeightLayout};

/// As transformers saves the text beside images, as Gemma 3 was published, and without a head.
const BELOW_IMAGES: &[ModuleNames] = &[at(
    &["model.language_model.", "language_model.model.", "language_model."],
    "layers.{}.self_attn",
    WeightLayout::Canonical,
)];

#[rustfmt::skip]
const GEMMA: Family = Family {
    model_type: "gemma", sizes: [28, 3072, 16], heads: Heads::Grouped(Some(16), Some(256)),
    bias: Bias::AllIf("attention_bias", false),
    rope: Rotary::All(rope(10_000.0, 8192)),
    // What it does depends on the implementation of attention that transformers uses: some keep the causal mask.
    only: &[("use_bidirectional_attention", "false")], ..DECODER
};
#[rustfmt::skip]
const GEMMA2: Family = Family {
    model_type: "gemma2", sizes: [26, 2304, 8], heads: Heads::Grouped(Some(4), Some(256)),
    window: |fields, layer| sliding(fields, layer, layer.is_multiple_of(2), Some(4096)),
    scale: Some(("query_pre_attn_scalar", 256.0, -0.5)),
    adjust: |fields, _, cfg| softcapped(fields, cfg),
    ..GEMMA
};
#[rustfmt::skip]
const GEMMA3_TEXT: Family = Family {
    model_type: "gemma3_text",
    rope: Rotary::ByKind {
        windowed: rope(10_000.0, 131_072).theta_from("rope_local_base_freq"), full: rope(1e6, 131_072),
        scales_windowed: false,
    },
    qk_norm: Some(Norm { kind: QkNormKind::RmsPlusOne, ..rms_norm(QkNormScope::PerHead, 1e-6) }),
    window: |fields, layer| all_but_each(fields, layer, 6), mask: Mask::CausalOrBidirectional,
    only: &[("model_type", "\"gemma3_text\""), ("attn_logit_softcapping", "null")],
    adjust: |_, _, cfg| Ok(cfg), ..GEMMA2
};
/// Wide heads of which a quarter of the pairs rotates.
const PROPORTIONAL: Rope =
    rope(1e6, 131_072).scaled_unless_given(|_| Ok(RopeScaling::Proportional { factor: 1.0, proportion: 0.25 }));
#[rustfmt::skip]
const GEMMA3N: Family = Family {
    model_type: "gemma3n_text", sizes: [35, 2048, 8], heads: Heads::Grouped(Some(2), Some(256)),
    bias: Bias::AllIf("attention_bias", false),
    rope: Rotary::ByKind {
        windowed: rope(10_000.0, 32_768).theta_from("rope_local_base_freq"), full: rope(1e6, 32_768),
        scales_windowed: false,
    },
    qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)),
    window: |fields, layer| sliding(fields, layer, !(layer + 1).is_multiple_of(5), Some(512)),
    kv_layer: |fields, layer| earlier(fields, layer, &GEMMA3N, 15),
    adjust: |fields, layer, cfg| value_normed(fields, cfg, earlier(fields, layer, &GEMMA3N, 15)?), ..DECODER
};
#[rustfmt::skip]
const GEMMA4: Family = Family {
    model_type: "gemma4_text", sizes: [30, 2304, 8], heads: Heads::Grouped(Some(4), Some(256)),
    rope: Rotary::ByKind { windowed: rope(10_000.0, 131_072), full: PROPORTIONAL, scales_windowed: false },
    window: |fields, layer| gemma4_window(fields, layer, 512), mask: Mask::CausalOrBidirectional,
    kv_layer: |fields, layer| earlier(fields, layer, &GEMMA4, 0),
    adjust: |fields, layer, cfg| {
        let keys_as_values = fields.flag("attention_k_eq_v", false)?;
        let key_heads = fields.optional("num_global_key_value_heads")?.filter(|_| keys_as_values);
        let cfg = widened(fields, cfg, key_heads)?;
        let cfg = if keys_as_values && is_full(&cfg) { cfg.with_kv_source(KvSource::KeysAsValues) } else { cfg };
        value_normed(fields, cfg, earlier(fields, layer, &GEMMA4, 0)?)
    },
    ..GEMMA3N
};

#[rustfmt::skip]
const GEMMA4_UNIFIED: Family = Family {
    model_type: "gemma4_unified_text", window: |fields, layer| gemma4_window(fields, layer, 1024), ..GEMMA4
};

/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    // Its encoder.
    Family {
        model_type: "diffusion_gemma_text",
        modules: &[at(
            &["model.encoder.language_model.", "encoder.language_model.", ""], "layers.{}.self_attn",
            WeightLayout::Canonical,
        )],
        kv_layer: |_, _| Ok(None),
        adjust: |fields, _, cfg| {
            let cfg = widened(fields, cfg, fields.optional("num_global_key_value_heads")?)?;
            let cfg = if is_full(&cfg) { cfg.with_kv_source(KvSource::KeysAsValues) } else { cfg };
            value_normed(fields, cfg, None)
        },
        ..GEMMA4
    },
    Family {
        model_type: "embedding_gemma2_text", sizes: [24, 512, 4], heads: Heads::Grouped(Some(2), Some(256)),
        rope: Rotary::ByKind { windowed: rope(10_000.0, 262_144), full: rope(1e6, 262_144), scales_windowed: false },
        window: |fields, layer| sliding(fields, layer, !(layer + 1).is_multiple_of(6), Some(512)),
        mask: Mask::Encoder, kv_layer: |_, _| Ok(None),
        adjust: |fields, _, cfg| {
            let cfg = widened(fields, cfg, Some(fields.get_or("num_global_key_value_heads", 1)?))?;
            value_normed(fields, cfg, None)
        },
        ..GEMMA4
    },
    GEMMA,
    GEMMA2,
    Family {
        model_type: "gemma3", section: Some("text_config"),
        modules: BELOW_IMAGES, ..GEMMA3_TEXT
    },
    GEMMA3_TEXT,
    Family {
        model_type: "gemma3n", section: Some("text_config"),
        modules: BELOW_IMAGES, ..GEMMA3N
    },
    GEMMA3N,
    Family {
        model_type: "gemma4", section: Some("text_config"),
        modules: BELOW_IMAGES, ..GEMMA4
    },
    GEMMA4,
    Family {
        model_type: "gemma4_unified", section: Some("text_config"),
        modules: BELOW_IMAGES, ..GEMMA4_UNIFIED
    },
    GEMMA4_UNIFIED,
    Family { model_type: "vaultgemma", ..GEMMA2 },
];

/// The last layer is never windowed.
fn gemma4_window(fields: &Fields, layer: usize, default: usize) -> Result<Option<usize>> {
    match layer + 1 == fields.get_or(LAYERS, GEMMA4.sizes[0])? {
        true => Ok(None),
        false => sliding(fields, layer, !(layer + 1).is_multiple_of(6), Some(default)),
    }
}

fn is_full(cfg: &MultiHeadAttentionConfig) -> bool {
    cfg.window().is_none() && cfg.band().is_none()
}

/// Layers that see all keys have heads of their own, unless the config says so for each layer by itself.
fn widened(
    fields: &Fields,
    cfg: MultiHeadAttentionConfig,
    key_heads: Option<usize>,
) -> Result<MultiHeadAttentionConfig> {
    if !is_full(&cfg) || fields.has("per_layer_config") {
        return Ok(cfg);
    }
    let cfg = cfg.with_head_dim(fields.get_or("global_head_dim", 512)?);
    Ok(match key_heads {
        Some(key_heads) => cfg.with_num_kv_heads(key_heads),
        None => cfg,
    })
}

/// Scores are not scaled, and values are normalised by the layer that makes them.
fn value_normed(
    fields: &Fields,
    cfg: MultiHeadAttentionConfig,
    earlier: Option<usize>,
) -> Result<MultiHeadAttentionConfig> {
    let cfg = cfg.with_scale(1.0);
    Ok(match earlier {
        Some(_) => cfg.with_kv_source(KvSource::EarlierLayer).with_k_bias(false).with_v_bias(false),
        None => cfg.with_value_norm(fields.get_or("rms_norm_eps", 1e-6)?),
    })
}

/// The last layer of the same kind before the `num_kv_shared_layers` last ones, for these.
fn earlier(fields: &Fields, layer: usize, family: &Family, default: usize) -> Result<Option<usize>> {
    const SHARED: &str = "num_kv_shared_layers";
    let layers = fields.get_or(LAYERS, family.sizes[0])?;
    // Zero is a valid number of them.
    let none = fields.get(SHARED).map_or(default == 0, |shared| *shared == 0);
    let shared = if none { 0 } else { fields.get_or(SHARED, default)? };
    let own = layers.saturating_sub(shared);
    if layer < own {
        return Ok(None);
    }
    let is_windowed = |layer| (family.window)(fields, layer).map(|window| window.is_some());
    let kind = is_windowed(layer)?;
    for earlier in (0..own).rev() {
        if is_windowed(earlier)? == kind {
            return Ok(Some(earlier));
        }
    }
    fields.fail(format!("{SHARED} is {shared}, but no layer of the kind of layer {layer} comes before these"))
}

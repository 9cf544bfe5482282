//! Rules of single families for the numbers of heads and the widths of heads and inputs, which no column of the table
//! describes.

use candle_attention_core::{KvSharing, MultiHeadAttentionConfig as Config};
use candle_attention_modules::gate::{GateActivation, OutputGate};
use candle_attention_modules::norm::{QkNorm, QkNormKind, QkNormScope};
use candle_core::Result;
use serde_json::Value;

use super::fields::Fields;
use super::rules::{GATE, GATE_OF_HEADS};

/// Reads the number of key heads of DBRX: `kv_n_heads` of `attn_config`.
pub(super) fn dbrx_key_heads(fields: &Fields, _: usize) -> Result<usize> {
    fields.section("attn_config")?.get_or("kv_n_heads", 1)
}

/// Reads the number of key heads of Falcon: one for all query heads (`multi_query`), one for each, or one for each
/// group (`new_decoder_architecture`).
pub(super) fn falcon_key_heads(fields: &Fields, num_heads: usize) -> Result<usize> {
    let grouped = fields.flag("new_decoder_architecture", false)?;
    if !grouped && fields.flag("multi_query", true)? {
        return Ok(1);
    }
    let key_heads = fields.optional("num_kv_heads")?.unwrap_or(num_heads);
    if !grouped && key_heads != 1 {
        fields.agrees("num_kv_heads", num_heads)?;
    }
    Ok(key_heads)
}

/// Reads the number of key heads of Dia's attention to its encoder.
pub(super) fn dia_key_heads(fields: &Fields, _: usize) -> Result<usize> {
    fields.get_or("cross_num_key_value_heads", 16)
}

/// Reads the widths of the heads and of the encoder's outputs of Dia's attention to its encoder.
pub(super) fn dia_cross(fields: &Fields, cfg: Config) -> Result<Config> {
    let width = fields.get_or("cross_hidden_size", 1024)?;
    Ok(cfg.with_head_dim(fields.get_or("cross_head_dim", 128)?).with_kdim(width).with_vdim(width))
}

/// Reads the number of key heads of GPT BigCode: one for all query heads, or one for each.
pub(super) fn bigcode_key_heads(fields: &Fields, num_heads: usize) -> Result<usize> {
    let key_heads = if fields.flag("multi_query", true)? { 1 } else { num_heads };
    fields.agrees("num_key_value_heads", key_heads)?;
    Ok(key_heads)
}

/// Reads the number of heads of the layer in a list, or returns `None` without the list. `what` names these heads in an
/// error.
fn heads_of_layer(fields: &Fields, name: &str, what: &str) -> Result<Option<usize>> {
    let Some(found) = fields.of_layer(name)? else { return Ok(None) };
    match found.as_u64().and_then(|heads| usize::try_from(heads).ok()) {
        Some(heads) => Ok(Some(heads)),
        None => fields.fail(format!("layer {} has {found} {what}, expected a whole number", fields.layer)),
    }
}

/// Reads `gating` of Laguna, and the heads of each layer in `num_attention_heads_per_layer`.
pub(super) fn laguna(fields: &Fields, cfg: Config) -> Result<Config> {
    let per_head = fields.get("gating").is_none_or(|gating| *gating == true || *gating == "per-head");
    let sigmoid_gate = if per_head { GATE_OF_HEADS } else { GATE };
    let gate = OutputGate { activation: GateActivation::Softplus, ..sigmoid_gate };
    let heads = heads_of_layer(fields, "num_attention_heads_per_layer", "heads")?.unwrap_or(cfg.num_heads());
    let key_heads = cfg.num_kv_heads();
    Ok(cfg.with_heads(heads, key_heads).with_output_gate(gate))
}

/// Reads Step 3.5's scale, `query_pre_attn_scalar`, and the heads of layers with a window.
pub(super) fn step3p5(fields: &Fields, cfg: Config) -> Result<Config> {
    let width = fields.optional("query_pre_attn_scalar")?.unwrap_or(cfg.head_dim() as f64);
    let other = fields.optional("num_sliding_attention_heads")?;
    let cfg = cfg.with_scale(width.powf(-0.5));
    Ok(match other.filter(|_| cfg.window().is_some() && !fields.has("per_layer_config")) {
        Some(heads) => {
            let key_heads = cfg.num_kv_heads();
            cfg.with_heads(heads, key_heads)
        }
        None => cfg,
    })
}

/// Reads the heads of Gemma 4's layers that attend to all keys, and with `attention_k_eq_v` uses their keys as values.
pub(super) fn gemma4_full(fields: &Fields, cfg: Config) -> Result<Config> {
    let keys_as_values = fields.flag("attention_k_eq_v", false)?;
    let key_heads = fields.optional("num_global_key_value_heads")?.filter(|_| keys_as_values);
    let cfg = with_full_heads(fields, cfg, key_heads)?;
    Ok(if keys_as_values && is_full(&cfg) { cfg.with_kv_sharing(KvSharing::KeysAsValues) } else { cfg })
}

/// Reads the heads of the layers of Gemma's diffusion model that attend to all keys. Their keys are always values.
pub(super) fn diffusion_gemma_full(fields: &Fields, cfg: Config) -> Result<Config> {
    let cfg = with_full_heads(fields, cfg, fields.optional("num_global_key_value_heads")?)?;
    Ok(if is_full(&cfg) { cfg.with_kv_sharing(KvSharing::KeysAsValues) } else { cfg })
}

/// Reads the head counts of EmbeddingGemma 2 for its layers without a window. These layers have a value projection.
pub(super) fn embedding_gemma_full(fields: &Fields, cfg: Config) -> Result<Config> {
    let key_heads = fields.get_or("num_global_key_value_heads", 1)?;
    with_full_heads(fields, cfg, Some(key_heads))
}

/// Sets the heads of layers that attend to all keys, unless the config has the heads of each layer.
fn with_full_heads(fields: &Fields, cfg: Config, key_heads: Option<usize>) -> Result<Config> {
    if !is_full(&cfg) || fields.has("per_layer_config") {
        return Ok(cfg);
    }
    let cfg = cfg.with_head_dim(fields.get_or("global_head_dim", 512)?);
    Ok(match key_heads {
        Some(key_heads) => cfg.with_num_kv_heads(key_heads),
        None => cfg,
    })
}

fn is_full(cfg: &Config) -> bool {
    cfg.window().is_none() && cfg.local_window().is_none()
}

/// Reads `d_kv` of T5.
pub(super) fn t5_heads(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_head_dim(fields.get_or("d_kv", 64)?))
}

/// Refuses fewer key heads than query heads, which Nomic does not have.
pub(super) fn equal_heads(fields: &Fields, cfg: Config) -> Result<Config> {
    fields.agrees("num_key_value_heads", cfg.num_heads())?;
    Ok(cfg)
}

/// Sets the width of values of MobileBERT, which may be projected from a wider input than queries and keys.
pub(super) fn mobilebert_values(fields: &Fields, cfg: Config) -> Result<Config> {
    if fields.flag("use_bottleneck_attention", false)? {
        return Ok(cfg);
    }
    Ok(cfg.with_vdim(fields.get_or("hidden_size", 512)?))
}

/// Sets the width of the concatenated features of several layers, `vision_feature_layer`.
pub(super) fn several_layers(fields: &Fields, cfg: Config) -> Result<Config> {
    let layers = match fields.get("vision_feature_layer").or_else(|| fields.get("vit_layers")) {
        None => 2,
        Some(Value::Array(layers)) if !layers.is_empty() => layers.len(),
        Some(other) => return fields.fail(format!("vision_feature_layer is {other}, expected a list of layers")),
    };
    let width = cfg.embed_dim();
    let Some(wide) = width.checked_mul(layers) else {
        return fields.fail(format!("features of {layers} layers of {width} are too wide"));
    };
    Ok(cfg.with_embed_dim(wide).with_out_dim(width))
}

/// Reads `use_qk_norm` and the key heads of each layer of Sapiens 2.
pub(super) fn sapiens(fields: &Fields, cfg: Config) -> Result<Config> {
    let full = |name| fields.count(name, 8);
    let is_full = fields.layer < full("num_first_full_attention_layers")?
        || fields.layer >= fields.num_layers.saturating_sub(full("num_last_full_attention_layers")?);
    let key_heads = match heads_of_layer(fields, "num_key_value_heads_per_layer", "key heads")? {
        Some(heads) => heads,
        None if is_full => cfg.num_heads(),
        None => fields.get_or("num_key_value_attention_heads", 8)?,
    };
    let eps = fields.get_or("rms_norm_eps", 1e-6)?;
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps };
    Ok(cfg.with_num_kv_heads(key_heads).with_qk_norm(fields.flag("use_qk_norm", true)?.then_some(norm)))
}

/// Sets heads that share half of the width, as in SAM's layers.
pub(super) fn half_width(fields: &Fields, cfg: Config) -> Result<Config> {
    narrowed(fields, cfg, 2)
}

/// Reads `attention_downsample_rate`, by which SAM's heads share a part of the width.
pub(super) fn narrowed_width(fields: &Fields, cfg: Config) -> Result<Config> {
    narrowed(fields, cfg, fields.get_or("attention_downsample_rate", 2)?)
}

fn narrowed(fields: &Fields, cfg: Config, rate: usize) -> Result<Config> {
    let (width, heads) = (cfg.embed_dim() / rate, cfg.num_heads());
    if !width.is_multiple_of(heads) {
        return fields.fail(format!("{heads} heads share a width of {width}, which they do not divide"));
    }
    Ok(cfg.with_head_dim(width / heads))
}

/// Sets the width of the images that the text of BLIP attends to.
pub(super) fn encoder_width(fields: &Fields, cfg: Config) -> Result<Config> {
    let width = fields.get_or("encoder_hidden_size", 768)?;
    Ok(cfg.with_kdim(width).with_vdim(width))
}

/// Sets the width of the images that a layer of Idefics attends to, in every `cross_layer_interval`-th layer.
pub(super) fn idefics_cross(fields: &Fields, cfg: Config) -> Result<Config> {
    let interval = fields.get_or("cross_layer_interval", 1)?;
    let layers = fields.num_layers / interval;
    if fields.layer >= layers {
        return fields.fail(format!("there is no layer {}, {layers} have cross-attention", fields.layer));
    }
    let width = fields.section("vision_config")?.get_or("embed_dim", 768)?;
    Ok(cfg.with_kdim(width).with_vdim(width))
}

/// Sets the width of the images that a Q-Former attends to, in every `cross_attention_frequency`-th layer.
pub(super) fn qformer_cross(fields: &Fields, cfg: Config) -> Result<Config> {
    let every = fields.get_or("cross_attention_frequency", 2)?;
    let layer = fields.layer;
    if !layer.is_multiple_of(every) {
        return fields.fail(format!("layer {layer} has no cross-attention, one layer in {every} has"));
    }
    let width = fields.get_or("encoder_hidden_size", 1408)?;
    Ok(cfg.with_kdim(width).with_vdim(width))
}

/// Reads the width of the encoder's outputs of TrOCR.
pub(super) fn trocr_cross(fields: &Fields, cfg: Config) -> Result<Config> {
    let width = fields.optional::<usize>("cross_attention_hidden_size")?;
    Ok(cfg.with_kdim(width).with_vdim(width))
}

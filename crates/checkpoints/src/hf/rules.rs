//! What a row of the table cannot say with a field and its default.

use candle_core::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::families::{HEADS, HIDDEN};
use super::fields::Fields;
use super::rope::{Rope, rope};
use candle_attention_core::{
    AlibiConfig, MultiHeadAttentionConfig, MultiHeadLatentAttentionConfig, QkNorm, QkNormKind, QkNormScope,
    QueryScaling, RopeScaling,
};

/// The window of a layer that has one by `layer_types`, or else by the family's own rule.
pub(super) fn sliding(fields: &Fields, layer: usize, otherwise: bool, default: Option<usize>) -> Result<Option<usize>> {
    if !is_sliding(fields, layer, otherwise)? {
        return Ok(None);
    }
    match fields.nullable("sliding_window", default)? {
        Some(window) => Ok(Some(window)),
        None => fields.fail("a layer has sliding_attention, but sliding_window is not given"),
    }
}

fn is_sliding(fields: &Fields, layer: usize, otherwise: bool) -> Result<bool> {
    match fields.of_layer("layer_types", layer)? {
        None => Ok(otherwise),
        Some(kind) if kind == "sliding_attention" => Ok(true),
        Some(kind) if kind == "full_attention" || kind == "attention" => Ok(false),
        Some(kind) => fields.fail(format!(
            "layer_types has {kind} for layer {layer}, expected \"full_attention\" or \"sliding_attention\""
        )),
    }
}

/// Every n-th layer has no window.
pub(super) fn all_but_each(fields: &Fields, layer: usize, n: usize) -> Result<Option<usize>> {
    let n = fields.get_or("sliding_window_pattern", n)?;
    sliding(fields, layer, !(layer + 1).is_multiple_of(n), Some(4096))
}

/// Every n-th layer has softmax attention over all keys, the others are recurrences.
pub(super) fn softmax_each(fields: &Fields, layer: usize, n: usize) -> Result<Option<usize>> {
    let n = fields.get_or("full_attention_interval", n)?;
    if fields.get("layer_types").is_none() && !(layer + 1).is_multiple_of(n) {
        return fields.fail(format!("layer {layer} has linear_attention, expected softmax attention"));
    }
    sliding(fields, layer, false, None)
}

/// Layers with positions have norms after them and see a chunk of keys; those without scale their queries.
pub(super) fn llama4(fields: &Fields, layer: usize, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    let rotates = cfg.rope().is_some();
    let is_chunked = match fields.of_layer("layer_types", layer)? {
        None => rotates,
        Some(kind) if kind == "chunked_attention" => true,
        Some(kind) if kind == "full_attention" => false,
        Some(kind) => {
            return fields.fail(format!(
                "layer_types has {kind} for layer {layer}, expected \"chunked_attention\" or \"full_attention\""
            ));
        }
    };
    let cfg = match (is_chunked, fields.nullable("attention_chunk_size", Some(8192))?) {
        (true, Some(chunk)) => cfg.with_chunk(chunk),
        (true, None) => return fields.fail("a layer has chunked_attention, but attention_chunk_size is not given"),
        (false, _) => cfg,
    };
    if rotates && fields.flag("use_qk_norm", true)? {
        let eps = fields.get_or("rms_norm_eps", 1e-5)?;
        let norm = QkNorm { kind: QkNormKind::RmsNoWeight, scope: QkNormScope::PerHead, eps };
        return Ok(cfg.with_qk_norm(norm).with_norm_after_rope(true));
    }
    if rotates || !fields.flag("attn_temperature_tuning", true)? {
        return Ok(cfg);
    }
    let (beta, interval) = (fields.get_or("attn_scale", 0.1)?, fields.get_or("floor_scale", 8192)?);
    Ok(cfg.with_query_scaling(QueryScaling { beta, interval, first: 1 }))
}

/// The scaling of a config that gives none.
pub(super) fn ministral3_scaling(_: &Fields) -> Result<RopeScaling> {
    Ok(RopeScaling::Yarn {
        factor: 16.0,
        original_context: 16_384,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: Some(1.0),
        mscale_all_dim: Some(1.0),
        truncate: true,
    })
}

/// `llama_4_scaling_beta` beside the parameters of rotary positions.
pub(super) fn query_scaling(
    fields: &Fields,
    _: usize,
    cfg: MultiHeadAttentionConfig,
) -> Result<MultiHeadAttentionConfig> {
    let parameters = match fields.object("rope_parameters")? {
        None => fields.object("rope_scaling")?,
        parameters => parameters,
    };
    let Some(parameters) = parameters else {
        return Ok(cfg.with_query_scaling(QueryScaling { beta: 0.1, interval: 16_384, first: 0 }));
    };
    Ok(match parameters.optional("llama_4_scaling_beta")? {
        Some(beta) => {
            let interval = parameters.required("original_max_position_embeddings")?;
            cfg.with_query_scaling(QueryScaling { beta, interval, first: 0 })
        }
        None => cfg,
    })
}

/// Layers from `max_window_layers` on have a window, if windows are used at all: many configurations that give a
/// `sliding_window` turn them off.
pub(super) fn qwen_window(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    qwen_window_from(fields, layer, 28)
}

/// [`qwen_window`] with another default of `max_window_layers`.
pub(super) fn qwen_window_from(fields: &Fields, layer: usize, first: usize) -> Result<Option<usize>> {
    let used = fields.flag("use_sliding_window", false)?;
    let given = used && fields.nullable("sliding_window", Some(4096))?.is_some();
    // Zero is a valid number of layers here.
    let none = fields.get("max_window_layers").is_some_and(|layers| *layers == 0);
    let full = if none { 0 } else { fields.get_or("max_window_layers", first)? };
    let window = sliding(fields, layer, given && layer >= full, Some(4096))?;
    if window.is_some() && !used {
        return fields.fail(format!("layer {layer} has sliding_attention, but use_sliding_window is false"));
    }
    Ok(window)
}

/// Every so many layers see all keys, the others a band of `local_attention` of them.
pub(super) fn modernbert_side(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    let side = fields.get_or("local_attention", 128)? / 2;
    fields.agrees("sliding_window", side)?;
    let interval = fields.get_or("global_attn_every_n_layers", 3)?;
    Ok(is_sliding(fields, layer, !layer.is_multiple_of(interval))?.then_some(side))
}

/// Every so many layers have no positions.
pub(super) fn smollm3_rotates(fields: &Fields, layer: usize) -> Result<bool> {
    let interval = fields.get_or("no_rope_layer_interval", 4)?;
    match fields.of_layer("no_rope_layers", layer)? {
        None => Ok(!(layer + 1).is_multiple_of(interval)),
        Some(flag) if *flag == 1 || *flag == true => Ok(true),
        Some(flag) if *flag == 0 || *flag == false => Ok(false),
        Some(flag) => fields.fail(format!("no_rope_layers has {flag} for layer {layer}, expected 0 or 1")),
    }
}

/// One key head for all query heads (`multi_query`), one for each, or one for each group (`new_decoder_architecture`).
pub(super) fn falcon_key_heads(fields: &Fields, num_heads: usize) -> Result<usize> {
    let grouped = fields.flag("new_decoder_architecture", false)?;
    if !grouped && fields.flag("multi_query", true)? {
        return Ok(1);
    }
    let key_heads = fields.nullable("num_kv_heads", None)?.unwrap_or(num_heads);
    if !grouped && key_heads != 1 {
        fields.agrees("num_kv_heads", num_heads)?;
    }
    Ok(key_heads)
}

/// `attn_config`. Options that the model's first implementation has and transformers ignores are refused.
pub(super) fn mpt(attention: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    attention.only("attn_type", "multihead_attention")?;
    attention.only("alibi", true)?;
    for name in ["prefix_lm", "qk_ln", "attn_uses_sequence_id"] {
        attention.only(name, false)?;
    }
    attention.only("alibi_bias_max", 8)?;
    let mut cfg = cfg.with_alibi(AlibiConfig::Standard).with_dropout(attention.get_or("attn_pdrop", 0.0)?);
    // transformers treats 0 as absent.
    if let Some(clip) = attention.optional("clip_qkv")?.filter(|&clip| clip != 0.0) {
        cfg = cfg.with_clip_qkv(clip);
    }
    if let Some(scale) = attention.optional("softmax_scale")? {
        cfg = cfg.with_scale(scale);
    }
    Ok(cfg)
}

/// The scaling of the published checkpoints, for a config that gives none.
pub(super) fn gpt_oss_scaling(fields: &Fields) -> Result<RopeScaling> {
    Ok(RopeScaling::Yarn {
        factor: 32.0,
        original_context: fields.optional("original_max_position_embeddings")?.unwrap_or(4096),
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: false,
    })
}

/// The defaults of latent attention's own sizes.
#[derive(Clone, Copy)]
pub(super) struct LatentSizes {
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    pub nope_head_dim: usize,
    pub rope_head_dim: usize,
    pub value_head_dim: usize,
}

pub(super) const DEEPSEEK: LatentSizes =
    LatentSizes { q_lora_rank: 1536, kv_lora_rank: 512, nope_head_dim: 128, rope_head_dim: 64, value_head_dim: 128 };

/// DeepSeek V3's attention, for a context of so many positions.
pub(super) fn deepseek_v3(
    fields: &Fields,
    row: [usize; 3],
    sizes: LatentSizes,
    context: usize,
) -> Result<MultiHeadLatentAttentionConfig> {
    let half = rope(10_000.0, context);
    deepseek(fields, row, sizes, if fields.flag("rope_interleave", true)? { half.interleaved() } else { half })
}

/// `row` is the table's default of the number of layers, of `embed_dim` and of `num_heads`.
pub(super) fn deepseek(
    fields: &Fields,
    row: [usize; 3],
    sizes: LatentSizes,
    rope: Rope,
) -> Result<MultiHeadLatentAttentionConfig> {
    let [_, embed_dim, heads] = row;
    let num_heads = fields.get_or(HEADS, heads)?;
    let nope = fields.get_or("qk_nope_head_dim", sizes.nope_head_dim)?;
    let rotated = fields.get_or("qk_rope_head_dim", sizes.rope_head_dim)?;
    fields.agrees("num_key_value_heads", num_heads)?;
    fields.agrees("head_dim", rotated)?;
    fields.agrees("qk_head_dim", nope.saturating_add(rotated))?;
    let rope = rope.config(fields, rotated)?;
    if !matches!(rope.scaling(), RopeScaling::None | RopeScaling::Yarn { .. }) {
        // transformers corrects the scale of the scores with any scaling, but only models with YaRN have been checked.
        for name in ["rope_scaling", "rope_parameters"] {
            fields.section(name)?.only("mscale_all_dim", 0)?;
        }
    }
    let cfg = MultiHeadLatentAttentionConfig::new(fields.get_or(HIDDEN, embed_dim)?, num_heads)
        .with_kv_lora_rank(fields.get_or("kv_lora_rank", sizes.kv_lora_rank)?)
        .with_nope_head_dim(nope)
        .with_rope_head_dim(rotated)
        .with_value_head_dim(fields.nullable("v_head_dim", None)?.unwrap_or(sizes.value_head_dim))
        .with_bias(fields.flag("attention_bias", false)?)
        .with_rope(rope)
        // transformers ignores `rms_norm_eps` in the norms of the latents.
        .with_norm_eps(1e-6)
        .with_causal(fields.flag("is_causal", true)?)
        .with_dropout(fields.optional("attention_dropout")?.unwrap_or(0.0));
    Ok(match fields.nullable("q_lora_rank", Some(sizes.q_lora_rank))? {
        Some(rank) => cfg.with_q_lora_rank(rank),
        None => cfg,
    })
}

/// Llama 3's scaling: its factor, those of low and high frequencies, and the context of the training.
pub(super) fn llama3(factor: f64, frequencies: [f64; 2], original_context: usize) -> RopeScaling {
    let [low_freq_factor, high_freq_factor] = frequencies;
    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }
}

/// `clip_qkv`.
pub(super) fn clipped(fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    Ok(match fields.optional("clip_qkv")? {
        Some(clip) => cfg.with_clip_qkv(clip),
        None => cfg,
    })
}

/// `attn_logit_softcapping`, as in Gemma 2.
pub(super) fn softcapped(fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    Ok(match fields.nullable("attn_logit_softcapping", Some(50.0))? {
        Some(softcap) => cfg.with_softcap(softcap),
        None => cfg,
    })
}

/// Every so many layers see all keys, where others have a window at all.
pub(super) fn exaone_window(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    match fields.nullable("sliding_window", Some(4096))? {
        Some(_) => all_but_each(fields, layer, 4),
        None => Ok(None),
    }
}

/// Layers that see all keys have no positions, where others have a window.
pub(super) fn exaone_rotates(fields: &Fields, layer: usize) -> Result<bool> {
    Ok(fields.nullable("sliding_window", Some(4096))?.is_none() || exaone_window(fields, layer)?.is_some())
}

/// Every fifth layer sees all keys.
pub(super) fn kolibri_window(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    sliding(fields, layer, !(layer + 1).is_multiple_of(5), Some(513))
}

/// `attention_layers`, or `attention_types`, which says how often a list of kinds of layers stands in it.
pub(super) fn gpt_neo_window(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    let kind = match fields.of_layer("attention_layers", layer)? {
        Some(kind) => kind.clone(),
        None => {
            let default = json!([[["global", "local"], 12]]);
            let given = fields.get("attention_types").unwrap_or(&default);
            let Ok(types) = Vec::<(Vec<Value>, usize)>::deserialize(given) else {
                return fields
                    .fail(format!("attention_types is {given}, expected a list of lists of kinds and their number"));
            };
            let mut rest = layer;
            let kind =
                types.iter().find_map(|(kinds, times)| match rest.checked_sub(kinds.len().saturating_mul(*times)) {
                    None => kinds.get(rest % kinds.len()),
                    Some(after) => {
                        rest = after;
                        None
                    }
                });
            match kind {
                Some(kind) => kind.clone(),
                None => {
                    return fields.fail(format!(
                        "attention_types has kinds of {} layers, expected one for each layer",
                        layer - rest
                    ));
                }
            }
        }
    };
    match kind.as_str() {
        Some("global") => Ok(None),
        Some("local") => fields.get_or("window_size", 256).map(Some),
        _ => fields.fail(format!("layer {layer} has {kind}, expected \"global\" or \"local\"")),
    }
}

//! The fields of decoders with softmax attention that their architecture alone has.

use candle_core::Result;
use serde_json::json;

use super::header::{has_tensor, tensor_info};
use super::hybrid::{kinds_by_key_heads, scale_yarn};
use super::metadata::{ConfigFields, DEFAULT_BASE, FullLayer, Metadata, kinds_by_window, set_key_heads};

/// The factor by which queries grow with their position.
pub(super) const TEMPERATURE_SCALE: &str = "attention.temperature_scale";

/// Sets the kinds of layers of a family in which all but every fourth layer have a window, if the file has a window and
/// does not tell the layers.
pub(super) fn windows_of_four(metadata: &Metadata, fields: &mut ConfigFields, full_layer: FullLayer) -> Result<()> {
    let layers = 0..metadata.num_layers()?;
    if !has_window(metadata)? {
        fields.insert("layer_types".into(), kinds_by_window(layers.map(|_| false)));
        return no_window(metadata, fields);
    }
    if !fields.contains_key("layer_types") {
        fields.insert("layer_types".into(), kinds_by_window(layers.map(|layer| full_layer.has_window(layer, 4))));
    }
    Ok(())
}

fn has_window(metadata: &Metadata) -> Result<bool> {
    Ok(metadata.size("attention.sliding_window")?.is_some_and(|window| window > 0))
}

/// Removes windows, which the file does not describe.
pub(super) fn no_window(_: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    fields.insert("sliding_window".into(), json!(null));
    Ok(())
}

/// Sets the rotary positions of layers with a window, which have another base and no scaling.
pub(super) fn rope_by_kind(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    rope_by_kind_with(metadata, fields, DEFAULT_BASE)
}

/// Sets the rotary positions of layers with a window, which have the base of the other layers unless the file has
/// another, and no scaling.
pub(super) fn rope_by_kind_or_same(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let base = metadata.number("rope.freq_base")?.unwrap_or(DEFAULT_BASE);
    rope_by_kind_with(metadata, fields, base)
}

fn rope_by_kind_with(metadata: &Metadata, fields: &mut ConfigFields, default_base: f64) -> Result<()> {
    let base = metadata.number("rope.freq_base_swa")?.unwrap_or(default_base);
    let full = fields["rope_parameters"].take();
    fields["rope_parameters"] = json!({"full_attention": full, "sliding_attention": {"rope_theta": base}});
    Ok(())
}

/// Reads the bound of queries, keys and values.
fn bound(metadata: &Metadata) -> Result<Option<f64>> {
    Ok(metadata.number("attention.clamp_kqv")?.filter(|&bound| bound > 0.0))
}

/// Sets the bound of queries, keys and values.
pub(super) fn clip(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    fields.insert("clip_qkv".into(), json!(bound(metadata)?));
    Ok(())
}

/// Sets DBRX's `attn_config`.
pub(super) fn dbrx(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let attn_config = json!({"kv_n_heads": fields["num_kv_heads"], "clip_qkv": bound(metadata)?});
    fields.insert("attn_config".into(), attn_config);
    Ok(())
}

/// Removes the windows of EXAONE 4, which llama.cpp has in the largest model alone, by its number of layers.
pub(super) fn exaone4(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    if metadata.num_hidden_layers()? != 64 {
        fields.remove("layer_types");
        return no_window(metadata, fields);
    }
    Ok(())
}

/// Sets the layers of Gemma 3n that read keys and values of earlier layers: all but the first 20.
pub(super) fn gemma3n(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    const OWN_KEYS: usize = 20;
    rope_by_kind(metadata, fields)?;
    let shared = metadata.num_layers()?.saturating_sub(OWN_KEYS);
    fields.insert("num_kv_shared_layers".into(), json!(shared));
    Ok(())
}

/// Sets the heads of Gemma 4's two kinds of layers, and the layers that read keys and values of earlier layers. The
/// factors of rotary frequencies of layers without a window are a tensor.
pub(super) fn gemma4(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    rope_by_kind(metadata, fields)?;
    let full_width = metadata.required("attention.key_length")?;
    let width = metadata.required("attention.key_length_swa")?;
    fields.insert("global_head_dim".into(), json!(full_width));
    fields.insert("head_dim".into(), json!(width));
    let shared = metadata.size("attention.shared_kv_layers")?.unwrap_or(0);
    fields.insert("num_kv_shared_layers".into(), json!(shared));
    let Some(window_flags) = metadata.flags("attention.sliding_window_pattern")? else {
        return metadata.fail("the metadata has no attention.sliding_window_pattern");
    };
    let Some(key_heads) = metadata.per_layer("attention.head_count_kv")? else { return Ok(()) };
    let has = |part: &str, layer| has_tensor(metadata.content, &format!("blk.{layer}.attn_{part}.weight"));
    for (layer, (has_window, heads)) in window_flags.into_iter().zip(key_heads).enumerate() {
        if has_window {
            set_key_heads(fields, heads);
            continue;
        }
        fields.insert("num_global_key_value_heads".into(), json!(heads));
        if has("k", layer) && !has("v", layer) {
            fields.insert("attention_k_eq_v".into(), json!(true));
        }
    }
    Ok(())
}

/// Sets the heads of each layer of Laguna, and the kind of its gate, which its first tensor tells.
pub(super) fn laguna(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    windows_of_four(metadata, fields, FullLayer::First)?;
    rope_by_kind_or_same(metadata, fields)?;
    let Some(heads) = metadata.per_layer("attention.head_count")? else { return Ok(()) };
    let gate = tensor_info(metadata.content, "blk.0.attn_gate.weight");
    let rows = gate.and_then(|info| info.dims.first().copied());
    fields.insert("gating".into(), json!(if rows == heads.first().copied() { "per-head" } else { "per-element" }));
    fields.insert("num_attention_heads_per_layer".into(), json!(heads));
    Ok(())
}

/// Sets the layers of LFM 2 that are convolutions.
pub(super) fn lfm2(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    if let Some(eps) = metadata.number("attention.layer_norm_rms_epsilon")? {
        fields.insert("norm_eps".into(), json!(eps));
    }
    kinds_by_key_heads(metadata, fields, "conv")
}

/// Sets what llama.cpp knows of Llama 4 without metadata: chunks of keys and norms of queries and keys.
pub(super) fn llama4(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    const EXPERTS_OF_MAVERICK: usize = 128;
    let layers = metadata.num_layers()?;
    if metadata.size("attention.sliding_window")? == Some(0) {
        fields.insert("layer_types".into(), kinds_by_window(vec![false; layers]));
        fields.insert("no_rope_layers".into(), json!(vec![1; layers]));
    }
    fields.remove("sliding_window");
    let has_norms = metadata.size("expert_count")? != Some(EXPERTS_OF_MAVERICK);
    fields.insert("use_qk_norm".into(), json!(has_norms));
    Ok(())
}

/// Sets the windows of Mellum, and the rotary positions of its layers with a window.
pub(super) fn mellum(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    windows_of_four(metadata, fields, FullLayer::Last)?;
    rope_by_kind_or_same(metadata, fields)
}

/// Sets the queries of Ministral 3 that grow with their position. Other Mistral models have none.
pub(super) fn mistral3(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let beta = metadata.number(TEMPERATURE_SCALE)?.filter(|&beta| beta != 0.0);
    scale_yarn(metadata, fields, |multiplier| multiplier)?;
    if beta.is_none() {
        fields.insert("model_type".into(), json!("mistral"));
        fields.entry("sliding_window").or_insert(json!(null));
        return Ok(());
    }
    let context = metadata.required("rope.scaling.original_context_length")?;
    fields["rope_parameters"]["original_max_position_embeddings"] = json!(context);
    fields["rope_parameters"]["llama_4_scaling_beta"] = json!(beta);
    Ok(())
}

/// Sets the windows of OLMo 3, whose files have the architecture of OLMo 2.
pub(super) fn olmo2(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    if has_window(metadata)? {
        fields.insert("model_type".into(), json!("olmo3"));
        windows_of_four(metadata, fields, FullLayer::Last)?;
        return rope_by_kind_or_same(metadata, fields);
    }
    Ok(())
}

/// Sets the sections of positions on several axes. Positions of text are the same on all axes.
pub(super) fn on_axes(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    if let Some(mut sections) = metadata.list("rope.dimension_sections")? {
        // llama.cpp has four axes, of which the last ones have no pairs.
        while sections.last() == Some(&0) {
            sections.pop();
        }
        fields["rope_parameters"]["mrope_section"] = json!(sections);
    }
    Ok(())
}

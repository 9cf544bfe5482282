//! The fields of latent attention, of linear attention, and of models in which some layers are recurrences.

use candle_core::Result;
use serde_json::{Value, json};

use super::metadata::{ConfigFields, Metadata, set_key_heads};

/// 0.1 times the factor by which YaRN corrects the scale of the scores.
pub(super) const YARN_LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// Sets the kinds of layers by their key heads: softmax attention, or a recurrence of this kind.
pub(super) fn kinds_by_key_heads(metadata: &Metadata, fields: &mut ConfigFields, recurrence: &str) -> Result<()> {
    let kinds: Vec<_> =
        metadata.has_key_heads()?.into_iter().map(|has| if has { "attention" } else { recurrence }).collect();
    fields.insert("layer_types".into(), json!(kinds));
    Ok(())
}

/// Sets the first layer with softmax attention and the number of layers from one to the next, which Jamba's fields are.
pub(super) fn jamba(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let has_heads = metadata.has_key_heads()?;
    let with_heads: Vec<_> = (0..has_heads.len()).filter(|&layer| has_heads[layer]).collect();
    let offset = with_heads.first().copied().unwrap_or(0);
    let period = match with_heads.get(1) {
        Some(next) => next - offset,
        None => has_heads.len(),
    };
    if (0..has_heads.len()).any(|layer| has_heads[layer] != (layer % period == offset)) {
        return metadata.fail("attention.head_count_kv has other layers with attention than one of each period");
    }
    fields.insert("attn_layer_offset".into(), json!(offset));
    fields.insert("attn_layer_period".into(), json!(period));
    Ok(())
}

/// Sets the kinds of layers of Nemotron H, among which are layers of feed-forward networks alone.
pub(super) fn nemotron_h(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    kinds_by_key_heads(metadata, fields, "mamba")?;
    if let Some(kinds) = fields.remove("layer_types") {
        fields.insert("layers_block_type".into(), kinds);
    }
    Ok(())
}

/// Sets the kinds of layers of Granite 4, whose attention has no positions. Files of Bamba, which has some, are
/// refused.
pub(super) fn granite_hybrid(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    const ROTATES: &str = "rope.scaling.finetuned";
    kinds_by_key_heads(metadata, fields, "mamba")?;
    match (metadata.flag(ROTATES)?, metadata.get(ROTATES)) {
        (Some(true), Some(found)) => metadata.expected(ROTATES, found, "false: files of Bamba are not supported"),
        _ => {
            fields.insert("position_embedding_type".into(), json!("nope"));
            Ok(())
        }
    }
}

/// Sets the sizes of linear attention of Qwen3-Next and Qwen3.5, and the layers that have it.
pub(super) fn qwen3_next(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let value_heads = metadata.required("ssm.time_step_rank")?;
    let width = metadata.required("ssm.inner_size")?;
    if !width.is_multiple_of(value_heads) {
        return metadata
            .fail(format!("ssm.inner_size is {width}, expected a multiple of ssm.time_step_rank, {value_heads}"));
    }
    for (name, size) in [
        ("linear_num_value_heads", value_heads),
        ("linear_value_head_dim", width / value_heads),
        ("linear_num_key_heads", metadata.required("ssm.group_count")?),
        ("linear_key_head_dim", metadata.required("ssm.state_size")?),
        ("linear_conv_kernel_dim", metadata.required("ssm.conv_kernel")?),
    ] {
        fields.insert(name.into(), json!(size));
    }
    let interval = metadata.count("full_attention_interval")?.unwrap_or(4);
    let is_linear = match metadata.flags("attention.recurrent_layers")? {
        Some(flags) => flags,
        None => (0..metadata.num_layers()?).map(|layer| !(layer + 1).is_multiple_of(interval)).collect(),
    };
    let kind = |linear: bool| if linear { "linear_attention" } else { "full_attention" };
    let kinds: Vec<_> = is_linear.into_iter().take(metadata.num_hidden_layers()?).map(kind).collect();
    fields.insert("full_attention_interval".into(), json!(interval));
    fields.insert("layer_types".into(), json!(kinds));
    if let (Some(rotated), Some(head_dim)) =
        (metadata.count("rope.dimension_count")?, metadata.count("attention.key_length")?)
    {
        fields["rope_parameters"]["partial_rotary_factor"] = json!(rotated as f64 / head_dim as f64);
    }
    Ok(())
}

/// Sets the sizes of Kimi Linear: of latent attention, which has no positions, and of linear attention.
pub(super) fn kimi_linear(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let has_heads = metadata.has_key_heads()?;
    let full: Vec<_> = (1..=has_heads.len()).filter(|number| has_heads[number - 1]).collect();
    let linear: Vec<_> = (1..=has_heads.len()).filter(|number| !has_heads[number - 1]).collect();
    let config = json!({
        "full_attn_layers": full,
        "kda_layers": linear,
        "num_heads": metadata.required("attention.head_count")?,
        "head_dim": metadata.required("kda.head_dim")?,
        "short_conv_kernel_size": metadata.required("ssm.conv_kernel")?,
    });
    fields.insert("linear_attn_config".into(), config);
    fields.insert("mla_use_nope".into(), json!(true));
    latent(metadata, fields)
}

/// Sets the sizes of latent attention. The number of key heads and the width of heads in the metadata belong to the
/// form in which queries absorb the projection to keys.
pub(super) fn latent(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let rotated = metadata.required("rope.dimension_count")?;
    let key_width = match metadata.count("attention.key_length_mla")? {
        Some(width) => width,
        None => metadata.required("attention.key_length")?,
    };
    let Some(nope @ 1..) = key_width.checked_sub(rotated) else {
        return metadata.fail(format!("keys are {key_width} wide, expected more than rope.dimension_count, {rotated}"));
    };
    let value_width = match metadata.count("attention.value_length_mla")? {
        None => metadata.count("attention.value_length")?,
        width => width,
    };
    fields.insert("qk_nope_head_dim".into(), json!(nope));
    fields.insert("qk_rope_head_dim".into(), json!(rotated));
    fields.insert("v_head_dim".into(), json!(value_width));
    fields.insert("kv_lora_rank".into(), json!(metadata.required("attention.kv_lora_rank")?));
    fields.insert("q_lora_rank".into(), json!(metadata.count("attention.q_lora_rank")?));
    set_key_heads(fields, metadata.query_heads()?);
    fields.insert("head_dim".into(), Value::Null);
    scale_yarn(metadata, fields, |multiplier| (multiplier * 1e7).round() / 1e6)
}

/// Sets the factors by which YaRN corrects the scale of the scores, from the number in the metadata. Configs have two,
/// which are equal.
pub(super) fn scale_yarn(metadata: &Metadata, fields: &mut ConfigFields, factor: impl Fn(f64) -> f64) -> Result<()> {
    if let Some(multiplier) = metadata.number(YARN_LOG_MULTIPLIER)?.filter(|&multiplier| multiplier != 0.0) {
        for name in ["mscale", "mscale_all_dim"] {
            fields["rope_parameters"][name] = json!(factor(multiplier));
        }
    }
    Ok(())
}

/// Sets the fields of a file of latent attention. A file whose experts are chosen by a softmax is DeepSeek V2, and V3
/// otherwise.
pub(super) fn deepseek2(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    const SOFTMAX: usize = 1;
    if metadata.size("expert_gating_func")? == Some(SOFTMAX) {
        fields.insert("model_type".into(), json!("deepseek_v2"));
    }
    let scale = metadata.number("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
    fields.insert("routed_scaling_factor".into(), json!(scale));
    fields.insert("norm_topk_prob".into(), json!(metadata.flag("expert_weights_norm")?.unwrap_or(false)));
    if metadata.size("expert_group_count")?.is_some_and(|groups| groups > 1) {
        fields.insert("topk_method".into(), json!("group_limited_greedy"));
    }
    latent(metadata, fields)
}

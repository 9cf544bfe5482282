//! Rules of single families, for what no column of the table describes. Rules for heads and widths are in `shapes`.

use candle_attention_core::{
    AlibiConfig, AttentionTemperature, BlockIndexerConfig, BlockScores, MultiHeadAttentionConfig as Config, RopeAxes,
    RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle,
};
use candle_attention_modules::gate::{GateActivation, GateLayout, GateScope, OutputGate};
use candle_attention_modules::norm::{OutputNorm, QkNorm, QkNormKind, QkNormScope};
use candle_core::Result;
use serde_json::Value;

use super::fields::Fields;
use super::layer_kinds::{has_kind, is_fourth_from_last};

/// A gate in the projection of the queries: Qwen 3 Next's.
pub(super) const GATE_IN_QUERY: OutputGate = OutputGate {
    activation: GateActivation::Sigmoid,
    scope: GateScope::Elementwise,
    layout: GateLayout::FusedWithQuery,
};
/// A gate with its own projection.
pub(super) const GATE: OutputGate = OutputGate { layout: GateLayout::Separate { bias: false }, ..GATE_IN_QUERY };
/// A gate with its own projection and one number for each head.
pub(super) const GATE_OF_HEADS: OutputGate = OutputGate { scope: GateScope::PerHead, ..GATE };

/// Returns whether OLMo Hybrid has rotary positions. The published models have none: their base is null.
pub(super) fn has_theta(fields: &Fields) -> Result<bool> {
    let theta = fields.nullable("rope_theta", Some(1.0))?;
    let theta_of_parameters = fields.section("rope_parameters")?.nullable("rope_theta", Some(1.0))?;
    Ok(theta.is_some() && theta_of_parameters.is_some())
}

/// Returns whether Falcon has rotary positions, which it has if it has no ALiBi.
pub(super) fn has_no_alibi(fields: &Fields) -> Result<bool> {
    Ok(!fields.flag("alibi", false)?)
}

/// Returns whether a layer of Muse Glimmer has rotary positions. Layers that attend to all keys have none. A base of 0
/// means none too.
pub(super) fn muse_rotary(fields: &Fields) -> Result<bool> {
    Ok(match fields.of_layer("layer_rope_theta")? {
        Some(theta) => theta.as_f64() != Some(0.0),
        None => !is_fourth_from_last(fields),
    })
}

/// Sets ALiBi.
pub(super) fn alibi(_: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_alibi(AlibiConfig::Standard))
}

/// Sets Falcon's ALiBi if the flag `alibi` is true.
pub(super) fn alibi_if_flag(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(if fields.flag("alibi", false)? { cfg.with_alibi(AlibiConfig::Falcon) } else { cfg })
}

/// Reads `clip_qkv`.
pub(super) fn clipped(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_clip_qkv(fields.optional::<f64>("clip_qkv")?))
}

/// Reads `attn_logit_softcapping`, with Gemma 2's default.
pub(super) fn softcapped(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_softcap(fields.nullable("attn_logit_softcapping", Some(50.0))?))
}

/// Sets BitNet's RMS norm of the attention output.
pub(super) fn rms_of_output(fields: &Fields, cfg: Config) -> Result<Config> {
    let eps = fields.get_or("rms_norm_eps", 1e-5)?;
    Ok(cfg.with_output_norm(OutputNorm { kind: QkNormKind::Rms, eps }))
}

/// Sets Kosmos-2's layer norm of the attention output.
pub(super) fn layer_norm_of_output(fields: &Fields, cfg: Config) -> Result<Config> {
    let eps = fields.get_or("layer_norm_eps", 1e-5)?;
    Ok(cfg.with_output_norm(OutputNorm { kind: QkNormKind::Layer, eps }))
}

/// Reads `attn_config` of DBRX.
pub(super) fn dbrx(fields: &Fields, cfg: Config) -> Result<Config> {
    let attn_config = fields.section("attn_config")?;
    let mut cfg = cfg.with_dropout(attn_config.optional("attn_pdrop")?.unwrap_or(0.0));
    // As published, `attn_config` has the base.
    let base = attn_config.optional("rope_theta")?;
    if fields.object("rope_parameters")?.is_none()
        && let Some(base) = base
    {
        cfg = cfg.with_rope(RopeConfig::new(base));
    }
    clipped(&attn_config, cfg)
}

/// Reads `attn_config` of MPT, and refuses options that the model's first implementation has and transformers ignores.
pub(super) fn mpt(fields: &Fields, cfg: Config) -> Result<Config> {
    let attn_config = fields.section("attn_config")?;
    attn_config.only("attn_type", "multihead_attention")?;
    attn_config.only("alibi", true)?;
    for name in ["prefix_lm", "qk_ln", "attn_uses_sequence_id"] {
        attn_config.only(name, false)?;
    }
    attn_config.only("alibi_bias_max", 8)?;
    let cfg = cfg.with_alibi(AlibiConfig::Standard).with_dropout(attn_config.get_or("attn_pdrop", 0.0)?);
    // transformers treats 0 as absent.
    let clip = attn_config.optional("clip_qkv")?.filter(|&clip: &f64| clip != 0.0);
    Ok(cfg.with_clip_qkv(clip).with_scale(attn_config.optional::<f64>("softmax_scale")?))
}

/// Reads `scale_attn_weights` and `scale_attn_by_inverse_layer_idx` of GPT-2.
pub(super) fn gpt2_scale(fields: &Fields, cfg: Config) -> Result<Config> {
    let width = if fields.flag("scale_attn_weights", true)? { (cfg.head_dim() as f64).sqrt() } else { 1.0 };
    let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
    let depth = if by_layer { fields.layer as f64 + 1.0 } else { 1.0 };
    Ok(if width == 1.0 || by_layer { cfg.with_scale(1.0 / (width * depth)) } else { cfg })
}

/// Reads `scale_attn_weights` of GPT BigCode.
pub(super) fn bigcode_scale(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(if fields.flag("scale_attn_weights", true)? { cfg } else { cfg.with_scale(1.0) })
}

/// Sets Hunyuan's norms after rotary positions.
pub(super) fn norm_after_rotary(_: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_norm_after_rope(true))
}

/// Reads `rotary_scaling_factor` of Nomic's published configurations: a base that grows with the length of a call.
pub(super) fn nomic_scaling(fields: &Fields, cfg: Config) -> Result<Config> {
    let factor = fields.optional::<f64>("rotary_scaling_factor")?.filter(|&factor| factor != 0.0);
    let (Some(factor), Some(rope)) = (factor, cfg.rope().cloned()) else { return Ok(cfg) };
    let original_context = fields.get_or("max_trained_positions", 2048)?;
    Ok(cfg.with_rope(rope.with_scaling(RopeScaling::Dynamic { factor, original_context })))
}

/// Reads `rotary_dim` of GPT-J.
pub(super) fn gptj_rotary(fields: &Fields, cfg: Config) -> Result<Config> {
    let rope = RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved);
    Ok(cfg.with_rope(rope.with_rotary_dim(fields.get_or("rotary_dim", 64)?)))
}

/// Reads `rotary_dim` of MiniMax M2, unless `partial_rotary_factor` is set.
pub(super) fn minimax_rotary(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(match (cfg.rope(), fields.optional::<usize>("rotary_dim")?) {
        (Some(rope), Some(rotary_dim)) if rope.rotary_dim(cfg.head_dim()) == cfg.head_dim() => {
            let rope = rope.clone().with_rotary_dim(rotary_dim);
            cfg.with_rope(rope)
        }
        _ => cfg,
    })
}

/// Reads the indexer of a MiniMax M3 layer: by `layer_types`, or by `sparse_attention_config` as published, whose sizes
/// have other names.
pub(super) fn minimax_indexer(fields: &Fields, cfg: Config) -> Result<Config> {
    let published = fields.section("sparse_attention_config")?;
    let is_sparse = match has_kind(fields, "minimax_m3_sparse")? {
        Some(is_sparse) => is_sparse,
        None => published.of_layer("sparse_attention_freq")?.is_some_and(|flag| *flag == 1 || *flag == true),
    };
    if !is_sparse {
        return Ok(cfg);
    }
    let size = |published_name: &str, name: &str, default: usize| -> Result<usize> {
        if published.has(published_name) { published.required(published_name) } else { fields.get_or(name, default) }
    };
    let Some(norm) = cfg.qk_norm() else { return Ok(cfg) };
    let local_blocks = match published.has("sparse_local_block") {
        true => published.count("sparse_local_block", 1)?,
        false => fields.count("index_local_blocks", 1)?,
    };
    Ok(cfg.with_indexer(BlockIndexerConfig {
        num_heads: size("sparse_num_index_heads", "index_n_heads", 4)?,
        head_dim: size("sparse_index_dim", "index_head_dim", 128)?,
        block: size("sparse_block_size", "index_block_size", 128)?,
        top_blocks: size("sparse_topk_blocks", "index_topk_blocks", 16)?,
        local_blocks,
        norm,
        scores: BlockScores::LargestKey,
    }))
}

/// Reads the indexer of a Qwen 4 layer, whose sizes have no defaults.
pub(super) fn qwen4_indexer(fields: &Fields, cfg: Config) -> Result<Config> {
    let Some(norm) = cfg.qk_norm() else { return Ok(cfg) };
    fields.only("indexer_kv_heads", 1)?;
    let block: usize = fields.required("indexer_compress_ratio")?;
    let budget: usize = fields.required("indexer_budget")?;
    if block == 0 || !budget.is_multiple_of(block) {
        return fields.fail(format!(
            "indexer_budget is {budget}, expected a multiple of indexer_compress_ratio, which is {block}"
        ));
    }
    Ok(cfg.with_indexer(BlockIndexerConfig {
        num_heads: fields.required("indexer_n_heads")?,
        head_dim: fields.required("indexer_head_dim")?,
        block,
        top_blocks: budget / block,
        local_blocks: 0,
        norm,
        scores: BlockScores::MeanKey,
    }))
}

/// Rotates a third of each head by each of three axes; pairs that are left over are not rotated.
pub(super) fn thirds_of_heads(_: &Fields, cfg: Config) -> Result<Config> {
    let pairs = cfg.head_dim() / 3 / 2;
    let Some(rope) = cfg.rope().cloned() else { return Ok(cfg) };
    let axes = RopeAxes::new(vec![pairs; 3], RopeAxisLayout::Axial);
    Ok(cfg.with_rope(rope.with_rotary_dim(6 * pairs).with_axes(axes)))
}

/// Reads the windows of the layers of Moonshine's streaming encoder: the number of keys up to the query's own, and the
/// number from the query's own on. Both count the query's own key.
pub(super) fn moonshine_windows(fields: &Fields, cfg: Config) -> Result<Config> {
    let default = if matches!(fields.layer, 2 | 3) { [16, 0] } else { [16, 4] };
    let [before, after]: [usize; 2] = match fields.of_layer("sliding_windows")? {
        None => default,
        Some(window) => match window.as_array().map(|sides| sides.iter().map(Value::as_u64).collect::<Vec<_>>()) {
            Some(sides) if let [Some(before), Some(after)] = sides[..] => [before as usize, after as usize],
            _ => return fields.fail(format!("sliding_windows has {window}, expected two numbers for each layer")),
        },
    };
    if before == 0 {
        return fields.fail("sliding_windows has a layer without earlier keys, expected at least the query's own");
    }
    Ok(cfg.with_local_window(before - 1, after.saturating_sub(1)))
}

/// Reads the windows of T5Gemma 2's encoder, half of which is on each side of the query. Of an even window one key more
/// is after the query.
pub(super) fn half_windows(_: &Fields, cfg: Config) -> Result<Config> {
    Ok(match cfg.local_window() {
        Some(window) => {
            let width = window.left;
            cfg.with_local_window(width.div_ceil(2).saturating_sub(1), width / 2)
        }
        None => cfg,
    })
}

/// Refuses Phi-MoE's own kind of scaling of rotary positions.
pub(super) fn no_scaling(fields: &Fields, cfg: Config) -> Result<Config> {
    if is_scaled(&cfg) {
        return fields.fail("the model's own kind of scaling of rotary positions is not supported");
    }
    Ok(cfg)
}

/// Refuses a scaling for some layers of Molmo 2.
pub(super) fn molmo_scaling(fields: &Fields, cfg: Config) -> Result<Config> {
    let scaled_layers = fields.optional::<Vec<usize>>("rope_scaling_layers")?;
    if scaled_layers.is_some_and(|layers| is_scaled(&cfg) && !layers.contains(&fields.layer)) {
        return fields.fail("rope_scaling_layers has some layers only, which is not supported");
    }
    Ok(cfg)
}

fn is_scaled(cfg: &Config) -> bool {
    cfg.rope().is_some_and(|rope| *rope.scaling() != RopeScaling::None)
}

/// Refuses positions of ESM that are neither rotary nor learned.
pub(super) fn esm_positions(fields: &Fields, cfg: Config) -> Result<Config> {
    match fields.optional::<&str>("position_embedding_type")? {
        None | Some("absolute" | "rotary") => Ok(cfg),
        Some(other) => {
            fields.fail(format!("position_embedding_type is {other:?}, expected \"absolute\" or \"rotary\""))
        }
    }
}

/// Reads Llama 4's fields: layers with rotary positions have norms after them and attend to a chunk of keys; those
/// without scale their queries.
pub(super) fn llama4(fields: &Fields, cfg: Config) -> Result<Config> {
    let rotates = cfg.rope().is_some();
    let is_chunked = has_kind(fields, "chunked_attention")?.unwrap_or(rotates);
    let chunk = fields.nullable("attention_chunk_size", Some(8192))?;
    let mut cfg = cfg;
    if is_chunked {
        let Some(chunk) = chunk else {
            return fields.fail("a layer has chunked_attention, but attention_chunk_size is not given");
        };
        cfg = cfg.with_chunk(chunk);
    }
    if rotates && fields.flag("use_qk_norm", true)? {
        let eps = fields.get_or("rms_norm_eps", 1e-5)?;
        let norm = QkNorm { kind: QkNormKind::RmsNoWeight, scope: QkNormScope::PerHead, eps };
        return Ok(cfg.with_qk_norm(norm).with_norm_after_rope(true));
    }
    if rotates || !fields.flag("attn_temperature_tuning", true)? {
        return Ok(cfg);
    }
    let beta = fields.get_or("attn_scale", 0.1)?;
    let interval = fields.get_or("floor_scale", 8192)?;
    Ok(cfg.with_attention_temperature(AttentionTemperature { beta, interval, first: 1 }))
}

/// Reads `llama_4_scaling_beta` of Ministral 3, among the parameters of rotary positions.
pub(super) fn attention_temperature(fields: &Fields, cfg: Config) -> Result<Config> {
    let parameters = match fields.object("rope_parameters")? {
        None => fields.object("rope_scaling")?,
        parameters => parameters,
    };
    let Some(parameters) = parameters else {
        return Ok(cfg.with_attention_temperature(AttentionTemperature { beta: 0.1, interval: 16_384, first: 0 }));
    };
    Ok(match parameters.optional("llama_4_scaling_beta")? {
        Some(beta) => {
            let interval = parameters.required("original_max_position_embeddings")?;
            cfg.with_attention_temperature(AttentionTemperature { beta, interval, first: 0 })
        }
        None => cfg,
    })
}

/// Reads `use_attention_gate` of LFM 3.
pub(super) fn gate_if_flag(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(if fields.flag("use_attention_gate", true)? { cfg.with_output_gate(GATE_OF_HEADS) } else { cfg })
}

/// Reads `attention_out_bias` of SeedOSS.
pub(super) fn out_bias(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_out_bias(fields.flag("attention_out_bias", false)?))
}

/// Reads the dropout of FastSpeech 2's decoder, which has its own field.
pub(super) fn fastspeech_decoder_dropout(fields: &Fields, cfg: Config) -> Result<Config> {
    Ok(cfg.with_dropout(fields.nullable("decoder_attention_dropout_rate", Some(0.2))?.unwrap_or(0.0)))
}

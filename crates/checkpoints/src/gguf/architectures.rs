//! llama.cpp's architectures.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Result, bail};
use serde_json::json;

use super::hybrid;
use super::metadata::{Architecture, DEFAULT_BASE, Fields, FullLayer, Metadata, shown};
use super::t5::t5;

const fn of(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture {
        name,
        model_type,
        reorders_rotary: false,
        is_hybrid: false,
        reads: &[],
        window_pattern: None,
        adjust: |_, _| Ok(()),
    }
}

impl Architecture {
    const fn reorders_rotary(self) -> Self {
        Self { reorders_rotary: true, ..self }
    }

    const fn hybrid(self) -> Self {
        Self { is_hybrid: true, ..self }
    }

    const fn reads(self, reads: &'static [&'static str]) -> Self {
        Self { reads, ..self }
    }

    const fn window_pattern(self, full_layer: FullLayer) -> Self {
        Self { window_pattern: Some(full_layer), ..self }
    }

    const fn adjust(self, adjust: fn(&Metadata, &mut Fields) -> Result<()>) -> Self {
        Self { adjust, ..self }
    }
}

/// In alphabetical order.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    of("bert", "bert"),
    of("bloom", "bloom"),
    of("chatglm", "glm"),
    of("cohere2", "cohere2").window_pattern(FullLayer::Last),
    of("command-r", "cohere"),
    of("deepseek2", "deepseek_v3").reads(&[hybrid::YARN_LOG_MULTIPLIER]).adjust(hybrid::deepseek2),
    of("eurobert", "eurobert"),
    of("falcon", "falcon").adjust(|_, fields| {
        fields.insert("new_decoder_architecture".into(), json!(fields["num_kv_heads"] != 1));
        Ok(())
    }),
    of("falcon-h1", "falcon_h1"),
    of("gemma", "gemma"),
    of("gemma-embedding", "gemma3_text").window_pattern(FullLayer::Last).adjust(|metadata, fields| {
        fields.insert("use_bidirectional_attention".into(), json!(true));
        rope_by_kind(metadata, fields)?;
        gemma_scale(metadata, fields, usize::MAX)
    }),
    of("gemma2", "gemma2").window_pattern(FullLayer::Last).adjust(|metadata, fields| gemma_scale(metadata, fields, 46)),
    of("gemma3", "gemma3_text").window_pattern(FullLayer::Last).adjust(|metadata, fields| {
        rope_by_kind(metadata, fields)?;
        gemma_scale(metadata, fields, 62)
    }),
    of("glm4", "glm4"),
    of("gpt-oss", "gpt_oss").window_pattern(FullLayer::Last).adjust(|_, fields| {
        fields["rope_parameters"]["truncate"] = json!(false);
        Ok(())
    }),
    of("gpt2", "gpt2"),
    of("gptneox", "gpt_neox"),
    of("granite", "granite").reorders_rotary(),
    of("granitehybrid", "granitemoehybrid").reorders_rotary().hybrid().adjust(hybrid::granite_hybrid),
    of("jamba", "jamba").hybrid().adjust(hybrid::jamba),
    of("jina-bert-v3", "jina_embeddings_v3"),
    of("kimi-linear", "kimi_linear").hybrid().adjust(hybrid::kimi_linear),
    of("llama", "llama").reorders_rotary().adjust(|metadata, fields| {
        if metadata.size("expert_count")?.is_some_and(|experts| experts > 0) {
            fields["model_type"] = json!("mixtral");
        } else if fields.get("sliding_window").is_some_and(|window| !window.is_null()) {
            fields["model_type"] = json!("mistral");
        }
        Ok(())
    }),
    of("minicpm3", "minicpm3").adjust(hybrid::latent),
    of("modern-bert", "modernbert").window_pattern(FullLayer::First).adjust(|metadata, fields| {
        if let Some(window) = fields.remove("sliding_window") {
            fields.insert("local_attention".into(), window);
        }
        rope_by_kind(metadata, fields)
    }),
    of("mpt", "mpt").adjust(|metadata, fields| {
        let slope = metadata.number("attention.max_alibi_bias")?;
        let clip = metadata.number("attention.clamp_kqv")?;
        let alibi = json!({"alibi": slope != Some(0.0), "alibi_bias_max": slope.unwrap_or(8.0), "clip_qkv": clip});
        fields.insert("attn_config".into(), alibi);
        Ok(())
    }),
    of("nemotron_h", "nemotron_h").hybrid().adjust(hybrid::nemotron_h),
    of("nemotron_h_moe", "nemotron_h").hybrid().adjust(hybrid::nemotron_h),
    of("nomic-bert", "nomic_bert"),
    of("olmo2", "olmo2").adjust(|metadata, _| match metadata.size("attention.sliding_window")? {
        Some(window @ 1..) => metadata.fail(format!("the window of Olmo 3, {window}, is not supported")),
        _ => Ok(()),
    }),
    of("phi2", "phi"),
    of("phi3", "phi3"),
    of("qwen2", "qwen2"),
    of("qwen3", "qwen3"),
    of("qwen35", "qwen3_5_text").hybrid().adjust(hybrid::qwen3_5),
    of("qwen35moe", "qwen3_5_moe_text").hybrid().adjust(hybrid::qwen3_5),
    of("qwen3next", "qwen3_next").hybrid().adjust(hybrid::qwen3_next),
    of("smollm3", "smollm3").reorders_rotary(),
    of("stablelm", "stablelm"),
    of("starcoder", "gpt_bigcode"),
    of("starcoder2", "starcoder2"),
    of("t5", "t5").adjust(t5),
    of("t5encoder", "t5").adjust(t5),
];

/// Finds the architecture of a file.
///
/// # Errors
/// If the file names no architecture, or one that is not known.
pub(super) fn metadata_of(content: &Content) -> Result<Metadata<'_>> {
    let names = || ARCHITECTURES.iter().map(|architecture| architecture.name).collect::<Vec<_>>().join(", ");
    let Some(name) = content.metadata.get("general.architecture") else {
        bail!("[gguf] the metadata has no general.architecture, expected one of: {}", names())
    };
    for architecture in ARCHITECTURES {
        if name.to_string().is_ok_and(|text| text == architecture.name) {
            return Ok(Metadata { content, architecture });
        }
    }
    bail!("[gguf] general.architecture is {}, expected one of: {}", shown(name), names())
}

/// Sets the scale of Gemma's scores. The largest model of a family, which is recognised by its number of layers, scales
/// scores by the width `embed_dim / num_heads`, the other models by the width of their heads.
fn gemma_scale(metadata: &Metadata, fields: &mut Fields, layers_of_largest: usize) -> Result<()> {
    let largest = metadata.required("block_count")? == layers_of_largest;
    let follows = metadata.required("embedding_length")?.checked_div(metadata.required("attention.head_count")?);
    let head_dim = metadata.size("attention.key_length")?.filter(|_| !largest).or(follows);
    fields.insert("query_pre_attn_scalar".into(), json!(head_dim));
    Ok(())
}

/// Sets the rotary positions of layers with a window, which have another base and no scaling.
fn rope_by_kind(metadata: &Metadata, fields: &mut Fields) -> Result<()> {
    let base = metadata.number("rope.freq_base_swa")?.unwrap_or(DEFAULT_BASE);
    let full = fields["rope_parameters"].take();
    fields["rope_parameters"] = json!({"full_attention": full, "sliding_attention": {"rope_theta": base}});
    Ok(())
}

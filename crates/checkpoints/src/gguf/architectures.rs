//! llama.cpp's architectures.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Result, bail};
use serde_json::json;

use super::decoders::{self, rope_by_kind};
use super::file::of_part;
use super::hybrid;
use super::metadata::{Architecture, ConfigFields, FullLayer, Metadata, shown};
use super::refused::REFUSED;
use super::t5::t5;
use candle_attention_modules::base::did_you_mean;

/// Begins a row.
const fn of(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture::PLAIN.name(name).model_type(model_type)
}

/// The architectures that load, in alphabetical order.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    of("afmoe", "afmoe")
        .window_pattern(FullLayer::Last)
        .adjust(|metadata, fields| decoders::windows_of_four(metadata, fields, FullLayer::Last)),
    of("apertus", "apertus"),
    of("arcee", "arcee").reorders_rotary(true),
    of("bert", "bert"),
    of("bloom", "bloom"),
    of("chatglm", "glm"),
    of("cohere2", "cohere2").window_pattern(FullLayer::Last),
    of("cohere2moe", "cohere2_moe").window_pattern(FullLayer::First),
    of("command-r", "cohere"),
    of("dbrx", "dbrx").adjust(decoders::dbrx),
    of("deepseek2", "deepseek_v3").reads(&[hybrid::YARN_LOG_MULTIPLIER]).adjust(hybrid::deepseek2),
    of("dots1", "dots1").adjust(decoders::no_window),
    of("ernie4_5", "ernie4_5"),
    of("ernie4_5-moe", "ernie4_5_moe"),
    of("eurobert", "eurobert"),
    of("exaone-moe", "exaone_moe").window_pattern(FullLayer::Last),
    of("exaone4", "exaone4").window_pattern(FullLayer::Last).adjust(decoders::exaone4),
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
    of("gemma3n", "gemma3n_text").window_pattern(FullLayer::Last).adjust(decoders::gemma3n),
    of("gemma4", "gemma4_text")
        .window_pattern(FullLayer::Last)
        .heads_by_layer(true)
        .factors_without_window(true)
        .adjust(decoders::gemma4),
    of("glm4", "glm4"),
    of("glm4moe", "glm4_moe"),
    of("gpt-oss", "gpt_oss").window_pattern(FullLayer::Last).adjust(|_, fields| {
        fields["rope_parameters"]["truncate"] = json!(false);
        Ok(())
    }),
    of("gpt2", "gpt2"),
    of("gptneox", "gpt_neox"),
    of("granite", "granite").reorders_rotary(true),
    of("granite_swa", "granite_swa").reorders_rotary(true).window_pattern(FullLayer::First),
    of("granitehybrid", "granitemoehybrid").reorders_rotary(true).is_hybrid(true).adjust(hybrid::granite_hybrid),
    of("granitemoe", "granitemoe").reorders_rotary(true),
    of("hunyuan-dense", "hunyuan_v1_dense"),
    of("hunyuan-moe", "hunyuan_v1_moe"),
    of("hy_v3", "hy_v3"),
    of("jais2", "jais2"),
    of("jamba", "jamba").is_hybrid(true).adjust(hybrid::jamba),
    of("jina-bert-v3", "jina_embeddings_v3"),
    of("kimi-linear", "kimi_linear").is_hybrid(true).adjust(hybrid::kimi_linear),
    of("laguna", "laguna").window_pattern(FullLayer::First).heads_by_layer(true).adjust(decoders::laguna),
    of("lfm2", "lfm2").is_hybrid(true).adjust(decoders::lfm2),
    of("lfm2moe", "lfm2_moe").is_hybrid(true).adjust(decoders::lfm2),
    of("llama", "llama").reorders_rotary(true).adjust(|metadata, fields| {
        if metadata.size("expert_count")?.is_some_and(|experts| experts > 0) {
            fields["model_type"] = json!("mixtral");
        } else if fields.get("sliding_window").is_some_and(|window| !window.is_null()) {
            fields["model_type"] = json!("mistral");
        }
        Ok(())
    }),
    of("llama4", "llama4_text").window_pattern(FullLayer::Last).adjust(decoders::llama4),
    of("mellum", "mellum").window_pattern(FullLayer::Last).adjust(decoders::mellum),
    of("minicpm3", "minicpm3").adjust(hybrid::latent),
    of("minimax-m2", "minimax_m2"),
    of("mistral3", "ministral3")
        .reorders_rotary(true)
        .reads(&[hybrid::YARN_LOG_MULTIPLIER, decoders::TEMPERATURE_SCALE])
        .adjust(decoders::mistral3),
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
    of("nemotron", "nemotron"),
    of("nemotron_h", "nemotron_h").is_hybrid(true).adjust(hybrid::nemotron_h),
    of("nemotron_h_moe", "nemotron_h").is_hybrid(true).adjust(hybrid::nemotron_h),
    of("nomic-bert", "nomic_bert"),
    of("olmo", "olmo").reorders_rotary(true).adjust(decoders::clip),
    of("olmo2", "olmo2").window_pattern(FullLayer::Last).adjust(decoders::olmo2),
    of("olmoe", "olmoe"),
    of("phi2", "phi"),
    of("phi3", "phi3"),
    of("qwen2", "qwen2"),
    of("qwen2moe", "qwen2_moe"),
    of("qwen2vl", "qwen2_vl_text").adjust(decoders::on_axes),
    of("qwen3", "qwen3"),
    of("qwen35", "qwen3_5_text").is_hybrid(true).adjust(qwen3_5),
    of("qwen35moe", "qwen3_5_moe_text").is_hybrid(true).adjust(qwen3_5),
    of("qwen3moe", "qwen3_moe"),
    of("qwen3next", "qwen3_next").is_hybrid(true).adjust(hybrid::qwen3_next),
    of("qwen3vl", "qwen3_vl_text").adjust(decoders::on_axes),
    of("qwen3vlmoe", "qwen3_vl_moe_text").adjust(decoders::on_axes),
    of("seed_oss", "seed_oss"),
    of("smollm3", "smollm3").reorders_rotary(true),
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
    let Some(found) = content.metadata.get("general.architecture") else {
        bail!(
            "[gguf] the metadata has no general.architecture, expected one of `gguf::architectures`{}",
            of_part(content)
        )
    };
    let Ok(name) = found.to_string() else { bail!("[gguf] general.architecture is {}, expected text", shown(found)) };
    if let Some(architecture) = ARCHITECTURES.iter().find(|architecture| architecture.name == name) {
        return Ok(Metadata { content, architecture });
    }
    if let Some(refused) = REFUSED.iter().find(|refused| refused.name == name) {
        bail!("[gguf] the architecture {name:?} is not supported: {}", refused.reason)
    }
    let names = ARCHITECTURES.iter().map(|architecture| architecture.name);
    let advice =
        did_you_mean(name, names.clone(), || format!("expected one of: {}.", names.collect::<Vec<_>>().join(", ")));
    bail!(
        "[gguf] general.architecture is {name:?}, which is not known; {advice} If the attention is that of a known \
         architecture, write its name there and at the beginning of the keys, or load the model's safetensors with \
         `hf::load_attention`"
    )
}

/// Sets the sizes of Qwen3.5, and the pairs of each axis of its positions.
fn qwen3_5(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    hybrid::qwen3_next(metadata, fields)?;
    decoders::on_axes(metadata, fields)
}

/// Sets the scale of Gemma's scores. The largest model of a family, which is recognised by its number of layers, scales
/// scores by the width `embed_dim / num_heads`, the other models by the width of their heads.
fn gemma_scale(metadata: &Metadata, fields: &mut ConfigFields, layers_of_largest: usize) -> Result<()> {
    let largest = metadata.required("block_count")? == layers_of_largest;
    let follows = metadata.required("embedding_length")?.checked_div(metadata.required("attention.head_count")?);
    let head_dim = metadata.size("attention.key_length")?.filter(|_| !largest).or(follows);
    fields.insert("query_pre_attn_scalar".into(), json!(head_dim));
    Ok(())
}

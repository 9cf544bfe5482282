//! llama.cpp's architectures, and their metadata as the fields of a `config.json`.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Result, bail};
use serde_json::{Map, json};

/// A value of `general.architecture`.
pub(super) struct Architecture {
    pub name: &'static str,
    model_type: &'static str,
    /// Whether llama.cpp's converter reorders the rows of q and k, so that the two entries of a rotated pair are
    /// neighbours.
    pub reorders_rotary: bool,
    /// Fields of this architecture alone.
    adjust: fn(&Metadata, &mut Fields) -> Result<()>,
}

type Fields = Map<String, serde_json::Value>;

const fn of(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture { name, model_type, reorders_rotary: false, adjust: |_, _| Ok(()) }
}

impl Architecture {
    const fn reorders_rotary(self) -> Self {
        Self { reorders_rotary: true, ..self }
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
    of("cohere2", "cohere2"),
    of("command-r", "cohere"),
    of("falcon", "falcon").adjust(|_, fields| {
        fields.insert("new_decoder_architecture".into(), json!(fields["num_kv_heads"] != 1));
        Ok(())
    }),
    of("gemma", "gemma"),
    of("gemma2", "gemma2").adjust(|metadata, fields| gemma_scale(metadata, fields, 46)),
    of("gemma3", "gemma3_text").adjust(|metadata, fields| {
        rope_by_kind(metadata, fields)?;
        gemma_scale(metadata, fields, 62)
    }),
    of("glm4", "glm4"),
    of("gpt-oss", "gpt_oss").adjust(|_, fields| {
        fields["rope_parameters"]["truncate"] = json!(false);
        Ok(())
    }),
    of("gpt2", "gpt2"),
    of("gptneox", "gpt_neox"),
    of("granite", "granite").reorders_rotary(),
    of("llama", "llama").reorders_rotary().adjust(|metadata, fields| {
        if metadata.size("expert_count")?.is_some_and(|experts| experts > 0) {
            fields["model_type"] = json!("mixtral");
        } else if fields.get("sliding_window").is_some_and(|window| !window.is_null()) {
            fields["model_type"] = json!("mistral");
        }
        Ok(())
    }),
    of("modern-bert", "modernbert").adjust(|metadata, fields| {
        for (usual, own) in
            [("sliding_window", "local_attention"), ("sliding_window_pattern", "global_attn_every_n_layers")]
        {
            if let Some(value) = fields.remove(usual) {
                fields.insert(own.into(), value);
            }
        }
        rope_by_kind(metadata, fields)
    }),
    of("mpt", "mpt").adjust(|metadata, fields| {
        let (slope, clip) = (metadata.number("attention.max_alibi_bias")?, metadata.number("attention.clamp_kqv")?);
        let alibi = json!({"alibi": slope != Some(0.0), "alibi_bias_max": slope.unwrap_or(8.0), "clip_qkv": clip});
        fields.insert("attn_config".into(), alibi);
        Ok(())
    }),
    of("nomic-bert", "nomic_bert"),
    of("olmo2", "olmo2").adjust(|metadata, _| match metadata.size("attention.sliding_window")? {
        Some(window @ 1..) => metadata.fail(format!("the window of Olmo 3, {window}, is not supported")),
        _ => Ok(()),
    }),
    of("phi2", "phi"),
    of("phi3", "phi3"),
    of("qwen2", "qwen2"),
    of("qwen3", "qwen3"),
    of("smollm3", "smollm3").reorders_rotary(),
    of("stablelm", "stablelm"),
    of("starcoder", "gpt_bigcode"),
    of("starcoder2", "starcoder2"),
];

/// The largest model of a family, which so many layers tell, scales scores by the width of `embed_dim / num_heads`, the
/// others by that of their heads.
fn gemma_scale(metadata: &Metadata, fields: &mut Fields, layers_of_largest: usize) -> Result<()> {
    let largest = metadata.required("block_count")? == layers_of_largest;
    let follows = metadata.required("embedding_length")?.checked_div(metadata.required("attention.head_count")?);
    let head_dim = metadata.size("attention.key_length")?.filter(|_| !largest).or(follows);
    fields.insert("query_pre_attn_scalar".into(), json!(head_dim));
    Ok(())
}

/// Layers with a window rotate by a base of their own, unscaled.
fn rope_by_kind(metadata: &Metadata, fields: &mut Fields) -> Result<()> {
    let base = metadata.number("rope.freq_base_swa")?.unwrap_or(DEFAULT_BASE);
    let full = fields["rope_parameters"].take();
    fields["rope_parameters"] = json!({"full_attention": full, "sliding_attention": {"rope_theta": base}});
    Ok(())
}

/// llama.cpp's base of rotary frequencies where the metadata has none.
const DEFAULT_BASE: f64 = 10_000.0;

/// The metadata of a file whose architecture is known.
pub(super) struct Metadata<'a> {
    pub content: &'a Content,
    pub architecture: &'static Architecture,
}

impl<'a> Metadata<'a> {
    pub fn of(content: &'a Content) -> Result<Self> {
        let known = || ARCHITECTURES.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
        let Some(name) = content.metadata.get("general.architecture") else {
            bail!("[gguf] the metadata has no general.architecture, expected one of: {}", known())
        };
        match ARCHITECTURES.iter().find(|known| name.to_string().is_ok_and(|name| name == known.name)) {
            Some(architecture) => Ok(Self { content, architecture }),
            None => bail!("[gguf] unknown architecture {}, expected one of: {}", shown(name), known()),
        }
    }

    pub fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[gguf] {}: {message}", self.architecture.name)
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(&format!("{}.{key}", self.architecture.name))
    }

    fn expected<T>(&self, key: &str, found: &Value, expected: &str) -> Result<T> {
        self.fail(format!("{key} is {}, expected {expected}", shown(found)))
    }

    /// A number of things. A list with an entry for each layer has to have the same for all.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let one = match found {
            Value::Array(list) if list.iter().all(|entry| whole(entry) == list.first().and_then(whole)) => list.first(),
            one => Some(one),
        };
        match one.and_then(whole) {
            Some(size) => Ok(Some(size)),
            None => self.expected(key, found, "a whole number, the same for all layers"),
        }
    }

    pub fn required(&self, key: &str) -> Result<usize> {
        match self.size(key)? {
            Some(size) => Ok(size),
            None => self.fail(format!("the metadata has no {key}")),
        }
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F64(number)) => Ok(Some(*number)),
            // The shortest decimal, which is what the configuration had that was converted.
            Some(found) => match found.to_f32().ok().and_then(|number| number.to_string().parse().ok()) {
                Some(number) => Ok(Some(number)),
                None => self.expected(key, found, "a number"),
            },
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(found) => self.expected(key, found, "text"),
        }
    }

    /// What the model's `config.json` says, as far as the metadata tell it.
    pub fn config(&self) -> Result<serde_json::Value> {
        let num_heads = self.required("attention.head_count")?;
        let num_kv_heads = self.size("attention.head_count_kv")?.unwrap_or(num_heads);
        let has_qk_norm = self.content.tensor_infos.contains_key("blk.0.attn_q_norm.weight");
        let mut fields = Fields::new();
        let mut set = |name: &str, value: serde_json::Value| {
            fields.insert(name.into(), value);
        };
        set("model_type", json!(self.architecture.model_type));
        set("num_hidden_layers", json!(self.required("block_count")?));
        set("hidden_size", json!(self.required("embedding_length")?));
        set("num_attention_heads", json!(num_heads));
        set("head_dim", json!(self.size("attention.key_length")?));
        for name in ["num_key_value_heads", "num_kv_heads"] {
            set(name, json!(num_kv_heads));
        }
        set("multi_query", json!(num_kv_heads == 1));
        for name in ["use_qk_norm", "qk_layernorm"] {
            set(name, json!(has_qk_norm));
        }
        // Biases are those of the tensors.
        for name in ["attention_bias", "bias", "use_bias", "use_qkv_bias"] {
            set(name, json!(false));
        }
        let sizes = [
            ("intermediate_size", "feed_forward_length"),
            ("max_position_embeddings", "context_length"),
            ("vocab_size", "vocab_size"),
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
        ];
        for (name, key) in sizes {
            if let Some(size) = self.size(key)? {
                set(name, json!(size));
            }
        }
        let numbers = [
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("attention_multiplier", "attention.scale"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("logit_scale", "logit_scale"),
            ("logits_scaling", "logit_scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
        ];
        for (name, key) in numbers {
            if let Some(number) = self.number(key)? {
                set(name, json!(number));
            }
        }
        if let Some(window) = self.size("attention.sliding_window")? {
            set("sliding_window", json!(Some(window).filter(|&window| window > 0)));
        }
        match self.get("attention.sliding_window_pattern") {
            None => {}
            Some(Value::Array(layers)) => {
                let kind = |layer: &Value| match layer.to_bool() {
                    Ok(true) => "sliding_attention",
                    _ => "full_attention",
                };
                set("layer_types", layers.iter().map(kind).collect());
            }
            Some(_) => set("sliding_window_pattern", json!(self.size("attention.sliding_window_pattern")?)),
        }
        for (name, key) in [("is_causal", "attention.causal"), ("use_parallel_residual", "use_parallel_residual")] {
            match self.get(key) {
                None => {}
                Some(Value::Bool(flag)) => set(name, json!(flag)),
                Some(found) => return self.expected(key, found, "true or false"),
            }
        }
        set("tie_word_embeddings", json!(!self.content.tensor_infos.contains_key("output.weight")));
        for name in ["bos_token_id", "eos_token_id"] {
            if let Some(id) = self.content.metadata.get(&format!("tokenizer.ggml.{name}")).and_then(whole) {
                set(name, json!(id));
            }
        }
        set("rope_parameters", self.rope()?);
        (self.architecture.adjust)(self, &mut fields)?;
        Ok(fields.into())
    }

    /// Rotary positions, but for what tensors hold.
    fn rope(&self) -> Result<serde_json::Value> {
        let factor = match self.number("rope.scaling.factor")? {
            None => self.number("rope.scale_linear")?,
            factor => factor,
        };
        let kind = match self.text("rope.scaling.type")? {
            Some("yarn") if factor.is_none() => return self.fail("the metadata has no rope.scaling.factor"),
            Some("yarn") => "yarn",
            None | Some("linear") if factor.is_some_and(|factor| factor != 0.0 && factor != 1.0) => "linear",
            None | Some("linear" | "none" | "longrope") => "default",
            Some(other) => {
                return self
                    .fail(format!("rope.scaling.type is {other:?}, expected one of: none, linear, yarn, longrope"));
            }
        };
        for &(key, neutral) in UNSUPPORTED {
            if let Some(number) = self.number(key)?.filter(|&number| number != neutral) {
                return self.fail(format!("{key} is {number}, which is not supported, expected {neutral}"));
            }
        }
        let base = self.number("rope.freq_base")?.unwrap_or(DEFAULT_BASE);
        let mut rope = json!({"rope_type": kind, "rope_theta": base});
        if kind != "default" {
            rope["factor"] = json!(factor);
            rope["original_max_position_embeddings"] = json!(self.size("rope.scaling.original_context_length")?);
            rope["beta_fast"] = json!(self.number("rope.scaling.yarn_beta_fast")?);
            rope["beta_slow"] = json!(self.number("rope.scaling.yarn_beta_slow")?);
            if let Some(factor) = self.number("rope.scaling.attn_factor")?.filter(|&factor| factor != 1.0) {
                return self.fail(format!("rope.scaling.attn_factor is {factor}, which is not supported, expected 1"));
            }
        }
        Ok(rope)
    }
}

/// Numbers that change attention, and the value of each that changes nothing.
const UNSUPPORTED: &[(&str, f64)] = &[
    ("attention.temperature_scale", 0.0),
    ("attention.output_scale", 1.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
];

fn whole(value: &Value) -> Option<usize> {
    let signed = |number: i64| u64::try_from(number).ok();
    let number = match *value {
        Value::I8(number) => signed(number.into()),
        Value::I16(number) => signed(number.into()),
        Value::I32(number) => signed(number.into()),
        Value::I64(number) => signed(number),
        Value::Bool(_) => None,
        ref value => value.to_u64().ok(),
    };
    number.and_then(|number| usize::try_from(number).ok())
}

fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::String(text) => format!("{text:?}"),
        value => format!("{value:?}"),
    }
}

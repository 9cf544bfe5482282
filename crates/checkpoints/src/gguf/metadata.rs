//! llama.cpp's architectures, and their metadata as the fields of a `config.json`.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Error, Result, bail};
use serde_json::{Map, json};

use candle_attention_modules::base::root;

/// An architecture of llama.cpp: a value of `general.architecture`.
pub(super) struct Architecture {
    pub name: &'static str,
    /// The `model_type` of the same model in transformers.
    model_type: &'static str,
    /// Whether llama.cpp's converter reorders the rows of q and k, so that the two entries of a rotated pair are
    /// neighbours.
    pub reorders_rotary: bool,
    /// Which layers have a window where `attention.sliding_window_pattern` is one number.
    window_pattern: Option<FullLayer>,
    /// Sets the fields that this architecture alone has.
    adjust: fn(&Metadata, &mut Fields) -> Result<()>,
}

/// The position of the layer without a window in each group of layers.
#[derive(Clone, Copy)]
enum FullLayer {
    First,
    Last,
}

impl FullLayer {
    /// Returns whether a layer has a window, where every `period`-th layer has none. A period of 0 means that all
    /// layers have one, as in llama.cpp.
    fn has_window(self, layer: usize, period: usize) -> bool {
        if period == 0 {
            return true;
        }
        match self {
            Self::First => !layer.is_multiple_of(period),
            Self::Last => !(layer + 1).is_multiple_of(period),
        }
    }
}

type Fields = Map<String, serde_json::Value>;

const fn of(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture { name, model_type, reorders_rotary: false, window_pattern: None, adjust: |_, _| Ok(()) }
}

impl Architecture {
    const fn reorders_rotary(self) -> Self {
        Self { reorders_rotary: true, ..self }
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
    of("falcon", "falcon").adjust(|_, fields| {
        fields.insert("new_decoder_architecture".into(), json!(fields["num_kv_heads"] != 1));
        Ok(())
    }),
    of("gemma", "gemma"),
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
    of("llama", "llama").reorders_rotary().adjust(|metadata, fields| {
        if metadata.size("expert_count")?.is_some_and(|experts| experts > 0) {
            fields["model_type"] = json!("mixtral");
        } else if fields.get("sliding_window").is_some_and(|window| !window.is_null()) {
            fields["model_type"] = json!("mistral");
        }
        Ok(())
    }),
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

/// llama.cpp's base of rotary frequencies where the metadata has none.
const DEFAULT_BASE: f64 = 10_000.0;

/// The tensors that divide rotary frequencies: of calls of any length, of short and of long ones.
pub(super) const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

const WINDOW_PATTERN: &str = "attention.sliding_window_pattern";
const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";

/// The metadata of a file whose architecture is known.
pub(super) struct Metadata<'a> {
    pub content: &'a Content,
    pub architecture: &'static Architecture,
}

impl<'a> Metadata<'a> {
    /// Finds the architecture of a file.
    ///
    /// # Errors
    /// If the file names no architecture, or one that is not known.
    pub fn of(content: &'a Content) -> Result<Self> {
        let known = || ARCHITECTURES.iter().map(|one| one.name).collect::<Vec<_>>().join(", ");
        let Some(name) = content.metadata.get("general.architecture") else {
            bail!("[gguf] the metadata has no general.architecture, expected one of: {}", known())
        };
        match ARCHITECTURES.iter().find(|one| name.to_string().is_ok_and(|text| text == one.name)) {
            Some(architecture) => Ok(Self { content, architecture }),
            None => bail!("[gguf] general.architecture is {}, expected one of: {}", shown(name), known()),
        }
    }

    /// Returns an error that names the architecture.
    pub fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[gguf] {}: {message}", self.architecture.name)
    }

    /// Adds the metadata that an error of a config is about, which calls them by other names.
    pub fn explain(&self, error: &Error) -> Error {
        let text = root(error).to_string();
        let text = text.lines().next().unwrap_or_default().trim_start_matches("[hf] ").to_string();
        let mut causes = Vec::new();
        for (key, names) in NAMES_IN_CONFIGS {
            if let Some(value) = self.get(key)
                && names.iter().any(|name| text.contains(name))
            {
                causes.push(format!("{key} {}", shown(value)));
            }
        }
        let causes =
            if causes.is_empty() { String::new() } else { format!("; the metadata have {}", causes.join(", ")) };
        Error::msg(format!("[gguf] as a config.json: {text}{causes}"))
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(&format!("{}.{key}", self.architecture.name))
    }

    fn expected<T>(&self, key: &str, found: &Value, expected: &str) -> Result<T> {
        self.fail(format!("{key} is {}, expected {expected}", shown(found)))
    }

    /// Reads a whole number. A list has to have the same number for each layer.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let size = match found {
            Value::Array(list) => {
                let first = list.first().and_then(whole);
                let is_one_number = list.len() == self.num_layers()? && list.iter().all(|entry| whole(entry) == first);
                if is_one_number { first } else { None }
            }
            one => whole(one),
        };
        match size {
            Some(size) => Ok(Some(size)),
            None => self.expected(key, found, "a whole number, the same for all layers"),
        }
    }

    /// Reads a whole number of at least 1.
    fn count(&self, key: &str) -> Result<Option<usize>> {
        match (self.size(key)?, self.get(key)) {
            (Some(0), Some(found)) => self.expected(key, found, "a whole number of at least 1"),
            (count, _) => Ok(count),
        }
    }

    /// Reads a whole number of at least 1 that has to be there.
    pub fn required(&self, key: &str) -> Result<usize> {
        match self.count(key)? {
            Some(count) => Ok(count),
            None => self.fail(format!("the metadata has no {key}")),
        }
    }

    fn num_layers(&self) -> Result<usize> {
        let key = "block_count";
        match self.get(key) {
            None => self.fail(format!("the metadata has no {key}")),
            Some(found) => match whole(found) {
                Some(layers @ 1..) => Ok(layers),
                _ => self.expected(key, found, "a whole number of at least 1"),
            },
        }
    }

    /// Reads a finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let number = match found {
            Value::F64(number) => Some(*number),
            // The shortest decimal, which is what the configuration had that was converted.
            Value::F32(number) => number.to_string().parse().ok(),
            _ => None,
        };
        match number {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => self.expected(key, found, "a finite number"),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(found) => self.expected(key, found, "text"),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(found) => self.expected(key, found, "true or false"),
        }
    }

    /// Returns the fields of the model's `config.json` that the metadata tell.
    pub fn config(&self) -> Result<serde_json::Value> {
        let mut fields = Fields::new();
        self.add_sizes(&mut fields)?;
        self.add_numbers(&mut fields)?;
        self.add_windows(&mut fields)?;
        for (name, key) in [("is_causal", "attention.causal"), ("use_parallel_residual", "use_parallel_residual")] {
            if let Some(flag) = self.flag(key)? {
                fields.insert(name.into(), json!(flag));
            }
        }
        fields.insert("tie_word_embeddings".into(), json!(!self.content.tensor_infos.contains_key("output.weight")));
        for name in ["bos_token_id", "eos_token_id"] {
            if let Some(found) = self.content.metadata.get(&format!("tokenizer.ggml.{name}")) {
                let Some(id) = whole(found) else {
                    bail!("[gguf] tokenizer.ggml.{name} is {}, expected a whole number", shown(found))
                };
                fields.insert(name.into(), json!(id));
            }
        }
        fields.insert("rope_parameters".into(), self.rope()?);
        (self.architecture.adjust)(self, &mut fields)?;
        Ok(fields.into())
    }

    fn add_sizes(&self, fields: &mut Fields) -> Result<()> {
        let mut set = |name: &str, value: serde_json::Value| {
            fields.insert(name.into(), value);
        };
        let num_heads = self.required("attention.head_count")?;
        let num_kv_heads = self.count("attention.head_count_kv")?.unwrap_or(num_heads);
        set("model_type", json!(self.architecture.model_type));
        set("num_hidden_layers", json!(self.required("block_count")?));
        set("hidden_size", json!(self.required("embedding_length")?));
        set("num_attention_heads", json!(num_heads));
        set("head_dim", json!(self.count("attention.key_length")?));
        for name in ["num_key_value_heads", "num_kv_heads"] {
            set(name, json!(num_kv_heads));
        }
        set("multi_query", json!(num_kv_heads == 1));
        let has_qk_norm = self.content.tensor_infos.contains_key("blk.0.attn_q_norm.weight");
        for name in ["use_qk_norm", "qk_layernorm"] {
            set(name, json!(has_qk_norm));
        }
        // The tensors tell which biases there are.
        for name in ["attention_bias", "bias", "use_bias", "use_qkv_bias"] {
            set(name, json!(false));
        }
        if let Some(context) = self.count("context_length")? {
            set("max_position_embeddings", json!(context));
        }
        let others = [
            ("intermediate_size", "feed_forward_length"),
            ("vocab_size", "vocab_size"),
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
        ];
        for (name, key) in others {
            if let Some(size) = self.size(key)? {
                set(name, json!(size));
            }
        }
        Ok(())
    }

    fn add_numbers(&self, fields: &mut Fields) -> Result<()> {
        let numbers = [
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("logit_scale", "logit_scale"),
            ("logits_scaling", "logit_scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
        ];
        for (name, key) in numbers {
            if let Some(number) = self.number(key)? {
                fields.insert(name.into(), json!(number));
            }
        }
        if let Some(scale) = self.scale()? {
            fields.insert("attention_multiplier".into(), json!(scale));
        }
        Ok(())
    }

    /// Reads the scale of the scores; 0 means the usual one, as in llama.cpp.
    pub fn scale(&self) -> Result<Option<f64>> {
        Ok(self.number("attention.scale")?.filter(|&scale| scale != 0.0))
    }

    fn add_windows(&self, fields: &mut Fields) -> Result<()> {
        if let Some(window) = self.size("attention.sliding_window")? {
            fields.insert("sliding_window".into(), json!(Some(window).filter(|&window| window > 0)));
        }
        let Some(found) = self.get(WINDOW_PATTERN) else { return Ok(()) };
        let Some(full_layer) = self.architecture.window_pattern else {
            return self.expected(WINDOW_PATTERN, found, "none, since the layers of this architecture are alike");
        };
        let layers = self.num_layers()?;
        let expected = "whether each layer has a window, or after how many layers one has none";
        let has_window: Vec<bool> = match found {
            Value::Array(list) => list.iter().map(is_set).collect::<Option<_>>().unwrap_or_default(),
            one => match whole(one) {
                Some(period) => (0..layers).map(|layer| full_layer.has_window(layer, period)).collect(),
                None => Vec::new(),
            },
        };
        if has_window.len() != layers {
            return self.expected(WINDOW_PATTERN, found, expected);
        }
        let kind = |is_sliding| if is_sliding { "sliding_attention" } else { "full_attention" };
        fields.insert("layer_types".into(), has_window.into_iter().map(kind).collect());
        Ok(())
    }

    /// Returns `rope_parameters`, without the factors that are tensors.
    fn rope(&self) -> Result<serde_json::Value> {
        for &(key, neutral) in UNSUPPORTED {
            if let Some(number) = self.number(key)?.filter(|&number| number != neutral) {
                return self.fail(format!("{key} is {number}, which is not supported, expected {neutral}"));
            }
        }
        let base = self.number("rope.freq_base")?.unwrap_or(DEFAULT_BASE);
        let factor_key =
            if self.get("rope.scaling.factor").is_some() { "rope.scaling.factor" } else { "rope.scale_linear" };
        let factor = self.number(factor_key)?;
        let has_factor = factor.is_some_and(|factor| factor != 0.0 && factor != 1.0);
        let kind = match self.text("rope.scaling.type")? {
            Some("yarn") if factor.is_none() => {
                return self.fail("rope.scaling.type is \"yarn\", but the metadata has no rope.scaling.factor");
            }
            Some("yarn") => "yarn",
            None | Some("linear") if has_factor => "linear",
            Some("longrope") if has_factor => {
                return self.fail(format!("{factor_key} is {factor:?} beside a rope.scaling.type of \"longrope\""));
            }
            None | Some("linear" | "none" | "longrope") => "default",
            Some(other) => {
                return self
                    .fail(format!("rope.scaling.type is {other:?}, expected one of: none, linear, yarn, longrope"));
            }
        };
        let has_factors = ROPE_FACTORS.iter().any(|name| self.content.tensor_infos.contains_key(*name));
        if let Some(scale) = self.number(ATTENTION_FACTOR)?.filter(|&scale| scale != 1.0)
            && !(kind == "default" && has_factors)
        {
            return self.fail(format!("{ATTENTION_FACTOR} is {scale}, which is not supported, expected 1"));
        }
        // These are read for every kind, so that a value of the wrong type is an error.
        let original_context = self.count("rope.scaling.original_context_length")?;
        let beta_fast = self.number("rope.scaling.yarn_beta_fast")?;
        let beta_slow = self.number("rope.scaling.yarn_beta_slow")?;
        let mut rope = json!({"rope_type": kind, "rope_theta": base});
        if kind != "default" {
            rope["factor"] = json!(factor);
            rope["original_max_position_embeddings"] = json!(original_context);
            rope["beta_fast"] = json!(beta_fast);
            rope["beta_slow"] = json!(beta_slow);
        }
        Ok(rope)
    }

    /// Returns the factor by which files with [`ROPE_FACTORS`] multiply queries and keys.
    pub fn attention_factor(&self) -> Result<f64> {
        Ok(self.number(ATTENTION_FACTOR)?.unwrap_or(1.0))
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

/// The keys that configs are made of, and the names by which errors of configs call them.
const NAMES_IN_CONFIGS: &[(&str, &[&str])] = &[
    ("block_count", &["layer"]),
    ("embedding_length", &["hidden_size", "embed_dim"]),
    ("attention.head_count", &["num_attention_heads", "num_heads", "heads"]),
    ("attention.head_count_kv", &["num_key_value_heads", "num_kv_heads", "heads"]),
    ("attention.key_length", &["head_dim", "rotary_dim"]),
    ("attention.value_length", &["value_head_dim"]),
    ("attention.layer_norm_rms_epsilon", &["eps"]),
    ("attention.layer_norm_epsilon", &["eps"]),
    ("attention.scale", &["attention_multiplier", "scale"]),
    ("attn_logit_softcapping", &["softcap"]),
    ("attention.sliding_window", &["window", "local_attention", "sliding_attention"]),
    ("attention.sliding_window_pattern", &["layer_types", "sliding_attention"]),
    ("attention.max_alibi_bias", &["alibi"]),
    ("attention.clamp_kqv", &["clip_qkv"]),
    ("attention.causal", &["is_causal"]),
    ("context_length", &["max_position_embeddings", "original_context"]),
    ("rope.freq_base", &["rope_theta", "base"]),
    ("rope.freq_base_swa", &["rope_theta", "base"]),
    ("rope.dimension_count", &["rotary_dim"]),
    ("rope.scaling.factor", &["factor"]),
    ("rope.scale_linear", &["factor"]),
    ("rope.scaling.attn_factor", &["attention_factor"]),
    ("rope.scaling.original_context_length", &["original_context", "original_max_position_embeddings"]),
    ("rope.scaling.yarn_beta_fast", &["beta"]),
    ("rope.scaling.yarn_beta_slow", &["beta"]),
];

/// Returns a whole number of any integer type; none for a negative one.
fn whole(value: &Value) -> Option<usize> {
    let number = match *value {
        Value::U8(number) => number.into(),
        Value::U16(number) => number.into(),
        Value::U32(number) => number.into(),
        Value::U64(number) => number,
        Value::I8(number) => number.try_into().ok()?,
        Value::I16(number) => number.try_into().ok()?,
        Value::I32(number) => number.try_into().ok()?,
        Value::I64(number) => number.try_into().ok()?,
        Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => return None,
    };
    usize::try_from(number).ok()
}

/// Returns a flag, which may also be 0 or 1 of any integer type.
fn is_set(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        other => match whole(other)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::String(text) => format!("{text:?}"),
        value => format!("{value:?}"),
    }
}

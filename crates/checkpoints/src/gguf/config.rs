//! The metadata of a GGUF file as the fields of a `config.json`.

use candle_core::quantized::gguf_file::Value;
use candle_core::{Result, bail};
use serde_json::json;

use super::header::has_tensor;
use super::metadata::{
    ATTENTION_FACTOR, ConfigFields, DEFAULT_BASE, Metadata, is_set, kinds_by_window, set_key_heads, shown, whole,
};

/// The tensor that divides rotary frequencies in calls of any length.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// The tensor that divides rotary frequencies in calls within the original context.
pub(super) const ROPE_FACTORS_SHORT: &str = "rope_factors_short.weight";

/// The tensor that divides rotary frequencies in longer calls.
pub(super) const ROPE_FACTORS_LONG: &str = "rope_factors_long.weight";

/// The tensors that divide rotary frequencies.
pub(super) const ROPE_FACTORS: [&str; 3] = [ROPE_FREQS, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG];

const WINDOW_PATTERN: &str = "attention.sliding_window_pattern";

impl Metadata<'_> {
    /// Returns the fields of the model's `config.json` that the metadata tell.
    pub fn config(&self) -> Result<serde_json::Value> {
        let mut fields = ConfigFields::new();
        self.add_sizes(&mut fields)?;
        self.add_numbers(&mut fields)?;
        self.add_windows(&mut fields)?;
        for (name, key) in [("is_causal", "attention.causal"), ("use_parallel_residual", "use_parallel_residual")] {
            if let Some(flag) = self.flag(key)? {
                fields.insert(name.into(), json!(flag));
            }
        }
        fields.insert("tie_word_embeddings".into(), json!(!has_tensor(self.content, "output.weight")));
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

    fn add_sizes(&self, fields: &mut ConfigFields) -> Result<()> {
        let num_heads = self.query_heads()?;
        set_key_heads(fields, self.key_heads()?.unwrap_or(num_heads));
        let mut set = |name: &str, value: serde_json::Value| {
            fields.insert(name.into(), value);
        };
        set("model_type", json!(self.architecture.model_type));
        set("num_hidden_layers", json!(self.num_hidden_layers()?));
        set("hidden_size", json!(self.required("embedding_length")?));
        set("num_attention_heads", json!(num_heads));
        set("head_dim", json!(self.count("attention.key_length")?));
        let has_qk_norm = has_tensor(self.content, "blk.0.attn_q_norm.weight");
        for name in ["use_qk_norm", "qk_layernorm"] {
            set(name, json!(has_qk_norm));
        }
        // The tensors tell which biases there are.
        for name in ["attention_bias", "bias", "qkv_bias", "use_bias", "use_qkv_bias"] {
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
            ("n_group", "expert_group_count"),
            ("topk_group", "expert_group_used_count"),
        ];
        for (name, key) in others {
            if let Some(size) = self.size_of_part(key)? {
                set(name, json!(size));
            }
        }
        Ok(())
    }

    fn add_numbers(&self, fields: &mut ConfigFields) -> Result<()> {
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

    fn add_windows(&self, fields: &mut ConfigFields) -> Result<()> {
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
        fields.insert("layer_types".into(), kinds_by_window(has_window));
        Ok(())
    }

    /// Returns `rope_parameters`, without the factors that are tensors.
    fn rope(&self) -> Result<serde_json::Value> {
        let is_read = |key: &&str| self.architecture.reads.contains(key);
        for &(key, neutral) in UNSUPPORTED.iter().filter(|(key, _)| !is_read(key)) {
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
        let has_factors = ROPE_FACTORS.iter().any(|name| has_tensor(self.content, name));
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
}

/// Numbers that change attention, and the value of each that changes nothing.
const UNSUPPORTED: &[(&str, f64)] = &[
    ("attention.temperature_scale", 0.0),
    ("attention.output_scale", 1.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
];

//! Models that are published with other code than transformers', under the settings that transformers has for them.

use candle_core::{Result, bail};
use serde_json::Value;

/// The model type of GTE's own encoder in its published checkpoints; transformers reads them as "gte".
pub const GTE: &str = "new";
/// The model type of Jina v3 in transformers. Its published checkpoints have the type of XLM-RoBERTa.
pub const JINA_V3: &str = "jina_embeddings_v3";
/// The base of rotary positions in the code of Jina v3, if the config has none.
const JINA_BASE: f64 = 10_000.0;

/// A setting of which one value is supported.
struct Only {
    key: &'static str,
    value: Value,
}

impl Only {
    fn new(key: &'static str, value: impl Into<Value>) -> Self {
        Self { key, value: value.into() }
    }

    /// Checks that a `config.json` has this value, or none.
    fn check(&self, json: &Value) -> Result<()> {
        let own = &json[self.key];
        // A number may be written with a fraction of zero.
        let is_equal = match (own.as_f64(), self.value.as_f64()) {
            (Some(own_number), Some(number)) => own_number == number,
            _ => *own == self.value,
        };
        if !own.is_null() && !is_equal {
            bail!("[encoder] {} is {own}, expected {}", self.key, self.value)
        }
        Ok(())
    }
}

/// Returns a `config.json` under the model type and the names that transformers has for it.
///
/// # Errors
/// If a setting of a published checkpoint is not that of the model in transformers.
pub fn known_as(json: &Value) -> Result<Value> {
    let mut known = json.clone();
    match json["model_type"].as_str().unwrap_or_default() {
        // Snowflake's Arctic v2 has the names of the published files under the model type of transformers.
        GTE | "gte" => {
            for only in [
                Only::new("layer_norm_type", "layer_norm"),
                Only::new("logn_attention_scale", false),
                Only::new("pack_qkv", true),
                Only::new("position_embedding_type", "rope"),
            ] {
                only.check(json)?;
            }
            known["model_type"] = "gte".into();
        }
        "xlm-roberta" if json["position_embedding_type"] == "rotary" => {
            for only in [Only::new("load_trained_adapters", true), Only::new("truncate_dim", Value::Null)] {
                only.check(json)?;
            }
            known["model_type"] = JINA_V3.into();
            known["rope_theta"] = json["rotary_emb_base"].as_f64().unwrap_or(JINA_BASE).into();
        }
        "nomic_bert" => {
            for only in [
                Only::new("prenorm", false),
                Only::new("use_rms_norm", false),
                Only::new("parallel_block", false),
                Only::new("mlp_fc1_bias", has_experts(json)),
                Only::new("mlp_fc2_bias", has_experts(json)),
                Only::new("expert_choice_router", false),
                Only::new("moe_normalize_expert_weights", false),
                Only::new("num_shared_experts", 0),
                Only::new("ffn_div", 1),
            ] {
                only.check(json)?;
            }
        }
        _ => {}
    }
    Ok(known)
}

/// Returns whether some layers of Nomic's model have experts.
pub fn has_experts(json: &Value) -> bool {
    ["num_experts", "moe_every_n_layers"].iter().all(|key| json[*key].as_u64().is_some_and(|count| count > 0))
}

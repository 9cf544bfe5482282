//! The settings of quantisation in the config of a model.

use serde_json::Value;

use super::float8::ScaleBlock;
use candle_attention_modules::base::ConfigMethod;

/// The settings of quantisation in a config; null where it has none.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    object: Value,
    /// The whole config.
    model: Value,
}

impl Settings {
    pub(crate) fn new(config: &Value) -> Self {
        Self { object: ConfigMethod::object(config).cloned().unwrap_or_default(), model: config.clone() }
    }

    /// Returns the object: `quantization_config`, `quantization` or `compression_config`.
    pub(super) fn object(&self) -> &Value {
        &self.object
    }

    /// Returns the blocks of floats of 8 bits that share a scale: `weight_block_size`.
    pub(crate) fn block(&self) -> Option<ScaleBlock> {
        let sizes = self.object["weight_block_size"].as_array()?;
        let [rows, columns] = sizes.as_slice() else { return None };
        let size = |value: &Value| Some(value.as_u64()? as usize).filter(|&size| size > 0);
        Some(ScaleBlock { rows: size(rows)?, columns: size(columns)? })
    }

    /// Returns the number of inputs of a linear layer, by its name and the sizes of the model; `None` for a name that
    /// is not known.
    pub(super) fn inputs_of(&self, module: &str) -> Option<usize> {
        let text = if self.model["text_config"].is_object() { &self.model["text_config"] } else { &self.model };
        let size = |key: &str| text[key].as_u64().map(|size| size as usize).filter(|&size| size > 0);
        match module.rsplit('.').next()? {
            "q_proj" | "k_proj" | "v_proj" | "qkv_proj" | "gate_proj" | "up_proj" | "gate_up_proj" | "lm_head" => {
                size("hidden_size")
            }
            "o_proj" => match size("head_dim") {
                Some(head_dim) => size("num_attention_heads")?.checked_mul(head_dim),
                None => size("hidden_size"),
            },
            "down_proj" => size("intermediate_size"),
            _ => None,
        }
    }
}

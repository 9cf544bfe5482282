//! The settings of quantisation in the config of a model.

use serde_json::Value;

use super::float8::Block;
use candle_attention_modules::base::ConfigMethod;

/// The settings of quantisation in a config; null where it has none.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    object: Value,
}

impl Settings {
    pub(crate) fn new(config: &Value) -> Self {
        Self { object: ConfigMethod::object(config).cloned().unwrap_or_default() }
    }

    /// Returns the object: `quantization_config`, `quantization` or `compression_config`.
    pub(super) fn object(&self) -> &Value {
        &self.object
    }

    /// Returns the blocks of floats of 8 bits that share a scale: `weight_block_size`.
    pub(crate) fn block(&self) -> Option<Block> {
        let sizes = self.object["weight_block_size"].as_array()?;
        let [rows, columns] = sizes.as_slice() else { return None };
        let size = |value: &Value| Some(value.as_u64()? as usize).filter(|&size| size > 0);
        Some(Block { rows: size(rows)?, columns: size(columns)? })
    }
}

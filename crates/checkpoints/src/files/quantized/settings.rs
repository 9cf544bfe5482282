//! The settings of quantisation in the config of a model.

use serde_json::Value;

use candle_attention_modules::base::ConfigMethod;

/// The settings of quantisation in a config; null where it has none.
#[derive(Debug, Default)]
pub(super) struct Settings {
    object: Value,
}

impl Settings {
    pub(super) fn new(config: &Value) -> Self {
        Self { object: ConfigMethod::object(config).cloned().unwrap_or_default() }
    }

    /// Returns the object: `quantization_config`, `quantization` or `compression_config`.
    pub(super) fn object(&self) -> &Value {
        &self.object
    }
}

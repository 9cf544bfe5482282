//! Any config.json, and layers of it from a checkpoint that has no tensors.

use std::collections::HashMap;

use candle_attention::hf;
use candle_core::{DType, Device, Tensor};

pub fn run(text: &[u8]) {
    let Ok(json) = serde_json::from_slice(text) else { return };
    for layer in [0, 1, 5] {
        if let Ok(cfg) = hf::attention_config(&json, layer) {
            assert!(cfg.num_heads() > 0 && cfg.head_dim() > 0, "{cfg:?}");
        }
        let _ = hf::latent_attention_config(&json, layer);
        let _ = hf::linear_attention_config(&json, layer);
        let empty = candle_nn::VarBuilder::from_tensors(HashMap::<String, Tensor>::new(), DType::F32, &Device::Cpu);
        assert!(hf::load_attention(&json, layer, empty.clone()).is_err());
        assert!(hf::load_latent_attention(&json, layer, empty.clone()).is_err());
        assert!(hf::load_linear_attention(&json, layer, empty.clone()).is_err());
        for name in hf::attention_names(&json).unwrap_or_default() {
            let _ = hf::named_attention_config(&json, name, layer);
            assert!(hf::load_named_attention(&json, name, layer, empty.clone()).is_err());
        }
        assert!(hf::load_relative_bias(&json, empty).is_err());
    }
}

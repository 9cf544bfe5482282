//! Configurations of quantised weights; tests/errors has the texts of errors.

use candle_attention::{AttentionInput, weights};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::json;

use crate::common::{error_text, values};
use crate::golden::forward_from;
use crate::{CPU, Model, Tensors, builder};

/// A float8 checkpoint gives the layer of its weights times their scales, or an error where a builder ignores scales.
#[test]
fn float8_weights_are_read_with_their_scales_or_refused() -> Result<()> {
    for name in ["llama", "deepseek_v3"] {
        let mut model = Model::named(name);
        model.config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        let (mut stored, mut exact) = (Tensors::new(), Tensors::new());
        for (name, tensor) in &model.weights {
            stored.insert(name.clone(), tensor.clone());
            exact.insert(name.clone(), tensor.clone());
            if !name.ends_with("weight") || tensor.rank() < 2 {
                continue;
            }
            let weight = tensor.to_dtype(DType::F8E4M3)?;
            let blocks = weight.dims().iter().map(|dim| dim.div_ceil(128)).collect::<Vec<_>>();
            exact.insert(name.clone(), (weight.to_dtype(DType::F32)? * 0.75)?);
            stored.insert(format!("{name}_scale_inv"), Tensor::full(0.75f32, blocks, &CPU)?);
            stored.insert(name.clone(), weight);
        }
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        candle_core::safetensors::save(&stored, &path)?;
        let run = |vb| forward_from(vb, &model, 0, AttentionInput::new(&model.golden["layer0.in"]));
        let found = run(weights::open(&path, DType::F32, &CPU)?)?;
        assert_eq!(values(&found), values(&run(builder(exact))?), "{name}");
        // SAFETY: nothing writes to the file after it was saved.
        let without_scales = unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::F32, &CPU)? };
        let error = error_text(run(without_scales));
        assert!(error.contains("weight_scale_inv, which this builder does not do"), "{name}: {error}");
    }
    Ok(())
}

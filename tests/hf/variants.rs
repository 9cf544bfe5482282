//! Configurations in other spellings, and with fields left out.

use std::path::Path;

use candle_attention::hf;
use candle_core::Result;
use serde_json::{Value, json};

use crate::{LATENT, Model};

#[test]
fn other_spellings_and_absent_fields_say_what_transformers_reads_in_them() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/variants.json");
    let text = std::fs::read_to_string(path).expect("the file is there");
    let variants: Vec<Value> = serde_json::from_str(&text).expect("the file is a list");
    let mut compared = 0;
    for variant in &variants {
        let [raw, saved] = ["raw", "saved"].map(|key| &variant[key]);
        if !hf::architectures().any(|known| raw["model_type"] == known) {
            continue;
        }
        match raw["model_type"].as_str().is_some_and(|model_type| LATENT.contains(&model_type)) {
            true => compare(hf::latent_attention_config, raw, saved)?,
            false => compare(hf::attention_config, raw, saved)?,
        }
        if hf::decoder_attention_config(saved, 0).is_ok() {
            compare(hf::decoder_attention_config, raw, saved)?;
            compare(hf::cross_attention_config, raw, saved)?;
        }
        compared += 1;
    }
    assert!(compared >= 95, "{compared} variants");
    Ok(())
}

/// transformers 5.0 to 5.12 write one `rope_parameters` for all layers of Olmo 3, where the scaling of the published
/// models is for layers that see all keys.
#[test]
fn olmo_3_may_have_one_rope_for_all_layers() -> Result<()> {
    let yarn = json!({
        "rope_type": "yarn", "rope_theta": 300.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    });
    let plain = json!({"rope_type": "default", "rope_theta": 300.0});
    for all in [&yarn, &plain] {
        let config = |rope| json!({"model_type": "olmo3", "num_hidden_layers": 8, "rope_parameters": rope});
        let by_kind = json!({"full_attention": all, "sliding_attention": plain});
        compare(hf::attention_config, &config(all), &config(&by_kind))?;
    }
    Ok(())
}

/// Kimi K2's config.json has a name of its own, which transformers reads as DeepSeek V3.
#[test]
fn kimi_k2_is_deepseek_v3() -> Result<()> {
    let saved = Model::named("deepseek_v3").config;
    let mut raw = saved.clone();
    raw["model_type"] = "kimi_k2".into();
    compare(hf::latent_attention_config, &raw, &saved)
}

/// What a reader finds in both spellings, layer by layer.
fn compare<C: PartialEq + std::fmt::Debug>(
    read: fn(&Value, usize) -> Result<C>,
    raw: &Value,
    saved: &Value,
) -> Result<()> {
    let mut layers = 0;
    // Some layers of hybrid models are no attention.
    for i in 0..200 {
        match read(saved, i) {
            Ok(expected) => {
                assert_eq!(read(raw, i)?, expected, "layer {i} of {raw}");
                layers += 1;
            }
            Err(_) => assert!(read(raw, i).is_err(), "layer {i} of {raw}"),
        }
    }
    assert!(layers > 0, "{saved}");
    Ok(())
}

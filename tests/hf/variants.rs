//! Configurations in other spellings, and with fields omitted: the variants of `make.py`, and in `spellings.json`
//! configurations that are not transformers'. Versions 5.0 to 5.12 write one `rope_parameters` for all layers of Olmo
//! 3, where the scaling of the published models is for layers without a window. Kimi K2 has another name, which
//! transformers reads as DeepSeek V3.

use candle_attention::hf;
use candle_core::Result;
use serde_json::Value;

use crate::LATENT;
use crate::common::{read_json, recorded};

#[test]
fn hf_configs_in_other_spellings_match_transformers() -> Result<()> {
    let lists: [Vec<Value>; 2] = ["hf/variants.json", "hf/spellings.json"].map(|file| read_json(recorded(file)));
    let mut compared = 0;
    for variant in lists.iter().flatten() {
        let [raw, saved] = ["raw", "saved"].map(|key| &variant[key]);
        if !hf::architectures().any(|known| raw["model_type"] == known) {
            continue;
        }
        match saved["model_type"].as_str().unwrap_or_default() {
            "deepseek_v4" => compare(hf::compressed_key_attention_config, raw, saved)?,
            model_type if LATENT.contains(&model_type) => compare(hf::latent_attention_config, raw, saved)?,
            _ => compare(hf::attention_config, raw, saved)?,
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

/// Compares the configs that are read from both spellings, layer by layer.
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

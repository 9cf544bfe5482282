//! A loss over hidden states reaches every variable of the example's encoders.

use candle_attention::untrained;
use candle_core::Result;

use crate::common::variables;
use crate::model::Encoder;
use crate::{MODELS, folder};

#[test]
fn every_variable_of_an_encoder_gets_a_gradient() -> Result<()> {
    for model in MODELS {
        let (vars, vb) = variables(&folder(model).join("model.safetensors"))?;
        let config = std::fs::read_to_string(folder(model).join("config.json")).expect("a config");
        let encoder = Encoder::load(&serde_json::from_str(&config).expect("JSON"), vb, |_, _| {})?;
        let hidden = encoder.forward(&[&[5, 6, 7], &[8, 9]])?;
        let mut missing = untrained(&hidden.sqr()?.sum_all()?.backward()?, &vars);
        // What stands behind the hidden states.
        missing.retain(|name| !name.contains("pooler"));
        assert_eq!(missing, [""; 0], "{model}");
    }
    Ok(())
}

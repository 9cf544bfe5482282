//! A loss over hidden states reaches every variable of the example's encoders.

use candle_attention::untrained;
use candle_core::Result;

use crate::common::variables;
use crate::model::Encoder;
use crate::{MODELS, checkpoint};

#[test]
fn every_variable_of_an_encoder_gets_a_gradient() -> Result<()> {
    for model in MODELS {
        let checkpoint = checkpoint(model);
        let (vars, vb) = variables(&checkpoint.file("model.safetensors"))?;
        let encoder = Encoder::load(&checkpoint.json("config.json"), vb, |_, _| {})?;
        let hidden = encoder.forward(&[&[5, 6, 7], &[8, 9]])?;
        let mut missing = untrained(&hidden.sqr()?.sum_all()?.backward()?, &vars);
        // What stands behind the hidden states.
        missing.retain(|name| !name.contains("pooler"));
        assert_eq!(missing, [""; 0], "{model}");
    }
    Ok(())
}

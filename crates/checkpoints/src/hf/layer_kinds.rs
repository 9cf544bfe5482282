//! Rules that tell the layers of a model apart.

use candle_core::Result;

use super::fields::Fields;

/// Returns whether a layer of SmolLM 3 or Llama 4 has rotary positions: all but every `no_rope_layer_interval`-th.
pub(super) fn alternates_rotary(fields: &Fields) -> Result<bool> {
    let interval = fields.get_or("no_rope_layer_interval", 4)?;
    match fields.of_layer("no_rope_layers")? {
        None => Ok(!(fields.layer + 1).is_multiple_of(interval)),
        Some(flag) if *flag == 1 || *flag == true => Ok(true),
        Some(flag) if *flag == 0 || *flag == false => Ok(false),
        Some(flag) => fields.fail(format!("no_rope_layers has {flag} for layer {}, expected 0 or 1", fields.layer)),
    }
}

/// Returns whether a layer is the last of the model, or a multiple of four layers before it.
pub(super) fn is_fourth_from_last(fields: &Fields) -> bool {
    (fields.num_layers - 1).abs_diff(fields.layer).is_multiple_of(4)
}

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

/// Returns whether a layer has this kind in `layer_types`, and not "full_attention"; `None` without `layer_types`.
pub(super) fn has_kind(fields: &Fields, kind: &str) -> Result<Option<bool>> {
    match fields.of_layer("layer_types")? {
        None => Ok(None),
        Some(found) if found == kind => Ok(Some(true)),
        Some(found) if found == "full_attention" => Ok(Some(false)),
        Some(found) => fields.fail(format!(
            "layer_types has {found} for layer {}, expected {kind:?} or \"full_attention\"",
            fields.layer
        )),
    }
}

/// Returns the kind of a Dots 3 layer, by its name in new configurations: "indexed_attention", "full_attention" or
/// "sliding_attention". Published ones call the first "full_attention" too.
pub(super) fn dots3<'a>(fields: &Fields<'a>) -> Result<&'a str> {
    const INDEXED: &str = "indexed_attention";
    const FULL: &str = "full_attention";
    let has_indexer = match fields.get("use_dsa") {
        Some(_) => Some(fields.flag("use_dsa", true)?),
        None if fields.has("per_layer_config") => None,
        None => Some(true),
    };
    let is_windowed = fields.flag("use_sliding_window", true)? && fields.layer >= 2 && fields.layer % 4 != 1;
    let kind = match fields.of_layer("layer_types")? {
        Some(kind) => kind.as_str().unwrap_or_default(),
        None if is_windowed => "sliding_attention",
        None => INDEXED,
    };
    match (kind, has_indexer) {
        (FULL, Some(true)) => Ok(INDEXED),
        (INDEXED, Some(false)) => Ok(FULL),
        (INDEXED | FULL | "sliding_attention", _) => Ok(kind),
        _ => fields.fail(format!(
            "layer_types has {kind:?} for layer {}, expected \"indexed_attention\" or \"sliding_attention\"",
            fields.layer
        )),
    }
}

/// Returns whether a Dots 3 layer has an indexer.
pub(super) fn dots3_has_indexer(fields: &Fields) -> Result<bool> {
    Ok(dots3(fields)? == "indexed_attention")
}

/// Returns whether a layer is the last of the model, or a multiple of four layers before it.
pub(super) fn is_fourth_from_last(fields: &Fields) -> bool {
    (fields.num_layers - 1).abs_diff(fields.layer).is_multiple_of(4)
}

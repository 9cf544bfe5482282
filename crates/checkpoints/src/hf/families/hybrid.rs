//! Decoders of text in which few layers have softmax attention, and the others are recurrences.

use candle_core::Result;

use super::{DECODER, MODEL};
use crate::hf::family::{Bias, Family, Heads, Rotary, at};
use crate::hf::fields::Fields;
use crate::hf::rope::rope;
use crate::hf::rules::sliding;
use candle_attention_core::WeightLayout;

/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "bamba", heads: Heads::Grouped(Some(8), None), bias: Bias::AllIf("attention_bias", false),
        rope: Rotary::All(rope(10_000.0, 262_144).partial("partial_rotary_factor", 0.5)),
        window: |fields, layer| {
            let listed = fields.optional::<Vec<usize>>("attn_layer_indices")?.unwrap_or_default();
            no_window(fields, layer, listed.contains(&layer))
        },
        ..DECODER
    },
    Family {
        model_type: "granitemoehybrid", bias: Bias::AllIf("attention_bias", false),
        rope: Rotary::If(
            |fields, _| Ok(fields.get("position_embedding_type").is_some_and(|kind| *kind == "rope")),
            rope(10_000.0, 2048),
        ),
        window: |fields, layer| match fields.get("layer_types") {
            Some(_) => sliding(fields, layer, false, None),
            None => no_window(fields, layer, false),
        },
        scale: Some(("attention_multiplier", 1.0, 1.0)), ..DECODER
    },
    Family {
        model_type: "jamba", heads: Heads::Grouped(Some(8), None),
        window: |fields, layer| {
            // Zero is a valid offset.
            let none = fields.get("attn_layer_offset").is_some_and(|offset| *offset == 0);
            let offset = if none { 0 } else { fields.get_or("attn_layer_offset", 4)? };
            no_window(fields, layer, layer % fields.get_or("attn_layer_period", 8)? == offset)
        },
        ..DECODER
    },
    // The layers of experts and of other feed-forward networks count too.
    Family {
        model_type: "nemotron_h", sizes: [4, 4096, 32], heads: Heads::Grouped(Some(8), Some(128)),
        modules: &[at(&["model.", "backbone.", ""], "layers.{}.mixer", WeightLayout::Canonical)],
        bias: Bias::AllIf("attention_bias", false), aliases: &[("layer_types", "layers_block_type")],
        window: |fields, layer| {
            let has_softmax = match fields.of_layer("layers_block_type", layer)? {
                Some(kind) => *kind == "full_attention" || *kind == "attention",
                None => {
                    let pattern = fields.optional::<&str>("hybrid_override_pattern")?.unwrap_or("ME*-");
                    pattern.chars().nth(layer) == Some('*')
                }
            };
            no_window(fields, layer, has_softmax)?;
            fields.nullable("sliding_window", None)
        },
        ..DECODER
    },
    Family {
        model_type: "recurrent_gemma", sizes: [26, 2560, 10], heads: Heads::Grouped(None, None),
        head_dim_follows: true, bias: Bias::OutAndQkvIf("attention_bias", false),
        modules: &[at(MODEL, "layers.{}.temporal_block", WeightLayout::Canonical)],
        rope: Rotary::All(rope(10_000.0, 8192).partial("partial_rotary_factor", 0.5)),
        window: |fields, layer| {
            let usual = ["recurrent", "recurrent", "attention"];
            let has_softmax = match fields.get("block_types").and_then(|types| types.as_array()) {
                Some(types) if !types.is_empty() => types[layer % types.len()] == "attention",
                _ => usual[layer % usual.len()] == "attention",
            };
            no_window(fields, layer, has_softmax)?;
            fields.get_or("attention_window_size", 2048).map(Some)
        },
        ..DECODER
    },
];

/// All keys, in a layer that has any.
fn no_window(fields: &Fields, layer: usize, has_softmax: bool) -> Result<Option<usize>> {
    match has_softmax {
        true => Ok(None),
        false => fields.fail(format!("layer {layer} is a recurrence, expected softmax attention")),
    }
}

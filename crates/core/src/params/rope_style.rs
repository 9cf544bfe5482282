//! A warning about weights whose rows are in the order of another style of rotary positions.

use super::layout::WeightLayout;
use crate::config::MultiHeadAttentionConfig;
use crate::position::RopeStyle;
use candle_attention_modules::base::ParameterReader;
use candle_attention_modules::linear::Projection;
use candle_attention_modules::warn_once;

/// Logs a warning, once in a process, if weights of Meta or torchtune are loaded for rotary positions that rotate
/// halves: those libraries rotate neighbours, and order the rows of queries and keys for it.
pub(super) fn warn_of_rope_style(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, reader: &ParameterReader) {
    let exceptions = match layout {
        WeightLayout::Meta => "",
        WeightLayout::Torchtune => ", except in Qwen2 and Phi-3",
        _ => return,
    };
    let is_half = cfg.rope().is_some_and(|rope| rope.style() == RopeStyle::RotateHalf);
    if is_half && reader.has(&layout.weight_name(Projection::Query, true)) {
        warn_once!(
            "[{}] the layout {layout} is loaded with `RopeStyle::RotateHalf`, but its models rotate \
             neighbours{exceptions}; expected `RopeStyle::Interleaved`",
            reader.op
        );
    }
}

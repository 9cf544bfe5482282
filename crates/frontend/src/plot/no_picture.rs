//! What stands for pictures of heat maps in a build without the feature `plot`: an error that names it.

use candle_core::{Result, bail};

use super::{Heads, HeatMap};

pub(super) use without_feature as to_png;
pub(super) use without_feature as to_svg;

pub(super) fn without_feature<T>(_: &HeatMap, _: Heads) -> Result<T> {
    bail!(
        "[heat_map] pictures need the feature `plot` of candle-attention, as `cargo run --features plot` or `features = \
         [\"plot\"]` in Cargo.toml gives it; `to_terminal` needs none"
    )
}

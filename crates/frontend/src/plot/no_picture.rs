//! What stands for pictures of heat maps in a build without the feature `plot`: an error that names it.

use candle_core::{Result, bail};

use super::{Heads, HeatMap};

pub(super) fn to_svg(_: &HeatMap, _: Heads) -> Result<String> {
    without_feature()
}

pub(super) fn to_png(_: &HeatMap, _: Heads) -> Result<Vec<u8>> {
    without_feature()
}

fn without_feature<T>() -> Result<T> {
    bail!(
        "[heat_map] pictures need the feature `plot` of candle-attention, as `cargo run --features plot` or `features = \
         [\"plot\"]` in Cargo.toml gives it; `to_terminal` needs none"
    )
}

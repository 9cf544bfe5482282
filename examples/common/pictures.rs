//! What examples draw, where the feature `plot` is on.

use std::path::Path;

use candle_attention::plot::HeatMap;
use candle_core::Result;

/// Draws a panel for each head.
#[cfg(feature = "plot")]
pub fn save(map: &HeatMap, file: &Path) -> Result<()> {
    map.save(file, candle_attention::plot::Heads::All)
}

#[cfg(not(feature = "plot"))]
pub fn save(_: &HeatMap, _: &Path) -> Result<()> {
    candle_core::bail!("pictures need a feature: run again with `cargo run --features plot --example ..`")
}

//! What of the heat map needs the feature `plot`, in a build without it.

use std::path::Path;

use candle_core::{Result, bail};

use super::{Heads, HeatMap};

impl HeatMap {
    /// Writes the map as SVG or PNG: an error in this build, which is without the feature `plot`.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn save(&self, _path: impl AsRef<Path>, _heads: Heads) -> Result<()> {
        no_picture()
    }

    /// The map as an SVG document: an error in this build, which is without the feature `plot`.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn to_svg(&self, _heads: Heads) -> Result<String> {
        no_picture()
    }

    /// The map as a PNG file: an error in this build, which is without the feature `plot`.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn to_png(&self, _heads: Heads) -> Result<Vec<u8>> {
        no_picture()
    }
}

fn no_picture<T>() -> Result<T> {
    bail!(
        "[heat_map] pictures need the feature `plot` of candle-attention, as `cargo run --features plot` or `features = \
         [\"plot\"]` in Cargo.toml gives it; `to_terminal` needs none"
    )
}

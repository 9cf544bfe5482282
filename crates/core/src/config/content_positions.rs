//! What relative positions by content want of the rest of a layer.

use candle_core::{Result, bail};

use super::{KvSource, MultiHeadAttentionConfig};
use crate::position::ContentPositions;

/// The most rows and columns of a grid or window, and the furthest key that has a vector of its own.
const MAX_SIZE: usize = 1 << 16;

impl MultiHeadAttentionConfig {
    pub(super) fn validate_content_positions(&self) -> Result<()> {
        let Some(positions) = &self.content_positions else { return Ok(()) };
        if self.kv_source() == KvSource::EarlierLayer {
            bail!("[content_positions] keys are an earlier layer's, expected those of the tokens of a call")
        }
        match positions {
            ContentPositions::Grid { height, width } => {
                check_window([*height, *width])?;
                if self.softcap().is_some() {
                    bail!(
                        "[content_positions] softcap is set, which bounds scores before relative positions of a grid \
                         are added"
                    )
                }
                if self.score_scale() as f32 == 0.0 {
                    bail!("[content_positions] scale is 0, expected another beside relative positions of a grid")
                }
            }
            ContentPositions::Window { height, width } => check_window([*height, *width])?,
            ContentPositions::CosineWindow { height, width, trained } => {
                check_window([*height, *width])?;
                if let Some(trained) =
                    trained.filter(|trained| trained.iter().any(|size| !(2..=MAX_SIZE).contains(size)))
                {
                    bail!("[content_positions] trained is {trained:?}, expected 2 to {MAX_SIZE} each")
                }
                if let Some(scale) = self.scale() {
                    bail!("[content_positions] scale is {scale}, expected none beside the factors of cosine scores")
                }
            }
            ContentPositions::TransformerXl => {
                if !self.embed_dim().is_multiple_of(2) {
                    bail!("[content_positions] embed_dim is {}, expected pairs of sines and cosines", self.embed_dim())
                }
            }
            ContentPositions::Clipped { left, right } => {
                for (name, size) in [("left", *left), ("right", *right)] {
                    if size > MAX_SIZE {
                        bail!("[content_positions] {name} is {size}, expected at most {MAX_SIZE}")
                    }
                }
            }
            ContentPositions::Disentangled(config) => {
                config.validate()?;
                let (h, h_kv) = (self.num_heads(), self.num_kv_heads());
                if h != h_kv {
                    bail!(
                        "[content_positions] num_kv_heads is {h_kv}, expected the {h} query heads of disentangled \
                         positions"
                    )
                }
            }
        }
        Ok(())
    }
}

fn check_window(sizes: [usize; 2]) -> Result<()> {
    match ["height", "width"].into_iter().zip(sizes).find(|&(_, size)| size == 0 || size > MAX_SIZE) {
        Some((name, size)) => bail!("[content_positions] {name} is {size}, expected 1 to {MAX_SIZE}"),
        None => Ok(()),
    }
}

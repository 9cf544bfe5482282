//! Relative positions by content: terms of a score that depend on where the key stands from its query, and on what one
//! of the two holds.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::grid::GridTables;
use crate::weights::Source;
use crate::{KvSource, MultiHeadAttentionConfig};

/// Terms of the scores by the place of the key from its query and by what one of the two holds, for self-attention.
///
/// ```
/// use candle_attention::{ContentPositions, MultiHeadAttention, MultiHeadAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// // A window of SAM, whose images are the rows of a batch of 4 windows.
/// let positions = ContentPositions::Grid { height: 14, width: 14 };
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_bias(true).with_content_positions(positions);
/// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let ys = mha.forward(&Tensor::zeros((4, 14 * 14, 64), DType::F32, &Device::Cpu)?)?;
/// # assert_eq!(ys.dims(), [4, 196, 64]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ContentPositions {
    /// The decomposed form of MViTv2 (<https://arxiv.org/abs/2112.01526>), SAM and ViTDet, for the patches of an image,
    /// row by row, T = height · width: `q · rel_pos_h[r] + q · rel_pos_w[c]` with the distances r and c of the two rows
    /// and columns, added to the scaled score. Parameters `rel_pos_h` (2 · height - 1, D), from the query furthest above
    /// its key on, and `rel_pos_w` (2 · width - 1, D).
    ///
    /// The terms are part of the product of queries and keys, which are `height + width` numbers wider for them.
    Grid {
        /// Rows of patches.
        height: usize,
        /// Columns of patches.
        width: usize,
    },
}

/// The most rows and columns of a grid.
const MOST: usize = 1 << 16;

impl ContentPositions {
    /// Checks that the numbers fit together and the rest of a layer.
    pub(crate) fn validate(&self, cfg: &MultiHeadAttentionConfig) -> Result<()> {
        if cfg.kv_source() == KvSource::EarlierLayer {
            bail!("[content_positions] keys are an earlier layer's, expected those of the tokens of a call")
        }
        match self {
            Self::Grid { height, width } => {
                for (name, size) in [("height", *height), ("width", *width)] {
                    if size == 0 || size > MOST {
                        bail!("[content_positions] {name} is {size}, expected 1 to {MOST}")
                    }
                }
                if cfg.softcap().is_some() {
                    bail!(
                        "[content_positions] softcap is set, which bounds scores before relative positions of a grid are added"
                    )
                }
                if cfg.score_scale() as f32 == 0.0 {
                    bail!("[content_positions] scale is 0, expected another beside relative positions of a grid")
                }
            }
        }
        Ok(())
    }
}

/// The parameters of a layer's [`ContentPositions`].
#[derive(Debug, Clone)]
pub(crate) enum ContentTables {
    Grid(GridTables),
}

/// Parameters of these terms, which change the numbers where they are.
const PARAMETERS: [&str; 2] = ["rel_pos_h", "rel_pos_w"];

impl ContentTables {
    pub(crate) fn load(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<Option<Self>> {
        match cfg.content_positions() {
            None => {
                PARAMETERS.iter().try_for_each(|name| source.refuse(name, "the config has no content_positions"))?;
                Ok(None)
            }
            Some(&ContentPositions::Grid { height, width }) => {
                Ok(Some(Self::Grid(GridTables::load([height, width], cfg.head_dim(), source)?)))
            }
        }
    }

    /// With what variables hold now.
    pub(crate) fn freeze(&self) -> Result<Self> {
        match self {
            Self::Grid(tables) => Ok(Self::Grid(tables.freeze()?)),
        }
    }

    /// By their names.
    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        match self {
            Self::Grid(tables) => tables.parameters(),
        }
    }
}

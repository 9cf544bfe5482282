//! Relative positions by content: terms of a score that depend on the position of its key relative to its query and,
//! except for windows of an image, on the content of one of the two. Each kind is a file.

mod call;
mod clipped;
mod cosine_window;
mod disentangled;
mod distances;
mod grid;
mod specs;
mod transformer_xl;
mod window;

pub use disentangled::{DisentangledConfig, RelativeEmbeddings};

pub(crate) use distances::{ContentScores, KeysByHeads};
pub(crate) use specs::LayerSpecs;

use std::sync::Arc;

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::SharedTerm;
use call::Image;
use candle_attention_modules::base::{ParameterList, ParameterSpec, number};
use clipped::Clipped;
use cosine_window::CosineWindow;
use disentangled::Disentangled;
use distances::LatestVectors;
use grid::GridTerm;
use transformer_xl::TransformerXl;
use window::{WindowBias, WindowTerm};

const OP: &str = "content_positions";

/// Relative positions of self-attention that depend on the content of queries or keys, or on positions in an image:
/// each kind adds a term to the scores.
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
///
/// [`Grid`](Self::Grid), [`Window`](Self::Window) and [`CosineWindow`](Self::CosineWindow) cost little. The other kinds
/// compute a bias (B, T, T) for each head by a product of T by 2 T vectors, in f32 also in half precision. While it is
/// computed, the term of a head takes 4 · B · T² numbers. Heads are computed in groups of up to 16 MB, or one key head
/// at a time if its terms are larger, and the fused kernel attends to a group before the next one is computed. If
/// something is tracked for gradients, the graph keeps all biases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ContentPositions {
    /// The decomposed relative positions of MViTv2 (<https://arxiv.org/abs/2112.01526>), SAM and ViTDet, for the
    /// patches of an image, listed row by row, T = height · width. The term `q · rel_pos_h[r] + q · rel_pos_w[c]` is
    /// added to the scaled score, where r and c are the distances between the rows and the columns of query and key.
    /// Parameters `rel_pos_h` (2 · height - 1, D), whose first entry is for the query furthest above its key, and
    /// `rel_pos_w` (2 · width - 1, D).
    ///
    /// The term is part of the product of queries and keys, which become `height + width` entries wider.
    Grid {
        /// The number of rows of patches.
        height: usize,
        /// The number of columns of patches.
        width: usize,
    },
    /// The relative position bias of Swin (<https://arxiv.org/abs/2103.14030>): a number for each position of a key
    /// relative to its query in a window, listed row by row, T = height · width, is added to the scaled score.
    /// Parameter `relative_position_bias_table` ((2 · height - 1) · (2 · width - 1), H), whose first entry is for the
    /// query furthest above and left of its key.
    ///
    /// [`Windows`](crate::Windows) makes a batch of the windows of an image, and the mask of shifted windows. The bias
    /// (1, H, T, T) is computed once, unless a parameter is tracked for gradients.
    Window {
        /// The number of rows of tokens.
        height: usize,
        /// The number of columns of tokens.
        width: usize,
    },
    /// The cosine attention of Swin v2 (<https://arxiv.org/abs/2111.09883>): the score is the cosine of query and key,
    /// times `exp(min(logit_scale, ln 100))`, and the bias of a relative position is `16 · sigmoid(W₂ relu(W₁ x + b))`,
    /// where x has the signed logarithms of its distances down and across. Parameters `logit_scale` (H, 1, 1), and
    /// `continuous_position_bias_mlp.0.weight` (512, 2), `.0.bias` (512) and `.2.weight` (H, 512).
    CosineWindow {
        /// The number of rows of tokens.
        height: usize,
        /// The number of columns of tokens.
        width: usize,
        /// Rows and columns of the windows of the training, if they had another size; at least 2 each.
        trained: Option<[usize; 2]>,
    },
    /// The relative positions of Transformer-XL (<https://arxiv.org/abs/1901.02860>) and conformers: the score is
    /// `scale · ((q + u) · k + (q + v) · W r)`, where r has sines and cosines of the distance. Parameters
    /// `linear_pos.weight` (H·D, E) is W, `pos_bias_u` and `pos_bias_v` (H, D); or `relative_k_proj.weight`, `bias_u`
    /// and `bias_v`.
    TransformerXl,
    /// The relative positions of Shaw et al. (<https://arxiv.org/abs/1803.02155>), for keys only: the score is `scale ·
    /// (q · k + q · r)`, where r is the vector of the distance. Parameter `distance_embedding.weight` (left + right +
    /// 1, D), for keys from `left` before the query to `right` after it; keys further away have the vector of the
    /// largest distance.
    Clipped {
        /// The largest distance of a key before the query.
        left: usize,
        /// The largest distance of a key after the query.
        right: usize,
    },
    /// The disentangled attention of DeBERTa (<https://arxiv.org/abs/2006.03654>): the score is `scale · (q · k + q ·
    /// W_k r + k · W_q r)`, where r is the vector of the distance. The layers of a stack share these vectors
    /// ([`with_relative_embeddings`](crate::MultiHeadAttention::with_relative_embeddings)). Parameters `pos_key_proj`
    /// and `pos_query_proj`, unless W_k and W_q are the layer's own projections. The config needs a
    /// [scale](crate::MultiHeadAttentionConfig::with_scale), usually 1/sqrt(3 D).
    Disentangled(DisentangledConfig),
}

/// The most rows and columns of a grid or window, and the largest distance that has a vector.
const MAX_SIZE: usize = 1 << 16;

impl ContentPositions {
    /// Checks that every option is in its range and that the options fit together.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub(crate) fn validate(&self) -> Result<()> {
        match self {
            Self::Grid { height, width } | Self::Window { height, width } => validate_image(*height, *width),
            Self::CosineWindow { height, width, trained } => {
                validate_image(*height, *width)?;
                for &size in trained.iter().flatten() {
                    number::within(OP, "a size of trained", size, 2..=MAX_SIZE)?;
                }
                Ok(())
            }
            Self::TransformerXl => Ok(()),
            Self::Clipped { left, right } => {
                number::within(OP, "left", *left, 0..=MAX_SIZE)?;
                number::within(OP, "right", *right, 0..=MAX_SIZE)
            }
            Self::Disentangled(config) => config.validate(),
        }
    }

    /// Returns the parameters.
    fn specs(&self, layer: &LayerSpecs) -> Vec<ParameterSpec> {
        match self {
            &Self::Grid { height, width } => grid::specs(Image { rows: height, columns: width }, layer),
            &Self::Window { height, width } => window::specs(Image { rows: height, columns: width }, layer),
            Self::CosineWindow { .. } => cosine_window::specs(layer),
            Self::TransformerXl => transformer_xl::specs(layer),
            &Self::Clipped { left, right } => clipped::specs(left, right, layer),
            Self::Disentangled(config) => disentangled::specs(config, layer),
        }
    }

    /// Returns the names of the weights (out, in) of linear layers, which low-rank adapters may change.
    pub(crate) fn linear_weights(&self) -> &'static [&'static str] {
        match self {
            Self::TransformerXl => transformer_xl::LINEAR_WEIGHTS,
            Self::CosineWindow { .. } => cosine_window::LINEAR_WEIGHTS,
            Self::Disentangled(_) => disentangled::LINEAR_WEIGHTS,
            Self::Grid { .. } | Self::Window { .. } | Self::Clipped { .. } => &[],
        }
    }

    /// Returns the score modifier of a layer with these parameters. `embeddings` are the vectors of distances that the
    /// layers of a stack share.
    pub(crate) fn modifier(&self, parameters: ParameterList, embeddings: Option<RelativeEmbeddings>) -> SharedTerm {
        let bias = WindowBias::default();
        let vectors = LatestVectors::default();
        match *self {
            Self::Grid { height, width } => {
                Arc::new(GridTerm { image: Image { rows: height, columns: width }, parameters })
            }
            Self::Window { height, width } => {
                Arc::new(WindowTerm { image: Image { rows: height, columns: width }, parameters, bias })
            }
            Self::CosineWindow { height, width, trained } => {
                let trained = trained.map(|[rows, columns]| Image { rows, columns });
                Arc::new(CosineWindow { image: Image { rows: height, columns: width }, trained, parameters, bias })
            }
            Self::TransformerXl => Arc::new(TransformerXl { parameters, vectors }),
            Self::Clipped { left, right } => Arc::new(Clipped { left, right, parameters, vectors }),
            Self::Disentangled(ref config) => {
                Arc::new(Disentangled { config: config.clone(), parameters, embeddings, vectors })
            }
        }
    }
}

/// Checks the numbers of rows and columns of an image.
fn validate_image(height: usize, width: usize) -> Result<()> {
    number::within(OP, "height", height, 1..=MAX_SIZE)?;
    number::within(OP, "width", width, 1..=MAX_SIZE)
}

/// Returns the parameters of relative positions by content, if the layer has some.
///
/// # Errors
/// For parameters of such positions in a file if the config has none.
pub(crate) fn content_specs(positions: Option<&ContentPositions>, layer: &LayerSpecs) -> Result<Vec<ParameterSpec>> {
    if let Some(positions) = positions {
        return Ok(positions.specs(layer));
    }
    let height = 1;
    let width = 1;
    let one_of_each = [
        ContentPositions::Grid { height, width },
        ContentPositions::Window { height, width },
        ContentPositions::CosineWindow { height, width, trained: None },
        ContentPositions::TransformerXl,
        ContentPositions::Clipped { left: 0, right: 0 },
        ContentPositions::Disentangled(DisentangledConfig::new(1)),
    ];
    for kind in one_of_each {
        let names = kind.specs(layer).into_iter().map(|spec| spec.stored);
        layer.source.refuse(names, "the config has no content_positions")?;
    }
    Ok(Vec::new())
}

//! Relative positions by content: terms of a score that depend on where the key stands from its query, and mostly on
//! what one of the two holds.

mod disentangled;
mod distances;
mod images;

pub use disentangled::{DisentangledConfig, RelativeEmbeddings};

pub(super) use distances::DistanceTerms;
pub(crate) use distances::KeysByHeads;

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candle_nn::Init;
use serde::{Deserialize, Serialize};

use super::{Latest, ScoreTerm, Scores, Term, TermCall, latest};
use crate::mask::AttentionMask;
use candle_attention_modules::base::{ParameterList, Source, Spec, accumulation_dtype, number};
use distances::TRANSFORMER_XL;

const OP: &str = "content_positions";

/// Terms of the scores by the place of the key from its query and, but for those of windows, by what one of the two
/// holds, for self-attention.
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
/// But for those of a grid or a window, the terms are a bias, (B, T, T) for a head, which is computed for a few heads
/// at a time and then given to the fused kernel: a product of T by 2 T for each head and term, in f32 also in half
/// precision. While it is computed, a term of a head takes 4 · B · T² numbers; as many heads as have products of 16 MB
/// are taken at once, or those of one key head, and let go after it, unless something is tracked for gradients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ContentPositions {
    /// The decomposed form of MViTv2 (<https://arxiv.org/abs/2112.01526>), SAM and ViTDet, for the patches of an image,
    /// row by row, T = height · width: `q · rel_pos_h[r] + q · rel_pos_w[c]` with the distances r and c of the two rows
    /// and columns, added to the scaled score. Parameters `rel_pos_h` (2 · height - 1, D), from the query furthest
    /// above its key on, and `rel_pos_w` (2 · width - 1, D).
    ///
    /// The terms are part of the product of queries and keys, which are `height + width` numbers wider for them.
    Grid {
        /// Rows of patches.
        height: usize,
        /// Columns of patches.
        width: usize,
    },
    /// Swin's (<https://arxiv.org/abs/2103.14030>): a number for each place of the key from its query in a window, row
    /// by row, T = height · width, added to the scaled score. Parameter `relative_position_bias_table` ((2 · height -
    /// 1) · (2 · width - 1), H), from the query furthest above and left of its key on.
    ///
    /// [`Windows`](crate::Windows) makes the rows of a batch of an image, and the mask of shifted windows. The bias
    /// (1, H, T, T) is computed once, unless something is tracked for gradients.
    Window {
        /// Rows of tokens.
        height: usize,
        /// Columns of tokens.
        width: usize,
    },
    /// Swin v2's (<https://arxiv.org/abs/2111.09883>): the score is the cosine of query and key, times
    /// `exp(min(logit_scale, ln 100))`, and the bias of a place is `16 · sigmoid(W₂ relu(W₁ x + b))`, x being the
    /// signed logarithms of its distances down and across. Parameters `logit_scale` (H, 1, 1), and
    /// `continuous_position_bias_mlp.0.weight` (512, 2), `.0.bias` (512) and `.2.weight` (H, 512).
    CosineWindow {
        /// Rows of tokens.
        height: usize,
        /// Columns of tokens.
        width: usize,
        /// Rows and columns of the windows of the training, if it was of others; at least 2.
        trained: Option<[usize; 2]>,
    },
    /// Transformer-XL's (<https://arxiv.org/abs/1901.02860>), of conformers: `scale · ((q + u) · k + (q + v) · W r)`, r
    /// being sines and cosines of the distance. Parameters `linear_pos.weight` (H·D, E) is W, `pos_bias_u` and
    /// `pos_bias_v` (H, D); or `relative_k_proj.weight`, `bias_u` and `bias_v`.
    TransformerXl,
    /// Those of Shaw et al. (<https://arxiv.org/abs/1803.02155>), for keys alone: `scale · (q · k + q · r)`, r being
    /// the vector of a distance. Parameter `distance_embedding.weight` (left + right + 1, D), for keys from `left`
    /// before the query to `right` after it; keys further away have the last.
    Clipped {
        /// The furthest key before the query that has a vector of its own.
        left: usize,
        /// The furthest after it.
        right: usize,
    },
    /// DeBERTa's (<https://arxiv.org/abs/2006.03654>): `scale · (q · k + q · W_k r + k · W_q r)`, r being the vector of
    /// a distance, which the layers of a stack share
    /// ([`with_relative_embeddings`](crate::MultiHeadAttention::with_relative_embeddings)). Parameters `pos_key_proj`
    /// and
    /// `pos_query_proj`, unless W_k and W_q are the layer's own projections. The scale, mostly 1/sqrt(3 D), is to be
    /// given.
    Disentangled(DisentangledConfig),
}

/// The most rows and columns of a grid or window, and the furthest key that has a vector of its own.
const MAX_SIZE: usize = 1 << 16;

impl ContentPositions {
    /// Rows and columns of an image.
    fn image(&self) -> Option<[usize; 2]> {
        match *self {
            Self::Grid { height, width }
            | Self::Window { height, width }
            | Self::CosineWindow { height, width, .. } => Some([height, width]),
            Self::TransformerXl | Self::Clipped { .. } | Self::Disentangled(_) => None,
        }
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub(crate) fn validate(&self) -> Result<()> {
        if let Some([height, width]) = self.image() {
            number::within(OP, "height", height, 1..=MAX_SIZE)?;
            number::within(OP, "width", width, 1..=MAX_SIZE)?;
        }
        match self {
            Self::Grid { .. } | Self::Window { .. } | Self::TransformerXl => Ok(()),
            Self::CosineWindow { trained, .. } => {
                let mut trained = trained.iter().flatten();
                trained.try_for_each(|&size| number::within(OP, "a size of trained", size, 2..=MAX_SIZE))
            }
            Self::Clipped { left, right } => {
                number::within(OP, "left", *left, 0..=MAX_SIZE)?;
                number::within(OP, "right", *right, 0..=MAX_SIZE)
            }
            Self::Disentangled(config) => config.validate(),
        }
    }
}

/// The parameters of such terms, in a layer of this width and these heads.
///
/// # Errors
/// For parameters that a config without such positions does not name.
pub(crate) fn content_specs(
    positions: Option<&ContentPositions>,
    embed_dim: usize,
    num_heads: usize,
    head_dim: usize,
    source: &Source,
) -> Result<Vec<Spec>> {
    let Some(positions) = positions else {
        let anywhere = PREFIXES.iter().flat_map(|prefix| images::WINDOW.map(|name| format!("{prefix}{name}")));
        let names = images::GRID.iter().chain(&distances::PARAMETERS).map(|name| name.to_string()).chain(anywhere);
        source.refuse(names, "the config has no content_positions")?;
        return Ok(Vec::new());
    };
    Ok(match *positions {
        ContentPositions::Grid { height, width } => images::grid_specs([height, width], head_dim),
        ContentPositions::Window { height, width } => vec![images::table_spec([height, width], num_heads, source)?],
        ContentPositions::CosineWindow { .. } => images::cosine_specs(num_heads, source),
        ContentPositions::TransformerXl => distances::transformer_xl(embed_dim, num_heads, head_dim, source),
        ContentPositions::Clipped { left, right } => {
            let init = Init::Randn { mean: 0.0, stdev: 1.0 };
            vec![Spec::new(distances::CLIPPED, [left + right + 1, head_dim], init)]
        }
        ContentPositions::Disentangled(ref config) => {
            disentangled::specs(config, [num_heads * head_dim, embed_dim], source)
        }
    })
}

/// Below which files have the parameters of windows and of disentangled positions, the crate's own first.
const PREFIXES: [&str; 3] = ["", "self.", "relative_position_bias."];

/// A parameter, below whichever prefix the file has it.
fn spec(name: &str, shape: &[usize], init: Init, source: &Source) -> Spec {
    let names = PREFIXES.map(|prefix| format!("{prefix}{name}"));
    let stored = names.iter().find(|name| source.has(name)).unwrap_or(&names[0]);
    Spec::new(name, shape, init).stored(stored)
}

/// The term of a layer.
#[derive(Debug)]
struct Content {
    positions: ContentPositions,
    parameters: ParameterList,
    /// The stack's.
    embeddings: Option<RelativeEmbeddings>,
    /// For the latest length, where it depends on plain tensors alone.
    latest: Latest<usize, Computed>,
}

/// What is computed once for all calls of one length: the bias of a window (1, H, T, T); or for each distance i - j of
/// query i and key j a vector (H, 2T, D), or (1, 2T, D) for all heads, to be multiplied with queries, of the distances
/// T - 1 down to -T, and one to be multiplied with keys, of 1 - T up to T.
type Computed = [Option<Tensor>; 2];

/// The term of a layer with these parameters, and with the vectors of distances that the layers of a stack share.
pub(crate) fn content(
    positions: &ContentPositions,
    parameters: &ParameterList,
    embeddings: Option<&RelativeEmbeddings>,
) -> Term {
    let (positions, parameters, embeddings) = (positions.clone(), parameters.clone(), embeddings.cloned());
    Arc::new(Content { positions, parameters, embeddings, latest: Latest::default() })
}

impl ScoreTerm for Content {
    fn add(&self, scores: &mut Scores, call: &TermCall) -> Result<()> {
        let (Some(k), None) = (scores.k.clone(), call.others) else {
            bail!(
                "[multi_head_attention] {} were given, but relative positions by content are between the tokens of a call",
                call.others.unwrap_or("keys of others")
            )
        };
        let (scale, parameters) = (scores.options.scale.unwrap_or(1.0), &self.parameters);
        let [t, d] = [scores.q.dim(2)?, scores.q.dim(3)?];
        if let Some([rows, columns]) = self.positions.image()
            && t != rows * columns
        {
            let image = if let ContentPositions::Grid { .. } = self.positions { "grid" } else { "window" };
            bail!("[multi_head_attention] queries have {t} tokens, expected the {rows} × {columns} of the {image}")
        }
        let (queries, rows) = match self.positions {
            ContentPositions::Grid { height, width } => {
                let [q, k] = images::widened(&scores.q, &k, scale, [height, width], parameters)?;
                (scores.q, scores.k) = (q, Some(k));
                return Ok(());
            }
            ContentPositions::Window { height, width } | ContentPositions::CosineWindow { height, width, .. } => {
                let compute = || images::window_bias([height, width], &self.positions, parameters);
                let [bias, _] = self.latest(t, || Ok([Some(compute()?), None]))?;
                scores.mask = bias.iter().fold(scores.mask.clone(), AttentionMask::with_bias);
                if let ContentPositions::CosineWindow { .. } = self.positions {
                    let [q, k] = images::cosines(&scores.q, &k, parameters)?;
                    (scores.q, scores.k) = (q, Some(k));
                    // Queries have their scale already.
                    scores.options.scale = Some(1.0);
                }
                return Ok(());
            }
            ContentPositions::TransformerXl => {
                let [_, u, v] = TRANSFORMER_XL[0];
                let wide = scores.q.to_dtype(accumulation_dtype(k.dtype()))?;
                let with = |bias| wide.broadcast_add(&parameters.expect(bias)?.to_dtype(wide.dtype())?.unsqueeze(1)?);
                scores.q = with(u)?.to_dtype(k.dtype())?;
                (with(v)?, self.latest(t, || distances::wave_rows([t, d], parameters))?)
            }
            ContentPositions::Clipped { left, right } => {
                (scores.q.clone(), self.latest(t, || distances::clipped_rows(t, [left, right], parameters))?)
            }
            ContentPositions::Disentangled(ref config) => {
                let (vectors, projections) = (self.embeddings.as_ref(), call.projections);
                let compute = || disentangled::rows(config, [t, d], vectors, parameters, projections);
                // Modules may differ in a clone of the layer, and may change.
                let is_fixed = !(config.shared_projections && projections.has_modules());
                (scores.q.clone(), if is_fixed { self.latest(t, compute)? } else { compute()? })
            }
        };
        scores.by_heads = Some(DistanceTerms { rows, queries, keys: k, scale });
        Ok(())
    }
}

impl Content {
    fn latest(&self, t: usize, compute: impl FnOnce() -> Result<Computed>) -> Result<Computed> {
        let is_tracked = |found: &Computed| found.iter().flatten().any(Tensor::track_op);
        latest(&self.latest, |own| *own == t, compute, |found| (!is_tracked(found)).then_some(t))
    }
}

//! Relative positions by content: terms of a score that depend on where the key stands from its query, and mostly on
//! what one of the two holds.

mod disentangled;
mod distances;
mod images;

pub use disentangled::{DisentangledConfig, RelativeEmbeddings};

use candle_core::{Result, Tensor, bail};
use candle_nn::Init;
use serde::{Deserialize, Serialize};

use super::{Latest, ScoreTerm, Scores, TermCall, latest};
use crate::mask::AttentionMask;
use candle_attention_modules::base::{
    Heads, LINEAR_WEIGHT, ParameterList, ParameterReader, ParameterSpec, accumulation_dtype, linear_bias, number,
};
use distances::{KeysByHeads, PARAKEET, TRANSFORMER_XL};
use images::{GRID, HIDDEN};

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
    /// and `pos_query_proj`, unless W_k and W_q are the layer's own projections. The scale, mostly 1/sqrt(3 D), is to
    /// be given.
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
            Self::CosineWindow { trained: Some(trained), .. } => {
                trained.iter().try_for_each(|&size| number::within(OP, "a size of trained", size, 2..=MAX_SIZE))
            }
            Self::Clipped { left, right } => {
                number::within(OP, "left", *left, 0..=MAX_SIZE)?;
                number::within(OP, "right", *right, 0..=MAX_SIZE)
            }
            Self::Disentangled(config) => config.validate(),
            _ => Ok(()),
        }
    }

    /// The parameters in a layer of width E with H heads of width D.
    fn specs(&self, [e, h, d]: [usize; 3], source: &ParameterReader) -> Vec<ParameterSpec> {
        let spec = |name: &str, shape: &[usize], init| {
            let names = PREFIXES.map(|prefix| format!("{prefix}{name}"));
            let stored = names.iter().find(|name| source.has(name)).unwrap_or(&names[0]);
            ParameterSpec::new(name, shape, init).stored(stored)
        };
        let of_heads = |name: &str, shape: &[usize], init| spec(name, shape, init).by_head(Heads::Query, 0);
        let drawn = |stdev| Init::Randn { mean: 0.0, stdev };
        match *self {
            Self::Grid { height, width } => {
                let table = |(name, n): (&str, usize)| spec(name, &[2 * n - 1, d], Init::Const(0.0));
                GRID.into_iter().zip([height, width]).map(table).collect()
            }
            Self::Window { height, width } => {
                let places = (2 * height - 1) * (2 * width - 1);
                vec![spec("relative_position_bias_table", &[places, h], drawn(0.02)).by_head(Heads::Query, 1)]
            }
            Self::CosineWindow { .. } => vec![
                of_heads("logit_scale", &[h, 1, 1], Init::Const(10f64.ln())),
                spec("continuous_position_bias_mlp.0.weight", &[HIDDEN, 2], LINEAR_WEIGHT),
                spec("continuous_position_bias_mlp.0.bias", &[HIDDEN], linear_bias(2)),
                of_heads("continuous_position_bias_mlp.2.weight", &[h, HIDDEN], LINEAR_WEIGHT),
            ],
            Self::TransformerXl => {
                let [projection, u, v] = TRANSFORMER_XL;
                let stored = if source.has(PARAKEET[1]) { PARAKEET } else { TRANSFORMER_XL };
                let bias = |name| of_heads(name, &[h, d], Init::Const(0.0));
                let own = [of_heads(projection, &[h * d, e], LINEAR_WEIGHT), bias(u), bias(v)];
                own.into_iter().zip(stored).map(|(spec, stored)| spec.stored(stored)).collect()
            }
            Self::Clipped { left, right } => {
                vec![spec("distance_embedding.weight", &[left + right + 1, d], drawn(1.0))]
            }
            Self::Disentangled(ref config) => {
                let weight = |name| of_heads(&format!("{name}.weight"), &[h * d, e], LINEAR_WEIGHT);
                let bias = |name| of_heads(&format!("{name}.bias"), &[h * d], linear_bias(e));
                config.projections().flat_map(|name| [weight(name), bias(name)]).collect()
            }
        }
    }
}

/// The parameters of such terms, in a layer of width E with H heads of width D.
///
/// # Errors
/// For parameters that a config without such positions does not name.
pub(crate) fn content_specs(
    kind: Option<&ContentPositions>,
    sizes: [usize; 3],
    source: &ParameterReader,
) -> Result<Vec<ParameterSpec>> {
    if let Some(kind) = kind {
        return Ok(kind.specs(sizes, source));
    }
    let (height, width) = (1, 1);
    let one_of_each = [
        ContentPositions::Grid { height, width },
        ContentPositions::Window { height, width },
        ContentPositions::CosineWindow { height, width, trained: None },
        ContentPositions::TransformerXl,
        ContentPositions::Clipped { left: 0, right: 0 },
        ContentPositions::Disentangled(DisentangledConfig::new(1)),
    ];
    for kind in one_of_each {
        let names = kind.specs(sizes, source).into_iter().map(|spec| spec.stored);
        source.refuse(names, "the config has no content_positions")?;
    }
    Ok(Vec::new())
}

/// Below which files have such parameters, the crate's own first.
const PREFIXES: [&str; 3] = ["", "self.", "relative_position_bias."];

/// The term of a layer.
#[derive(Debug)]
pub(crate) struct Content {
    pub positions: ContentPositions,
    pub parameters: ParameterList,
    /// The vectors of distances that the layers of a stack share.
    pub embeddings: Option<RelativeEmbeddings>,
    /// For the latest length, where it depends on plain tensors alone.
    pub latest: Latest<usize, Computed>,
}

/// What is computed once for all calls of one length: the bias of a window (1, H, T, T); or for each distance i - j of
/// query i and key j a vector (H, 2T, D), or (1, 2T, D) for all heads, to be multiplied with queries, of the distances
/// T - 1 down to -T, and one to be multiplied with keys, of 1 - T up to T.
pub(crate) type Computed = [Option<Tensor>; 2];

impl ScoreTerm for Content {
    fn add(&self, scores: &mut Scores, call: &TermCall) -> Result<()> {
        let (Some([k, v]), None) = (scores.own.clone(), call.others) else {
            bail!(
                "[multi_head_attention] {} were given, but relative positions by content are between the tokens of a call",
                call.others.unwrap_or("keys of others")
            )
        };
        let scale = scores.options.scale.unwrap_or(1.0);
        let [t, d] = [scores.q.dim(2)?, scores.q.dim(3)?];
        if let Some([rows, columns]) = self.positions.image()
            && t != rows * columns
        {
            let image = if let ContentPositions::Grid { .. } = self.positions { "grid" } else { "window" };
            bail!("[multi_head_attention] queries have {t} tokens, expected the {rows} × {columns} of the {image}")
        }
        // There are no scores to add to.
        if scores.q.elem_count() == 0 {
            return Ok(());
        }
        let queries = match self.positions {
            ContentPositions::Grid { height, width } => {
                let [q, k] = self.widened(&scores.q, &k, scale, [height, width])?;
                (scores.q, scores.own) = (q, Some([k, v]));
                return Ok(());
            }
            ContentPositions::Window { height, width } | ContentPositions::CosineWindow { height, width, .. } => {
                let [bias, _] = self.latest(t, || Ok([Some(self.window_bias([height, width])?), None]))?;
                scores.mask = bias.iter().fold(scores.mask.clone(), AttentionMask::with_bias);
                if let ContentPositions::CosineWindow { .. } = self.positions {
                    let [q, k] = self.cosines(&scores.q, &k)?;
                    (scores.q, scores.own) = (q, Some([k, v]));
                    // Queries have their scale already.
                    scores.options.scale = Some(1.0);
                }
                return Ok(());
            }
            ContentPositions::TransformerXl => {
                let [_, of_content, of_distances] = TRANSFORMER_XL;
                let q = scores.q.to_dtype(accumulation_dtype(k.dtype()))?;
                let with = |bias| q.broadcast_add(&self.wide(bias)?.unsqueeze(1)?);
                scores.q = with(of_content)?.to_dtype(k.dtype())?;
                with(of_distances)?
            }
            ContentPositions::Clipped { .. } | ContentPositions::Disentangled(_) => scores.q.clone(),
        };
        let compute = || self.rows([t, d], call.projections);
        // Modules may differ in a clone of the layer, and may change.
        let is_shared = matches!(&self.positions, ContentPositions::Disentangled(config) if config.shared_projections);
        let is_fixed = !(is_shared && call.projections.has_modules());
        let rows = if is_fixed { self.latest(t, compute)? } else { compute()? };
        scores.keys = Some(Box::new(KeysByHeads { k, v, queries, rows, scale }));
        Ok(())
    }
}

impl Content {
    fn latest(&self, t: usize, compute: impl FnOnce() -> Result<Computed>) -> Result<Computed> {
        let is_tracked = |found: &Computed| found.iter().flatten().any(Tensor::track_op);
        latest(&self.latest, |own| *own == t, compute, |found| (!is_tracked(found)).then_some(t))
    }

    /// A parameter in the dtype in which scores are computed.
    fn wide(&self, name: &str) -> Result<Tensor> {
        let tensor = self.parameters.expect(name)?;
        tensor.to_dtype(accumulation_dtype(tensor.dtype()))
    }
}

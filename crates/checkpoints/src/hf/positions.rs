//! Relative positions: biases by distance, and score modifiers by distance and content.

use candle_attention_core::{ContentPositions, DisentangledConfig, MultiHeadAttentionConfig, RelativeBiasConfig};
use candle_core::Result;
use serde_json::Value;

use super::fields::Fields;
use super::windows::Stages;

/// A kind of positions, with the defaults of its fields.
#[derive(Clone, Copy)]
pub(super) enum Positions {
    /// T5's buckets of distances.
    Relative {
        bidirectional: bool,
    },
    /// MPNet's buckets of distances, which have no field for the largest distance.
    MpNet,
    /// Sines and cosines of distances.
    TransformerXl,
    /// The kind in `position_embeddings_type`, with this default.
    Conformer(&'static str),
    Disentangled(Deberta),
    /// Swin's table of biases. The number is the default of the patches on each side of a window.
    Table(usize),
    Cosine(Cosine),
    /// SAM's relative positions, a table for rows and one for columns: of a window, or of the whole image.
    Grid {
        /// The default of the width of the image in pixels.
        image: usize,
    },
    /// SAM's relative positions of the whole image in every layer.
    SegGpt,
    /// SAM's relative positions of a window in the layers of `window_block_indices`, and of the whole image in others.
    VitDet,
}

impl Positions {
    /// Adds the positions to a config.
    pub fn add(self, fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        const TABLES: &str = "use_relative_position_embeddings";
        let positions = match self {
            Self::Relative { bidirectional } => {
                let distance = fields.get_or("relative_attention_max_distance", 128)?;
                return Ok(cfg.with_relative_bias(buckets(fields, bidirectional)?.with_max_distance(distance)));
            }
            Self::MpNet => return Ok(cfg.with_relative_bias(buckets(fields, true)?)),
            Self::Disentangled(defaults) => return defaults.add(fields, cfg),
            Self::Cosine(defaults) => return defaults.add(fields, cfg.with_k_bias(false)),
            Self::TransformerXl => Some(ContentPositions::TransformerXl),
            Self::Conformer(default) => conformer(fields, default)?,
            Self::Table(default) => {
                let window = fields.get_or("window_size", default)?;
                Some(ContentPositions::Window { height: window, width: window })
            }
            Self::Grid { image } => {
                let is_global = fields.get_or("global_attn_indexes", vec![2, 5, 8, 11])?.contains(&fields.layer);
                let window = if is_global { None } else { Some(fields.get_or("window_size", 14)?) };
                if fields.flag("use_rel_pos", true)? { Some(grid(fields, window, [image; 2])?) } else { None }
            }
            Self::SegGpt if fields.flag(TABLES, true)? => Some(grid(fields, None, [896, 448])?),
            Self::VitDet => {
                let in_windows = fields.get_or("window_block_indices", Vec::<usize>::new())?.contains(&fields.layer);
                let window = if in_windows { Some(fields.required("window_size")?) } else { None };
                if fields.flag(TABLES, false)? { Some(grid(fields, window, [224; 2])?) } else { None }
            }
            Self::SegGpt => None,
        };
        Ok(cfg.with_content_positions(positions))
    }
}

fn buckets(fields: &Fields, bidirectional: bool) -> Result<RelativeBiasConfig> {
    let buckets = fields.get_or("relative_attention_num_buckets", 32)?;
    Ok(RelativeBiasConfig::new(bidirectional).with_num_buckets(buckets))
}

fn conformer(fields: &Fields, default: &str) -> Result<Option<ContentPositions>> {
    let side = |name, usual| fields.get_or::<f64>(name, usual).map(|size| size as usize);
    Ok(match fields.nullable("position_embeddings_type", Some(default))? {
        None => None,
        Some("relative") => Some(ContentPositions::TransformerXl),
        Some("relative_key") => Some(ContentPositions::Clipped {
            left: side("left_max_position_embeddings", 64.0)?,
            right: side("right_max_position_embeddings", 8.0)?,
        }),
        Some(other) => {
            return fields.fail(format!(
                "position_embeddings_type is {other:?}, which is not supported, expected \"relative\" or \
                 \"relative_key\""
            ));
        }
    })
}

/// Returns the relative positions in a window, whose sides are given in patches, or in the whole image.
fn grid(fields: &Fields, window: Option<usize>, image: [usize; 2]) -> Result<ContentPositions> {
    let image = fields.pair("image_size", image)?;
    let patch = fields.pair("patch_size", [16; 2])?;
    let [height, width] = match window {
        Some(window) => [window; 2],
        None => [image[0] / patch[0], image[1] / patch[1]],
    };
    Ok(ContentPositions::Grid { height, width })
}

/// Swin v2's cosines, with the defaults of an image, a patch and a window. A window is no larger than the image of its
/// stage; both are taken to be square.
#[derive(Clone, Copy)]
pub(super) struct Cosine {
    pub image: usize,
    pub patch: usize,
    pub window: usize,
    /// The stages that halve the image, each with the window of its training.
    pub stages: Option<Stages>,
}

impl Cosine {
    fn add(&self, fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        let mut halvings = 0;
        let mut trained = 0;
        if let Some(stages) = self.stages {
            let [stage, _] = stages.place(fields)?;
            let windows = fields.get_or("pretrained_window_sizes", vec![0; 4])?;
            (halvings, trained) = (stage, windows.get(stage).copied().unwrap_or(0));
        }
        let [rows, _] = fields.pair("image_size", [self.image; 2])?;
        let [patch, _] = fields.pair("patch_size", [self.patch; 2])?;
        let rows = u32::try_from(halvings).ok().and_then(|stage| (rows / patch).checked_shr(stage)).unwrap_or(0);
        let window = fields.get_or("window_size", self.window)?.min(rows);
        let trained = (trained > 0).then_some([trained; 2]);
        Ok(cfg.with_content_positions(ContentPositions::CosineWindow { height: window, width: window, trained }))
    }
}

/// The defaults of DeBERTa's fields.
#[derive(Clone, Copy)]
pub(super) struct Deberta {
    pub is_relative: bool,
    pub buckets: Option<usize>,
    pub shares_projections: bool,
    pub norms: bool,
}

impl Deberta {
    fn add(&self, fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        let [by_query, by_key] = ["c2p", "p2c"].map(|term| has_term(fields, term, self.is_relative));
        fields.agrees("attention_head_size", cfg.head_dim())?;
        let buckets = if fields.has("position_buckets") { positive(fields, "position_buckets")? } else { self.buckets };
        let max_distance = match positive(fields, "max_relative_positions")? {
            Some(most) => most,
            None => fields.get_or("max_position_embeddings", 512)?,
        };
        let norm = fields.nullable("norm_rel_ebd", Some(if self.norms { "layer_norm" } else { "none" }))?;
        let norm = match norm {
            Some(kinds) if listed(kinds, "layer_norm") => Some(fields.get_or("layer_norm_eps", 1e-7)?),
            _ => None,
        };
        let positions = DisentangledConfig::new(max_distance).with_terms(by_query, by_key);
        let positions = positions.with_shared_projections(fields.flag("share_att_key", self.shares_projections)?);
        // Without relative positions the scale is still that of all terms.
        let terms = cfg.head_dim() as f64 * positions.num_terms() as f64;
        let cfg = cfg.with_scale(1.0 / terms.sqrt());
        if !fields.flag("relative_attention", self.is_relative)? {
            return Ok(cfg);
        }
        let positions = positions.with_num_buckets(buckets).with_layer_norm(norm);
        Ok(cfg.with_content_positions(ContentPositions::Disentangled(positions)))
    }
}

/// Reads a number that is -1 where there is none.
fn positive(fields: &Fields, name: &str) -> Result<Option<usize>> {
    Ok(fields.nullable::<f64>(name, None)?.filter(|number| *number >= 1.0).map(|number| number as usize))
}

/// Returns whether DeBERTa's kinds of terms, a list or one text, have one of them.
fn has_term(fields: &Fields, term: &str, default: bool) -> bool {
    match fields.get("pos_att_type") {
        Some(Value::String(text)) => listed(text, term),
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == term),
        _ => default && !fields.has("pos_att_type"),
    }
}

/// Returns whether a name is in a text like "c2p|p2c".
fn listed(text: &str, name: &str) -> bool {
    text.to_lowercase().split('|').any(|kind| kind.trim() == name)
}

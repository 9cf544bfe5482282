//! DeBERTa's relative positions: vectors of distances that are projected as tokens are, to keys and to queries.

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use super::distances::{descending, rows_of};
use super::{Computed, Content, OP};
use candle_attention_modules::base::{ParameterReader, accumulation_dtype, frozen, number};
use candle_attention_modules::linear::{Projected, Projections};
use candle_attention_modules::norm::{Norm, QkNormKind};

/// Projections to keys and to queries, of which each has a weight (H·D, E) and a bias.
const NAMES: [&str; 2] = ["pos_key_proj", "pos_query_proj"];

/// The terms of [`ContentPositions::Disentangled`](crate::ContentPositions::Disentangled).
///
/// ```
/// use candle_attention::DisentangledConfig;
/// let v3 = DisentangledConfig::new(512).with_num_buckets(256).with_shared_projections(true).with_layer_norm(1e-7);
/// assert_eq!(v3.span(), 256);
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct DisentangledConfig {
    max_distance: usize,
    num_buckets: Option<usize>,
    content_to_position: bool,
    position_to_content: bool,
    pub(super) shared_projections: bool,
    layer_norm: Option<f64>,
}

impl DisentangledConfig {
    /// Returns the config of both terms with separate projections of distances, and a vector for each distance below
    /// `max_distance` (`max_relative_positions`).
    pub fn new(max_distance: usize) -> Self {
        Self {
            max_distance,
            num_buckets: None,
            content_to_position: true,
            position_to_content: true,
            shared_projections: false,
            layer_norm: None,
        }
    }

    /// Sets the number of vectors for each direction (`position_buckets`). Distances up to half of it have a vector
    /// each; larger ones share vectors, the more the larger they are. The default is a vector for each distance.
    pub fn with_num_buckets(mut self, num_buckets: usize) -> Self {
        self.num_buckets = Some(num_buckets);
        self
    }

    /// Sets whether queries are multiplied with vectors of distances (`c2p`), and whether keys are (`p2c`). The default
    /// is both.
    pub fn with_terms(mut self, content_to_position: bool, position_to_content: bool) -> Self {
        self.content_to_position = content_to_position;
        self.position_to_content = position_to_content;
        self
    }

    /// Sets whether vectors of distances are projected by the layer's query and key projections (`share_att_key`). The
    /// default is no: they have projections `pos_key_proj` and `pos_query_proj`.
    pub fn with_shared_projections(mut self, shared_projections: bool) -> Self {
        self.shared_projections = shared_projections;
        self
    }

    /// Sets the epsilon of a layer norm of the vectors before they are projected (`norm_rel_ebd`). There is none by
    /// default.
    pub fn with_layer_norm(mut self, eps: f64) -> Self {
        self.layer_norm = Some(eps);
        self
    }

    /// Returns the number of vectors for each direction.
    pub fn span(&self) -> usize {
        self.num_buckets.unwrap_or(self.max_distance)
    }

    /// Returns the number of terms of a score, with the product of query and key.
    pub fn num_terms(&self) -> usize {
        1 + usize::from(self.content_to_position) + usize::from(self.position_to_content)
    }

    /// Checks that every option is in its range and that the options fit together.
    pub(crate) fn validate(&self) -> Result<()> {
        const MOST: usize = 1 << 24;
        number::within(OP, "max_distance", self.max_distance, 1..=MOST)?;
        let is_right = |buckets: usize| buckets >= 4 && buckets / 2 + 1 < self.max_distance;
        let expected = format!("at least 4, and half of them below max_distance {} - 1", self.max_distance);
        number::expect(OP, "num_buckets", self.num_buckets, is_right, expected)?;
        number::epsilon(OP, "layer_norm", self.layer_norm)
    }

    /// The projections of vectors to keys and to queries that are parameters of the layer.
    pub(super) fn projections(&self) -> impl Iterator<Item = &'static str> {
        let wanted = [self.content_to_position, self.position_to_content];
        let wanted = NAMES.into_iter().zip(wanted.map(|wanted| wanted && !self.shared_projections));
        wanted.filter_map(|(name, wanted)| wanted.then_some(name))
    }

    /// The vector of a key so far behind its query (in front of it, where negative). The first half of the buckets are
    /// for one distance each, the others grow with it; in f32, as in transformers, so that borders are the same.
    fn row(&self, behind: i64) -> usize {
        let span = self.span() as i64;
        let bucket = match self.num_buckets {
            Some(buckets) if behind.unsigned_abs() as usize > buckets / 2 => {
                let middle = buckets / 2;
                let turns = |x: f32| f64::from(x).ln() as f32;
                let of = turns(behind.unsigned_abs() as f32 / middle as f32);
                let all = turns((self.max_distance - 1) as f32 / middle as f32);
                let grown = (of / all * (middle - 1) as f32).ceil() as i64 + middle as i64;
                grown * behind.signum()
            }
            _ => behind,
        };
        (bucket + span).clamp(0, 2 * span - 1) as usize
    }
}

/// The vectors of distances that all layers of a stack share: parameter `rel_embeddings.weight` (2 · span, E), and
/// `LayerNorm` where the config has one.
#[derive(Debug, Clone)]
pub struct RelativeEmbeddings {
    weight: Tensor,
    norm: Option<Norm>,
}

impl RelativeEmbeddings {
    /// Those of an encoder, below the builder's prefix.
    ///
    /// # Errors
    /// For a config that does not fit together, and for a missing or misshapen tensor.
    pub fn new(config: &DisentangledConfig, embed_dim: usize, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let source = ParameterReader::new("relative_embeddings", "deberta", vb)?;
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let weight = source.pp("rel_embeddings").get((2 * config.span(), embed_dim), "weight", init)?;
        let norm = |eps| Norm::load(QkNormKind::Layer, eps, embed_dim, true, &source.pp("LayerNorm"));
        let norm = config.layer_norm.map(norm).transpose()?;
        Ok(Self { weight, norm })
    }

    /// The parameter (2 · span, E).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// (2 · span, E), normalised.
    fn forward(&self) -> Result<Tensor> {
        self.norm.as_ref().map_or_else(|| Ok(self.weight.clone()), |norm| norm.forward(&self.weight))
    }

    pub(crate) fn freeze(&self) -> Result<Self> {
        Ok(Self { weight: frozen(&self.weight)?, norm: self.norm.as_ref().map(Norm::freeze).transpose()? })
    }
}

impl Content {
    /// Vectors of the distances of T tokens, for queries and for keys, (2T, H · D) each.
    pub(super) fn vectors(&self, config: &DisentangledConfig, t: usize, projections: &Projections) -> Result<Computed> {
        let Some(embeddings) = &self.embeddings else {
            bail!(
                "[multi_head_attention] the config has disentangled positions, expected the stack's embeddings in \
                 `with_relative_embeddings`"
            )
        };
        let embeddings = embeddings.forward()?;
        let [keys, queries] = if config.shared_projections {
            let xs = embeddings.unsqueeze(0)?;
            let Projected { q, kv, .. } = projections.query_key_value(&xs, Some([&xs, &xs]))?;
            let keys = kv.filter(|_| config.content_to_position).map(|kv| kv.keys.squeeze(0));
            [keys.transpose()?, config.position_to_content.then(|| q.squeeze(0)).transpose()?]
        } else {
            let project = |name: &str| -> Result<Option<Tensor>> {
                let Some(weight) = self.parameters.tensor(&format!("{name}.weight"))? else { return Ok(None) };
                let bias = self.parameters.expect(&format!("{name}.bias"))?;
                Ok(Some(embeddings.matmul(&weight.t()?)?.broadcast_add(&bias)?))
            };
            [project(NAMES[0])?, project(NAMES[1])?]
        };
        let dtype = accumulation_dtype(embeddings.dtype());
        let rows = |table: Option<Tensor>, sign: i64| {
            let rows = descending(t).map(|distance| config.row(sign * distance));
            table.map(|table| rows_of(&table.to_dtype(dtype)?, rows)).transpose()
        };
        Ok([rows(keys, 1)?, rows(queries, -1)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `make_log_bucket_position` of transformers gave these, of DeBERTa v3's 256 buckets for distances below 512.
    #[test]
    fn distances_are_in_transformers_buckets() {
        let v3 = DisentangledConfig::new(512).with_num_buckets(256);
        let buckets = [(0, 0), (5, 5), (-127, -127), (128, 128), (-129, -129), (130, 130), (131, 131), (200, 169)];
        let further = [(-300, -207), (400, 233), (510, 255), (511, 255), (512, 256), (513, 256), (-5000, -465)];
        for (distance, bucket) in buckets.into_iter().chain(further) {
            let expected = (bucket + 256i64).clamp(0, 511) as usize;
            assert_eq!(v3.row(distance), expected, "distance {distance}");
        }
    }
}

//! DeBERTa's relative positions: vectors of distances, which are projected to keys and to queries as tokens are.

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use super::super::{CallContext, KeyValueHeads, ScoreArguments, ScoreTerm};
use super::OP;
use super::call::projected_keys;
use super::distances::{ContentScores, DistanceVectors, LatestVectors, by_head, descending, rows_of};
use super::specs::LayerSpecs;
use candle_attention_modules::base::{
    LINEAR_WEIGHT, ParameterList, ParameterReader, ParameterSpec, accumulation_dtype, frozen, linear_bias, number,
};
use candle_attention_modules::linear::{Projected, UpdatesOfCall};
use candle_attention_modules::norm::{Norm, QkNormKind};

/// The projection of vectors to keys, with a weight (H·D, E) and a bias.
const KEYS: &str = "pos_key_proj";
/// The projection of vectors to queries.
const QUERIES: &str = "pos_query_proj";
/// The weights of linear layers.
pub(super) const LINEAR_WEIGHTS: &[&str] = &["pos_key_proj.weight", "pos_query_proj.weight"];

/// The config of DeBERTa's relative positions, see
/// [`ContentPositions::Disentangled`](crate::ContentPositions::Disentangled).
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
    shared_projections: bool,
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
    pub fn with_num_buckets(mut self, num_buckets: impl Into<Option<usize>>) -> Self {
        self.num_buckets = num_buckets.into();
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
    pub fn with_layer_norm(mut self, eps: impl Into<Option<f64>>) -> Self {
        self.layer_norm = eps.into();
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

    /// Returns the names of the projections of vectors that are parameters of the layer.
    fn projections(&self) -> impl Iterator<Item = &'static str> {
        let has_keys = self.content_to_position && !self.shared_projections;
        let has_queries = self.position_to_content && !self.shared_projections;
        has_keys.then_some(KEYS).into_iter().chain(has_queries.then_some(QUERIES))
    }

    /// Returns the vector of a key that is `behind` positions before its query, or after it if negative. The first half
    /// of the buckets are for one distance each, the others for more distances the larger these are. Computed in f32,
    /// as in transformers, so that the borders of buckets are the same.
    fn row(&self, behind: i64) -> usize {
        let span = self.span() as i64;
        let bucket = match self.num_buckets {
            Some(buckets) if behind.unsigned_abs() as usize > buckets / 2 => {
                let middle = buckets / 2;
                let ln = |x: f32| f64::from(x).ln() as f32;
                let log_distance = ln(behind.unsigned_abs() as f32 / middle as f32);
                let log_max_distance = ln((self.max_distance - 1) as f32 / middle as f32);
                let bucket = (log_distance / log_max_distance * (middle - 1) as f32).ceil() as i64 + middle as i64;
                bucket * behind.signum()
            }
            _ => behind,
        };
        (bucket + span).clamp(0, 2 * span - 1) as usize
    }
}

/// The vectors of distances that all layers of a stack share: parameter `rel_embeddings.weight` (2 · span, E), and
/// `LayerNorm` if the config has one.
#[derive(Debug, Clone)]
pub struct RelativeEmbeddings {
    weight: Tensor,
    norm: Option<Norm>,
}

impl RelativeEmbeddings {
    /// Loads the vectors of an encoder, below the builder's prefix.
    ///
    /// # Errors
    /// For a config whose options do not fit together, and for a missing or misshapen tensor.
    pub fn new(config: &DisentangledConfig, embed_dim: usize, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let source = ParameterReader::new("relative_embeddings", "deberta", vb)?;
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let weight = source.pp("rel_embeddings").get((2 * config.span(), embed_dim), "weight", init)?;
        let norm = |eps| Norm::load(QkNormKind::Layer, eps, embed_dim, true, &source.pp("LayerNorm"));
        let norm = config.layer_norm.map(norm).transpose()?;
        Ok(Self { weight, norm })
    }

    /// Returns the parameter (2 · span, E).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the vectors (2 · span, E), normalised.
    fn forward(&self) -> Result<Tensor> {
        self.norm.as_ref().map_or_else(|| Ok(self.weight.clone()), |norm| norm.forward(&self.weight))
    }

    /// Returns a copy that does not follow variables.
    pub(crate) fn freeze(&self) -> Result<Self> {
        Ok(Self { weight: frozen(&self.weight)?, norm: self.norm.as_ref().map(Norm::freeze).transpose()? })
    }
}

/// The term of [`ContentPositions::Disentangled`](crate::ContentPositions::Disentangled).
#[derive(Debug)]
pub(super) struct Disentangled {
    pub config: DisentangledConfig,
    pub parameters: ParameterList,
    /// The vectors of distances that the layers of a stack share.
    pub embeddings: Option<RelativeEmbeddings>,
    pub vectors: LatestVectors,
}

/// Returns the parameters.
pub(super) fn specs(config: &DisentangledConfig, layer: &LayerSpecs) -> Vec<ParameterSpec> {
    let width = layer.num_heads * layer.head_dim;
    let e = layer.embed_dim;
    let mut specs = Vec::new();
    for name in config.projections() {
        specs.push(layer.by_head(&format!("{name}.weight"), &[width, e], LINEAR_WEIGHT));
        specs.push(layer.by_head(&format!("{name}.bias"), &[width], linear_bias(e)));
    }
    specs
}

impl ScoreTerm for Disentangled {
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        projected_keys(kv, call)?;
        if arguments.q.elem_count() == 0 {
            return Ok(());
        }
        let t = arguments.q.dim(2)?;
        let d = arguments.q.dim(3)?;
        let compute = || self.compute(t, d, call);
        // Modules and adapters may differ in a clone of the layer, and may change.
        let may_change = self.config.shared_projections && call.projections.may_change();
        let is_random = call.train && self.parameters.has_dropout();
        let vectors = self.vectors.get(t, may_change || is_random, compute)?;
        arguments.content_scores = Some(ContentScores::new(arguments.q.clone(), vectors, &arguments.options));
        Ok(())
    }
}

impl Disentangled {
    /// Returns the vectors of the distances of `t` tokens, for heads of width `d`.
    fn compute(&self, t: usize, d: usize, call: &CallContext) -> Result<DistanceVectors> {
        let Some(embeddings) = &self.embeddings else {
            bail!(
                "[multi_head_attention] the config has disentangled positions, expected a call of \
                 `with_relative_embeddings` with the `RelativeEmbeddings` that all layers of the model share"
            )
        };
        let config = &self.config;
        let embeddings = embeddings.forward()?;
        let mut keys = None;
        let mut queries = None;
        if config.shared_projections {
            let xs = embeddings.unsqueeze(0)?;
            let updates = UpdatesOfCall::without_names(call.train);
            let Projected { q, kv, .. } = call.projections.query_key_value(&xs, Some([&xs, &xs]), updates)?;
            if let Some(kv) = kv
                && config.content_to_position
            {
                keys = Some(kv.keys.squeeze(0)?);
            }
            if config.position_to_content {
                queries = Some(q.squeeze(0)?);
            }
        } else {
            keys = self.project(KEYS, &embeddings, call.train)?;
            queries = self.project(QUERIES, &embeddings, call.train)?;
        }
        let dtype = accumulation_dtype(embeddings.dtype());
        let rows = |table: Option<Tensor>, sign: i64| -> Result<Option<Tensor>> {
            let Some(table) = table else { return Ok(None) };
            let rows = descending(t).map(|distance| config.row(sign * distance));
            by_head(&rows_of(&table.to_dtype(dtype)?, rows)?, d).map(Some)
        };
        Ok(DistanceVectors { of_queries: rows(keys, 1)?, of_keys: rows(queries, -1)? })
    }

    /// Returns the vectors projected by parameters of the layer, if it has this projection.
    fn project(&self, name: &str, embeddings: &Tensor, train: bool) -> Result<Option<Tensor>> {
        let weight_name = format!("{name}.weight");
        let Some(weight) = self.parameters.tensor(&weight_name)? else { return Ok(None) };
        let bias = self.parameters.expect(&format!("{name}.bias"))?;
        let product = embeddings.matmul(&weight.t()?)?;
        self.parameters.add_updates(&weight_name, product, embeddings, train)?.broadcast_add(&bias).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with `make_log_bucket_position` of transformers for DeBERTa v3's 256 buckets of distances below
    /// 512.
    #[test]
    fn content_positions_disentangled_have_the_buckets_of_transformers() {
        let v3 = DisentangledConfig::new(512).with_num_buckets(256);
        let buckets = [(0, 0), (5, 5), (-127, -127), (128, 128), (-129, -129), (130, 130), (131, 131), (200, 169)];
        let further = [(-300, -207), (400, 233), (510, 255), (511, 255), (512, 256), (513, 256), (-5000, -465)];
        for (distance, bucket) in buckets.into_iter().chain(further) {
            let expected = (bucket + 256i64).clamp(0, 511) as usize;
            assert_eq!(v3.row(distance), expected, "distance {distance}");
        }
    }
}

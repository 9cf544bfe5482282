//! T5's relative positions: a learned bias for each head and bucket of distances.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use super::{
    CallContext, KeyValueHeads, Latest, Positions, QueryKeyPositions, ScoreArguments, ScoreTerm, gathered, latest,
};
use candle_attention_modules::base::{HeadShard, ParameterReader, frozen, number};

const OP: &str = "relative_bias";

/// The most biases that are stored for the next layer, 64 MB.
const KEPT: usize = 1 << 24;

/// The config of T5's relative positions: distances are grouped in buckets, and [`RelativeBias`] has a bias for each.
///
/// ```
/// use candle_attention::RelativeBiasConfig;
/// let encoder = RelativeBiasConfig::new(true);
/// let decoder = RelativeBiasConfig::new(false).with_num_buckets(16).with_max_distance(64);
/// assert_eq!((encoder.num_buckets(), decoder.num_buckets()), (32, 16));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct RelativeBiasConfig {
    bidirectional: bool,
    #[serde(default = "default_num_buckets")]
    num_buckets: usize,
    #[serde(default = "default_max_distance")]
    max_distance: usize,
}

/// Returns the default of [`RelativeBiasConfig::num_buckets`].
fn default_num_buckets() -> usize {
    32
}

/// Returns the default of [`RelativeBiasConfig::max_distance`].
fn default_max_distance() -> usize {
    128
}

impl RelativeBiasConfig {
    /// Returns T5's config: 32 buckets for distances up to 128. If `bidirectional`, as in encoders, one half of the
    /// buckets is for later keys; otherwise later keys count as the query's own position.
    pub fn new(bidirectional: bool) -> Self {
        Self { bidirectional, num_buckets: default_num_buckets(), max_distance: default_max_distance() }
    }

    /// Sets the number of buckets (`relative_attention_num_buckets`). The default is 32.
    pub fn with_num_buckets(mut self, num_buckets: usize) -> Self {
        self.num_buckets = num_buckets;
        self
    }

    /// Sets the distance from which on all distances share one bucket (`relative_attention_max_distance`). The default
    /// is 128.
    pub fn with_max_distance(mut self, max_distance: usize) -> Self {
        self.max_distance = max_distance;
        self
    }

    /// Returns whether later keys have separate buckets.
    pub fn bidirectional(&self) -> bool {
        self.bidirectional
    }

    /// Returns the number of buckets.
    pub fn num_buckets(&self) -> usize {
        self.num_buckets
    }

    /// Returns the distance from which on all distances share one bucket.
    pub fn max_distance(&self) -> usize {
        self.max_distance
    }

    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub fn validate(&self) -> Result<()> {
        let least = if self.bidirectional { 4 } else { 2 };
        number::within(OP, "num_buckets", self.num_buckets, least..=u32::MAX as usize)?;
        // The shortest distances have a bucket each.
        let exact = self.directed() / 2;
        number::within(OP, "max_distance", self.max_distance, exact + 1..=u32::MAX as usize)
    }

    /// Returns the number of buckets of one direction.
    fn directed(&self) -> usize {
        if self.bidirectional { self.num_buckets / 2 } else { self.num_buckets }
    }

    /// Returns the bucket of a key that is `behind` positions before its query, or after it if negative. The first half
    /// of a direction's buckets are for one distance each, the others for more distances the larger these are. Computed
    /// in f32 where transformers does, so that the borders of buckets are the same.
    fn bucket(&self, behind: i64) -> usize {
        let directed = self.directed();
        let is_later = behind < 0;
        if is_later && !self.bidirectional {
            return 0;
        }
        let first = if is_later { directed } else { 0 };
        let distance = behind.unsigned_abs() as usize;
        let exact = directed / 2;
        if distance < exact {
            return first + distance;
        }
        let log_distance = f64::from(distance as f32 / exact as f32).ln() as f32;
        let log_max_distance = (self.max_distance as f64 / exact as f64).ln() as f32;
        let bucket = exact + (log_distance / log_max_distance * (directed - exact) as f32) as usize;
        first + bucket.min(directed - 1)
    }
}

/// A learned bias for each query head and bucket of distances (T5, MPNet): parameter `relative_attention_bias.weight`
/// (num_buckets, H). The layers of a stack share one; clones share the biases that were computed last.
///
/// ```
/// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, RelativeBias, RelativeBiasConfig, WeightLayout};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let buckets = RelativeBiasConfig::new(true);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_scale(1.0).with_relative_bias(buckets.clone());
/// let bias = RelativeBias::new(&buckets, 4, vb.pp("block.0.layer.0.SelfAttention"))?;
/// let layer = |i| {
///     let vb = vb.pp(format!("block.{i}.layer.0.SelfAttention"));
///     MultiHeadAttention::new(&cfg, vb)?.with_relative_bias(bias.clone())
/// };
/// let layers = (0..2).map(layer).collect::<candle_core::Result<Vec<_>>>()?;
/// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
/// let ys = layers[1].forward(&layers[0].forward(&xs)?)?;
/// # assert_eq!(ys.dims(), [2, 6, 64]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RelativeBias {
    config: RelativeBiasConfig,
    /// (num_buckets, H).
    weight: Tensor,
    /// The biases that were computed last, with the positions of their queries and keys.
    latest: Arc<Latest<[Positions; 2], Tensor>>,
}

impl ScoreTerm for RelativeBias {
    fn modify(&self, arguments: &mut ScoreArguments, _: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        let biases = if let Some(sequences) = call.packed {
            if call.has_given_positions {
                bail!(
                    "[multi_head_attention] positions were given with packed sequences, expected none for a relative \
                     bias: each counts from 0"
                )
            }
            let queries = Positions::starting_at(&[0], sequences.most_queries())?;
            self.between(&queries, &Positions::starting_at(&[0], sequences.most_keys())?)?
        } else if let Some(QueryKeyPositions { queries, keys }) = call.positions {
            self.between(queries, keys)?
        } else {
            return Ok(());
        };
        // Biases by pair have four dimensions, biases by distance have fewer.
        if biases.rank() == 4 {
            arguments.mask = arguments.mask.clone().with_bias(&biases);
        } else {
            arguments.options.relative_bias = Some(biases);
        }
        Ok(())
    }
}

impl RelativeBias {
    /// Loads `relative_attention_bias.weight` below the builder's prefix.
    ///
    /// # Errors
    /// For a config whose options do not fit together, and for a missing or misshapen tensor.
    pub fn new(config: &RelativeBiasConfig, num_heads: usize, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        number::size(OP, "num_heads", num_heads)?;
        let source = ParameterReader::new(OP, "t5", vb)?;
        // `nn.Embedding`'s initialisation.
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let weight = source.pp("relative_attention_bias").get((config.num_buckets, num_heads), "weight", init)?;
        Ok(Self { config: config.clone(), weight, latest: Arc::default() })
    }

    /// Returns the biases of one rank's heads, see
    /// [`MultiHeadAttention::load_shard`](crate::MultiHeadAttention::load_shard).
    ///
    /// # Errors
    /// For a world size that does not divide the heads.
    pub fn shard(&self, shard: HeadShard) -> Result<Self> {
        let h = self.num_heads();
        let n = shard.world_size();
        if !h.is_multiple_of(n) {
            bail!("[{OP}] a world size of {n} does not divide the {h} heads")
        }
        let heads = shard.rank_range(h);
        let columns = self.weight.narrow(1, heads.start, heads.len())?;
        // A view of a variable stays a view: training changes it in place.
        Ok(self.with_weight(if columns.track_op() { columns } else { columns.force_contiguous()? }))
    }

    /// Returns a copy that does not follow a variable.
    pub(crate) fn freeze(&self) -> Result<Self> {
        if self.weight.track_op() { Ok(self.with_weight(frozen(&self.weight)?)) } else { Ok(self.clone()) }
    }

    fn with_weight(&self, weight: Tensor) -> Self {
        Self { config: self.config.clone(), weight, latest: Arc::default() }
    }

    /// Returns the config of the buckets.
    pub fn config(&self) -> &RelativeBiasConfig {
        &self.config
    }

    /// Returns the parameter (num_buckets, H).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the number of query heads (H).
    pub fn num_heads(&self) -> usize {
        self.weight.dims().get(1).copied().unwrap_or(0)
    }

    /// Returns the biases (1, H, T_q, T_kv) of queries at the positions `offset`, `offset + 1` and so on, and of keys
    /// at 0, 1 and so on. They are added to the scores by
    /// [`AttentionMask::with_bias`](crate::AttentionMask::with_bias). In f32, or in f64 if the parameter is.
    /// Differentiable.
    ///
    /// [`by_distance`](Self::by_distance) has the same numbers in T_q + T_kv - 1 entries for each head.
    ///
    /// # Errors
    /// For positions of 2^24 and more, and for biases that do not fit in memory.
    pub fn forward(&self, t_q: usize, t_kv: usize, offset: usize) -> Result<Tensor> {
        self.by_pair(&Positions::starting_at(&[offset], t_q)?, &Positions::starting_at(&[0], t_kv)?)
    }

    /// Returns the biases of [`forward`](Self::forward) by distance, (H, T_q + T_kv - 1), for
    /// [`SdpaOptions::with_relative_bias`](crate::SdpaOptions::with_relative_bias). Differentiable.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn by_distance(&self, t_q: usize, t_kv: usize, offset: usize) -> Result<Tensor> {
        self.computed(&Positions::starting_at(&[offset], t_q)?, &Positions::starting_at(&[0], t_kv)?)
    }

    /// Returns the [`computed`](Self::computed) biases, which the layers of a stack share for the same positions.
    fn between(&self, queries: &Positions, keys: &Positions) -> Result<Tensor> {
        let may_be_stored = |biases: &Tensor| !biases.track_op() && biases.elem_count() <= KEPT;
        let key = |biases: &Tensor| may_be_stored(biases).then(|| [queries, keys].map(Clone::clone));
        let is_same = |latest: &[Positions; 2]| latest.each_ref() == [queries, keys];
        latest(&self.latest, is_same, || self.computed(queries, keys), key)
    }

    /// Computes the biases by distance, (H, T_q + T_kv - 1) or (B, H, T_q + T_kv - 1), if positions count up by one;
    /// otherwise by pair.
    fn computed(&self, queries: &Positions, keys: &Positions) -> Result<Tensor> {
        let starts = queries.starts().zip(keys.starts());
        let Some((of_queries, of_keys)) = starts else { return self.by_pair(queries, keys) };
        let first = |of: &[u32], b: usize| of.get(b).or(of.first()).map_or(0, |&start| i64::from(start));
        // The distance of the first key before the last query.
        let furthest = |b: usize| first(&of_queries, b) + queries.t as i64 - 1 - first(&of_keys, b);
        let mut all: Vec<_> = (0..of_queries.len().max(of_keys.len()).max(1)).map(furthest).collect();
        if all.iter().all(|distance| *distance == all[0]) {
            all.truncate(1);
        }
        let distances = (queries.t + keys.t).saturating_sub(1);
        let behind = all.iter().flat_map(|&distance| (0..distances as i64).map(move |n| distance - n));
        let biases = self.of_distances(behind, &[all.len(), distances])?;
        if all.len() == 1 { biases.squeeze(0) } else { Ok(biases) }
    }

    /// Computes the biases by pair, (B, H, T_q, T_kv), with B = 1 if all sequences have the same positions.
    fn by_pair(&self, queries: &Positions, keys: &Positions) -> Result<Tensor> {
        let rows = [queries.rows(), keys.rows()];
        // Positions that all sequences share have one row, even if there is no sequence.
        let b = if rows.contains(&0) { 0 } else { rows[0].max(rows[1]) };
        let pairs = (0..b).flat_map(|b| queries.of_sequence(b).iter().map(move |query| (query, keys.of_sequence(b))));
        let behind = pairs.flat_map(|(&query, row)| row.iter().map(move |&key| i64::from(query) - i64::from(key)));
        self.of_distances(behind, &[b, queries.t, keys.t])
    }

    /// Returns the biases (B, H, ..) of pairs of a query and a key. `behind` lists, in the shape (B, ..), how far each
    /// key is behind its query.
    fn of_distances(&self, behind: impl Iterator<Item = i64>, shape: &[usize]) -> Result<Tensor> {
        gathered(OP, &self.weight, behind.map(|behind| self.config.bucket(behind)), shape)?.transpose(0, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use std::collections::HashMap;

    fn bias(heads: usize) -> Result<RelativeBias> {
        let weight = Tensor::rand(-1f32, 1.0, (32, heads), &Device::Cpu)?;
        let tensors = HashMap::from([("relative_attention_bias.weight".to_string(), weight)]);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        RelativeBias::new(&RelativeBiasConfig::new(true), heads, vb)
    }

    #[test]
    fn layers_of_a_stack_share_what_was_computed() -> Result<()> {
        let bias = bias(2)?;
        let computed = |layer: &RelativeBias, offset: usize| -> Result<_> {
            Ok(layer.between(&Positions::starting_at(&[offset], 3)?, &Positions::starting_at(&[0], 5)?)?.id())
        };
        let first = computed(&bias, 2)?;
        assert_eq!(computed(&bias.clone(), 2)?, first);
        assert_ne!(computed(&bias, 1)?, first);
        Ok(())
    }

    #[test]
    fn sequences_have_positions_of_their_own() -> Result<()> {
        let bias = bias(3)?;
        let queries = Positions::starting_at(&[4, 0, 9], 2)?;
        let keys = Positions::starting_at(&[0], 6)?;
        let together = bias.by_pair(&queries, &keys)?;
        assert_eq!(together.dims(), [3, 3, 2, 6]);
        for (b, offset) in [4, 0, 9].into_iter().enumerate() {
            let alone = bias.forward(2, 6, offset)?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(together.get(b)?.flatten_all()?.to_vec1::<f32>()?, alone);
        }
        assert_eq!(bias.forward(0, 4, 0)?.dims(), [1, 3, 0, 4]);
        Ok(())
    }

    #[test]
    fn biases_by_distance_are_those_of_every_pair() -> Result<()> {
        let bias = bias(2)?;
        let queries = Positions::starting_at(&[4, 0, 9], 3)?;
        let keys = Positions::starting_at(&[0], 6)?;
        let by_distance = bias.between(&queries, &keys)?;
        let by_pair = bias.by_pair(&queries, &keys)?;
        assert_eq!(by_distance.dims(), [3, 2, 8]);
        for i in 0..3 {
            let diagonal = by_distance.narrow(2, 2 - i, 6)?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(diagonal, by_pair.narrow(2, i, 1)?.flatten_all()?.to_vec1::<f32>()?);
        }
        assert_eq!(bias.by_distance(3, 6, 4)?.to_vec2::<f32>()?, by_distance.get(0)?.to_vec2::<f32>()?);
        let scattered = Positions::of_each(vec![0, 2, 3], 3)?;
        assert_eq!(bias.between(&scattered, &keys)?.dims(), [1, 2, 3, 6]);
        Ok(())
    }
}

//! Relative positions of Shaw et al.: a vector for each distance up to a largest one, multiplied with queries.

use candle_core::Result;

use super::super::{CallContext, KeyValueHeads, ScoreArguments, ScoreTerm};
use super::call::{projected_keys, wide};
use super::distances::{ContentScores, DistanceVectors, LatestVectors, by_head, descending, rows_of};
use super::specs::{LayerSpecs, normal};
use candle_attention_modules::base::{ParameterList, ParameterSpec};

/// The parameter (left + right + 1, D).
const TABLE: &str = "distance_embedding.weight";

/// The term of [`ContentPositions::Clipped`](crate::ContentPositions::Clipped).
#[derive(Debug)]
pub(super) struct Clipped {
    /// The largest distance of a key before the query that has a vector.
    pub left: usize,
    /// The largest distance of a key after the query that has a vector.
    pub right: usize,
    pub parameters: ParameterList,
    pub vectors: LatestVectors,
}

/// Returns the parameters.
pub(super) fn specs(left: usize, right: usize, layer: &LayerSpecs) -> Vec<ParameterSpec> {
    vec![layer.shared(TABLE, &[left + right + 1, layer.head_dim], normal(1.0))]
}

impl ScoreTerm for Clipped {
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        projected_keys(kv, call)?;
        if arguments.q.elem_count() == 0 {
            return Ok(());
        }
        let t = arguments.q.dim(2)?;
        let d = arguments.q.dim(3)?;
        let vectors = self.vectors.get(t, false, || self.compute(t, d))?;
        arguments.content_scores = Some(ContentScores::new(arguments.q.clone(), vectors, &arguments.options));
        Ok(())
    }
}

impl Clipped {
    /// Returns the vectors of the distances of `t` tokens, for heads of width `d`.
    fn compute(&self, t: usize, d: usize) -> Result<DistanceVectors> {
        let left = self.left as i64;
        let right = self.right as i64;
        let rows = descending(t).map(|distance| (left - distance.clamp(-right, left)) as usize);
        let of_queries = Some(by_head(&rows_of(&wide(&self.parameters, TABLE)?, rows)?, d)?);
        Ok(DistanceVectors { of_queries, of_keys: None })
    }
}

//! Relative positions of Shaw et al.: a vector for each distance up to a largest one, multiplied with queries.

use candle_core::Result;

use super::super::{CallContext, ScoreArguments, ScoreModifier};
use super::call::{own_keys, wide};
use super::distances::{ContentScores, DistanceVectors, LatestVectors, by_head, descending, rows_of};
use super::specs::{LayerSpecs, normal};
use candle_attention_modules::base::{ParameterList, ParameterSpec};
use candle_attention_modules::linear::KeysAndValues;

/// The parameter (left + right + 1, D).
const TABLE: &str = "distance_embedding.weight";

/// The term of [`ContentPositions::Clipped`](crate::ContentPositions::Clipped).
#[derive(Debug)]
pub(super) struct Clipped {
    pub left: usize,
    pub right: usize,
    pub parameters: ParameterList,
    pub vectors: LatestVectors,
}

/// Returns the parameters.
pub(super) fn specs(left: usize, right: usize, layer: &LayerSpecs) -> Vec<ParameterSpec> {
    vec![layer.shared(TABLE, &[left + right + 1, layer.head_dim], normal(1.0))]
}

impl ScoreModifier for Clipped {
    fn modify(
        &self,
        arguments: &mut ScoreArguments,
        own: Option<&mut KeysAndValues>,
        call: &CallContext,
    ) -> Result<()> {
        own_keys(own, call)?;
        if arguments.q.elem_count() == 0 {
            return Ok(());
        }
        let [t, d] = [arguments.q.dim(2)?, arguments.q.dim(3)?];
        let vectors = self.vectors.get(t, || self.compute(t, d))?;
        let queries = arguments.q.clone();
        let scale = arguments.options.scale.unwrap_or(1.0);
        arguments.content_scores = Some(ContentScores { queries, vectors, scale });
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

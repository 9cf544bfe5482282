//! Relative positions by content along one axis: a vector for each distance between query and key, which queries or
//! keys are multiplied with; and attention for some heads at a time, so that there is a bias for these alone.

use std::ops::Range;

use candle_core::{D, Result, Tensor};

use super::super::{Latest, latest};
use super::OP;
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, Keys, Outputs, OwnKeys, SdpaOptions};
use candle_attention_modules::base::{accumulation_dtype, check_memory};

/// The vectors of distances i - j of query i and key j: (H, 2T, D), or (1, 2T, D) if all heads share them.
#[derive(Debug, Clone)]
pub(super) struct DistanceVectors {
    /// The vectors that queries are multiplied with, of the distances T - 1 down to -T.
    pub of_queries: Option<Tensor>,
    /// The vectors that keys are multiplied with, of the distances 1 - T up to T.
    pub of_keys: Option<Tensor>,
}

impl DistanceVectors {
    fn is_tracked(&self) -> bool {
        self.of_queries.iter().chain(&self.of_keys).any(Tensor::track_op)
    }
}

/// The vectors for the number of tokens of the latest call, unless they are tracked for gradients.
#[derive(Debug, Default)]
pub(super) struct LatestVectors(Latest<usize, DistanceVectors>);

impl LatestVectors {
    /// Returns the vectors for `t` tokens, which are computed if they are not the latest.
    pub fn get(&self, t: usize, compute: impl FnOnce() -> Result<DistanceVectors>) -> Result<DistanceVectors> {
        latest(&self.0, |&own| own == t, compute, |vectors| (!vectors.is_tracked()).then_some(t))
    }
}

/// Returns distances from T - 1 down to -T.
pub(super) fn descending(t: usize) -> impl Iterator<Item = i64> {
    (-(t as i64)..t as i64).rev()
}

/// Returns rows of a table (N, ..): (indices, ..).
pub(super) fn rows_of(table: &Tensor, indices: impl Iterator<Item = usize>) -> Result<Tensor> {
    let indices = Tensor::from_iter(indices.map(|index| index as u32), table.device())?;
    table.contiguous()?.index_select(&indices, 0)
}

/// Returns vectors (2T, heads · D) for heads of width D as (heads, 2T, D).
pub(super) fn by_head(vectors: &Tensor, d: usize) -> Result<Tensor> {
    let (rows, width) = vectors.dims2()?;
    vectors.reshape((rows, width / d, d))?.transpose(0, 1)?.contiguous()
}

/// Returns the products of queries or keys (B, h, T, D) with the vectors (h or 1, 2T, D) of their distances, (B, h, T,
/// T): row i is multiplied with vector T - 1 - i and the T - 1 vectors after it.
///
/// The products of a row begin one column further left than the products of the row before it. In rows that are shorter
/// by one entry they are columns (Dai et al., <https://arxiv.org/abs/1901.02860>, appendix B).
fn by_distance(xs: &Tensor, vectors: &Tensor) -> Result<Tensor> {
    let (b, h, t, _) = xs.dims4()?;
    let dims = [b, h, t, 2 * t];
    let bytes = [&dims[..], &[xs.dtype().size_in_bytes()]].concat();
    check_memory(OP, format_args!("a term of {dims:?}"), &bytes)?;
    let products = xs.contiguous()?.broadcast_matmul(&vectors.transpose(D::Minus2, D::Minus1)?)?;
    let shifted = products.reshape((b, h, 2 * t * t))?.narrow(2, t - 1, t * (2 * t - 1))?;
    shifted.reshape((b, h, t, 2 * t - 1))?.narrow(3, 0, t)
}

/// The most numbers in which terms are computed at once, 16 MB, so that they stay in a processor's cache until they are
/// read. The terms of one key head may be more.
const MAX_NUMBERS: usize = 1 << 22;

/// The keys and values of a call, with the terms that are added to its scores.
pub(super) struct KeysByHeads {
    /// (B, H_kv, T, D).
    pub k: Tensor,
    /// (B, H_kv, T, D_v).
    pub v: Tensor,
    /// The queries (B, H, T, D) that vectors are multiplied with.
    pub queries: Tensor,
    pub vectors: DistanceVectors,
    /// The factor on all terms.
    pub scale: f64,
}

impl Keys for KeysByHeads {
    /// Attends for some heads at a time. Weights and statistics are computed for all heads at once.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let ((b, h, t, _), h_kv) = (q.dims4()?, self.k.dim(1)?);
        let group = h / h_kv;
        // The terms of the query heads of one key head.
        let numbers = [t, 2 * t, group].into_iter().fold(b, usize::saturating_mul).max(1);
        let in_parts = matches!(outputs, Outputs::Context | Outputs::Plan) && !options.drops_by_seed();
        let size = if in_parts { (MAX_NUMBERS / numbers).clamp(1, h_kv) } else { h_kv };
        let attend = |start: usize| {
            let keys = start..h_kv.min(start + size);
            let heads = keys.start * group..keys.end * group;
            let own = |tensor: &Tensor| tensor.narrow(1, keys.start, keys.len());
            let own = OwnKeys { k: own(&self.k)?, v: own(&self.v)?, sequences: None, function: None };
            let (q, options) = (q.narrow(1, heads.start, heads.len())?, options.of_heads(&heads)?);
            let mask = mask.of_heads(heads.clone(), h)?.with_bias(&self.bias(heads)?);
            own.attend(&q, &mask, &options, outputs)
        };
        if outputs != Outputs::Context {
            // The path of the first heads is that of all.
            return attend(0);
        }
        let contexts = (0..h_kv).step_by(size).map(|start| attend(start)?.context.transpose(1, 2));
        let context = Tensor::cat(&contexts.collect::<Result<Vec<_>>>()?, 2)?.contiguous()?.transpose(1, 2)?;
        Ok(Attended::context(context))
    }
}

impl KeysByHeads {
    /// Returns the terms of some query heads, (B, heads, T, T), in the dtype of the accumulation.
    fn bias(&self, heads: Range<usize>) -> Result<Tensor> {
        let dtype = accumulation_dtype(self.k.dtype());
        let term = |xs: &Tensor, vectors: &Tensor| -> Result<Tensor> {
            let is_shared = vectors.dim(0)? == 1;
            let vectors = if is_shared { vectors.clone() } else { vectors.narrow(0, heads.start, heads.len())? };
            let xs = xs.narrow(1, heads.start, heads.len())?.to_dtype(dtype)?;
            by_distance(&(xs * self.scale)?, &vectors)
        };
        match (&self.vectors.of_queries, &self.vectors.of_keys) {
            (Some(of_queries), Some(of_keys)) => {
                term(&self.queries, of_queries)? + term(&self.k, of_keys)?.transpose(2, 3)?
            }
            (Some(of_queries), None) => term(&self.queries, of_queries),
            (None, Some(of_keys)) => term(&self.k, of_keys)?.transpose(2, 3),
            (None, None) => {
                let (b, _, t, _) = self.queries.dims4()?;
                Tensor::zeros((b, heads.len(), t, t), dtype, self.queries.device())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn content_positions_multiply_each_query_with_the_vectors_of_its_distances() -> Result<()> {
        let t = 5;
        let vectors = Tensor::ones((2, 3, t, 1), DType::F32, &Device::Cpu)?;
        let rows = Tensor::from_iter(descending(t).map(|distance| distance as f32), &Device::Cpu)?;
        let found = by_distance(&vectors, &rows.reshape((1, 2 * t, 1))?)?.get(1)?.get(2)?.to_vec2::<f32>()?;
        for (i, row) in found.into_iter().enumerate() {
            let expected: Vec<_> = (0..t).map(|j| i as f32 - j as f32).collect();
            assert_eq!(row, expected, "query {i}");
        }
        Ok(())
    }
}

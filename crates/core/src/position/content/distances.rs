//! Relative positions by content along one axis: a vector for each distance between query and key, which queries or
//! keys are multiplied with; and attention to some heads at a time, so that only their bias is in memory.

use std::ops::Range;

use candle_core::{D, Result, Tensor};

use super::super::{KeyValueHeads, Latest, latest};
use super::OP;
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, OwnKeys, Plan, SdpaOptions};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{accumulation_dtype, check_memory, matmul_by_head};

/// The vectors of distances i - j of query i and key j: (H, 2T, D), or (1, 2T, D) if all heads share them.
#[derive(Debug, Clone)]
pub(crate) struct DistanceVectors {
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
    /// Returns the vectors for `t` tokens, which are computed if they are not the latest. Vectors that may change from
    /// call to call, by dropout or a module of the caller, are computed each time.
    pub fn get(
        &self,
        t: usize,
        may_change: bool,
        compute: impl FnOnce() -> Result<DistanceVectors>,
    ) -> Result<DistanceVectors> {
        if may_change {
            return compute();
        }
        latest(&self.0, |&latest_t| latest_t == t, compute, |vectors| (!vectors.is_tracked()).then_some(t))
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
    let products = matmul_by_head(&xs.contiguous()?, &vectors.transpose(D::Minus2, D::Minus1)?)?;
    let shifted = products.reshape((b, h, 2 * t * t))?.narrow(2, t - 1, t * (2 * t - 1))?;
    shifted.reshape((b, h, t, 2 * t - 1))?.narrow(3, 0, t)
}

/// The most numbers in which terms are computed at once, 16 MB, so that they stay in a processor's cache until they are
/// read. The terms of one key head may be more.
const MAX_NUMBERS: usize = 1 << 22;

/// Scores by content that are added to the products of queries and keys: products of queries and of keys with vectors
/// of their distance.
pub(crate) struct ContentScores {
    /// The queries that are multiplied with the vectors, (B, H, T, D).
    pub queries: Tensor,
    pub vectors: DistanceVectors,
    /// The factor on the scores.
    pub scale: f64,
}

impl ContentScores {
    /// Returns the scores of a call with these options.
    pub(super) fn new(queries: Tensor, vectors: DistanceVectors, options: &SdpaOptions) -> Self {
        Self { queries, vectors, scale: options.scale.unwrap_or(1.0) }
    }
}

/// Keys and values of a call with scores by content, which are computed for some heads at a time.
pub(crate) struct KeysByHeads {
    /// Keys (B, H_kv, T, D) and values (B, H_kv, T, D_v).
    pub kv: KeyValueHeads,
    pub scores: ContentScores,
}

/// The arguments of attention for some heads.
struct HeadsCall {
    keys: OwnKeys<'static>,
    q: Tensor,
    mask: AttentionMask,
    options: SdpaOptions,
}

impl KeysByHeads {
    /// Attends from queries (B, H, T, D): some heads at a time for the output alone, and all heads at once for other
    /// results.
    pub fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        let h_kv = self.kv.keys.dim(1)?;
        let of_key_heads = |key_heads| {
            let call = self.call_of_key_heads(key_heads, q, mask, options)?;
            call.keys.attend(&call.q, &call.mask, &call.options, wanted)
        };
        if wanted != RequestedResults::default() {
            return of_key_heads(0..h_kv);
        }
        let step = self.step(q, options)?;
        let mut outputs = Vec::new();
        for start in (0..h_kv).step_by(step) {
            outputs.push(of_key_heads(start..h_kv.min(start + step))?.output.transpose(1, 2)?);
        }
        Ok(Tensor::cat(&outputs, 2)?.contiguous()?.transpose(1, 2)?.into())
    }

    /// Returns the path of the first heads, which is that of all heads.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let call = self.call_of_key_heads(0..self.step(q, options)?, q, mask, options)?;
        call.keys.plan(&call.q, &call.mask, &call.options)
    }

    /// Returns the number of key heads whose scores are computed at once.
    fn step(&self, q: &Tensor, options: &SdpaOptions) -> Result<usize> {
        let (b, h, t, _) = q.dims4()?;
        let h_kv = self.kv.keys.dim(1)?;
        if options.drops_by_seed() {
            return Ok(h_kv);
        }
        let numbers = [t, 2 * t, h / h_kv].into_iter().fold(b, usize::saturating_mul).max(1);
        Ok((MAX_NUMBERS / numbers).clamp(1, h_kv))
    }

    /// Returns the arguments of attention for some key heads and their query heads.
    fn call_of_key_heads(
        &self,
        key_heads: Range<usize>,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<HeadsCall> {
        let KeyValueHeads { keys: k, values: v } = &self.kv;
        let h = q.dim(1)?;
        let group = h / k.dim(1)?;
        let heads = key_heads.start * group..key_heads.end * group;
        let narrowed = |tensor: &Tensor| tensor.narrow(1, key_heads.start, key_heads.len());
        Ok(HeadsCall {
            keys: OwnKeys { k: narrowed(k)?, v: narrowed(v)?, sequences: None },
            q: q.narrow(1, heads.start, heads.len())?,
            mask: mask.of_heads(heads.clone(), h)?.with_bias(&self.scores.of_heads(k, heads.clone())?),
            options: options.for_heads(&heads)?,
        })
    }
}

impl ContentScores {
    /// Returns the scores of some query heads with keys `k` (B, H_kv, T, D): (B, heads, T, T) in the dtype of the
    /// accumulation.
    fn of_heads(&self, k: &Tensor, heads: Range<usize>) -> Result<Tensor> {
        let dtype = accumulation_dtype(k.dtype());
        let term = |xs: &Tensor, vectors: &Tensor| -> Result<Tensor> {
            let is_shared = vectors.dim(0)? == 1;
            let vectors = if is_shared { vectors.clone() } else { vectors.narrow(0, heads.start, heads.len())? };
            let xs = xs.narrow(1, heads.start, heads.len())?.to_dtype(dtype)?;
            by_distance(&(xs * self.scale)?, &vectors)
        };
        match (&self.vectors.of_queries, &self.vectors.of_keys) {
            (Some(of_queries), Some(of_keys)) => {
                term(&self.queries, of_queries)? + term(k, of_keys)?.transpose(2, 3)?
            }
            (Some(of_queries), None) => term(&self.queries, of_queries),
            (None, Some(of_keys)) => term(k, of_keys)?.transpose(2, 3),
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

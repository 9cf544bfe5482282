//! Relative positions along one axis by content: for each distance of query and key a vector, which one of the two is
//! multiplied with; and attention for some heads at a time, so that there is a bias for these alone.

use std::ops::Range;

use candle_core::{D, Device, Result, Tensor};

use super::{Computed, Content, ContentPositions, OP};
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, Keys, Outputs, OwnKeys, SdpaOptions};
use candle_attention_modules::base::{accumulation_dtype, check_memory};
use candle_attention_modules::linear::Projections;

/// Transformer-XL's parameters, as ESPnet and NeMo name them, and as transformers does for Parakeet.
pub(super) const TRANSFORMER_XL: [&str; 3] = ["linear_pos.weight", "pos_bias_u", "pos_bias_v"];
pub(super) const PARAKEET: [&str; 3] = ["relative_k_proj.weight", "bias_u", "bias_v"];

/// Distances from T - 1 down to -T.
pub(super) fn descending(t: usize) -> impl Iterator<Item = i64> {
    (-(t as i64)..t as i64).rev()
}

/// Rows of a table (N, ..), (indices, ..).
pub(super) fn rows_of(table: &Tensor, indices: impl Iterator<Item = usize>) -> Result<Tensor> {
    let indices = Tensor::from_iter(indices.map(|index| index as u32), table.device())?;
    table.contiguous()?.index_select(&indices, 0)
}

impl Content {
    /// For T tokens and heads of width D.
    pub(super) fn rows(&self, [t, d]: [usize; 2], projections: &Projections) -> Result<Computed> {
        let rows = match self.positions {
            ContentPositions::TransformerXl => {
                let projection = self.wide(TRANSFORMER_XL[0])?;
                let waves = sinusoids(t, projection.dim(1)?, projection.device())?.to_dtype(projection.dtype())?;
                [Some(waves.matmul(&projection.t()?)?), None]
            }
            ContentPositions::Clipped { left, right } => {
                let row = |distance: i64| (left as i64 - distance.clamp(-(right as i64), left as i64)) as usize;
                [Some(rows_of(&self.wide("distance_embedding.weight")?, descending(t).map(row))?), None]
            }
            ContentPositions::Disentangled(ref config) => self.vectors(config, t, projections)?,
            _ => [None, None],
        };
        // (2T, heads · D) to (heads, 2T, D).
        let by_head = |rows: Tensor| rows.reshape((2 * t, rows.dim(1)? / d, d))?.transpose(0, 1)?.contiguous();
        let [of_queries, of_keys] = rows.map(|rows| rows.map(by_head).transpose());
        Ok([of_queries?, of_keys?])
    }
}

/// Sine and cosine in turns of the distances T - 1 down to -T, (2T, E) for an even E, as in a table of absolute
/// positions (Vaswani et al., <https://arxiv.org/abs/1706.03762>).
fn sinusoids(t: usize, e: usize, device: &Device) -> Result<Tensor> {
    check_memory(OP, format_args!("a wave for each distance of {t} tokens"), &[2 * t, e])?;
    let frequency = |pair: usize| (-(10_000f64.ln()) * (2 * pair) as f64 / e as f64).exp() as f32;
    let frequencies: Vec<_> = (0..e / 2).map(frequency).collect();
    let angles =
        descending(t).flat_map(|distance| frequencies.iter().map(move |frequency| distance as f32 * frequency));
    Tensor::from_vec(angles.flat_map(|angle| [angle.sin(), angle.cos()]).collect(), (2 * t, e), device)
}

/// Vectors (B, h, T, D) times rows (h or 1, 2T, D), of which vector i meets rows T - 1 - i and the T - 1 after it:
/// (B, h, T, T).
///
/// Each product lies one place further left than in the vector before: in rows that are one shorter, they are columns
/// (Dai et al., <https://arxiv.org/abs/1901.02860>, appendix B).
fn by_distance(vectors: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let (b, h, t, _) = vectors.dims4()?;
    let dims = [b, h, t, 2 * t];
    check_memory(OP, format_args!("a term of {dims:?}"), &dims)?;
    let products = vectors.contiguous()?.broadcast_matmul(&rows.transpose(D::Minus2, D::Minus1)?)?;
    let shifted = products.reshape((b, h, 2 * t * t))?.narrow(2, t - 1, t * (2 * t - 1))?;
    shifted.reshape((b, h, t, 2 * t - 1))?.narrow(3, 0, t)
}

/// The most numbers in which terms are computed at once, unless those of one key head are more: 16 MB, for them to stay
/// in a processor's cache until they are read.
const MAX_NUMBERS: usize = 1 << 22;

/// The keys and values of a call, and what its scores get beside the product of queries and keys.
pub(super) struct KeysByHeads {
    /// (B, H_kv, T, D).
    pub k: Tensor,
    /// (B, H_kv, T, D_v).
    pub v: Tensor,
    /// What rows are multiplied with, (B, H, T, D).
    pub queries: Tensor,
    pub rows: Computed,
    /// A factor of all terms.
    pub scale: f64,
}

impl Keys for KeysByHeads {
    /// Weights and statistics are of all heads at once.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let ((b, h, t, _), h_kv) = (q.dims4()?, self.k.dim(1)?);
        let group = h / h_kv;
        // What the terms of a key head's scores hold at once.
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
    /// The terms of some query heads, (B, heads, T, T), in the dtype of the accumulation.
    fn bias(&self, heads: Range<usize>) -> Result<Tensor> {
        let dtype = accumulation_dtype(self.k.dtype());
        let term = |vectors: &Tensor, rows: &Tensor| -> Result<Tensor> {
            let rows = if rows.dim(0)? == 1 { rows.clone() } else { rows.narrow(0, heads.start, heads.len())? };
            let vectors = vectors.narrow(1, heads.start, heads.len())?.to_dtype(dtype)?;
            by_distance(&(vectors * self.scale)?, &rows)
        };
        let [of_queries, of_keys] = &self.rows;
        let by_queries = of_queries.as_ref().map(|rows| term(&self.queries, rows));
        let by_keys = of_keys.as_ref().map(|rows| term(&self.k, rows)?.transpose(2, 3));
        let (b, _, t, _) = self.queries.dims4()?;
        let sum = by_queries.into_iter().chain(by_keys).reduce(|one, other| one? + other?);
        sum.unwrap_or_else(|| Tensor::zeros((b, heads.len(), t, t), dtype, self.queries.device()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    #[test]
    fn each_vector_meets_the_rows_of_its_distances() -> Result<()> {
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

//! Relative positions along one axis by content: for each distance of query and key a vector, which one of the two is
//! multiplied with; and attention for some heads at a time, so that there is a bias for these alone.

use std::ops::Range;

use candle_core::{D, Device, Result, Tensor};
use candle_nn::Init;

use super::{Computed, OP};
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, Keys, Outputs, OwnKeys, SdpaOptions};
use candle_attention_modules::base::{
    Heads, LINEAR_WEIGHT, ParameterList, Source, Spec, accumulation_dtype, check_memory,
};

/// Names of Transformer-XL's parameters: ESPnet's and NeMo's, which transformers has of Parakeet.
pub(super) const TRANSFORMER_XL: [[&str; 3]; 2] =
    [["linear_pos.weight", "pos_bias_u", "pos_bias_v"], ["relative_k_proj.weight", "bias_u", "bias_v"]];
pub(super) const CLIPPED: &str = "distance_embedding.weight";
/// One of each kind.
pub(super) const PARAMETERS: [&str; 5] =
    ["pos_bias_u", "bias_u", "distance_embedding.weight", "pos_key_proj.weight", "pos_query_proj.weight"];

/// Distances from T - 1 down to -T.
pub(super) fn descending(t: usize) -> impl Iterator<Item = i64> {
    (-(t as i64)..t as i64).rev()
}

/// Rows of a table (N, ..), (indices, ..).
pub(super) fn rows_of(table: &Tensor, indices: impl Iterator<Item = usize>) -> Result<Tensor> {
    let indices = indices.map(|index| index as u32).collect::<Vec<_>>();
    let indices = Tensor::from_iter(indices, table.device())?;
    table.contiguous()?.index_select(&indices, 0)
}

pub(super) fn transformer_xl(embed_dim: usize, h: usize, d: usize, source: &Source) -> Vec<Spec> {
    let own = TRANSFORMER_XL[0];
    let stored = TRANSFORMER_XL.into_iter().find(|names| source.has(names[1])).unwrap_or(own);
    let spec =
        |n: usize, shape: [usize; 2], init| Spec::new(own[n], shape, init).stored(stored[n]).by_head(Heads::Query, 0);
    let bias = |n| spec(n, [h, d], Init::Const(0.0));
    vec![spec(0, [h * d, embed_dim], LINEAR_WEIGHT), bias(1), bias(2)]
}

/// Transformer-XL's, for T tokens and heads of width D.
pub(super) fn wave_rows([t, d]: [usize; 2], parameters: &ParameterList) -> Result<Computed> {
    let projection = parameters.expect(TRANSFORMER_XL[0][0])?;
    let (h, dtype) = (projection.dim(0)? / d, accumulation_dtype(projection.dtype()));
    let waves = sinusoids(t, projection.dim(1)?, projection.device())?.to_dtype(dtype)?;
    let rows = waves.matmul(&projection.to_dtype(dtype)?.t()?)?.reshape((2 * t, h, d))?;
    Ok([Some(rows.transpose(0, 1)?.contiguous()?), None])
}

/// Those of a table in which keys from `left` before their query to `right` after it have vectors of their own.
pub(super) fn clipped_rows(t: usize, [left, right]: [usize; 2], parameters: &ParameterList) -> Result<Computed> {
    let table = parameters.expect(CLIPPED)?;
    let behind = |distance: i64| (left as i64 - distance.clamp(-(right as i64), left as i64)) as usize;
    let rows = rows_of(&table.to_dtype(accumulation_dtype(table.dtype()))?, descending(t).map(behind))?;
    Ok([Some(rows.unsqueeze(0)?), None])
}

/// Sine and cosine in turns of the distances T - 1 down to -T, (2T, E), as in a table of absolute positions (Vaswani et
/// al., <https://arxiv.org/abs/1706.03762>).
fn sinusoids(t: usize, e: usize, device: &Device) -> Result<Tensor> {
    check_memory(OP, format_args!("a wave for each distance of {t} tokens"), &[2 * t, e])?;
    let frequency = |pair: usize| (-(10_000f64.ln()) * (2 * pair) as f64 / e as f64).exp() as f32;
    let frequencies: Vec<_> = (0..e.div_ceil(2)).map(frequency).collect();
    let mut waves = Vec::with_capacity(2 * t * e);
    for distance in descending(t) {
        let angles = frequencies.iter().map(|frequency| distance as f32 * frequency);
        waves.extend(angles.flat_map(|angle| [angle.sin(), angle.cos()]).take(e));
    }
    Tensor::from_vec(waves, (2 * t, e), device)
}

/// What the scores of a call get beside the product of queries and keys.
#[derive(Debug, Clone)]
pub(crate) struct DistanceTerms {
    pub(super) rows: Computed,
    /// (B, H, T, D).
    pub(super) queries: Tensor,
    /// (B, H_kv, T, D).
    pub(super) keys: Tensor,
    /// A factor of all terms.
    pub(super) scale: f64,
}

impl DistanceTerms {
    /// The terms of some query heads, (B, heads, T, T), in the dtype of the accumulation.
    pub(crate) fn bias(&self, heads: Range<usize>) -> Result<Tensor> {
        let dtype = accumulation_dtype(self.keys.dtype());
        let of = |tensor: &Tensor, rows: &Tensor| -> Result<Tensor> {
            let rows = if rows.dim(0)? == 1 { rows.clone() } else { rows.narrow(0, heads.start, heads.len())? };
            let vectors = tensor.narrow(1, heads.start, heads.len())?.to_dtype(dtype)?;
            by_distance(&(vectors * self.scale)?, &rows)
        };
        let [of_queries, of_keys] = &self.rows;
        let by_queries = of_queries.as_ref().map(|rows| of(&self.queries, rows)).transpose()?;
        let by_keys = of_keys.as_ref().map(|rows| of(&self.keys, rows)?.transpose(2, 3)).transpose()?;
        let (b, _, t, _) = self.queries.dims4()?;
        let sum = by_queries.into_iter().chain(by_keys).map(Ok).reduce(|one, other| one? + other?);
        sum.unwrap_or_else(|| Tensor::zeros((b, heads.len(), t, t), dtype, self.queries.device()))
    }
}

/// Vectors (B, h, T, D) times rows (h or 1, 2T, D), of which vector i meets rows T - 1 - i and the T - 1 after it:
/// (B, h, T, T).
///
/// Each product lies one place further left than in the vector before: in rows that are one shorter, they are columns
/// (Dai et al., <https://arxiv.org/abs/1901.02860>, appendix B).
fn by_distance(vectors: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let (b, h, t, _) = vectors.dims4()?;
    if b * t == 0 {
        return Tensor::zeros((b, h, t, t), vectors.dtype(), vectors.device());
    }
    let dims = [b, h, t, 2 * t];
    check_memory(OP, format_args!("a term of {dims:?}"), &dims)?;
    let products = vectors.contiguous()?.broadcast_matmul(&rows.transpose(D::Minus2, D::Minus1)?)?;
    let shifted = products.reshape((b, h, 2 * t * t))?.narrow(2, t - 1, t * (2 * t - 1))?;
    shifted.reshape((b, h, t, 2 * t - 1))?.narrow(3, 0, t)
}

/// The most numbers in which terms are computed at once, unless those of one key head are more: 16 MB, for them to stay
/// in a processor's cache until they are read.
const MAX_NUMBERS: usize = 1 << 22;

/// The keys and values of a call, and the terms of its scores.
pub(crate) struct KeysByHeads {
    /// (B, H, T, D) and (B, H, T, D_v), or with H_kv heads.
    pub k: Tensor,
    pub v: Tensor,
    pub terms: DistanceTerms,
}

impl Keys for KeysByHeads {
    /// Weights and statistics are of all heads at once.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let attend = |heads| self.attend_part(heads, q, mask, options, outputs);
        let mut blocks = self.blocks(q, options)?.into_iter();
        match outputs {
            Outputs::Context => {}
            // The path of the first heads is that of all.
            Outputs::Plan => return attend(blocks.next().unwrap_or(0..0)),
            _ => return attend(0..self.k.dim(1)?),
        }
        let contexts = blocks.map(|heads| attend(heads)?.context.transpose(1, 2));
        let context = Tensor::cat(&contexts.collect::<Result<Vec<_>>>()?, 2)?.contiguous()?.transpose(1, 2)?;
        Ok(Attended::context(context))
    }
}

impl KeysByHeads {
    /// Key heads that are attended to at once.
    fn blocks(&self, q: &Tensor, options: &SdpaOptions) -> Result<Vec<Range<usize>>> {
        let ((b, h, t, _), h_kv) = (q.dims4()?, self.k.dim(1)?);
        // What the terms of a head's scores hold at once.
        let numbers = [t, 2 * t, h / h_kv].into_iter().fold(b, usize::saturating_mul).max(1);
        let size = if options.drops_by_seed() { h_kv } else { (MAX_NUMBERS / numbers).clamp(1, h_kv) };
        Ok((0..h_kv).step_by(size).map(|start| start..h_kv.min(start + size)).collect())
    }

    /// Attention to some key heads.
    fn attend_part(
        &self,
        keys: Range<usize>,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        outputs: Outputs,
    ) -> Result<Attended> {
        let (h, h_kv) = (q.dim(1)?, self.k.dim(1)?);
        let heads = keys.start * (h / h_kv)..keys.end * (h / h_kv);
        let of_keys = |tensor: &Tensor| tensor.narrow(1, keys.start, keys.len());
        let (q, options) = (q.narrow(1, heads.start, heads.len())?, options.of_heads(&heads)?);
        let keys = OwnKeys { k: of_keys(&self.k)?, v: of_keys(&self.v)?, sequences: None, function: None };
        let mask = mask.of_heads(heads.clone(), h)?.with_bias(&self.terms.bias(heads)?);
        keys.attend(&q, &mask, &options, outputs)
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

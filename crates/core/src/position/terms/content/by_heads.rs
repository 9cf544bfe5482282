//! Attention whose scores get terms by content and distance: for some heads at a time, so that there is a bias for
//! these alone.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::distances::DistanceTerms;
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, Beside, Keys, Plan, SdpaOptions, attend, plan, scaled_dot_product_attention};

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

/// The arguments of attention for some heads.
struct Part {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: SdpaOptions,
}

impl Keys for KeysByHeads {
    /// Weights and statistics are of all heads at once.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, beside: Beside) -> Result<Attended> {
        if !matches!(beside, Beside::Nothing) {
            let Part { q, k, v, mask, options } = self.part(q, mask, options, 0..self.k.dim(1)?)?;
            return attend([&q, &k, &v], &mask, &options, beside);
        }
        let contexts = self.blocks(q, options)?.into_iter().map(|heads| {
            let Part { q, k, v, mask, options } = self.part(q, mask, options, heads)?;
            scaled_dot_product_attention(&q, &k, &v, &mask, &options)?.transpose(1, 2)
        });
        let context = Tensor::cat(&contexts.collect::<Result<Vec<_>>>()?, 2)?.contiguous()?.transpose(1, 2)?;
        Ok(Attended::context(context))
    }

    /// The path of the first heads, which is that of all.
    fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let first = self.blocks(q, options)?.into_iter().next().unwrap_or(0..0);
        let Part { q, k, v, mask, options } = self.part(q, mask, options, first)?;
        plan(&q, &k, &v, &mask, &options)
    }
}

impl KeysByHeads {
    /// Key heads that are attended to at once.
    fn blocks(&self, q: &Tensor, options: &SdpaOptions) -> Result<Vec<Range<usize>>> {
        let (h, h_kv) = (q.dim(1)?, self.k.dim(1)?);
        let numbers = self.terms.numbers_of_head()?.saturating_mul(h / h_kv).max(1);
        let size = if options.drops_by_seed() { h_kv } else { (MAX_NUMBERS / numbers).clamp(1, h_kv) };
        Ok((0..h_kv).step_by(size).map(|start| start..h_kv.min(start + size)).collect())
    }

    fn part(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, keys: Range<usize>) -> Result<Part> {
        let (h, h_kv) = (q.dim(1)?, self.k.dim(1)?);
        let heads = keys.start * (h / h_kv)..keys.end * (h / h_kv);
        let of_keys = |tensor: &Tensor| tensor.narrow(1, keys.start, keys.len());
        let mask = mask.of_heads(heads.clone(), h)?;
        Ok(Part {
            q: q.narrow(1, heads.start, heads.len())?,
            k: of_keys(&self.k)?,
            v: of_keys(&self.v)?,
            options: options.of_heads(&heads)?,
            mask: mask.with_bias(&self.terms.bias(heads)?),
        })
    }
}

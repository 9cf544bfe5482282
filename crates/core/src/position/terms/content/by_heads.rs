//! Attention whose scores get terms by content and distance: for some heads at a time, so that there is a bias for
//! these alone.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::distances::DistanceTerms;
use crate::mask::AttentionMask;
use crate::sdpa::{
    AttentionOutput, AttentionStatistics, Keys, Plan, SdpaOptions, StatisticsOptions, plan,
    scaled_dot_product_attention, scaled_dot_product_attention_with_statistics,
    scaled_dot_product_attention_with_weights,
};

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
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
        let contexts = self.blocks(q, options)?.into_iter().map(|heads| {
            let Part { q, k, v, mask, options } = self.part(q, mask, options, heads)?;
            scaled_dot_product_attention(&q, &k, &v, &mask, &options)?.transpose(1, 2)
        });
        Tensor::cat(&contexts.collect::<Result<Vec<_>>>()?, 2)?.contiguous()?.transpose(1, 2)
    }

    /// All at once, as weights are.
    fn attend_with_weights(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<AttentionOutput> {
        let Part { q, k, v, mask, options } = self.part(q, mask, options, 0..self.k.dim(1)?)?;
        scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options)
    }

    fn attend_with_statistics(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        let Part { q, k, v, mask, options } = self.part(q, mask, options, 0..self.k.dim(1)?)?;
        scaled_dot_product_attention_with_statistics(&q, &k, &v, &mask, &options, wanted)
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

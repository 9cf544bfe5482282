//! Packed sequences whose scores get a bias by distance: one after the other, each with its part of one bias.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::mask::AttentionMask;
use crate::position::RelativeBias;
use crate::sdpa::{PackedSequences, Plan, SdpaOptions, plan, scaled_dot_product_attention};

/// The keys and values of packed sequences, and the bias.
pub(super) struct PackedBias<'a> {
    /// (1, H_kv, total_kv, D) and (1, H_kv, total_kv, D_v).
    k: Tensor,
    v: Tensor,
    sequences: &'a PackedSequences,
    /// (1, H, T_q, T_kv) for as many queries and keys as the longest sequence has: those of a shorter one begin alike.
    bias: Tensor,
}

impl<'a> PackedBias<'a> {
    pub fn new(k: Tensor, v: Tensor, sequences: &'a PackedSequences, bias: &RelativeBias) -> Result<Self> {
        let longest = |range: fn(&PackedSequences, usize) -> Range<usize>| {
            (0..sequences.len()).map(|s| range(sequences, s).len()).max().unwrap_or(0)
        };
        let bias = bias.forward(longest(PackedSequences::queries), longest(PackedSequences::keys), 0)?;
        Ok(Self { k, v, sequences, bias })
    }

    /// The context (1, H, total_q, D_v), a view of (1, total_q, H, D_v).
    pub fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
        self.check(mask)?;
        let with_queries = (0..self.sequences.len()).filter(|&s| !self.sequences.queries(s).is_empty());
        let contexts = with_queries.map(|s| {
            let ([q, k, v], mask) = self.sequence(s, q, mask)?;
            scaled_dot_product_attention(&q, &k, &v, &mask, options)?.transpose(1, 2)
        });
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        if contexts.is_empty() {
            let (_, h, _, _) = q.dims4()?;
            return Tensor::zeros((1, h, 0, self.v.dim(3)?), q.dtype(), q.device());
        }
        Tensor::cat(&contexts, 1)?.contiguous()?.transpose(1, 2)
    }

    /// The path of the longest sequence.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        self.check(mask)?;
        let longest = (0..self.sequences.len()).max_by_key(|&s| self.sequences.queries(s).len());
        let Some(s) = longest else { bail!("[multi_head_attention] there are no packed sequences to plan for") };
        let ([q, k, v], mask) = self.sequence(s, q, mask)?;
        plan(&q, &k, &v, &mask, options)
    }

    fn check(&self, mask: &AttentionMask) -> Result<()> {
        match mask.tensor_kind() {
            Some(tensor) => bail!(
                "[multi_head_attention] the mask has a {tensor} tensor, expected none: packed sequences have no (B, \
                 H, T_q, T_kv)"
            ),
            None => Ok(()),
        }
    }

    /// Queries, keys and values of sequence `s`, and its mask.
    fn sequence(&self, s: usize, q: &Tensor, mask: &AttentionMask) -> Result<([Tensor; 3], AttentionMask)> {
        let (queries, keys) = (self.sequences.queries(s), self.sequences.keys(s));
        let own = self.bias.narrow(2, 0, queries.len())?.narrow(3, 0, keys.len())?;
        let mask = mask.of_sequence(s, self.sequences.len(), queries.len(), keys.len()).with_bias(&own);
        Ok((self.sequences.narrow(s, [q, &self.k, &self.v])?, mask))
    }
}

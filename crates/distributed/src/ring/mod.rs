//! Ring attention over a sequence whose positions are divided among ranks.

mod cache;
#[cfg(test)]
mod tests;
mod zigzag;

use std::ops::Range;

use candle_attention::{
    AttentionFunction, AttentionMask, SdpaOptions, merge_attention, scaled_dot_product_attention_with_lse,
};
use candle_attention_core::internal::{has_relative_bias, take_alibi_slopes, without_sinks};
use candle_core::{DType, Result, Tensor, bail};

use crate::communicator::{Communicator, expect_untracked};
pub use cache::ContextCache;
pub use zigzag::ZigZag;

/// Ring attention (Liu et al. 2023, arXiv:2310.01889). Each rank keeps the queries of its positions, and keys and
/// values are passed around a ring of ranks. The next keys are transferred while the queries attend to the present
/// keys. The partial outputs of a query are merged by their log-sum-exp.
///
/// A single rank returns the bits of
/// [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention). Several ranks add the partial
/// outputs of a query in another order, so results with different world sizes differ by rounding, by about 1e-6 of the
/// values. Results with one world size have the same bits every time.
///
/// It supports inference only. The gradients of keys and values would have to return from other ranks, but Candle
/// computes on each rank only the gradients that its own loss reaches, so a rank could wait for another rank that never
/// answers. With several ranks, keys and values that are tracked for gradients are an error. Queries stay on their rank
/// and may be tracked.
///
/// ```
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig};
/// use candle_attention_distributed::{RingAttention, SingleProcess, ZigZag};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let processes = SingleProcess; // or mpi::Mpi, on each of several ranks
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_rope(RopeConfig::new(10_000.0));
/// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let order = ZigZag::new(1024, &processes);
/// let positions = order.positions().map(|position| position as u32).collect::<Vec<_>>();
/// let xs = Tensor::randn(0f32, 1., (1, positions.len(), 64), &Device::Cpu)?; // of these positions
/// let positions = Tensor::new(positions, &Device::Cpu)?;
///
/// let attend = RingAttention::function(&order, &processes);
/// let ys = mha.forward_with(AttentionInput::new(&xs).with_positions(&positions).with_function(&attend))?;
/// assert_eq!(ys.dims(), xs.dims());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct RingAttention {
    mask: AttentionMask,
    options: SdpaOptions,
}

impl RingAttention {
    /// Returns ring attention with a mask and options as those arguments of
    /// [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention) for the whole sequence. The
    /// mask may be causal, and may have windows, local windows, chunks, lengths and starts.
    pub fn new(mask: &AttentionMask, options: &SdpaOptions) -> Self {
        Self { mask: mask.clone(), options: options.clone() }
    }

    /// Returns [`attend`](Self::attend) as a function for
    /// [`AttentionInput::with_function`](candle_attention::AttentionInput::with_function). The layer passes its mask
    /// and options.
    pub fn function<'a>(order: &'a ZigZag, processes: &'a dyn Communicator) -> Box<AttentionFunction<'a>> {
        Box::new(|q, k, v, mask, options| Ok(Self::new(mask, options).attend(q, k, v, order, processes)?.0))
    }

    /// Attends from this rank's queries to the keys of all ranks: q (B, H, T, D), k (B, H_kv, T, D) and v (B, H_kv, T,
    /// D_v) are of this rank's positions. Returns the attention output (B, H, T, D_v) and the log-sum-exp (B, H, T).
    ///
    /// # Errors
    /// - If the tensors do not have this rank's number of positions.
    /// - With several ranks, if keys or values are tracked for gradients.
    /// - If the mask has boolean masks or biases as tensors, as with relative biases and keys that a layer appends.
    /// - The errors of [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention) and of the
    ///   communicator.
    pub fn attend(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        order: &ZigZag,
        processes: &dyn Communicator,
    ) -> Result<(Tensor, Tensor)> {
        let rank = processes.rank();
        let size = processes.size();
        order.check_parts(q)?;
        for xs in [q, k, v] {
            if xs.rank() != 4 || xs.dim(2)? != order.count(rank) {
                bail!(
                    "[ring_attention] expected (B, H, {}, D) on rank {rank}, found {:?}",
                    order.count(rank),
                    xs.dims()
                )
            }
        }
        if size > 1 {
            expect_untracked("ring_attention", &[k, v])?;
            if has_relative_bias(&self.options) {
                bail!("[ring_attention] the options have a relative bias over one rank's keys, expected none")
            }
        }
        let mut runs: Vec<_> =
            order.runs(rank).into_iter().map(|queries| RingRun { queries, attended: None }).collect();
        let mut keys_values = [k.clone(), v.clone()];
        for step in 0..size {
            let source = (rank + size - step) % size;
            let mut attend = || self.attend_to(q, &keys_values, &order.runs(source), &mut runs);
            if step + 1 == size {
                attend()?;
                break;
            }
            // The next keys are the keys of the rank before the source of the present keys.
            let count = order.count((source + size - 1) % size);
            let shapes = keys_values.each_ref().map(|xs| [&xs.dims()[..2], &[count], &xs.dims()[3..]].concat());
            let next = processes.send_recv(&keys_values, &shapes, &mut attend)?;
            keys_values =
                next.try_into().map_err(|_| candle_core::Error::msg("[ring_attention] expected keys and values"))?;
        }
        let mut outputs = Vec::new();
        let mut lses = Vec::new();
        for (output, lse) in runs.into_iter().filter_map(|run| run.attended) {
            outputs.push(output);
            lses.push(lse);
        }
        if outputs.is_empty() {
            // This rank has no positions: the output is empty.
            return scaled_dot_product_attention_with_lse(q, k, v, &AttentionMask::none(), &self.options);
        }
        Ok((Tensor::cat(&outputs, 2)?, Tensor::cat(&lses, 2)?))
    }

    /// Attends from the queries of each run to `keys_values`, whose positions are `key_runs`. A pair of runs is skipped
    /// if the mask excludes all of its keys, but a run always attends to its own keys, since sinks are added there.
    fn attend_to(
        &self,
        q: &Tensor,
        keys_values: &[Tensor; 2],
        key_runs: &[Range<usize>],
        runs: &mut [RingRun],
    ) -> Result<()> {
        let b = q.dim(0)?;
        let mut first_query = 0;
        for RingRun { queries, attended } in runs {
            let own = q.narrow(2, first_query, queries.len())?;
            first_query += queries.len();
            let mut first_key = 0;
            for keys in key_runs {
                let start = first_key;
                let len = keys.len();
                first_key += len;
                let mask = self.mask.of_part(b, queries.clone(), keys.clone())?;
                let resolved = mask.resolve(b, queries.len(), len)?;
                let is_own = keys == queries;
                let is_excluded = |row: usize| (0..queries.len()).all(|query| resolved.kv_range(row, query).is_empty());
                if !is_own && (0..b).all(is_excluded) {
                    continue;
                }
                let k = keys_values[0].narrow(2, start, len)?;
                let v = keys_values[1].narrow(2, start, len)?;
                // A sink is one more score of a query. It is added once, with the query's own run, even if the mask
                // excludes that run.
                let options = if is_own { self.options.clone() } else { without_sinks(&self.options) };
                let part = scaled_dot_product_attention_with_lse(&own, &k, &v, &mask, &options)?;
                *attended = Some(match attended.take() {
                    None => part,
                    Some(before) => merge_attention(&[before, part])?,
                });
            }
        }
        Ok(())
    }

    /// Attends from one token at `position`, whose key is the last of all, to this rank's keys. Only one rank adds the
    /// sinks.
    pub(crate) fn attend_from(
        &self,
        position: usize,
        q: &Tensor,
        keys: &StoredKeys,
        has_sinks: bool,
    ) -> Result<(Tensor, Tensor)> {
        let StoredKeys { k, v, positions: stored } = keys;
        let b = q.dim(0)?;
        let resolved = self.mask.of_part(b, position..position + 1, 0..position + 1)?.resolve(b, 1, position + 1)?;
        let index = |bound: usize| stored.partition_point(|&key| key < bound);
        let mut starts = Vec::with_capacity(b);
        let mut ends = Vec::with_capacity(b);
        for row in 0..b {
            let attended = resolved.kv_range(row, 0);
            starts.push(index(attended.start));
            ends.push(index(attended.end));
        }
        let mut mask = AttentionMask::none().with_starts(starts).with_valid_lens(ends);
        let mut options = if has_sinks { self.options.clone() } else { without_sinks(&self.options) };
        if let Some(slopes) = take_alibi_slopes(&mut options) {
            let distances: Vec<_> = stored.iter().map(|&key| position.abs_diff(key) as f32).collect();
            let distances = Tensor::from_vec(distances, (1, 1, 1, stored.len()), q.device())?;
            let slopes = slopes.to_dtype(DType::F32)?.reshape((1, slopes.elem_count(), 1, 1))?;
            mask = mask.with_bias(&slopes.broadcast_mul(&distances)?.neg()?);
        }
        scaled_dot_product_attention_with_lse(q, k, v, &mask, &options)
    }
}

/// The keys and values that a rank stores, (B, H_kv, T, ..).
pub(crate) struct StoredKeys {
    pub k: Tensor,
    pub v: Tensor,
    /// The positions of the keys, in increasing order.
    pub positions: Vec<usize>,
}

/// Queries of successive positions, with their attention output and log-sum-exp so far. The first keys are their own.
struct RingRun {
    queries: Range<usize>,
    attended: Option<(Tensor, Tensor)>,
}

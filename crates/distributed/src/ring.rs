//! Attention over a sequence whose keys are on several processes.

use std::ops::Range;

use candle_attention::{
    AttentionFunction, AttentionMask, SdpaOptions, merge_attention, scaled_dot_product_attention_with_lse,
};
use candle_core::{DType, Result, Tensor, bail};

use crate::communicator::Communicator;
use crate::communicator::expect_untracked;
use crate::zigzag::ZigZag;

/// Ring attention (Liu et al. 2023, arXiv:2310.01889): each process keeps the queries of its positions, and keys and
/// values go from process to process, the next ones while the last ones are attended to. What a query saw in each place
/// is merged by its log-sum-exp.
///
/// One process gives the bits of [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention).
/// Several add up the parts of a query in another order than one would, so that results of different numbers of
/// processes differ by roundings, about 1e-6 of the values; those of one number of processes are the same bits every
/// time.
///
/// It is for inference. Gradients of keys and values would have to come back from other processes, but Candle computes
/// in each process only those that its own loss reaches, so that one could wait for another that never answers. Several
/// processes refuse keys and values that are tracked for gradients; queries stay where they are and may be tracked.
///
/// ```
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig};
/// use candle_attention_distributed::{RingAttention, SingleProcess, ZigZag};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let processes = SingleProcess; // or mpi::Mpi, in each of several processes
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
    /// Attention with the arguments of [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention)
    /// for the whole sequence: the mask may be causal, and have windows, bands, chunks, lengths and starts.
    pub fn new(mask: &AttentionMask, options: &SdpaOptions) -> Self {
        Self { mask: mask.clone(), options: options.clone() }
    }

    /// [`attend`](Self::attend) for [`AttentionInput::with_function`](candle_attention::AttentionInput::with_function),
    /// with the mask and the options of the layer.
    pub fn function<'a>(order: &'a ZigZag, processes: &'a dyn Communicator) -> Box<AttentionFunction<'a>> {
        Box::new(|q, k, v, mask, options| Ok(Self::new(mask, options).attend([q, k, v], order, processes)?.0))
    }

    /// q (B, H, T, D), k (B, H_kv, T, D) and v (B, H_kv, T, D_v) of this process's positions give the context (B, H, T,
    /// D_v) of its queries over the keys of all processes, and the log-sum-exp (B, H, T).
    ///
    /// # Errors
    /// If the tensors do not have this process's positions; in several processes, for keys and values that are tracked
    /// for gradients; for a mask with `keep` or `bias` tensors, as relative biases and keys that a layer appends are;
    /// and those of [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention) and of the
    /// processes.
    pub fn attend(&self, qkv: [&Tensor; 3], order: &ZigZag, processes: &dyn Communicator) -> Result<(Tensor, Tensor)> {
        let (rank, size) = (processes.rank(), processes.size());
        order.check_parts(qkv[0])?;
        for xs in qkv {
            if xs.rank() != 4 || xs.dim(2)? != order.count(rank) {
                bail!(
                    "[ring_attention] expected (B, H, {}, D) in process {rank}, found {:?}",
                    order.count(rank),
                    xs.dims()
                )
            }
        }
        let [q, k, v] = qkv;
        if size > 1 {
            expect_untracked("ring_attention", &[k, v])?;
            if self.options.has_distance_bias() {
                bail!(
                    "[ring_attention] the options have a distance bias, which is of one process's keys, expected none"
                )
            }
        }
        let mut runs: Vec<_> = order.runs(rank).into_iter().map(|queries| Run { queries, attended: None }).collect();
        let mut held = [k.clone(), v.clone()];
        for step in 0..size {
            let of = (rank + size - step) % size;
            let mut attend = || self.attend_to(q, &held, &order.runs(of), &mut runs);
            if step + 1 == size {
                attend()?;
                break;
            }
            // Those of the process before the one whose keys are here.
            let count = order.count((of + size - 1) % size);
            let shapes = held.each_ref().map(|xs| [&xs.dims()[..2], &[count], &xs.dims()[3..]].concat());
            let next = processes.send_recv(&held, &shapes, &mut attend)?;
            held = next.try_into().map_err(|_| candle_core::Error::msg("[ring_attention] expected keys and values"))?;
        }
        let attended = runs.into_iter().filter_map(|run| run.attended);
        let (contexts, lses) = attended.unzip::<_, _, Vec<_>, Vec<_>>();
        if contexts.is_empty() {
            // Of no positions.
            return scaled_dot_product_attention_with_lse(q, k, v, &AttentionMask::none(), &self.options);
        }
        Ok((Tensor::cat(&contexts, 2)?, Tensor::cat(&lses, 2)?))
    }

    /// Attends from the queries of each run to the keys and values `held`, which are of the positions `keys`: to their
    /// own ones, and to others as far as the mask leaves any.
    fn attend_to(&self, q: &Tensor, held: &[Tensor; 2], keys: &[Range<usize>], runs: &mut [Run]) -> Result<()> {
        let (b, mut first_query) = (q.dim(0)?, 0);
        for Run { queries, attended } in runs {
            let own = q.narrow(2, first_query, queries.len())?;
            first_query += queries.len();
            let mut first_key = 0;
            for keys in keys {
                let (start, len) = (first_key, keys.len());
                first_key += len;
                let mask = self.mask.of_part(b, queries.clone(), keys.clone())?;
                let seen = mask.resolve(b, queries.len(), len)?;
                let is_own = keys == queries;
                if !is_own && (0..b).all(|b| (0..queries.len()).all(|query| seen.kv_range(b, query).is_empty())) {
                    continue;
                }
                let [k, v] = [held[0].narrow(2, start, len)?, held[1].narrow(2, start, len)?];
                // A query's sink is one more score, and counts beside its own key, which may be hidden.
                let options = if is_own { self.options.clone() } else { self.options.clone().without_sinks() };
                let part = scaled_dot_product_attention_with_lse(&own, &k, &v, &mask, &options)?;
                *attended = Some(match attended.take() {
                    None => part,
                    Some(before) => merge_attention(&[before, part])?,
                });
            }
        }
        Ok(())
    }

    /// Attends from one token at `position`, whose key is the last one, to those of the keys that are `held`, of which
    /// the positions increase. The sinks are for one of the processes.
    pub(crate) fn attend_from(
        &self,
        position: usize,
        qkv: [&Tensor; 3],
        held: &[usize],
        has_sinks: bool,
    ) -> Result<(Tensor, Tensor)> {
        let [q, k, v] = qkv;
        let b = q.dim(0)?;
        let seen = self.mask.of_part(b, position..position + 1, 0..position + 1)?.resolve(b, 1, position + 1)?;
        let row = |position: usize| held.partition_point(|&held| held < position);
        let seen = (0..b).map(|b| seen.kv_range(b, 0)).map(|keys| (row(keys.start), row(keys.end)));
        let (starts, ends) = seen.unzip::<_, _, Vec<_>, Vec<_>>();
        let mut mask = AttentionMask::none().with_starts(starts).with_valid_lens(ends);
        let options = if has_sinks { self.options.clone() } else { self.options.clone().without_sinks() };
        let (options, slopes) = options.take_alibi_slopes();
        if let Some(slopes) = slopes {
            let distances: Vec<_> = held.iter().map(|&held| position.abs_diff(held) as f32).collect();
            let distances = Tensor::from_vec(distances, (1, 1, 1, held.len()), q.device())?;
            let slopes = slopes.to_dtype(DType::F32)?.reshape((1, slopes.elem_count(), 1, 1))?;
            mask = mask.with_bias(&slopes.broadcast_mul(&distances)?.neg()?);
        }
        scaled_dot_product_attention_with_lse(q, k, v, &mask, &options)
    }
}

/// Queries of successive positions, and their context and log-sum-exp so far, from their own keys on.
struct Run {
    queries: Range<usize>,
    attended: Option<(Tensor, Tensor)>,
}

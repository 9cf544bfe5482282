//! Attention over a sequence whose keys are on several processes, the positions that each of them has, and the keys and
//! values of one layer for decoding.

#[cfg(test)]
mod tests;

use std::ops::Range;

use candle_attention::{
    AttentionFunction, AttentionMask, SdpaOptions, merge_attention, scaled_dot_product_attention_with_lse,
};
use candle_attention_core::internal::{has_relative_bias, take_alibi_slopes, without_sinks};
use candle_core::{D, DType, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;

use crate::communicator::{Communicator, expect_untracked};

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
            if has_relative_bias(&self.options) {
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
        let mut options = if has_sinks { self.options.clone() } else { without_sinks(&self.options) };
        if let Some(slopes) = take_alibi_slopes(&mut options) {
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

/// The keys and values of a layer, of which each process holds some: those of its positions of the prompt, and of the
/// tokens after it one in as many as there are processes.
#[derive(Debug)]
pub struct ContextCache {
    /// Its clones share buffers, so that a clone of this cache would write over its tokens.
    own: KvCache,
    /// The positions that this process holds, which increase.
    positions: Vec<usize>,
    /// Positions in all processes, and how many of them were decoded.
    len: usize,
    decoded: usize,
}

impl ContextCache {
    /// A cache with room for `capacity` positions of this process, which grows beyond them.
    pub fn new(capacity: usize) -> Self {
        // Candle's cache grows by its first capacity.
        Self { own: KvCache::new(2, capacity.max(1)), positions: Vec::new(), len: 0, decoded: 0 }
    }

    /// The positions that this process holds.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether this process holds none.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Keeps the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of this process's part of a prompt, which is the
    /// beginning of the sequence.
    ///
    /// # Errors
    /// If they are not of the positions that the order gives this process, or not the first ones, and if they are
    /// tracked for gradients, which the cache would lose. The cache is as it was then.
    pub fn append_prompt(&mut self, k: &Tensor, v: &Tensor, order: &ZigZag) -> Result<()> {
        expect_untracked("context_cache", &[k, v])?;
        let positions: Vec<_> = order.positions().collect();
        if self.len > 0 || !fits(k, v, positions.len()) {
            bail!(
                "[context_cache] expected {} positions of a prompt in an empty cache, found k {:?} and v {:?} in {:?} \
                 and {:?}, and {} positions before",
                positions.len(),
                k.dims(),
                v.dims(),
                k.dtype(),
                v.dtype(),
                self.len
            )
        }
        let own = self.appended(k, v)?;
        (self.own, self.positions, self.len) = (own, positions, order.len());
        Ok(())
    }

    /// The cache's keys and values and some more, in the same buffers: the cache does not read behind its own.
    fn appended(&self, k: &Tensor, v: &Tensor) -> Result<KvCache> {
        let mut own = self.own.clone();
        own.append(&k.contiguous()?, &v.contiguous()?)?;
        Ok(own)
    }

    /// Attends from the last token, of which every process has the query (B, H, 1, D), key (B, H_kv, 1, D) and value,
    /// to the keys of all processes and its own, which one of them keeps. Every process gets the same context (B, H, 1,
    /// D_v).
    ///
    /// # Errors
    /// For more than one token, for tensors that are tracked for gradients, and those of [`RingAttention::attend`]. The
    /// cache is as it was then.
    pub fn decode(&mut self, qkv: [&Tensor; 3], ring: &RingAttention, processes: &dyn Communicator) -> Result<Tensor> {
        let [q, k, v] = qkv;
        if q.rank() != 4 || q.dim(2)? != 1 || !fits(k, v, 1) {
            bail!(
                "[context_cache] expected one token, found q {:?}, and k {:?} and v {:?} in {:?} and {:?}",
                q.dims(),
                k.dims(),
                v.dims(),
                k.dtype(),
                v.dtype()
            )
        }
        expect_untracked("context_cache", &qkv)?;
        let (position, keeps) = (self.len, self.decoded % processes.size() == processes.rank());
        let own_kv = if keeps { self.appended(k, v)? } else { self.own.clone() };
        let positions: Vec<_> = self.positions.iter().copied().chain(keeps.then_some(position)).collect();
        let (keys, values) = match (own_kv.k()?, own_kv.v()?) {
            (Some(keys), Some(values)) => (keys, values),
            _ => (k.narrow(2, 0, 0)?, v.narrow(2, 0, 0)?),
        };
        let (context, lse) = ring.attend_from(position, [q, &keys, &values], &positions, keeps)?;
        // One message for both.
        let own = Tensor::cat(&[context.to_dtype(DType::F32)?, lse.to_dtype(DType::F32)?.unsqueeze(D::Minus1)?], 3)?;
        let d_v = context.dim(3)?;
        let parts = processes.all_gather(&own)?;
        let parts = parts.iter().map(|part| Ok((part.narrow(3, 0, d_v)?, part.narrow(3, d_v, 1)?.squeeze(3)?)));
        let context = merge_attention(&parts.collect::<Result<Vec<_>>>()?)?.0.to_dtype(q.dtype())?;
        (self.own, self.positions) = (own_kv, positions);
        (self.len, self.decoded) = (self.len + 1, self.decoded + 1);
        Ok(context)
    }
}

/// Whether keys and values are of `t` positions of the same sequences and heads.
fn fits(k: &Tensor, v: &Tensor, t: usize) -> bool {
    let ([b, h, t_k, _], [b_v, h_v, t_v, _]) = (k.dims(), v.dims()) else { return false };
    [b, h, t_k, &t] == [b_v, h_v, t_v, t_k] && k.dtype() == v.dtype()
}

/// A sequence in twice as many parts as there are processes, of which each process has one from the front and one from
/// the back, so that a causal mask leaves all of them the same work:
///
/// ```text
/// process  0 1 2 2 1 0
/// part     0 1 2 3 4 5
/// ```
///
/// Parts differ in length by at most one position.
#[derive(Debug, Clone, Copy)]
pub struct ZigZag {
    len: usize,
    rank: usize,
    size: usize,
}

impl ZigZag {
    /// The order of a sequence of `len` positions.
    pub fn new(len: usize, processes: &dyn Communicator) -> Self {
        Self { len, rank: processes.rank(), size: processes.size() }
    }

    /// The positions of a process: those of its part from the front and of its part from the back.
    pub fn parts(&self, rank: usize) -> [Range<usize>; 2] {
        let part = |i: usize| {
            let first = |i: usize| i * self.len / (2 * self.size);
            first(i)..first(i + 1)
        };
        [part(rank), part(2 * self.size - 1 - rank)]
    }

    /// The positions of a process as runs of successive ones.
    pub(crate) fn runs(&self, rank: usize) -> Vec<Range<usize>> {
        let [front, back] = self.parts(rank);
        let runs = if front.end == back.start { [front.start..back.end, 0..0] } else { [front, back] };
        runs.into_iter().filter(|run| !run.is_empty()).collect()
    }

    /// The positions of all processes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The positions of this process, in the order of its tensors.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.parts(self.rank).into_iter().flatten()
    }

    /// The number of positions of a process.
    pub(crate) fn count(&self, rank: usize) -> usize {
        self.parts(rank).iter().map(ExactSizeIterator::len).sum()
    }

    /// Candle has no empty tensors on CUDA.
    pub(crate) fn check_parts(&self, xs: &Tensor) -> Result<()> {
        if xs.device().is_cuda() && self.len < 2 * self.size {
            bail!("[zigzag] expected at least {} positions on CUDA, found {}", 2 * self.size, self.len)
        }
        Ok(())
    }

    /// This process's part of a tensor whose dimension `dim` is the sequence.
    ///
    /// # Errors
    /// If it is not as long, and on CUDA if a part is empty.
    pub fn split(&self, xs: &Tensor, dim: usize) -> Result<Tensor> {
        self.check_parts(xs)?;
        if xs.dim(dim)? != self.len {
            bail!("[zigzag] expected {} positions in dimension {dim}, found {:?}", self.len, xs.dims())
        }
        let [front, back] = self.parts(self.rank);
        Tensor::cat(&[xs.narrow(dim, front.start, front.len())?, xs.narrow(dim, back.start, back.len())?], dim)
    }

    /// The inverse of [`split`](Self::split): the parts of all processes, in the order of the sequence, in each of
    /// them.
    ///
    /// # Errors
    /// If the part is not as long as this process's, and those of the processes.
    pub fn gather(&self, own: &Tensor, dim: usize, processes: &dyn Communicator) -> Result<Tensor> {
        let count = self.count(self.rank);
        if own.dim(dim)? != count {
            bail!("[zigzag] expected {count} positions in dimension {dim}, found {:?}", own.dims())
        }
        let longest = (0..self.size).map(|rank| self.count(rank)).max().unwrap_or(0);
        let all = processes.all_gather(&own.pad_with_zeros(dim, 0, longest - count)?)?;
        let part = |(rank, at): (usize, usize)| {
            let parts = self.parts(rank);
            all[rank].narrow(dim, at * parts[0].len(), parts[at].len())
        };
        let in_order = (0..self.size).map(|rank| (rank, 0)).chain((0..self.size).rev().map(|rank| (rank, 1)));
        Tensor::cat(&in_order.map(part).collect::<Result<Vec<_>>>()?, dim)
    }
}

//! Keys and values of one layer on several processes, for decoding.

use candle_attention::merge_attention;
use candle_core::{D, DType, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;

use crate::communicator::Communicator;
use crate::communicator::expect_untracked;
use crate::ring::RingAttention;
use crate::zigzag::ZigZag;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::SingleProcess;
    use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention};
    use candle_core::Device;

    /// A process that the others have left.
    struct Alone;

    impl Communicator for Alone {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
            bail!("[alone] nobody answers")
        }

        fn all_gather(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
            self.all_reduce_sum(xs).map(|sum| vec![sum])
        }

        fn send_recv(&self, xs: &[Tensor], _: &[Vec<usize>], _: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Tensor>> {
            xs.iter().map(|xs| self.all_reduce_sum(xs)).collect()
        }

        fn bytes_sent(&self) -> u64 {
            0
        }
    }

    fn numbers(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
        Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
    }

    /// Prompts and tokens that are refused, in each place that may refuse them, and between them those that are not.
    #[test]
    fn a_call_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
        let (prompt, all) = (5, 9);
        let (q, k, v) = (numbers((2, 4, all, 8))?, numbers((2, 2, all, 8))?, numbers((2, 2, all, 6))?);
        for capacity in [3, 16, 0] {
            let mut cache = ContextCache::new(capacity);
            let order = ZigZag::new(prompt, &SingleProcess);
            let (own_k, own_v) = (k.narrow(2, 0, prompt)?, v.narrow(2, 0, prompt)?);
            let wrong = [
                own_v.narrow(0, 0, 1)?,
                own_v.narrow(1, 0, 1)?,
                own_v.narrow(2, 0, 3)?,
                own_v.get(0)?,
                own_v.to_dtype(DType::I64)?,
            ];
            for v in wrong {
                let text = cache.append_prompt(&own_k, &v, &order).expect_err("other values").to_string();
                assert!(text.starts_with("[context_cache] "), "{text}");
                assert!(cache.is_empty());
            }
            cache.append_prompt(&own_k, &own_v, &order)?;

            let ring = RingAttention::default();
            for at in prompt..all {
                let [q, k, v] = [&q, &k, &v].map(|xs| xs.narrow(2, at, 1));
                let (q, k, v) = (q?, k?, v?);
                let (three, one) = (q.narrow(1, 0, 3)?, v.narrow(1, 0, 1)?);
                for refused in [[&three, &k, &v], [&q, &k, &one], [&q, &one, &v], [&q.get(0)?, &k, &v]] {
                    assert!(cache.decode(refused, &ring, &SingleProcess).is_err());
                    assert_eq!(cache.len(), at);
                }
                let text = cache.decode([&q, &k, &v], &ring, &Alone).expect_err("no answer").to_string();
                assert!(text.starts_with("[alone]"), "{text}");
                assert_eq!(cache.len(), at);
                cache.decode([&q, &k, &v], &ring, &SingleProcess)?;
            }
            let query = q.narrow(2, all - 1, 1)?;
            let found = cache.decode([&query, &k.narrow(2, 0, 1)?, &v.narrow(2, 0, 1)?], &ring, &SingleProcess)?;
            let with_first = |xs: &Tensor| Tensor::cat(&[xs, &xs.narrow(2, 0, 1)?], 2);
            let (k, v) = (with_first(&k)?, with_first(&v)?);
            let plain = (AttentionMask::none(), SdpaOptions::default());
            let expected = scaled_dot_product_attention(&query, &k, &v, &plain.0, &plain.1)?;
            let off = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(off < 1e-5, "off by {off}");
        }
        Ok(())
    }
}

//! Caches of calls that fail, and the order of positions.

use super::{ContextCache, RingAttention, ZigZag};
use crate::communicator::Communicator;
use crate::communicator::SingleProcess;
use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention};
use candle_core::{DType, Device, Result, Tensor, bail};

/// Communicator whose operations fail.
struct Alone;

impl Communicator for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
        bail!("[alone] no other rank answers")
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

/// Checks prompts and tokens that are an error, in each function that may return it, with valid tokens between them.
#[test]
fn a_call_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
    let prompt = 5;
    let all = 9;
    let q = numbers((2, 4, all, 8))?;
    let k = numbers((2, 2, all, 8))?;
    let v = numbers((2, 2, all, 6))?;
    for capacity in [3, 16, 0] {
        let mut cache = ContextCache::new(capacity);
        let order = ZigZag::new(prompt, &SingleProcess);
        let own_k = k.narrow(2, 0, prompt)?;
        let own_v = v.narrow(2, 0, prompt)?;
        let wrong = [
            own_v.narrow(0, 0, 1)?,
            own_v.narrow(1, 0, 1)?,
            own_v.narrow(2, 0, 3)?,
            own_v.get(0)?,
            own_v.to_dtype(DType::I64)?,
        ];
        for wrong_v in wrong {
            let text = cache.append_prompt(&own_k, &wrong_v, &order).expect_err("other values").to_string();
            assert!(text.starts_with("[context_cache] "), "{text}");
            assert!(cache.is_empty());
        }
        cache.append_prompt(&own_k, &own_v, &order)?;

        let ring = RingAttention::default();
        for at in prompt..all {
            let token_q = q.narrow(2, at, 1)?;
            let token_k = k.narrow(2, at, 1)?;
            let token_v = v.narrow(2, at, 1)?;
            let three_heads = token_q.narrow(1, 0, 3)?;
            let one_head = token_v.narrow(1, 0, 1)?;
            for [wrong_q, wrong_k, wrong_v] in [
                [&three_heads, &token_k, &token_v],
                [&token_q, &token_k, &one_head],
                [&token_q, &one_head, &token_v],
                [&token_q.get(0)?, &token_k, &token_v],
            ] {
                assert!(cache.decode(wrong_q, wrong_k, wrong_v, &ring, &SingleProcess).is_err());
                assert_eq!(cache.len(), at);
            }
            let text = cache.decode(&token_q, &token_k, &token_v, &ring, &Alone).expect_err("no answer").to_string();
            assert!(text.starts_with("[alone]"), "{text}");
            assert_eq!(cache.len(), at);
            cache.decode(&token_q, &token_k, &token_v, &ring, &SingleProcess)?;
        }
        let query = q.narrow(2, all - 1, 1)?;
        let found = cache.decode(&query, &k.narrow(2, 0, 1)?, &v.narrow(2, 0, 1)?, &ring, &SingleProcess)?;
        let with_first = |xs: &Tensor| Tensor::cat(&[xs, &xs.narrow(2, 0, 1)?], 2);
        let k = with_first(&k)?;
        let v = with_first(&v)?;
        let mask = AttentionMask::none();
        let expected = scaled_dot_product_attention(&query, &k, &v, &mask, &SdpaOptions::default())?;
        let off = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(off < 1e-5, "off by {off}");
    }
    Ok(())
}

#[test]
fn every_position_is_on_one_rank_and_causal_work_is_equal() {
    for size in 1..6 {
        for len in [0, 1, 7, 12, 60, 61] {
            let order = ZigZag { len, rank: 0, size };
            let mut all: Vec<_> = (0..size).flat_map(|rank| order.parts(rank)).flatten().collect();
            all.sort_unstable();
            assert_eq!(all, (0..len).collect::<Vec<_>>());
            if len.is_multiple_of(2 * size) {
                let work = |rank| order.parts(rank).into_iter().flatten().map(|position| position + 1).sum::<usize>();
                assert!((1..size).all(|rank| work(rank) == work(0)), "{len} over {size}");
            }
        }
    }
}

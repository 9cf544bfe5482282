//! Caches that are reordered, truncated and forked after calls of no token, of one, and of a few tokens.

use crate::program::{EMBED_DIM, difference, tolerance};
use crate::*;

/// A layer and the config of the cache that it continues.
struct Setup {
    layer: Box<dyn Layer>,
    cache: AttentionCacheConfig,
}

/// A cache and the tokens (length, E) of each of its sequences.
struct Filled {
    cache: AttentionCache,
    sequences: Vec<Tensor>,
}

fn setups() -> Result<Vec<Setup>> {
    let base = || Config::new(EMBED_DIM, 4).with_causal(true).with_head_dim(4);
    let growing = || AttentionCacheConfig::new().with_capacity(2);
    let sliding = || AttentionCacheConfig::new().with_window(3);
    let latent = LatentConfig::new(EMBED_DIM, 3).with_kv_lora_rank(8).with_nope_head_dim(4).with_rope_head_dim(2);
    let multi_head = [
        (base(), growing()),
        (base(), growing().with_capacity(0)),
        (base(), growing().with_capacity(16).with_growth(false)),
        (base().with_num_kv_heads(2).with_rope(RopeConfig::new(100.0)), growing()),
        (base(), growing().with_q8()),
        (base().with_window(3), sliding()),
        (base().with_window(3), sliding().with_q8()),
        (base().with_window(3), sliding().with_shared(true)),
        (base().with_alibi(AlibiConfig::Falcon), growing()),
    ];
    let multi_head = multi_head.into_iter().map(|(cfg, cache)| (LayerKind::MultiHead(cfg), cache));
    let latent = [growing(), growing().with_q8()].map(|cache| (LayerKind::Latent(latent.clone()), cache));
    let of_kind = |(kind, cache): (LayerKind, AttentionCacheConfig)| {
        Ok(Setup { layer: kind.of_parameters(&kind.parameters(3), DType::F32, &DEVICE)?, cache })
    };
    multi_head.chain(latent).map(of_kind).collect()
}

/// Joins the tokens of two sequences. Empty tensors are skipped, since Candle does not join them.
fn joined(one: &Tensor, other: &Tensor) -> Result<Tensor> {
    let parts: Vec<_> = [one, other].into_iter().filter(|part| part.elem_count() > 0).collect();
    if parts.is_empty() { Ok(one.clone()) } else { Tensor::cat(&parts, 0) }
}

impl Filled {
    /// Calls the layer with `t` tokens for each of `b` sequences, or with one token fewer for each sequence than for
    /// the one before it.
    fn new(setup: &Setup, b: usize, t: usize, is_ragged: bool) -> Result<Self> {
        let mut cache = AttentionCache::new(&setup.cache)?;
        let xs = wave(b, t, EMBED_DIM, 0.0)?;
        let lens: Vec<_> = (0..b).map(|n| if is_ragged { t.saturating_sub(n) } else { t }).collect();
        let input = AttentionInput::new(&xs).with_cache(&mut cache);
        setup.layer.run(if is_ragged { input.with_valid_lens(&lens) } else { input })?;
        let of_sequence = |(n, &len): (usize, &usize)| xs.i(n)?.narrow(0, 0, len);
        Ok(Self { cache, sequences: lens.iter().enumerate().map(of_sequence).collect::<Result<_>>()? })
    }

    fn truncate(mut self, len: usize) -> Result<Self> {
        let lens: Vec<_> = self.cache.lens().into_iter().map(|own| own.min(len)).collect();
        self.cache.truncate_to(&lens)?;
        let cut = |(sequence, &kept): (&Tensor, &usize)| sequence.narrow(0, 0, kept);
        self.sequences = self.sequences.iter().zip(&lens).map(cut).collect::<Result<_>>()?;
        Ok(self)
    }

    fn reorder(mut self, order: &[usize]) -> Result<Self> {
        self.cache.reorder(order)?;
        self.sequences = order.iter().map(|&n| self.sequences[n].clone()).collect();
        Ok(self)
    }

    /// Continues all sequences by calls of two, no and one tokens: the largest difference from calls without a cache.
    fn off_when_continued(mut self, setup: &Setup) -> Result<f64> {
        let mut most = 0.0f64;
        for (call, t) in [2, 0, 1].into_iter().enumerate() {
            let lens: Vec<_> = self.sequences.iter().map(|sequence| sequence.dims()[0]).collect();
            assert_eq!(self.cache.lens(), lens);
            let xs = wave(lens.len(), t, EMBED_DIM, 3.0 + call as f32)?;
            let ys = setup.layer.run(AttentionInput::new(&xs).with_cache(&mut self.cache))?;
            for (n, len) in lens.into_iter().enumerate() {
                self.sequences[n] = joined(&self.sequences[n], &xs.i(n)?)?;
                if t > 0 {
                    let whole = AttentionInput::new(&self.sequences[n]).with_backend(Backend::Reference);
                    let expected = setup.layer.run(whole)?.narrow(0, len, t)?;
                    most = most.max(difference(&ys.i(n)?, &expected));
                }
            }
        }
        Ok(most)
    }
}

/// Lists the edits of a cache after a call, with the sequences to continue after each.
fn edited(setup: &Setup, b: usize, t: usize, is_ragged: bool) -> Result<Vec<(String, Filled)>> {
    let filled = || Filled::new(setup, b, t, is_ragged);
    let reversed: Vec<_> = (0..b).rev().collect();
    let orders = [(0..b).collect(), reversed.clone(), vec![b - 1; b], vec![b / 2], vec![0; b + 1]];
    let mut edited = vec![("as it was".to_string(), filled()?)];
    for order in &orders {
        edited.push((format!("reordered to {order:?}"), filled()?.reorder(order)?));
        edited.push((format!("reordered to {order:?} twice"), filled()?.reorder(order)?.reorder(&[0, 0])?));
    }
    for len in 0..=t {
        edited.push((format!("truncated to {len}"), filled()?.truncate(len)?));
        edited.push((format!("truncated to {len} and reordered"), filled()?.truncate(len)?.reorder(&reversed)?));
    }
    let first = filled()?;
    let fork = Filled { cache: first.cache.fork()?, sequences: first.sequences.clone() };
    edited.extend([("a fork".to_string(), fork), ("a cache that was forked".to_string(), first)]);
    Ok(edited)
}

#[test]
fn caches_go_on_after_edits_of_short_calls() -> Result<()> {
    for (n, setup) in setups()?.iter().enumerate() {
        for (b, is_ragged) in [(1, false), (2, false), (2, true), (3, true)] {
            for t in [0, 1, 2, 3, 5] {
                for (edit, filled) in edited(setup, b, t, is_ragged)? {
                    let off = filled.off_when_continued(setup)?;
                    assert!(
                        off <= tolerance(DType::F32, &setup.cache),
                        "setup {n}, {b} sequences of {t} tokens (ragged: {is_ragged}), {edit}: off by {off:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Checks that a batch of empty sequences takes no memory as a tensor, and some memory for each sequence in a cache.
#[test]
fn cache_of_more_sequences_than_memory_is_rejected() -> Result<()> {
    let layer = layer(&Config::new(EMBED_DIM, 4).with_causal(true))?;
    let xs = Tensor::zeros((1 << 44, 0, EMBED_DIM), DType::F32, &DEVICE)?;
    let mut cache = AttentionCache::default();
    let text = error_text(layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache)));
    assert!(text.contains("the lengths of 17592186044416 sequences does not fit in memory"), "{text}");
    assert!(cache.is_empty());
    Ok(())
}

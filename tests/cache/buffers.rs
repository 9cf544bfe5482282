//! What a call with a cache allocates, and what it gives back of the batch.

use candle_attention::{AttentionCache, AttentionCacheConfig, AttentionInput, MultiHeadAttentionConfig as Config};
use candle_core::{DType, Device, Result, Tensor};

use crate::common::allocations::{self, Counting};
use crate::common::{assert_close, values};
use crate::compare::layer;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The bytes that this thread asks for in a call of one position, beyond those of the same call without a cache.
fn asked(cfg: &Config, cache: &mut AttentionCache, device: &Device) -> Result<usize> {
    let layer = layer(cfg, DType::F32, device)?;
    let prompt = Tensor::ones((2, 1000, cfg.embed_dim()), DType::F32, device)?;
    layer.forward_with(AttentionInput::new(&prompt).with_cache(cache))?;
    let token = Tensor::ones((2, 1, cfg.embed_dim()), DType::F32, device)?;
    let mut most = 0;
    for _ in 0..5 {
        allocations::reset();
        layer.forward_with(AttentionInput::new(&token).with_cache(cache))?;
        let with_cache = allocations::asked().bytes;
        allocations::reset();
        layer.forward(&token)?;
        most = most.max(with_cache.saturating_sub(allocations::asked().bytes));
    }
    Ok(most)
}

/// Keys and values are read in place, and no buffer is made while the capacity is enough.
#[test]
fn a_call_copies_nothing_that_is_cached() -> Result<()> {
    let cfg = Config::new(512, 4).with_num_kv_heads(2).with_causal(true);
    let full = || AttentionCacheConfig::new().with_capacity(1024);
    for (cfg, cache) in [
        (cfg.clone(), full()),
        (cfg.clone(), full().with_dtype(DType::BF16)),
        (cfg.clone(), full().with_q8()),
        (cfg.clone().with_window(600), full().with_window(600)),
    ] {
        let mut cache = AttentionCache::new(&cache)?;
        let most = asked(&cfg, &mut cache, &Device::Cpu)?;
        // The kernel's scratch, whatever is cached: a megabyte and more.
        assert!(most < 100_000 && cache.memory() > 1_000_000, "{most} bytes, and {} are cached", cache.memory());
    }
    Ok(())
}

/// A quarter of f32 and a scale for each row, of which no more than the block that a kernel works on is ever floats.
#[test]
fn numbers_of_8_bits_stay_so() -> Result<()> {
    let cfg = Config::new(64, 4).with_num_kv_heads(2).with_value_head_dim(8).with_causal(true);
    let layer = layer(&cfg, DType::F32, &Device::Cpu)?;
    let full = AttentionCacheConfig::new().with_capacity(8192);
    let (mut cache, mut small) = (AttentionCache::new(&full)?, AttentionCache::new(&full.with_q8())?);
    for _ in 0..8 {
        let piece = Tensor::randn(0f32, 1.0, (1, 1000, 64), &Device::Cpu)?;
        layer.forward_with(AttentionInput::new(&piece).with_cache(&mut cache))?;
        layer.forward_with(AttentionInput::new(&piece).with_cache(&mut small))?;
    }
    let (rows, floats) = (2 * 8192, 4);
    assert_eq!(cache.memory(), rows * (16 + 8) * floats);
    assert_eq!(small.memory(), cache.memory() / 4 + 2 * rows * floats);

    // A softmax that is spread over many keys.
    let token = Tensor::randn(0f32, 0.05, (1, 1, 64), &Device::Cpu)?;
    allocations::reset();
    let ys = layer.forward_with(AttentionInput::new(&token).with_cache(&mut small))?;
    let largest = allocations::asked().largest;
    assert!(largest < small.memory() / 10, "{largest} bytes at once");
    let expected = layer.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
    let largest = values(&expected).into_iter().map(f64::abs).fold(0.0, f64::max);
    assert_close(&ys, &expected, 3e-2 * largest, "8 bits");
    assert_eq!((small.lens(), small.fork()?.memory()), (vec![8001], small.memory()));
    Ok(())
}

#[test]
fn a_cache_that_is_reset_takes_the_next_batch() -> Result<()> {
    let layer = layer(&Config::new(8, 4).with_causal(true), DType::F32, &Device::Cpu)?;
    let xs = |b: usize, t: usize| Tensor::randn(0f32, 1.0, (b, t, 8), &Device::Cpu);
    let mut cache = AttentionCache::default();
    assert_eq!((cache.len(), cache.lens(), cache.is_empty(), cache.memory()), (0, vec![], true, 0));
    for b in [2, 2, 3, 1] {
        let (prompt, token) = (xs(b, 3)?, xs(b, 1)?);
        layer.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache))?;
        let memory = cache.memory();
        let ys = layer.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
        let whole = layer.forward(&Tensor::cat(&[&prompt, &token], 1)?)?;
        assert_close(&ys, &whole.narrow(1, 3, 1)?, 1e-5, "after a reset");
        assert_eq!((cache.lens(), cache.len()), (vec![4; b], 4));
        cache.reset();
        assert_eq!((cache.lens(), cache.is_empty(), cache.memory()), (vec![], true, memory), "the buffers stay");
    }
    Ok(())
}

/// One sequence without a batch, (T, E).
#[test]
fn two_dimensions_are_one_sequence() -> Result<()> {
    let layer = layer(&Config::new(8, 4).with_causal(true), DType::F32, &Device::Cpu)?;
    let xs = Tensor::randn(0f32, 1.0, (5, 8), &Device::Cpu)?;
    let mut cache = AttentionCache::default();
    let first = layer.forward_with(AttentionInput::new(&xs.narrow(0, 0, 3)?).with_cache(&mut cache))?;
    let seen = layer.forward_with_weights(AttentionInput::new(&xs.narrow(0, 3, 2)?).with_cache(&mut cache))?;
    let whole = layer.forward_with_weights(&xs)?;
    assert_close(&Tensor::cat(&[&first, &seen.output], 0)?, &whole.output, 1e-5, "outputs");
    assert_close(&seen.weights, &whole.weights.narrow(1, 3, 2)?, 1e-6, "weights (H, T_q, T_kv)");
    assert_eq!(cache.lens(), [5]);
    Ok(())
}

/// The weights have a column for each position that is held, and none for padding.
#[test]
fn weights_are_those_of_what_is_held() -> Result<()> {
    let cfg = Config::new(8, 2).with_causal(true).with_window(2);
    let layer = layer(&cfg, DType::F32, &Device::Cpu)?;
    let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(&cfg))?;
    let xs = Tensor::randn(0f32, 1.0, (1, 7, 8), &Device::Cpu)?;
    let whole = layer.forward_with_weights(&xs)?.weights;
    for n in 0..7 {
        let token = xs.narrow(1, n, 1)?;
        let weights = layer.forward_with_weights(AttentionInput::new(&token).with_cache(&mut cache))?.weights;
        let held = weights.dim(3)?;
        assert_close(&weights, &whole.narrow(2, n, 1)?.narrow(3, n + 1 - held, held)?, 1e-6, "a token's weights");
    }
    Ok(())
}

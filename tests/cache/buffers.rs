//! The memory of a cache, the allocations of a call with it, and the effect of edits.

use crate::common::allocations::{self, Counting};
use crate::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Checks that keys and values are read in place, and that no buffer is allocated while the capacity suffices.
#[test]
fn cache_is_read_without_copies() -> Result<()> {
    if skips_device("the allocations of the CPU are counted") {
        return Ok(());
    }
    let causal = Config::new(512, 4).with_num_kv_heads(2).with_causal(true);
    let full = || AttentionCacheConfig::new().with_capacity(1024);
    let windowed = causal.clone().with_window(600);
    let xs = wave(2, 1005, 512, 0.0)?;
    for (cfg, cache) in [
        (&causal, full()),
        (&causal, full().with_dtype(DType::BF16)),
        (&causal, full().with_q8()),
        (&windowed, full().with_window(600)),
    ] {
        let layer = layer(cfg)?;
        let mut cache = AttentionCache::new(&cache)?;
        in_calls(&layer, &mut cache, &xs, &[1000])?;
        for at in 1000..1005 {
            let token = part(&xs, at, 1)?;
            allocations::reset();
            layer.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
            let with_cache = allocations::asked().bytes;
            allocations::reset();
            layer.forward(&token)?;
            let more = with_cache.saturating_sub(allocations::asked().bytes);
            // The scratch buffers of the kernel, for any cache: a megabyte and more.
            assert!(more < 100_000 && cache.memory() > 1_000_000, "{more} bytes, and {} are cached", cache.memory());
        }
    }
    Ok(())
}

/// Checks that the cache takes a quarter of f32 and a scale for each row. Only the block that a kernel works on is ever
/// in floats.
#[test]
fn cache_of_8_bits_is_not_converted_to_floats() -> Result<()> {
    if skips_device("the allocations of the CPU are counted") {
        return Ok(());
    }
    let layer = layer(&Config::new(64, 4).with_num_kv_heads(2).with_value_head_dim(8).with_causal(true))?;
    let full = AttentionCacheConfig::new().with_capacity(8192);
    let mut cache = AttentionCache::new(&full)?;
    let mut small = AttentionCache::new(&full.with_q8())?;
    let xs = Tensor::randn(0f32, 1.0, (1, 8000, 64), &DEVICE)?;
    for filled in [&mut cache, &mut small] {
        in_calls(&layer, filled, &xs, &[1000; 8])?;
    }
    let rows = 2 * 8192;
    let floats = 4;
    assert_eq!(cache.memory(), rows * (16 + 8) * floats);
    assert_eq!(small.memory(), cache.memory() / 4 + 2 * rows * floats);

    // A softmax that is spread over many keys.
    let token = Tensor::randn(0f32, 0.05, (1, 1, 64), &DEVICE)?;
    allocations::reset();
    let ys = layer.forward_with(AttentionInput::new(&token).with_cache(&mut small))?;
    let largest = allocations::asked().largest;
    assert!(largest < small.memory() / 10, "{largest} bytes at once");
    let expected = layer.forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
    let magnitude = values(&expected).into_iter().map(f64::abs).fold(0.0, f64::max);
    assert_close(&ys, &expected, 3e-2 * magnitude, "8 bits");
    assert_eq!((small.lens(), small.fork()?.memory()), (vec![8001], small.memory()));
    Ok(())
}

/// Checks that nothing is stored for each head.
#[test]
fn cache_of_latent_attention_stores_one_latent_and_key_per_token() -> Result<()> {
    let cfg = LatentConfig::new(8, 4).with_kv_lora_rank(10).with_rope_head_dim(6);
    let layer = latents(cfg, DType::F32, &DEVICE)?;
    let new = || AttentionCacheConfig::new().with_capacity(32);
    for (config, bytes) in [(new(), 16 * 4), (new().with_dtype(DType::BF16), 16 * 2), (new().with_q8(), 16 + 4)] {
        let mut cache = AttentionCache::new(&config)?;
        in_calls(&*layer, &mut cache, &wave(2, 3, 8, 0.0)?, &[3])?;
        assert_eq!((cache.capacity(), cache.memory()), (32, 2 * 32 * bytes));
    }
    Ok(())
}

/// Checks that padding has no column. A single sequence may come without a batch dimension.
#[test]
fn cache_call_weights_have_one_column_per_stored_position() -> Result<()> {
    for (cfg, batch) in
        [(Config::new(8, 2).with_causal(true).with_window(2), &[1][..]), (Config::new(8, 4).with_causal(true), &[])]
    {
        let layer = layer(&cfg)?;
        let xs = wave(1, 7, 8, 0.0)?.reshape([batch, &[7, 8]].concat())?;
        let whole = layer.forward_with_weights(&xs)?;
        let t = batch.len();
        let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(&cfg))?;
        for n in 0..7 {
            let token = xs.narrow(t, n, 1)?;
            let found = layer.forward_with_weights(AttentionInput::new(&token).with_cache(&mut cache))?;
            let held = found.weights.dim(t + 2)?;
            let expected = whole.weights.narrow(t + 1, n, 1)?.narrow(t + 2, n + 1 - held, held)?;
            assert_close(&found.weights, &expected, 1e-6, "a token's weights");
            assert_close(&found.output, &whole.output.narrow(t, n, 1)?, 1e-5, "a token's output");
            let stored = cache.stored();
            assert_eq!((stored.len(), stored[0].start, stored[0].end), (1, n + 1 - held, n + 1));
        }
        assert_eq!(cache.lens(), [7]);
    }
    Ok(())
}

#[test]
fn cache_of_equal_lengths_is_reordered_in_place() -> Result<()> {
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(64))?;
    let layer = layer(&Config::new(8, 4).with_num_kv_heads(2).with_causal(true))?;
    in_calls(&layer, &mut cache, &wave(3, 5, 8, 0.0)?, &[5])?;
    let memory = cache.memory();
    for order in [[0, 1, 2], [2, 0, 1], [1, 1, 1]] {
        cache.reorder(&order)?;
        assert_eq!((cache.lens(), cache.memory(), cache.capacity()), (vec![5; 3], memory, 64));
    }
    cache.reorder(&[0])?;
    assert_eq!((cache.lens(), cache.memory() * 3, cache.capacity()), (vec![5], memory, 64));
    cache.reorder(&[])?;
    assert!(cache.is_empty() && cache.lens().is_empty(), "no sequences are left");
    cache.truncate(0)?;
    assert!(cache.fork()?.is_empty(), "an empty cache has nothing to edit");
    Ok(())
}

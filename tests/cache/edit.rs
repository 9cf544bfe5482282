//! Edits that the property does not come by: what lies where, and how far a window goes back.

use crate::*;

fn base() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 4).with_num_kv_heads(2).with_causal(true)
}

/// Speculative decoding: five tokens are tried in one call, and some of them taken back, wherever the window slides.
#[test]
fn what_the_last_call_brought_can_be_taken_back() -> Result<()> {
    let cfg = base().with_window(4);
    let (layer, whole) = (layer(&cfg)?, wave(1, 60, 8, 0.0)?);
    let expected = layer.forward(&whole)?;
    let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(&cfg))?;
    let (mut at, mut round) = (0, 0);
    while at + 5 <= 60 {
        let kept = 1 + round % 5;
        let tried = Tensor::cat(&[&part(&whole, at, kept)?, &wave(1, 5 - kept, 8, round as f32)?], 1)?;
        let ys = layer.forward_with(AttentionInput::new(&tried).with_cache(&mut cache))?;
        assert_close(&part(&ys, 0, kept)?, &part(&expected, at, kept)?, 1e-5, "what is kept");
        (at, round) = (at + kept, round + 1);
        cache.truncate(at)?;
    }
    assert!(round > 10 && cache.lens() == [at]);
    Ok(())
}

#[test]
fn a_batch_of_one_size_is_reordered_where_it_lies() -> Result<()> {
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(64))?;
    in_calls(&layer(&base())?, &mut cache, &wave(3, 5, 8, 0.0)?, &[5])?;
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

/// A window of 3 in 6 places: after seven tokens, one by one, positions 0 to 3 are gone.
#[test]
fn a_sliding_cache_goes_back_as_far_as_it_holds() -> Result<()> {
    let sliding = AttentionCacheConfig::new().with_window(3).with_capacity(6).with_growth(false);
    let (layer, mut cache) = (layer(&base().with_window(3))?, AttentionCache::new(&sliding)?);
    in_calls(&layer, &mut cache, &wave(1, 7, 8, 0.0)?, &[1; 7])?;
    assert_eq!(
        error_text(cache.truncate(3)),
        "[attention_cache] sequence 0 is to be truncated to 3 positions, expected 0 or at least the 4 that the window has dropped"
    );
    assert_eq!(cache.lens(), [7]);
    cache.truncate(5)?;
    let xs = wave(1, 2, 8, 3.0)?;
    // Position 5 sees the key at position 3.
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&part(&xs, 0, 1)?).with_cache(&mut cache))),
        "[attention_cache] a query of sequence 0 sees the key at position 3, but the cache holds those from 4 on; \
         expected a shorter window in the mask, or a longer one in the cache"
    );
    cache.truncate(0)?;
    let ys = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    assert_eq!((values(&ys), cache.lens()), (values(&layer.forward(&xs)?), vec![2]));
    Ok(())
}

/// A sliding cache under a layer that sees further is found out once there is something that it would miss.
#[test]
fn a_key_that_was_dropped_and_is_seen_is_an_error() -> Result<()> {
    for (cfg, first) in [(base().with_context_length(9), 0), (base().with_window(4), 3)] {
        let (layer, xs) = (layer(&cfg)?, wave(2, 7, 8, 0.0)?);
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_window(3))?;
        in_calls(&layer, &mut cache, &xs, &[1; 6])?;
        let error = error_text(layer.forward_with(AttentionInput::new(&part(&xs, 6, 1)?).with_cache(&mut cache)));
        let expected = format!("sees the key at position {first}, but the cache holds those from 4 on; expected");
        assert!(error.contains(&expected), "{error}");
        assert_eq!(cache.lens(), [6, 6]);
    }
    Ok(())
}

/// tests/errors has the same of other layers.
#[test]
fn a_call_of_latents_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
    let layer = latents(latent_of(4, &mut Random::new(15)), DType::F32, &CPU)?;
    let xs = wave(1, 3, 4, 0.0)?;
    let mut caches = [AttentionCache::default(), AttentionCache::default()];
    for cache in &mut caches {
        in_calls(&*layer, cache, &xs, &[3])?;
    }
    let wrong = AttentionMask::none().with_valid_lens(vec![1, 2]);
    let failed = layer.run(AttentionInput::new(&xs).with_mask(&wrong).with_cache(&mut caches[0]));
    assert!(error_text(failed).starts_with("[attention_mask]"));
    assert_eq!(caches[0].lens(), [3]);
    let [first, second] = caches.each_mut().map(|cache| in_calls(&*layer, cache, &xs, &[3]));
    assert_eq!(values(&first?), values(&second?));
    Ok(())
}

//! Batches whose sequences end and join: the memory of their places, the errors, and memories of beams. Random
//! schedules are in `program`.

use crate::common::allocations;
use crate::*;

fn causal() -> Config {
    Config::new(64, 4).with_num_kv_heads(2).with_causal(true)
}

/// Returns a cache of `b` sequences after a call of `t` tokens.
fn filled(layer: &MultiHeadAttention, cfg: &AttentionCacheConfig, b: usize, t: usize) -> Result<AttentionCache> {
    let mut cache = AttentionCache::new(cfg)?;
    in_calls(layer, &mut cache, &wave(b, t, layer.config().embed_dim(), 0.3)?, &[t])?;
    Ok(cache)
}

/// Checks that a new sequence takes memory of a removed one, so that only the last sequence and the new one are copied.
#[test]
fn cache_join_after_swap_remove_copies_two_sequences() -> Result<()> {
    let layer = layer(&causal())?;
    let cfg = AttentionCacheConfig::new().with_capacity(512);
    let mut cache = filled(&layer, &cfg, 4, 500)?;
    let memory = cache.memory();
    for _ in 0..3 {
        let prompt = filled(&layer, &cfg, 1, 100)?;
        allocations::reset();
        cache.swap_remove(1)?;
        cache.join(&prompt)?;
        let bytes = allocations::asked().bytes;
        let of_two = memory / 4 * (500 + 100) / 512;
        assert!(bytes <= of_two + 10_000, "{bytes} bytes for a cache of {memory}");
        assert_eq!((cache.memory(), cache.lens().len()), (memory, 4));
    }
    assert_eq!(cache.lens(), [500, 100, 500, 100]);
    cache.remove(3)?;
    assert_eq!((cache.memory(), cache.fork()?.memory() * 4), (memory, memory * 3));
    Ok(())
}

#[test]
fn cache_without_its_last_sequence_is_empty_and_can_be_joined() -> Result<()> {
    let layer = layer(&causal())?;
    let mut cache = filled(&layer, &AttentionCacheConfig::new(), 1, 5)?;
    cache.remove(0)?;
    assert!(cache.is_empty() && cache.lens().is_empty());
    cache.join(&AttentionCache::default())?;
    assert!(cache.is_empty(), "an empty cache adds nothing");
    let other = filled(&layer, &AttentionCacheConfig::new(), 2, 9)?;
    cache.join(&other)?;
    cache.join(&AttentionCache::default())?;
    let xs = wave(2, 1, 64, 0.9)?;
    let ys = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    let expected = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut other.fork()?))?;
    assert_eq!((cache.lens(), cache.stored()), (vec![10, 10], &[0..10, 0..10][..]));
    assert_eq!(bits(&ys), bits(&expected));
    Ok(())
}

/// Checks each error of a join, and that neither cache has changed.
#[test]
fn cache_join_with_another_format_is_an_error_that_changes_nothing() -> Result<()> {
    if skips_device("Metal has no f64") {
        return Ok(());
    }
    let layer_of = |cfg: &Config| layer(cfg);
    let own = layer_of(&causal())?;
    let new = AttentionCacheConfig::new;
    let f64_layer = layer_on(&causal(), DType::F64, &DEVICE)?;
    let mut of_f64 = AttentionCache::default();
    f64_layer.forward_with(AttentionInput::new(&wave(1, 3, 64, 0.0)?.to_dtype(DType::F64)?).with_cache(&mut of_f64))?;
    let cases = [
        (new(), filled(&own, &new().with_q8(), 1, 3)?, "the other cache stores 8 bits, expected F32 as this one"),
        (new().with_q8(), filled(&own, &new(), 1, 3)?, "the other cache stores F32, expected 8 bits as this one"),
        (new().with_dtype(DType::BF16), filled(&own, &new(), 1, 3)?, "the other cache stores F32, expected BF16"),
        (new(), of_f64, "the keys of the other cache have dtype F64, expected F32 as in the calls before"),
        (
            new(),
            filled(&layer_of(&causal().with_num_kv_heads(4))?, &new(), 1, 3)?,
            "keys (1, 4, T, 16) on Cpu and values (1, 4, T, 16) on Cpu of the other cache do not fit this one, which \
             has",
        ),
        (
            new().with_capacity(8).with_growth(false),
            filled(&own, &new(), 1, 9)?,
            "sequence 0 of the other cache has 9 positions, expected at most the capacity of 8",
        ),
    ];
    for (cfg, other, expected) in cases {
        let mut cache = filled(&own, &cfg, 2, 4)?;
        let untouched = filled(&own, &cfg, 2, 4)?;
        let text = error_text(cache.join(&other));
        assert!(text.contains(expected), "{text}");
        assert_eq!((cache.lens(), cache.memory()), (untouched.lens(), untouched.memory()));
        let xs = wave(2, 1, 64, 0.9)?;
        let call = |mut held: AttentionCache| own.forward_with(AttentionInput::new(&xs).with_cache(&mut held));
        assert_eq!(bits(&call(cache)?), bits(&call(untouched)?));
    }
    Ok(())
}

/// Checks that beams of one input read its memory where it is, and compares each beam with the beam alone.
#[test]
fn memory_of_one_sequence_is_read_in_place_by_all_beams() -> Result<()> {
    if skips_device("the allocations of the CPU are counted") {
        return Ok(());
    }
    let layer = layer(&Config::new(512, 4).with_num_kv_heads(2))?;
    let encoded = wave(1, 900, 512, 0.0)?;
    let memory = layer.project_memory(&encoded, &encoded)?;
    let one_copy = 2 * 2 * 900 * 128 * size_of::<f32>();
    for beams in [1, 4, 8] {
        let xs = wave(beams, 1, 512, 0.4)?;
        let call = |read: &ProjectedMemory| layer.forward_with(AttentionInput::new(&xs).with_memory(read));
        for read in [memory.clone(), memory.repeat(beams)?] {
            call(&read)?;
            allocations::reset();
            let ys = call(&read)?;
            let asked = allocations::asked();
            assert!(asked.largest < one_copy / 2, "{} bytes at once for {beams} beams", asked.largest);
            for beam in 0..beams {
                let own = xs.narrow(0, beam, 1)?.force_contiguous()?;
                let expected = layer.forward_with(AttentionInput::new(&own).with_memory(&memory))?;
                assert_close(&ys.narrow(0, beam, 1)?, &expected, 1e-6, "a beam alone");
            }
            let input = AttentionInput::new(&xs).with_memory(&read);
            assert_eq!(layer.plan(&input)?.backend, Backend::Fused);
        }
    }
    Ok(())
}

/// Compares beam search over a decoder's cache and a memory with each beam alone, over random orders.
#[test]
fn beams_with_a_memory_match_each_beam_alone() -> Result<()> {
    // The CPU computes each row by itself. The outputs are up to 41.
    let tolerance = if DEVICE.is_cpu() { 1e-5 } else { 1e-3 };
    let own = layer(&causal())?;
    let cross = layer_on(&Config::new(64, 4).with_add_zero_attn(true).with_bias_kv(true), DType::F32, &DEVICE)?;
    for seed in 0..20 {
        let random = &mut Random::new(seed);
        let inputs = 1 + random.up_to(2);
        let beams = 1 + random.up_to(2);
        let encoded = wave(inputs, 7, 64, seed as f32)?;
        let projected = cross.project_memory(&encoded, &encoded)?;
        let mut memory = projected.repeat(beams)?;
        assert_eq!(memory.batch_size(), inputs * beams);
        let mut cache = AttentionCache::default();
        // The tokens of each beam, and its input.
        let mut texts: Vec<(Vec<Tensor>, usize)> = (0..inputs * beams).map(|beam| (vec![], beam / beams)).collect();
        for step in 0..6 {
            let xs = wave(texts.len(), 1, 64, (seed * 10 + step) as f32)?;
            let hidden = own.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
            let ys = cross.forward_with(AttentionInput::new(&hidden).with_memory(&memory))?;
            for (beam, (tokens, input)) in texts.iter_mut().enumerate() {
                tokens.push(xs.narrow(0, beam, 1)?);
                let alone = own.forward(&Tensor::cat(tokens, 1)?)?.narrow(1, step as usize, 1)?.contiguous()?;
                let source = encoded.narrow(0, *input, 1)?.contiguous()?;
                let expected = cross.forward_with(AttentionInput::new(&alone).with_key_value(&source, &source))?;
                assert_close(&ys.narrow(0, beam, 1)?, &expected, tolerance, &format!("seed {seed}, beam {beam}"));
            }
            let order: Vec<_> = (0..1 + random.up_to(4)).map(|_| random.up_to(texts.len() - 1)).collect();
            cache.reorder(&order)?;
            memory.reorder(&order)?;
            texts = order.into_iter().map(|beam| texts[beam].clone()).collect();
        }
    }
    Ok(())
}

#[test]
fn memory_reorder_and_repeat_out_of_range_are_errors() -> Result<()> {
    let layer = layer(&Config::new(64, 4))?;
    let encoded = wave(2, 7, 64, 0.0)?;
    let mut memory = layer.project_memory(&encoded, &encoded)?;
    assert!(error_text(memory.reorder(&[0, 2])).contains("is 2, expected one of the memory's 2 sequences"));
    assert!(error_text(memory.repeat(0)).contains("n is 0, expected at least 1"));
    assert_eq!(memory.batch_size(), 2);
    let one = encoded.narrow(0, 0, 1)?.squeeze(0)?.contiguous()?;
    let mut unbatched = layer.project_memory(&one, &one)?;
    assert!(error_text(unbatched.reorder(&[0])).contains("expected `repeat` first"));
    let xs = wave(3, 1, 64, 0.4)?;
    let ys = layer.forward_with(AttentionInput::new(&xs).with_memory(&unbatched.repeat(3)?))?;
    memory.reorder(&[0])?;
    assert_eq!(bits(&ys), bits(&layer.forward_with(AttentionInput::new(&xs).with_memory(&memory))?));
    Ok(())
}

/// Compares a block of tokens that attend to each other with one call under a boolean mask over all keys.
#[test]
fn new_token_mask_of_a_block_matches_a_mask_of_all_keys() -> Result<()> {
    for cfg in [
        causal(),
        causal().with_rope(RopeConfig::new(100.0)).with_window(6),
        causal().with_alibi(AlibiConfig::Standard),
    ] {
        let layer = layer(&cfg)?;
        let xs = wave(2, 9, 64, 0.0)?;
        let mut cache = AttentionCache::default();
        in_calls(&layer, &mut cache, &xs, &[5])?;
        let rows = [[1u8, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1]];
        let mask = Tensor::new(&rows, &DEVICE)?;
        let block = part(&xs, 5, 4)?;
        let ys = layer.forward_with(AttentionInput::new(&block).with_cache(&mut cache).with_new_token_mask(&mask))?;
        // The same layer without its causal mask, and that mask in the mask of the call.
        let open = layer_on(&cfg.clone().with_causal(false), DType::F32, &DEVICE)?;
        let allowed = |i: usize, j: usize| match (i.checked_sub(5), j.checked_sub(5)) {
            (Some(query), Some(key)) => rows[query][key],
            _ => u8::from(j <= i),
        };
        let entries: Vec<u8> = (0..81).map(|n| allowed(n / 9, n % 9)).collect();
        let whole = AttentionMask::none().with_bool_mask(&Tensor::from_vec(entries, (9, 9), &DEVICE)?);
        let expected =
            open.forward_with(AttentionInput::new(&xs).with_mask(&whole).with_backend(Backend::Reference))?;
        assert_near(&ys, &part(&expected, 5, 4)?, 1e-6, &format!("{cfg:?}"));
    }
    Ok(())
}

/// Checks the path of a tree, that it needs no cache, and that a layer of an earlier cache has it too.
#[test]
fn tree_over_a_cache_takes_the_fused_kernel() -> Result<()> {
    if skips_device("the fused kernel computes on the CPU") {
        return Ok(());
    }
    let layer = layer(&causal())?;
    let tree = TokenTree::new(&[None, Some(0), Some(0), Some(2)])?;
    let xs = wave(2, 4, 64, 0.7)?;
    for mut cache in [AttentionCache::default(), filled(&layer, &AttentionCacheConfig::new().with_q8(), 2, 40)?] {
        let input = AttentionInput::new(&xs).with_cache(&mut cache).with_tree(&tree);
        let plan = layer.plan(&input)?;
        assert_eq!(plan.backend, Backend::Fused, "{plan}");
    }
    let without_cache = layer.forward_with(AttentionInput::new(&xs).with_tree(&tree))?;
    let with_cache =
        layer.forward_with(AttentionInput::new(&xs).with_cache(&mut AttentionCache::default()).with_tree(&tree))?;
    assert_close(&without_cache, &with_cache, 1e-6, "no earlier tokens");
    Ok(())
}

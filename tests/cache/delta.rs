//! The cache of a gated delta net: what is edited between calls, and the dtypes of what it keeps.

use crate::*;

const E: usize = 8;

/// The numbers of tokens of a call: none, fewer than the K - 1 = 3 that the convolutions keep, exactly 3, and more.
const CALLS: [usize; 5] = [0, 1, 2, 3, 5];

fn net(dtype: DType) -> Result<GatedDeltaNet> {
    let cfg = GatedDeltaNetConfig::new(E, 4).with_num_key_heads(2).with_key_head_dim(6).with_value_head_dim(5);
    GatedDeltaNet::load(&cfg, DeltaLayout::Qwen3_5, TorchSeed::new(3).var_builder(dtype, &DEVICE))
}

fn call(net: &GatedDeltaNet, cache: &mut DeltaCache, xs: &Tensor) -> Result<Tensor> {
    net.forward_with(DeltaInput::new(xs).with_cache(cache))
}

#[test]
fn delta_cache_truncates_to_snapshots() -> Result<()> {
    let net = net(DType::F32)?;
    let xs = wave(2, 12, E, 0.0)?;
    let expected = net.forward(&xs)?;
    let mut cache = DeltaCache::default();
    assert!(cache.is_empty() && cache.lens().is_empty());
    cache.truncate(0)?;
    for at in [0, 3, 6, 9] {
        let ys = call(&net, &mut cache, &part(&xs, at, 3)?)?;
        assert_close(&ys, &part(&expected, at, 3)?, 1e-5, "a prompt in pieces");
        cache.snapshot();
    }
    let memory = cache.memory();
    for (len, then) in [(9, 3), (6, 6), (3, 1), (0, 12), (12, 0)] {
        cache.truncate(len)?;
        assert_eq!((cache.len(), cache.lens()), (len, if len == 0 { vec![] } else { vec![len; 2] }));
        if then > 0 {
            let ys = call(&net, &mut cache, &part(&xs, len, then)?)?;
            assert_close(&ys, &part(&expected, len, then)?, 1e-5, "after going back");
        }
    }
    // Later snapshots are gone with what came after them.
    assert!(cache.truncate(9).is_err() && cache.memory() < memory);
    cache.reset();
    assert!(cache.is_empty() && cache.memory() == 0);
    Ok(())
}

/// Runs calls in which each sequence has another number of tokens, with a snapshot after each. A length for all
/// sequences is an error unless every sequence has it in one state.
#[test]
fn delta_cache_truncate_with_sequences_of_different_lengths_restores_snapshots_or_returns_error() -> Result<()> {
    let net = net(DType::F32)?;
    for seed in 0..10 {
        let random = &mut Random::new(seed);
        let xs = wave(2, 4, E, seed as f32)?;
        let mut cache = DeltaCache::default();
        let step = |state: &mut DeltaCache, lens: [usize; 2]| {
            net.forward_with(DeltaInput::new(&xs).with_valid_lens(&lens[..]).with_cache(state))
        };
        let mut after_snapshots = Vec::new();
        for _ in 0..3 {
            step(&mut cache, [random.up_to(4), random.up_to(4)])?;
            cache.snapshot();
            after_snapshots.push((cache.lens(), step(&mut cache.fork()?, [4, 4])?));
        }
        step(&mut cache, [1, 0])?;
        let present = cache.lens();
        let states = [present.clone()].into_iter().chain(after_snapshots.iter().map(|(lens, _)| lens.clone()));
        let states: Vec<_> = states.collect();
        for len in 1..=cache.len() + 1 {
            let mut fork = cache.fork()?;
            let truncated = fork.truncate(len);
            if states.contains(&vec![len; 2]) {
                truncated?;
                assert_eq!(fork.lens(), [len; 2], "seed {seed}");
            } else {
                let error = error_text(truncated);
                assert!(error.contains(&format!("tokens to [{len}, {len}], expected 0, the present")), "{error}");
                assert_eq!(fork.lens(), present, "seed {seed}");
            }
        }
        cache.truncate_to(&present)?;
        assert_eq!(cache.lens(), present);
        for (lens, expected) in after_snapshots.iter().rev() {
            cache.truncate_to(lens)?;
            assert_eq!(&cache.lens(), lens, "seed {seed}");
            assert_close(&step(&mut cache, [4, 4])?, expected, 0.0, &format!("seed {seed}"));
        }
    }
    Ok(())
}

#[test]
fn delta_cache_truncate_to_longest_of_different_lengths_names_truncate_to() -> Result<()> {
    let net = net(DType::F32)?;
    let xs = wave(2, 9, E, 0.0)?;
    let mut cache = DeltaCache::default();
    let step = |state: &mut DeltaCache, lens: &[usize]| {
        net.forward_with(DeltaInput::new(&xs).with_valid_lens(lens).with_cache(state))
    };
    step(&mut cache, &[9, 3])?;
    cache.snapshot();
    step(&mut cache, &[0, 1])?;
    let error = error_text(cache.truncate(cache.len()));
    let expected = "[delta_cache] cannot truncate sequences of [9, 4] tokens to [9, 9], expected 0, the present lengths \
                    or the lengths of a snapshot, one of [[9, 3]]: a state cannot forget its last token; `truncate_to` \
                    takes a length for each sequence";
    assert_eq!((error.as_str(), cache.lens()), (expected, vec![9, 4]));
    assert!(error_text(cache.truncate_to(&[9])).contains("lens has 1 entries, expected one for each of 2 sequences"));
    // A second snapshot with the same longest sequence does not replace the first.
    cache.snapshot();
    cache.truncate_to(&[9, 3])?;
    assert_eq!(cache.lens(), [9, 3]);
    cache.truncate(0)?;
    assert!(cache.is_empty());
    Ok(())
}

#[test]
fn delta_cache_forks_and_beams_are_independent() -> Result<()> {
    let net = net(DType::F32)?;
    let xs = wave(3, 8, E, 0.0)?;
    let mut cache = DeltaCache::default();
    call(&net, &mut cache, &part(&xs, 0, 5)?)?;
    cache.snapshot();
    let fork = cache.fork()?;
    for order in [vec![2, 0, 1], vec![1, 1], vec![0, 2, 2, 1]] {
        let mut beams = fork.fork()?;
        beams.reorder(&order)?;
        let index = Tensor::from_iter(order.iter().map(|&n| n as u32), &DEVICE)?;
        let own = xs.index_select(&index, 0)?;
        let expected = part(&net.forward(&own)?, 5, 3)?;
        for _ in 0..2 {
            assert_close(&call(&net, &mut beams, &part(&own, 5, 3)?)?, &expected, 1e-5, "beams");
            assert_eq!(beams.lens(), vec![8; order.len()]);
            // Its snapshots are reordered too.
            beams.truncate(5)?;
        }
    }
    let mut beams = fork.fork()?;
    beams.reorder(&[])?;
    assert!(beams.is_empty());
    // What happened to the forks is not in the first.
    let ys = call(&net, &mut cache, &part(&xs, 5, 3)?)?;
    assert_close(&ys, &part(&net.forward(&xs)?, 5, 3)?, 1e-5, "the first");
    assert_eq!((cache.len(), fork.len()), (8, 5));
    Ok(())
}

/// Runs random schedules: sequences of different lengths end and join, and each has the outputs of itself alone.
#[test]
fn delta_cache_with_sequences_that_leave_and_join_matches_each_alone() -> Result<()> {
    let net = net(DType::F32)?;
    for seed in 0..25 {
        let random = &mut Random::new(seed);
        let mut cache = DeltaCache::default();
        // The inputs of each sequence so far, (1, T, E).
        let mut sequences: Vec<Tensor> = Vec::new();
        for step in 0..12 {
            let first = (seed * 100 + step) as f32;
            match random.up_to(4) {
                _ if sequences.is_empty() || (sequences.len() < 4 && random.chance(0.3)) => {
                    let prompt = wave(1, 1 + random.up_to(6), E, first)?;
                    let mut other = DeltaCache::default();
                    call(&net, &mut other, &prompt)?;
                    cache.join(&other)?;
                    sequences.push(prompt);
                }
                0 => {
                    let sequence = random.up_to(sequences.len() - 1);
                    cache.remove(sequence)?;
                    sequences.remove(sequence);
                }
                1 => {
                    let sequence = random.up_to(sequences.len() - 1);
                    cache.swap_remove(sequence)?;
                    sequences.swap_remove(sequence);
                }
                _ => {
                    let xs = wave(sequences.len(), 1, E, first)?;
                    let ys = call(&net, &mut cache, &xs)?;
                    for (n, tokens) in sequences.iter_mut().enumerate() {
                        *tokens = Tensor::cat(&[&*tokens, &xs.narrow(0, n, 1)?], 1)?.contiguous()?;
                        let last = tokens.dim(1)? - 1;
                        let expected = net.forward(tokens)?.narrow(1, last, 1)?;
                        assert_close(&ys.narrow(0, n, 1)?, &expected, 1e-5, &format!("seed {seed}, sequence {n}"));
                    }
                }
            }
            let lens: Vec<_> = sequences.iter().map(|tokens| tokens.dim(1)).collect::<Result<_>>()?;
            assert_eq!(cache.lens(), lens);
        }
    }
    Ok(())
}

#[test]
fn delta_cache_join_of_another_layer_is_an_error_that_changes_nothing() -> Result<()> {
    let net = net(DType::F32)?;
    let mut cache = DeltaCache::default();
    call(&net, &mut cache, &wave(2, 3, E, 0.0)?)?;
    cache.snapshot();
    let memory = cache.memory();
    let cfg = GatedDeltaNetConfig::new(E, 4).with_num_key_heads(2).with_key_head_dim(6).with_value_head_dim(7);
    let other_net =
        GatedDeltaNet::load(&cfg, DeltaLayout::Qwen3_5, TorchSeed::new(3).var_builder(DType::F32, &DEVICE))?;
    let mut other = DeltaCache::default();
    call(&other_net, &mut other, &wave(1, 3, E, 0.0)?)?;
    assert!(error_text(cache.join(&other)).contains("of the other cache have shape"), "another shape");
    assert!(error_text(cache.remove(2)).contains("sequence is 2, expected one of the 2 sequences"));
    assert!(error_text(cache.swap_remove(2)).contains("sequence is 2, expected one of the 2 sequences"));
    assert_eq!((cache.lens(), cache.memory()), (vec![3, 3], memory));
    Ok(())
}

#[test]
fn delta_cache_in_every_dtype_matches_f64() -> Result<()> {
    if skips_device("Metal has no f64") {
        return Ok(());
    }
    let xs = wave(2, 7, E, 0.0)?;
    let expected = net(DType::F64)?.forward(&xs.to_dtype(DType::F64)?)?.to_dtype(DType::F32)?;
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::F32, 1e-5), (DType::F16, 1e-2), (DType::BF16, 6e-2)] {
        let net = net(dtype)?;
        let xs = xs.to_dtype(dtype)?;
        let mut cache = DeltaCache::default();
        let mut of = |at, len| call(&net, &mut cache, &part(&xs, at, len)?);
        let ys = Tensor::cat(&[of(0, 4)?, of(4, 1)?, of(5, 2)?], 1)?;
        assert_eq!(ys.dtype(), dtype);
        let error = relative_error(&ys.to_dtype(DType::F32)?, &expected);
        assert!(error <= tolerance, "{dtype:?}: off by {error:e}");
    }
    Ok(())
}

/// Runs beam search after calls of any number of tokens: each order in each step and in each dtype. `reorder` moves
/// snapshots too.
#[test]
fn delta_cache_reorder_after_short_calls_continues_chosen_sequences() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        if dtype == DType::F64 && DEVICE.is_metal() {
            continue;
        }
        let net = net(dtype)?;
        let tolerance = if dtype == DType::BF16 { 6e-2 } else { 1e-5 };
        for (first, second) in CALLS.into_iter().flat_map(|first| CALLS.map(|second| (first, second))) {
            for order in [vec![0, 1, 2], vec![2, 0, 1], vec![1, 1, 0, 2]] {
                let index = Tensor::from_iter(order.iter().map(|&n| n as u32), &DEVICE)?;
                let prompt = wave(3, 2 * (first + second) + 3, E, 0.0)?.to_dtype(dtype)?;
                let mut cache = DeltaCache::default();
                call(&net, &mut cache, &part(&prompt, 0, first)?)?;
                cache.snapshot();
                call(&net, &mut cache, &part(&prompt, first, second)?)?;
                let what = format!("{dtype:?}, calls of {first} and {second}, {order:?}");
                cache.reorder(&order).map_err(|error| error.context(what.clone()))?;
                let beams = prompt.index_select(&index, 0)?;
                let expected = net.forward(&beams)?;
                let mut at = first + second;
                for len in [second, first, 1] {
                    let ys = call(&net, &mut cache, &part(&beams, at, len)?)?;
                    if len > 0 {
                        assert_near(&ys, &part(&expected, at, len)?, tolerance, &what);
                    }
                    at += len;
                    // The second step of a search reorders what the first one wrote.
                    cache.reorder(&(0..order.len()).collect::<Vec<_>>())?;
                    assert_eq!(cache.lens(), vec![at; order.len()], "{what}");
                }
                cache.truncate(first)?;
                let ys = call(&net, &mut cache, &part(&beams, first, 2)?)?;
                assert_near(&ys, &part(&expected, first, 2)?, tolerance, &what);
            }
        }
    }
    Ok(())
}

/// Checks that a fork, a snapshot of every state, and the first cache continue independently.
#[test]
fn delta_cache_fork_and_snapshots_after_short_calls_are_independent() -> Result<()> {
    let net = net(DType::F32)?;
    for (first, second) in CALLS.into_iter().flat_map(|first| CALLS.map(|second| (first, second))) {
        let xs = wave(2, first + second + 2, E, 0.0)?;
        let others = wave(2, 2, E, 0.5)?;
        let expected = net.forward(&xs)?;
        let mut cache = DeltaCache::default();
        call(&net, &mut cache, &part(&xs, 0, first)?)?;
        cache.snapshot();
        call(&net, &mut cache, &part(&xs, first, second)?)?;
        let mut fork = cache.fork()?;
        call(&net, &mut fork, &others)?;
        fork.truncate(first)?;
        fork.reorder(&[0, 1])?;
        call(&net, &mut fork, &others)?;
        let what = format!("calls of {first} and {second}");
        let ys = call(&net, &mut cache, &part(&xs, first + second, 2)?)?;
        assert_close(&ys, &part(&expected, first + second, 2)?, 1e-5, &what);
        cache.truncate(first)?;
        let again = call(&net, &mut cache, &part(&xs, first, second + 2)?)?;
        assert_close(&again, &part(&expected, first, second + 2)?, 1e-5, &what);
    }
    Ok(())
}

//! Drafted tokens in the cache of a gated delta net: another number of them is taken back for each sequence, in rows
//! and in trees. Each sequence has the outputs of the layer without a cache over the tokens that it kept.

use crate::*;

const E: usize = 8;

fn nets() -> Result<Vec<GatedDeltaNet>> {
    let cfg = GatedDeltaNetConfig::new(E, 4).with_num_key_heads(2).with_key_head_dim(6).with_value_head_dim(5);
    let by_channel = cfg.clone().with_num_key_heads(4).with_decay_per_channel(true);
    let load = |own: &GatedDeltaNetConfig| {
        GatedDeltaNet::load(own, DeltaLayout::Separate, TorchSeed::new(3).var_builder(DType::F32, &DEVICE))
    };
    Ok(vec![load(&cfg)?, load(&by_channel)?])
}

/// The tokens (1, T, E) that each sequence has, in a layer with a cache.
struct Batch<'a> {
    net: &'a GatedDeltaNet,
    cache: DeltaCache,
    sequences: Vec<Vec<Tensor>>,
}

impl<'a> Batch<'a> {
    fn new(net: &'a GatedDeltaNet, cache: DeltaCache, sequences: usize) -> Self {
        Self { net, cache, sequences: vec![Vec::new(); sequences] }
    }

    /// Adds `counts[b]` tokens to each sequence in one call, and compares their outputs.
    fn append(&mut self, counts: &[usize], first: f32, what: &str) -> Result<()> {
        let longest = counts.iter().copied().max().unwrap_or(0);
        let xs = wave(counts.len(), longest, E, first)?;
        let input = DeltaInput::new(&xs).with_valid_lens(counts).with_cache(&mut self.cache);
        let ys = self.net.forward_with(input)?;
        for (sequence, &count) in counts.iter().enumerate() {
            for t in 0..count {
                self.sequences[sequence].push(xs.i((sequence..sequence + 1, t..t + 1))?);
            }
            if count > 0 {
                let tokens = Tensor::cat(&self.sequences[sequence], 1)?;
                let expected = self.net.forward(&tokens)?;
                let new = expected.narrow(1, tokens.dim(1)? - count, count)?;
                let own = ys.i((sequence..sequence + 1, ..count))?;
                assert_close(&own, &new, 1e-5, &format!("{what}, sequence {sequence}"));
            }
        }
        assert_eq!(self.cache.lens(), self.lens(), "{what}");
        Ok(())
    }

    fn lens(&self) -> Vec<usize> {
        self.sequences.iter().map(Vec::len).collect()
    }

    /// Keeps some of the tokens after the lengths.
    fn keep(&mut self, lens: &[usize], kept: &[Vec<usize>]) -> Result<()> {
        self.cache.keep(lens, kept)?;
        for ((sequence, &len), own) in self.sequences.iter_mut().zip(lens).zip(kept) {
            let tokens = own.iter().map(|token| sequence[len + token].clone()).collect::<Vec<_>>();
            sequence.truncate(len);
            sequence.extend(tokens);
        }
        Ok(())
    }
}

/// Runs random programs of calls, lengths that are taken back, tokens that are kept, and sequences that change places,
/// end and join.
#[test]
fn delta_cache_with_drafts_takes_back_tokens_of_each_sequence() -> Result<()> {
    for net in &nets()? {
        for seed in 0..12 {
            let random = &mut Random::new(seed);
            let mut batch = Batch::new(net, DeltaCache::with_drafts(5), 3);
            batch.append(&[9, 2, 6], seed as f32, "the prompts")?;
            for step in 0..14 {
                let what = format!("seed {seed}, step {step}");
                let before = batch.lens();
                let n = before.len();
                // One call of up to five drafts, or single tokens in several calls.
                let calls = if random.chance(0.3) { 1 + random.up_to(4) } else { 1 };
                for call in 0..calls {
                    let most = if calls == 1 { 5 } else { 1 };
                    let counts: Vec<_> = (0..n).map(|_| random.up_to(most)).collect();
                    batch.append(&counts, (100 * seed + 10 * step + call as u64) as f32, &what)?;
                }
                let drafted: Vec<_> = batch.lens().iter().zip(&before).map(|(end, start)| end - start).collect();
                let mut kept = Vec::new();
                for &count in &drafted {
                    let all: Vec<_> = (0..count).collect();
                    let first_ones = random.up_to(count);
                    let is_row = random.chance(0.7);
                    kept.push(all.into_iter().filter(|_| is_row || random.chance(0.5)).collect::<Vec<_>>());
                    if is_row {
                        kept.last_mut().expect("it was pushed").truncate(first_ones);
                    }
                }
                batch.keep(&before, &kept)?;
                match random.up_to(5) {
                    0 if n > 1 => {
                        batch.cache.swap_remove(0)?;
                        batch.sequences.swap_remove(0);
                    }
                    1 => {
                        batch.cache.reorder(&(0..n).rev().collect::<Vec<_>>())?;
                        batch.sequences.reverse();
                    }
                    2 if n < 4 => {
                        let mut other = Batch::new(net, DeltaCache::with_drafts(2), 1);
                        other.append(&[2], step as f32, &what)?;
                        batch.cache.join(&other.cache)?;
                        batch.sequences.extend(other.sequences);
                        let mut lens = batch.lens();
                        lens[n] -= 1;
                        batch.cache.truncate_to(&lens)?;
                        batch.sequences[n].pop();
                    }
                    _ => {}
                }
                // What stays can be taken back again.
                if random.chance(0.3) && kept.iter().all(|own| !own.is_empty()) && batch.lens().len() == n {
                    let lens: Vec<_> = batch.lens().iter().map(|len| len - 1).collect();
                    batch.keep(&lens, &vec![Vec::new(); n])?;
                }
            }
            batch.append(&vec![1; batch.lens().len()], 0.5, "after the program")?;
        }
    }
    Ok(())
}

/// Compares the nodes of trees of different sizes, and what follows the kept path, with each path alone.
#[test]
fn delta_cache_with_trees_of_drafts_continues_kept_paths() -> Result<()> {
    let trees = [
        TokenTree::new(&[None, Some(0), Some(0), Some(2), Some(1), Some(2)])?,
        TokenTree::new(&[None, None, Some(1)])?,
        TokenTree::new(&[])?,
        TokenTree::new(&[None, Some(0), Some(1)])?,
    ];
    let counts = trees.each_ref().map(TokenTree::len);
    for net in &nets()? {
        for leaves in [[3, 2, 0, 2], [4, 0, 0, 0], [0, 1, 0, 1]] {
            let mut batch = Batch::new(net, DeltaCache::with_drafts(6), 4);
            batch.append(&[5, 1, 3, 2], 0.25, "the prompts")?;
            batch.cache.snapshot();
            let before = batch.lens();
            let xs = wave(4, 6, E, 0.75)?;
            let input = || DeltaInput::new(&xs).with_valid_lens(&counts[..]).with_trees(&trees[..]);
            let ys = net.forward_with(input().with_cache(&mut batch.cache))?;
            assert_eq!(batch.cache.lens(), [11, 4, 3, 5]);
            let mut kept = Vec::new();
            for (sequence, tree) in trees.iter().enumerate() {
                for node in 0..tree.len() {
                    let mut tokens = batch.sequences[sequence].clone();
                    for token in tree.path(node)? {
                        tokens.push(xs.i((sequence..sequence + 1, token..token + 1))?);
                    }
                    let expected = net.forward(&Tensor::cat(&tokens, 1)?)?.narrow(1, tokens.len() - 1, 1)?;
                    let own = ys.i((sequence..sequence + 1, node..node + 1))?;
                    assert_close(&own, &expected, 1e-5, &format!("node {node} of tree {sequence}"));
                }
                kept.push(if tree.is_empty() { Vec::new() } else { tree.path(leaves[sequence])? });
                for token in 0..tree.len() {
                    batch.sequences[sequence].push(xs.i((sequence..sequence + 1, token..token + 1))?);
                }
            }
            batch.keep(&before, &kept)?;
            batch.append(&[2, 1, 0, 3], 0.5, &format!("after {kept:?}"))?;
            // The snapshot before the tree is still there.
            batch.cache.truncate_to(&before)?;
            for (sequence, &len) in batch.sequences.iter_mut().zip(&before) {
                sequence.truncate(len);
            }
            batch.append(&[1, 1, 1, 1], 0.5, "after the snapshot")?;
            // Without a cache, the trees begin after nothing.
            let alone = net.forward_with(input())?;
            let path = trees[0].path(4)?;
            let index = Tensor::from_iter(path.iter().map(|&node| node as u32), &DEVICE)?;
            let expected = net.forward(&xs.i(0..1)?.index_select(&index, 1)?)?;
            assert_close(&alone.i(0..1)?.index_select(&index, 1)?, &expected, 1e-5, "a tree without a cache");
        }
    }
    Ok(())
}

#[test]
fn delta_cache_with_drafts_that_do_not_fit_returns_error_and_changes_nothing() -> Result<()> {
    let net = &nets()?[0];
    let mut batch = Batch::new(net, DeltaCache::with_drafts(3), 2);
    batch.append(&[4, 4], 0.0, "the prompts")?;
    batch.append(&[3, 1], 0.5, "the drafts")?;
    let none = [Vec::new(), Vec::new()];
    for (lens, kept, expected) in [
        (
            [3, 4],
            none.clone(),
            "sequence 0 has 7 tokens and keeps 3, expected at least 4: the cache was made `with_dra",
        ),
        ([7, 6], none.clone(), "the length for sequence 1 is 6, expected at most its 5 tokens"),
        ([4, 4], [vec![3], vec![]], "a kept token of sequence 0 is 3, expected one of its last 3"),
        ([4, 4], [vec![1, 1], vec![]], "the kept tokens of sequence 0 are [1, 1], expected increasing numbers"),
    ] {
        let error = error_text(batch.cache.keep(&lens, &kept));
        assert!(error.starts_with("[delta_cache] ") && error.contains(expected), "{error}");
    }
    assert!(error_text(batch.cache.keep(&[4], &none)).contains("lens has 1 entries"));
    assert!(error_text(batch.cache.keep(&[4, 4], &none[..1])).contains("kept has 1 entries"));
    batch.append(&[1, 1], 0.25, "after the errors")?;

    let mut usual = DeltaCache::default();
    net.forward_with(DeltaInput::new(&wave(2, 3, E, 0.0)?).with_cache(&mut usual))?;
    let error = error_text(usual.keep(&[0, 0], &[vec![0, 2], vec![0]]));
    assert!(error.contains("expected a cache made `with_drafts`"), "{error}");
    assert!(error_text(usual.truncate_to(&[2, 3])).contains("a state cannot forget its last token"));
    assert_eq!(usual.lens(), [3, 3]);
    Ok(())
}

#[test]
fn delta_net_with_trees_that_do_not_fit_returns_error() -> Result<()> {
    let net = &nets()?[0];
    let tree = TokenTree::new(&[None, Some(0), Some(0), Some(2)])?;
    let xs = wave(2, 4, E, 0.0)?;
    let assert_error = |input: DeltaInput, expected: &str| {
        let found = error_text(net.forward_with(input));
        assert!(found.contains(expected), "{found}");
    };
    let wrong = TokenTree::new(&[None, None])?;
    assert_error(
        DeltaInput::new(&xs).with_tree(&wrong),
        "the tree of sequence 0 has 2 nodes, expected one for each of 4 tokens",
    );
    let three = vec![tree.clone(); 3];
    assert_error(
        DeltaInput::new(&xs).with_trees(&three[..]),
        "there are 3 trees, expected one for each of 2 sequences",
    );
    assert_error(
        DeltaInput::new(&xs).with_tree(&tree).with_cache(&mut DeltaCache::with_drafts(3)),
        "expected a cache made `with_drafts(4)`, found `with_drafts(3)`",
    );

    let mut cache = DeltaCache::with_drafts(4);
    net.forward_with(DeltaInput::new(&xs).with_tree(&tree).with_cache(&mut cache))?;
    assert_error(
        DeltaInput::new(&xs).with_cache(&mut cache),
        "the last tokens of sequence 0 are a tree with branches, expected a call of `keep`",
    );
    let found = error_text(cache.keep(&[0, 0], &[vec![0, 1], vec![1, 3]]));
    assert!(found.contains("sequence 1 keeps the tokens [1, 3] of a tree, expected a path"), "{found}");
    for (kept, sequence) in [([vec![0, 1], vec![0, 1, 2, 3]], 1), ([vec![0, 1, 2, 3], vec![0, 1, 2, 3]], 0)] {
        let of_all = error_text(cache.keep(&[0, 0], &kept));
        let expected = format!("sequence {sequence} keeps the tokens [0, 1, 2, 3] of a tree, expected a path");
        assert!(of_all.contains(&expected), "{of_all}");
    }
    assert_eq!(cache.lens(), [4, 4]);
    cache.keep(&[0, 0], &[vec![0, 1], vec![0, 2, 3]])?;
    net.forward_with(DeltaInput::new(&xs).with_cache(&mut cache))?;
    assert_eq!(cache.lens(), [6, 7]);
    Ok(())
}

/// Counts the bytes after each of many tokens: a cache without drafts stores one state, and one with drafts of n tokens
/// the states of n calls of one token, or one more state for a call of n tokens.
#[test]
fn delta_cache_memory_with_drafts_is_bounded() -> Result<()> {
    let net = &nets()?[0];
    let state = (4 * 6 * 5 + 3 * (2 * 2 * 6 + 4 * 5)) * 4;
    // The inputs of the convolutions, betas and decays of a token.
    let token = (2 * 2 * 6 + 4 * 5 + 4 + 4) * 4;
    let mut usual = DeltaCache::default();
    let mut drafts = DeltaCache::with_drafts(3);
    let mut calls_of_three = DeltaCache::with_drafts(3);
    for step in 0..8 {
        let xs = wave(1, 3, E, step as f32)?;
        for t in 0..3 {
            let input = part(&xs, t, 1)?;
            net.forward_with(DeltaInput::new(&input).with_cache(&mut usual))?;
            net.forward_with(DeltaInput::new(&input).with_cache(&mut drafts))?;
        }
        net.forward_with(DeltaInput::new(&xs).with_cache(&mut calls_of_three))?;
        assert_eq!(usual.memory(), state, "step {step}");
        assert_eq!(drafts.memory(), 4 * state + 3 * token, "step {step}");
        assert_eq!(calls_of_three.memory(), 2 * state + 3 * token, "step {step}");
    }
    assert_eq!((usual.drafts(), drafts.drafts()), (0, 3));
    Ok(())
}

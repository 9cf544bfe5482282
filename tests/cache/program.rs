//! Sequences that are continued in ragged calls, truncated, drafted, reordered, forked and begun anew, in batches that
//! sequences join and that they are removed from, each compared with the same sequence in one call of the reference
//! path without a cache. The layer projects keys and values, or reads the keys and values of an earlier layer.

use std::ops::Range;

use crate::masks::Drawn;
use crate::*;

pub const EMBED_DIM: usize = 12;

/// A layer, the cache that serves it, and what its calls may have.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub layer: &'a dyn Layer,
    /// The earlier layer whose keys and values the layer reads, if it projects none.
    pub earlier: Option<&'a MultiHeadAttention>,
    pub cache: &'a AttentionCacheConfig,
    pub dtype: DType,
    pub device: &'a Device,
    /// The mask of all calls.
    pub mask: &'a AttentionMask,
    /// The number of positions that a sliding cache stores in addition to the layer's window. The cache can be
    /// truncated to that many positions before its last call, if its capacity fits that call and the window.
    pub back: Option<usize>,
    /// Whether some calls have explicit positions.
    pub gives_positions: bool,
    /// Whether calls have random masks.
    pub draws_masks: bool,
}

/// The tokens of a sequence, and the position at which its last call began, or ended if the call cannot be undone.
#[derive(Debug, Clone, Default)]
struct Sequence {
    tokens: Vec<f32>,
    /// The position of each token.
    positions: Vec<u32>,
    begun: usize,
}

impl Sequence {
    fn len(&self) -> usize {
        self.positions.len()
    }

    fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len * EMBED_DIM);
        self.positions.truncate(len);
        self.begun = if len == 0 { 0 } else { self.begun };
    }
}

/// The positions of a call, and which of them are the next tokens of each sequence; the others are padding.
pub struct Call {
    pub t: usize,
    pub own: Vec<Range<usize>>,
    /// The tokens of each sequence before the call.
    pub before: Vec<usize>,
}

impl Call {
    /// Draws a prompt, a piece or a single token, often with padding on the left, the right, or both.
    fn draw(random: &mut Random, before: Vec<usize>) -> Self {
        let t = match random.up_to(3) {
            0 | 1 => 1,
            2 => random.up_to(5),
            _ => 4 + random.up_to(8),
        };
        let left = random.chance(0.35);
        let right = random.chance(0.35);
        let own = before.iter().map(|_| {
            let start = if left { random.up_to(t) } else { 0 };
            start..if right { start + random.up_to(t - start) } else { t }
        });
        Self { t, own: own.collect(), before }
    }
}

pub struct Program<'a> {
    setup: Setup<'a>,
    cache: AttentionCache,
    sequences: Vec<Sequence>,
    /// Whether the layer hears of positions where an earlier one is given them.
    says_positions: bool,
}

impl<'a> Program<'a> {
    /// Runs random steps over random sequences, and returns the largest difference.
    pub fn run(setup: Setup<'a>, steps: usize, seed: u64) -> Result<f64> {
        let random = &mut Random::new(seed);
        let sequences = vec![Sequence::default(); 1 + random.up_to(2)];
        let cache = AttentionCache::new(setup.cache)?;
        assert_eq!((cache.len(), cache.lens(), cache.is_empty(), cache.memory()), (0, vec![], true, 0));
        let says_positions = setup.earlier.is_none() || seed.is_multiple_of(2);
        let mut program = Self { setup, cache, sequences, says_positions };
        let mut most = program.call(random)?;
        for _ in 0..steps {
            most = most.max(program.step(random)?);
        }
        Ok(most)
    }

    fn step(&mut self, random: &mut Random) -> Result<f64> {
        let lens: Vec<_> = self.sequences.iter().map(Sequence::len).collect();
        assert_eq!(self.cache.lens(), lens);
        assert_eq!(self.cache.len(), lens.into_iter().max().unwrap_or(0));
        match random.up_to(34) {
            28..30 => self.leave(random).map(|()| 0.0),
            30..32 => self.arrive(random),
            32..34 => self.draft(random),
            0..3 => self.truncate(random).map(|()| 0.0),
            3..6 => {
                // Tokens that are tried, and some of them taken back.
                let most = self.call(random)?;
                self.truncate(random).map(|()| most)
            }
            6..9 => self.reorder(random).map(|()| 0.0),
            9 => self.reset(random),
            10..14 => self.fork(random),
            _ => self.call(random),
        }
    }

    /// Calls the layer with some tokens of each sequence, and compares the outputs with the whole sequence.
    fn call(&mut self, random: &mut Random) -> Result<f64> {
        let Setup { layer, cache, dtype, device, .. } = self.setup;
        let call = Call::draw(random, self.sequences.iter().map(Sequence::len).collect());
        let b = self.sequences.len();
        let t = call.t;
        // Nothing that the NaN of padding touches stays a number.
        let mut data = vec![f32::NAN; b * t * EMBED_DIM];
        // For each sequence, or for all of them and in integers of 64 bits.
        let is_given = self.setup.gives_positions && random.chance(0.6);
        let for_all = random.chance(0.3);
        let given: Vec<_> = (0..if for_all { t } else { b * t }).map(|_| random.up_to(30) as u32).collect();
        for (n, (sequence, own)) in self.sequences.iter_mut().zip(&call.own).enumerate() {
            let own = n * t + own.start..n * t + own.end;
            let numbers = &mut data[own.start * EMBED_DIM..own.end * EMBED_DIM];
            numbers.iter_mut().for_each(|number| *number = random.between(-1.0, 1.0) as f32);
            let stays = cache.window().is_some_and(|window| t + window > cache.most_held().unwrap_or(t));
            sequence.begun = sequence.begun.max(sequence.len() + if stays { own.len() } else { 0 });
            let place = sequence.len() as u32;
            sequence.tokens.extend_from_slice(numbers);
            match is_given {
                true => sequence.positions.extend(own.map(|at| given[at % given.len()])),
                false => sequence.positions.extend(place..place + own.len() as u32),
            }
        }
        let drawn = self.setup.draws_masks.then(|| Drawn::draw(random, &call));
        let mask = drawn.as_ref().map_or(Ok(AttentionMask::none()), |drawn| drawn.of_call(&call, device))?;
        let mask = self.setup.mask.and(&mask);
        let xs = copied_to(device, data, (b, t, EMBED_DIM))?.to_dtype(dtype)?;
        let given = match for_all {
            true => Tensor::from_vec(given, t, &Device::Cpu)?.to_dtype(DType::I64)?,
            false => Tensor::from_vec(given, (b, t), &Device::Cpu)?,
        };
        let [starts, ends] = [|own: &Range<usize>| own.start, |own: &Range<usize>| own.end]
            .map(|side| call.own.iter().map(side).collect::<Vec<_>>());
        let backend = if random.chance(0.25) { Backend::Reference } else { Backend::Auto };
        let input = |says: bool| {
            let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(backend);
            let input = if ends.iter().any(|&end| end < t) { input.with_valid_lens(&ends) } else { input };
            let input = if starts.iter().any(|&start| start > 0) { input.with_starts(&starts) } else { input };
            if is_given && says { input.with_positions(&given) } else { input }
        };
        let ys = match self.setup.earlier {
            None => layer.run(input(true).with_cache(&mut self.cache))?,
            Some(earlier) => {
                earlier.forward_with(input(true).with_cache(&mut self.cache))?;
                let shared = || input(self.says_positions).with_shared_cache(&self.cache);
                let ys = layer.run(shared())?;
                assert!(difference(&layer.run_with_weights(shared())?.output, &ys) <= 1e-2, "beside the weights");
                ys
            }
        };

        let mut most = 0.0f64;
        for (n, own) in call.own.iter().enumerate() {
            for i in (0..t).filter(|i| !own.contains(i)) {
                assert!(values(&ys.i((n, i))?).iter().all(|y| y.is_finite()), "padding {i} of sequence {n}");
            }
            if !own.is_empty() {
                let expected = self.expected(n, &call, drawn.as_ref())?;
                most = most.max(difference(&ys.i(n)?.narrow(0, own.start, own.len())?, &expected));
            }
        }
        Ok(most)
    }

    /// Returns the expected outputs of the last tokens of a sequence alone.
    fn expected(&self, n: usize, call: &Call, drawn: Option<&Drawn>) -> Result<Tensor> {
        let mask = drawn.map_or(Ok(AttentionMask::none()), |drawn| drawn.of_sequence(n, call, self.setup.device))?;
        self.alone(&self.sequences[n], &mask)?.narrow(0, call.before[n], call.own[n].len())
    }

    /// Returns the outputs of a sequence in one call without a cache.
    fn alone(&self, sequence: &Sequence, mask: &AttentionMask) -> Result<Tensor> {
        let Setup { layer, dtype, device, .. } = self.setup;
        let xs = copied_to(device, sequence.tokens.clone(), (sequence.len(), EMBED_DIM))?.to_dtype(dtype)?;
        let positions = Tensor::new(sequence.positions.as_slice(), &Device::Cpu)?;
        let mask = self.setup.mask.and(mask);
        let memory = self.setup.earlier.map(|earlier| earlier.project_memory(&xs, &xs)).transpose()?;
        let gives = self.setup.gives_positions;
        let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(Backend::Reference);
        let input = if gives && self.says_positions { input.with_positions(&positions) } else { input };
        layer.run(match &memory {
            Some(memory) if gives => input.with_memory(memory).with_key_positions(&positions),
            Some(memory) => input.with_memory(memory),
            None => input,
        })
    }

    /// Returns the smallest length, other than zero, to which a sequence can be truncated.
    fn least(&self, sequence: &Sequence) -> usize {
        self.setup.back.map_or(0, |back| sequence.begun.saturating_sub(back).min(sequence.len()))
    }

    fn truncate(&mut self, random: &mut Random) -> Result<()> {
        let drawn = |sequence: &Sequence| {
            let least = self.least(sequence);
            if random.chance(0.1) { 0 } else { least + random.up_to(sequence.len() - least) }
        };
        let lens: Vec<_> = self.sequences.iter().map(drawn).collect();
        let one = lens.iter().copied().max().unwrap_or(0);
        // One length for all, where that is possible.
        let to_one = self.sequences.iter().all(|sequence| (self.least(sequence)..=sequence.len()).contains(&one));
        let lens = if to_one && random.chance(0.5) {
            self.cache.truncate(one)?;
            vec![one; lens.len()]
        } else {
            self.cache.truncate_to(&lens)?;
            lens
        };
        self.sequences.iter_mut().zip(lens).for_each(|(sequence, len)| sequence.truncate(len));
        Ok(())
    }

    fn reorder(&mut self, random: &mut Random) -> Result<()> {
        let b = if random.chance(0.5) { self.sequences.len() } else { 1 + random.up_to(3) };
        let order: Vec<_> = (0..b).map(|_| random.up_to(self.sequences.len() - 1)).collect();
        self.cache.reorder(&order)?;
        self.sequences = order.into_iter().map(|n| self.sequences[n].clone()).collect();
        Ok(())
    }

    /// Removes a sequence, if another one stays.
    fn leave(&mut self, random: &mut Random) -> Result<()> {
        if self.sequences.len() == 1 {
            return Ok(());
        }
        let memory = self.cache.memory();
        let sequence = random.up_to(self.sequences.len() - 1);
        if random.chance(0.5) {
            self.cache.remove(sequence)?;
            self.sequences.remove(sequence);
        } else {
            self.cache.swap_remove(sequence)?;
            self.sequences.swap_remove(sequence);
        }
        assert_eq!(self.cache.memory(), memory);
        Ok(())
    }

    /// Adds the sequences of another cache, which continues independently.
    fn arrive(&mut self, random: &mut Random) -> Result<f64> {
        if self.sequences.len() > 3 {
            return self.leave(random).map(|()| 0.0);
        }
        let sequences = vec![Sequence::default(); 1 + random.up_to(1)];
        let mut guest = Program { cache: AttentionCache::new(self.setup.cache)?, sequences, ..*self };
        let first = guest.call(random)?;
        self.cache.join(&guest.cache)?;
        self.sequences.extend(guest.sequences.iter().cloned());
        let found = [first, guest.call(random)?, self.call(random)?, guest.call(random)?];
        Ok(found.into_iter().fold(0.0, f64::max))
    }

    /// Calls the layer with a tree of drafts for each sequence, compares each node with its path alone, and keeps a
    /// path or some of it.
    fn draft(&mut self, random: &mut Random) -> Result<f64> {
        let Setup { cache, dtype, device, mask, .. } = self.setup;
        // A draft may not drop keys that the next call needs.
        let most = cache.window().map_or(6, |window| cache.most_held().unwrap_or(6).saturating_sub(window).min(6));
        if most == 0 {
            return self.call(random);
        }
        let b = self.sequences.len();
        let before: Vec<_> = self.sequences.iter().map(Sequence::len).collect();
        let trees: Vec<_> = (0..b).map(|_| drawn_tree(random, most)).collect::<Result<_>>()?;
        let is_one = random.chance(0.4);
        let tree_of = |n: usize| &trees[if is_one { 0 } else { n }];
        let left = random.up_to(2);
        let t = left + (0..b).map(|n| tree_of(n).len()).max().unwrap_or(0);
        let starts: Vec<_> = (0..b).map(|n| if left == 0 { 0 } else { random.up_to(t - tree_of(n).len()) }).collect();
        let ends: Vec<_> = (0..b).map(|n| starts[n] + tree_of(n).len()).collect();
        let mut data = vec![f32::NAN; b * t * EMBED_DIM];
        for n in 0..b {
            let own = (n * t + starts[n]) * EMBED_DIM..(n * t + ends[n]) * EMBED_DIM;
            data[own].iter_mut().for_each(|number| *number = random.between(-1.0, 1.0) as f32);
        }
        let xs = copied_to(device, data.clone(), (b, t, EMBED_DIM))?.to_dtype(dtype)?;
        let backend = if random.chance(0.25) { Backend::Reference } else { Backend::Auto };
        let input = || {
            let input = AttentionInput::new(&xs).with_mask(mask).with_backend(backend);
            let input = input.with_starts(&starts).with_valid_lens(&ends);
            if is_one { input.with_tree(&trees[0]) } else { input.with_trees(&trees) }
        };
        let ys = match self.setup.earlier {
            None => self.setup.layer.run(input().with_cache(&mut self.cache))?,
            Some(earlier) => {
                earlier.forward_with(input().with_cache(&mut self.cache))?;
                self.setup.layer.run(input().with_shared_cache(&self.cache))?
            }
        };
        let mut largest = 0.0f64;
        let mut kept = Vec::new();
        for n in 0..b {
            let tree = tree_of(n);
            let continued = |path: &[usize]| {
                let mut sequence = self.sequences[n].clone();
                for &node in path {
                    let row = (n * t + starts[n] + node) * EMBED_DIM;
                    sequence.tokens.extend_from_slice(&data[row..row + EMBED_DIM]);
                    sequence.positions.push((before[n] + tree.depths()[node]) as u32);
                }
                sequence
            };
            for node in 0..tree.len() {
                let path = continued(&tree.path(node)?);
                let expected = self.alone(&path, &AttentionMask::none())?.narrow(0, path.len() - 1, 1)?;
                largest = largest.max(difference(&ys.i(n)?.narrow(0, starts[n] + node, 1)?, &expected));
            }
            let mut path = tree.path(random.up_to(tree.len() - 1))?;
            path.truncate(random.up_to(path.len()));
            kept.push((continued(&path), path));
        }
        let (sequences, paths): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
        self.cache.keep(&before, &paths)?;
        self.sequences = sequences;
        for (sequence, len) in self.sequences.iter_mut().zip(before) {
            sequence.begun = sequence.begun.max(len);
        }
        Ok(largest)
    }

    /// Resets the cache, whose buffers then serve a batch of another size.
    fn reset(&mut self, random: &mut Random) -> Result<f64> {
        let memory = self.cache.memory();
        self.cache.reset();
        assert_eq!((self.cache.lens(), self.cache.is_empty(), self.cache.memory()), (vec![], true, memory));
        self.sequences = vec![Sequence::default(); 1 + random.up_to(2)];
        self.call(random)
    }

    /// Continues a fork and the original in turn, and then one of them.
    fn fork(&mut self, random: &mut Random) -> Result<f64> {
        let mut other = Program { cache: self.cache.fork()?, sequences: self.sequences.clone(), ..*self };
        if random.chance(0.5) {
            std::mem::swap(self, &mut other);
        }
        let found = [self.call(random)?, other.call(random)?, self.call(random)?, other.call(random)?];
        Ok(found.into_iter().fold(0.0, f64::max))
    }
}

/// Draws a tree of up to `most` nodes.
fn drawn_tree(random: &mut Random, most: usize) -> Result<TokenTree> {
    let nodes = 1 + random.up_to(most - 1);
    let mut parents = Vec::with_capacity(nodes);
    for node in 0..nodes {
        parents.push(if random.chance(0.2) { None } else { random.up_to(node).checked_sub(1) });
    }
    TokenTree::new(&parents)
}

/// Returns the largest difference, relative to the largest expected number if that is above 1.
pub fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    max_error(found, expected) / values(expected).into_iter().map(f64::abs).fold(1.0, f64::max)
}

/// Returns the tolerance of a layer in a dtype with a cache.
pub fn tolerance(dtype: DType, cache: &AttentionCacheConfig) -> f64 {
    let of = |float| match float {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        _ => 4e-2,
    };
    let kept: f64 = match cache.codes() {
        None => of(cache.dtype().unwrap_or(dtype)),
        Some(KvCodeFormat::Q8) => 3e-2,
        Some(KvCodeFormat::E4M3 | KvCodeFormat::Q4) => 1e-1,
    };
    kept.max(of(dtype))
}

/// Returns the number of random programs of a test.
pub fn cases(default: u64) -> u64 {
    std::env::var("CACHE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

//! Sequences that are continued in ragged calls, truncated, reordered and forked, each beside the same sequence in one
//! call of the reference path without a cache.

use std::ops::Range;

use crate::masks::Drawn;
use crate::*;

pub const EMBED_DIM: usize = 12;

/// The longest call that a sliding cache can take back.
const SHORT: usize = 5;

/// A layer, the cache that serves it, and what its calls may have.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub layer: &'a dyn Layer,
    pub cache: &'a AttentionCacheConfig,
    pub dtype: DType,
    pub device: &'a Device,
    /// Of all calls.
    pub mask: &'a AttentionMask,
    /// How many positions a sliding cache holds beside those that the layer sees. It goes back as far behind the
    /// position at which its last call began, if that was short.
    pub back: Option<usize>,
    /// Whether some calls say where their tokens stand.
    pub gives_positions: bool,
    /// Whether calls have masks of their own.
    pub draws_masks: bool,
}

/// What a sequence consists of, and the position at which its last call began, or ended if that cannot be taken back.
#[derive(Debug, Clone, Default)]
struct Sequence {
    tokens: Vec<f32>,
    /// Of each token.
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
    /// A prompt, a piece or a single token, often with padding on the left, the right, or both.
    fn draw(random: &mut Random, before: Vec<usize>) -> Self {
        let t = match random.up_to(3) {
            0 | 1 => 1,
            2 => random.up_to(5),
            _ => 4 + random.up_to(8),
        };
        let (left, right) = (random.chance(0.35), random.chance(0.35));
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
}

impl<'a> Program<'a> {
    /// Random steps over random sequences: the largest difference.
    pub fn run(setup: Setup<'a>, steps: usize, seed: u64) -> Result<f64> {
        let random = &mut Random::new(seed);
        let sequences = vec![Sequence::default(); 1 + random.up_to(2)];
        let mut program = Self { setup, cache: AttentionCache::new(setup.cache)?, sequences };
        let mut most = program.call(random)?;
        for _ in 0..steps {
            most = most.max(program.step(random)?);
        }
        Ok(most)
    }

    fn step(&mut self, random: &mut Random) -> Result<f64> {
        let lens: Vec<_> = self.sequences.iter().map(Sequence::len).collect();
        assert_eq!(self.cache.lens(), lens);
        match random.up_to(6) {
            0 => self.truncate(random)?,
            1 => self.reorder(random)?,
            2 => return self.fork(random),
            _ => return self.call(random),
        }
        Ok(0.0)
    }

    /// Some tokens for each sequence; their outputs are those of the whole sequence.
    fn call(&mut self, random: &mut Random) -> Result<f64> {
        let Setup { layer, dtype, device, .. } = self.setup;
        let call = Call::draw(random, self.sequences.iter().map(Sequence::len).collect());
        let (b, t) = (self.sequences.len(), call.t);
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
            let stays = self.setup.back.is_some_and(|back| back == 0 || t > SHORT);
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
        let xs = Tensor::from_vec(data, (b, t, EMBED_DIM), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
        let given = match for_all {
            true => Tensor::from_vec(given, t, &Device::Cpu)?.to_dtype(DType::I64)?,
            false => Tensor::from_vec(given, (b, t), &Device::Cpu)?,
        };
        let [starts, ends] = [|own: &Range<usize>| own.start, |own: &Range<usize>| own.end]
            .map(|side| call.own.iter().map(side).collect::<Vec<_>>());
        let backend = if random.chance(0.25) { Backend::Reference } else { Backend::Auto };
        let mut input = AttentionInput::new(&xs).with_mask(&mask).with_backend(backend).with_cache(&mut self.cache);
        if ends.iter().any(|&end| end < t) {
            input = input.with_valid_lens(&ends);
        }
        if starts.iter().any(|&start| start > 0) {
            input = input.with_starts(&starts);
        }
        let ys = layer.run(if is_given { input.with_positions(&given) } else { input })?;

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

    /// The last tokens of a sequence by itself.
    fn expected(&self, n: usize, call: &Call, drawn: Option<&Drawn>) -> Result<Tensor> {
        let Setup { layer, dtype, device, .. } = self.setup;
        let sequence = &self.sequences[n];
        let xs = Tensor::from_slice(&sequence.tokens, (sequence.len(), EMBED_DIM), &Device::Cpu)?;
        let xs = xs.to_dtype(dtype)?.to_device(device)?;
        let positions = Tensor::new(sequence.positions.as_slice(), &Device::Cpu)?;
        let mask = drawn.map_or(Ok(AttentionMask::none()), |drawn| drawn.of_sequence(n, call, device))?;
        let mask = self.setup.mask.and(&mask);
        let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(Backend::Reference);
        let ys = layer.run(if self.setup.gives_positions { input.with_positions(&positions) } else { input })?;
        ys.narrow(0, call.before[n], call.own[n].len())
    }

    /// The shortest that a sequence may become, but for nothing at all.
    fn least(&self, sequence: &Sequence) -> usize {
        self.setup.back.map_or(0, |back| sequence.begun.saturating_sub(back).min(sequence.len()))
    }

    fn truncate(&mut self, random: &mut Random) -> Result<()> {
        let len = |sequence: &Sequence| {
            let least = self.least(sequence);
            if random.chance(0.1) { 0 } else { least + random.up_to(sequence.len() - least) }
        };
        let lens: Vec<_> = self.sequences.iter().map(len).collect();
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

    /// Two go on in turn, and then one of them.
    fn fork(&mut self, random: &mut Random) -> Result<f64> {
        let mut other = Program { cache: self.cache.fork()?, sequences: self.sequences.clone(), ..*self };
        if random.chance(0.5) {
            std::mem::swap(self, &mut other);
        }
        let found = [self.call(random)?, other.call(random)?, self.call(random)?, other.call(random)?];
        Ok(found.into_iter().fold(0.0, f64::max))
    }
}

/// The largest difference, relative to the largest number that is expected where that is above 1.
pub fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    max_error(found, expected) / values(expected).into_iter().map(f64::abs).fold(1.0, f64::max)
}

/// How far a layer in a dtype may be off with a cache.
pub fn tolerance(dtype: DType, cache: &AttentionCacheConfig) -> f64 {
    let of = |dtype| match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        _ => 4e-2,
    };
    let kept: f64 = if cache.q8() { 3e-2 } else { of(cache.dtype().unwrap_or(dtype)) };
    kept.max(of(dtype))
}

/// How many random programs a test draws.
pub fn cases(default: u64) -> u64 {
    std::env::var("CACHE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

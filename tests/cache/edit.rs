//! Sequences that are truncated, reordered and forked between calls go on as if they had never been anything else.

use std::ops::Range;

use candle_attention::init::TorchSeed;
use candle_attention::{
    AlibiConfig, AttentionCache, AttentionCacheConfig, AttentionInput, Backend, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, RelativeBias, RelativeBiasConfig, RopeConfig,
};
use candle_core::{DType, Device, IndexOp, Result, Tensor};

use crate::array::Random;
use crate::common::{assert_close, error_text, values};
use crate::compare::{Layer, difference, layer, tolerance_of};
use crate::latent_layers as latent;
use crate::plan::cases;

const EMBED_DIM: usize = 8;

fn base() -> Config {
    Config::new(EMBED_DIM, 4).with_num_kv_heads(2).with_causal(true)
}

/// How far a cache goes back behind the position at which its last call began.
const BACK: usize = 2;

/// Layers, the caches that serve them, and whether those drop positions.
fn setups() -> Vec<(Config, AttentionCacheConfig, bool)> {
    let new = AttentionCacheConfig::new;
    vec![
        (base(), new().with_capacity(2), false),
        (base().with_sinks(true).with_value_head_dim(3), new().with_capacity(64).with_growth(false), false),
        (base().with_window(3), new(), false),
        (base().with_rope(RopeConfig::new(100.0)), new(), false),
        (base().with_window(3).with_rope(RopeConfig::new(100.0)), new().with_window(3 + BACK), true),
        (base().with_window(1), new().with_window(1 + BACK).with_capacity(16), true),
        (base().with_sinks(true).with_value_head_dim(3), new().with_capacity(2).with_q8(), false),
        (base().with_window(3).with_rope(RopeConfig::new(100.0)), new().with_window(3 + BACK).with_q8(), true),
    ]
}

/// Layers that know of positions in each way.
fn setups_by_position() -> Vec<(Config, AttentionCacheConfig, bool)> {
    let new = || AttentionCacheConfig::new().with_capacity(2);
    let relative = || base().with_relative_bias(RelativeBiasConfig::new(true).with_num_buckets(8).with_max_distance(9));
    let rope = || RopeConfig::new(100.0);
    vec![
        (relative(), new(), false),
        (relative().with_rope(rope()), new().with_q8(), false),
        (relative().with_window(3), AttentionCacheConfig::new().with_window(3 + BACK), true),
        (base().with_alibi(AlibiConfig::Falcon), new(), false),
        (
            base().with_alibi(AlibiConfig::Falcon).with_window(3),
            AttentionCacheConfig::new().with_window(3 + BACK),
            true,
        ),
        (base().with_rope(rope()), new(), false),
    ]
}

/// A layer, with a bias where the config has one.
fn layer_with_bias(cfg: &Config, device: &Device) -> Result<MultiHeadAttention> {
    let layer = layer(cfg, DType::F32, device)?;
    let Some(buckets) = cfg.relative_bias() else { return Ok(layer) };
    let vb = TorchSeed::new(5).var_builder(DType::F32, device);
    layer.with_relative_bias(RelativeBias::new(buckets, cfg.num_heads(), vb)?)
}

/// What a sequence consists of, and where its last call began.
#[derive(Debug, Clone, Default)]
struct Sequence {
    tokens: Vec<f32>,
    /// Of each token.
    positions: Vec<u32>,
    begun: usize,
}

impl Sequence {
    fn len(&self) -> usize {
        self.tokens.len() / EMBED_DIM
    }

    fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len * EMBED_DIM);
        self.positions.truncate(len);
        if len == 0 {
            self.begun = 0;
        }
    }
}

struct Program<'a> {
    layer: &'a dyn Layer,
    cache: AttentionCache,
    slides: bool,
    /// Whether some calls say where their tokens stand.
    gives_positions: bool,
    sequences: Vec<Sequence>,
    device: &'a Device,
}

impl Program<'_> {
    /// Some tokens for each sequence, among padding; their outputs are those of the whole sequence without a cache.
    fn call(&mut self, random: &mut Random) -> Result<f64> {
        let t = 1 + random.up_to(4);
        let own: Vec<Range<usize>> = (self.sequences.iter())
            .map(|_| match random.chance(0.7) {
                true => 0..t,
                false => random.up_to(t)..t,
            })
            .collect();
        let data: Vec<f32> = (0..own.len() * t * EMBED_DIM).map(|_| random.between(-1.0, 1.0) as f32).collect();
        let given: Vec<_> = (0..own.len() * t).map(|_| random.up_to(30) as u32).collect();
        let is_given = self.gives_positions && random.chance(0.6);
        for (b, (sequence, own)) in self.sequences.iter_mut().zip(&own).enumerate() {
            sequence.begun = sequence.begun.max(sequence.len());
            let place = sequence.len() as u32;
            sequence.positions.extend(match is_given {
                true => given[b * t + own.start..b * t + own.end].to_vec(),
                false => (place..place + own.len() as u32).collect(),
            });
            sequence.tokens.extend(&data[(b * t + own.start) * EMBED_DIM..(b * t + own.end) * EMBED_DIM]);
        }
        let xs = Tensor::from_vec(data, (own.len(), t, EMBED_DIM), &Device::Cpu)?.to_device(self.device)?;
        let starts: Vec<_> = own.iter().map(|own| own.start).collect();
        let given = Tensor::from_vec(given, (own.len(), t), &Device::Cpu)?;
        let input = AttentionInput::new(&xs).with_cache(&mut self.cache).with_starts(&starts);
        let ys = self.layer.run(if is_given { input.with_positions(&given) } else { input })?;
        let mut most = 0.0f64;
        for (b, (sequence, own)) in self.sequences.iter().zip(&own).enumerate().filter(|(_, (_, own))| !own.is_empty())
        {
            let whole = Tensor::from_slice(&sequence.tokens, (sequence.len(), EMBED_DIM), &Device::Cpu)?;
            let whole = whole.to_device(self.device)?;
            let positions = Tensor::new(sequence.positions.as_slice(), &Device::Cpu)?;
            let input = AttentionInput::new(&whole).with_positions(&positions).with_backend(Backend::Reference);
            let expected = self.layer.run(input)?;
            let expected = expected.narrow(0, sequence.len() - own.len(), own.len())?;
            most = most.max(difference(&ys.i(b)?.narrow(0, own.start, own.len())?, &expected));
        }
        Ok(most)
    }

    /// The shortest that a sequence may become.
    fn least(&self, sequence: &Sequence) -> usize {
        if self.slides { sequence.begun.saturating_sub(BACK).min(sequence.len()) } else { 0 }
    }

    fn truncate(&mut self, random: &mut Random) -> Result<()> {
        let lens: Vec<_> = (self.sequences.iter())
            .map(|sequence| {
                let least = self.least(sequence);
                least + random.up_to(sequence.len() - least)
            })
            .collect();
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
}

impl<'a> Program<'a> {
    /// Random steps over random sequences: the largest difference.
    fn run(
        layer: &'a dyn Layer,
        kept: (&AttentionCacheConfig, bool),
        gives_positions: bool,
        seed: u64,
        device: &'a Device,
    ) -> Result<f64> {
        let random = &mut Random::new(seed);
        let sequences = vec![Sequence::default(); 1 + random.up_to(2)];
        let cache = AttentionCache::new(kept.0)?;
        let mut program = Self { layer, cache, slides: kept.1, gives_positions, sequences, device };
        let mut most = program.call(random)?;
        for _ in 0..16 {
            most = most.max(program.step(random)?);
        }
        Ok(most)
    }
}

fn sequences_go_on_from_what_they_were_made(device: &Device) {
    let all = setups().into_iter().map(|setup| (setup, false));
    for ((cfg, cache, slides), gives_positions) in
        all.chain(setups_by_position().into_iter().map(|setup| (setup, true)))
    {
        let layer = layer_with_bias(&cfg, device).expect("the config fits");
        for seed in 0..cases(60) {
            let off = Program::run(&layer, (&cache, slides), gives_positions, seed, device);
            let off = off.unwrap_or_else(|error| panic!("{cfg:?}, {cache:?}, seed {seed}: {error}"));
            assert!(off <= tolerance_of(DType::F32, &cache), "{cfg:?}, {cache:?}, seed {seed}: off by {off:e}");
        }
    }
}

fn sequences_of_latents_go_on_from_what_they_were_made(device: &Device) {
    for seed in 0..cases(25) {
        let random = &mut Random::new(seed);
        let cfg = latent::config_of(EMBED_DIM, random);
        let layer =
            latent::layer(&cfg, &latent::parameters(&cfg, random), DType::F32, device).expect("the config fits");
        for cache in [AttentionCacheConfig::new().with_capacity(2), AttentionCacheConfig::new().with_q8()] {
            let off = Program::run(&layer, (&cache, false), seed % 2 == 0, seed, device);
            let off = off.unwrap_or_else(|error| panic!("{cfg:?}, {cache:?}, seed {seed}: {error}"));
            // A random layer's scale of the scores can be large, which makes more of what 8 bits lose.
            let most = if cache.q8() { 6e-2 } else { 1e-5 };
            assert!(off <= most, "{cfg:?}, {cache:?}, seed {seed}: off by {off:e}");
        }
    }
}

crate::on_each_device!(sequences_go_on_from_what_they_were_made, sequences_of_latents_go_on_from_what_they_were_made,);

fn xs(b: usize, t: usize) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, (b, t, EMBED_DIM), &Device::Cpu)
}

/// A cache of `b` sequences after calls of these lengths.
fn filled(cfg: &AttentionCacheConfig, window: Option<usize>, (b, calls): (usize, &[usize])) -> Result<AttentionCache> {
    let cfg_of_layer = window.map_or(base(), |window| base().with_window(window));
    let (layer, mut cache) = (layer(&cfg_of_layer, DType::F32, &Device::Cpu)?, AttentionCache::new(cfg)?);
    for &t in calls {
        layer.forward_with(AttentionInput::new(&xs(b, t)?).with_cache(&mut cache))?;
    }
    Ok(cache)
}

/// Speculative decoding: five tokens are tried in one call, and some of them taken back, wherever the window slides.
#[test]
fn what_the_last_call_brought_can_be_taken_back() -> Result<()> {
    let cfg = base().with_window(4);
    let layer = layer(&cfg, DType::F32, &Device::Cpu)?;
    let whole = xs(1, 60)?;
    let expected = layer.forward(&whole)?;
    let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(&cfg))?;
    let (mut at, mut round) = (0, 0);
    while at + 5 <= 60 {
        let tried = Tensor::cat(&[&whole.narrow(1, at, 1 + round % 5)?, &xs(1, 4 - round % 5)?], 1)?;
        let ys = layer.forward_with(AttentionInput::new(&tried).with_cache(&mut cache))?;
        let kept = 1 + round % 5;
        assert_close(&ys.narrow(1, 0, kept)?, &expected.narrow(1, at, kept)?, 1e-5, "what is kept");
        (at, round) = (at + kept, round + 1);
        cache.truncate(at)?;
    }
    assert!(round > 10 && cache.lens() == [at]);
    Ok(())
}

#[test]
fn a_batch_of_one_size_is_reordered_where_it_lies() -> Result<()> {
    let mut cache = filled(&AttentionCacheConfig::new().with_capacity(64), None, (3, &[5]))?;
    let memory = cache.memory();
    for order in [[0, 1, 2], [2, 0, 1], [1, 1, 1]] {
        cache.reorder(&order)?;
        assert_eq!((cache.lens(), cache.memory(), cache.capacity()), (vec![5; 3], memory, 64));
    }
    cache.reorder(&[0])?;
    assert_eq!((cache.lens(), cache.memory() * 3, cache.capacity()), (vec![5], memory, 64));
    cache.reorder(&[])?;
    assert!(cache.is_empty() && cache.lens().is_empty(), "no sequences are left");
    Ok(())
}

#[test]
fn an_empty_cache_has_nothing_to_edit() -> Result<()> {
    let mut cache = AttentionCache::default();
    cache.truncate(0)?;
    cache.reorder(&[])?;
    assert!(cache.fork()?.is_empty());
    Ok(())
}

/// A window of 3 in 6 places: after seven tokens, one by one, positions 0 to 3 are gone.
#[test]
fn a_sliding_cache_goes_back_as_far_as_it_holds() -> Result<()> {
    let sliding = AttentionCacheConfig::new().with_window(3).with_capacity(6).with_growth(false);
    let mut cache = filled(&sliding, Some(3), (1, &[1; 7]))?;
    let layer = layer(&base().with_window(3), DType::F32, &Device::Cpu)?;
    assert_eq!(
        error_text(cache.truncate(3)),
        "[attention_cache] sequence 0 is to be truncated to 3 positions, expected 0 or at least the 4 that the window has dropped"
    );
    assert_eq!(cache.lens(), [7]);
    // Position 5 sees the key at position 3.
    cache.truncate(5)?;
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&xs(1, 1)?).with_cache(&mut cache))),
        "[attention_cache] a query of sequence 0 sees the key at position 3, but the cache holds those from 4 on; \
         expected a shorter window in the mask, or a longer one in the cache"
    );
    cache.truncate(0)?;
    let xs = xs(1, 2)?;
    let ys = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    assert_eq!(values(&ys), values(&layer.forward(&xs)?));
    assert_eq!(cache.lens(), [2]);
    Ok(())
}

//! Sliding caches that keep the first tokens: each token of random calls equals the last token of its kept tokens
//! alone, at their positions among each other, in plain loops of f64.

use crate::by_hand::{Input, Output, Parameters, forward, parameters, tensors};
use crate::program::{cases, difference, tolerance};
use crate::*;

const WIDTH: usize = 12;

crate::on_each_device!(
    sink_tokens_in_random_calls_match_plain_loops_over_kept_tokens,
    sink_tokens_count_positions_in_the_cache_for_context_and_frequencies,
);

fn base() -> Config {
    Config::new(WIDTH, 4).with_num_kv_heads(2).with_causal(true)
}

fn rotary() -> Config {
    base().with_head_dim(8).with_rope(RopeConfig::new(100.0))
}

fn keeping(sinks: usize, window: usize) -> AttentionCacheConfig {
    AttentionCacheConfig::new().with_window(window).with_sink_tokens(sinks)
}

/// Returns the tokens that the n-th token attends to, its own as the last.
fn kept(n: usize, cache: &AttentionCacheConfig) -> Vec<usize> {
    let window = cache.window().expect("a sliding cache");
    let sinks = cache.sink_tokens();
    (0..=n).filter(|&token| token < sinks || token + (window - sinks) > n).collect()
}

/// Computes the layer for the last of some tokens, which are alone.
fn last_of(cfg: &Config, weights: &Parameters, tokens: &[f32]) -> Output {
    let count = tokens.len() / WIDTH;
    let xs = Array::of(&[1, count, WIDTH], tokens.iter().map(|&x| x.into()).collect());
    let whole = forward(cfg, weights, &Input { queries: xs.clone(), keys: xs.clone(), values: xs, mask: Vec::new() });
    let last_row = |numbers: &[f64], width: usize| numbers[(count - 1) * width..][..width].to_vec();
    let heads = whole.weights.chunks_exact(count * count);
    Output { ys: last_row(&whole.ys, WIDTH), weights: heads.flat_map(|head| last_row(head, count)).collect() }
}

/// A layer with a cache, and the tokens that each sequence has had.
struct Run<'a> {
    cfg: &'a Config,
    weights: &'a Parameters,
    layer: MultiHeadAttention,
    cache: AttentionCache,
    sequences: Vec<Vec<f32>>,
    device: &'a Device,
}

impl Run<'_> {
    /// Runs a call with padding, and returns the largest difference of a token.
    fn call(&mut self, random: &mut Random) -> Result<f64> {
        let window = self.cache.config().window().expect("a sliding cache");
        let t = if random.chance(0.6) { 1 } else { 1 + random.up_to(3 * window) };
        let b = self.sequences.len();
        let mut starts = vec![0; b];
        let mut ends = vec![t; b];
        if random.chance(0.5) {
            starts.iter_mut().for_each(|start| *start = random.up_to(t));
            ends.iter_mut().zip(&starts).for_each(|(end, start)| *end = start + random.up_to(t - start));
        }
        let numbers: Vec<f32> = (0..b * t * WIDTH).map(|_| random.between(-1.0, 1.0) as f32).collect();
        let xs = copied_to(self.device, numbers.clone(), (b, t, WIDTH))?;
        let input = AttentionInput::new(&xs).with_cache(&mut self.cache).with_starts(&starts).with_valid_lens(&ends);
        let ys = self.layer.forward_with(input)?.to_device(&Device::Cpu)?;
        let mut most = 0.0;
        for (sequence, tokens) in self.sequences.iter_mut().enumerate() {
            for i in starts[sequence]..ends[sequence] {
                let n = tokens.len() / WIDTH;
                tokens.extend_from_slice(&numbers[(sequence * t + i) * WIDTH..][..WIDTH]);
                let rows = kept(n, self.cache.config());
                let alone: Vec<f32> = rows.iter().flat_map(|&row| tokens[row * WIDTH..][..WIDTH].to_vec()).collect();
                let expected = Tensor::new(last_of(self.cfg, self.weights, &alone).ys, &Device::Cpu)?;
                most = f64::max(most, difference(&ys.i((sequence, i))?, &expected));
            }
        }
        let lens: Vec<_> = self.sequences.iter().map(|tokens| tokens.len() / WIDTH).collect();
        assert_eq!(self.cache.lens(), lens);
        Ok(most)
    }

    /// Takes back the last token of each sequence after a call of one more.
    fn take_back(&mut self) -> Result<()> {
        let before = self.cache.lens();
        let xs = copied_to(self.device, vec![0.5f32; before.len() * WIDTH], (before.len(), 1, WIDTH))?;
        self.layer.forward_with(AttentionInput::new(&xs).with_cache(&mut self.cache))?;
        self.cache.truncate_to(&before)
    }

    /// Changes the batch: sequences change places, continue twice, end and come.
    fn edit(&mut self, random: &mut Random) -> Result<()> {
        let count = self.sequences.len();
        match random.up_to(4) {
            0 => {
                let order: Vec<_> = (0..1 + random.up_to(2)).map(|_| random.up_to(count - 1)).collect();
                self.cache.reorder(&order)?;
                self.sequences = order.iter().map(|&sequence| self.sequences[sequence].clone()).collect();
            }
            1 => self.cache = self.cache.fork()?,
            2 if count < 4 => {
                let mut copy = self.cache.fork()?;
                copy.swap_remove(0)?;
                self.cache.join(&copy)?;
                let mut added = self.sequences.clone();
                added.swap_remove(0);
                self.sequences.extend(added);
            }
            3 if count > 1 => {
                let sequence = random.up_to(count - 1);
                self.cache.remove(sequence)?;
                self.sequences.remove(sequence);
            }
            _ => self.take_back()?,
        }
        Ok(())
    }
}

/// Returns the largest difference in a run of random calls and edits.
fn run(cfg: &Config, config: &AttentionCacheConfig, seed: u64, device: &Device) -> Result<f64> {
    let weights = &parameters(cfg, 3);
    let vb = VarBuilder::from_tensors(tensors(weights, DType::F32, device)?, DType::F32, device);
    let layer = MultiHeadAttention::new(cfg, vb)?;
    let random = &mut Random::new(seed);
    let sequences = vec![Vec::new(); 1 + random.up_to(2)];
    let mut run = Run { cfg, weights, layer, cache: AttentionCache::new(config)?, sequences, device };
    let mut most = run.call(random)?;
    for _ in 0..14 {
        if random.chance(0.3) {
            run.edit(random)?;
        }
        most = most.max(run.call(random)?);
        let window = config.window().expect("a sliding cache");
        assert!(run.cache.capacity() <= config.most_held().unwrap_or(0).max(2 * window), "{}", run.cache.capacity());
    }
    Ok(most)
}

fn sink_tokens_in_random_calls_match_plain_loops_over_kept_tokens(device: &Device) -> Result<()> {
    let norm = |kind| QkNorm { kind, scope: QkNormScope::PerHead, eps: 1e-6 };
    let temperature = AttentionTemperature { beta: 0.7, interval: 3, first: 1 };
    let fixed = keeping(3, 8).with_capacity(8).with_growth(false);
    for (cfg, cache) in [
        (rotary(), keeping(2, 7)),
        (rotary(), keeping(4, 5)),
        (rotary().with_rope(RopeConfig::new(100.0).with_rotary_dim(4)).with_window(9), fixed),
        (rotary().with_sinks(true).with_softcap(2.0), keeping(1, 6).with_dtype(DType::F32)),
        (rotary().with_qk_norm(norm(QkNormKind::Rms)), keeping(2, 6)),
        (rotary().with_qk_norm(norm(QkNormKind::RmsNoWeight)).with_norm_after_rope(true), keeping(2, 6)),
        (rotary().with_attention_temperature(temperature), keeping(3, 8)),
        (base(), keeping(2, 6)),
        (rotary(), keeping(2, 7).with_q8()),
        (rotary(), keeping(2, 7).with_dtype(DType::BF16)),
    ] {
        for seed in 0..cases(4) {
            let off = run(&cfg, &cache, seed, device)?;
            let most = tolerance(DType::F32, &cache);
            assert!(off <= most, "{cfg:?}, {cache:?}, seed {seed}: off by {off:e}");
        }
    }
    Ok(())
}

/// Checks the columns of weights: a column for each row of the cache, sink tokens first.
#[test]
fn sink_tokens_have_the_first_columns_of_weights_and_statistics() -> Result<()> {
    let cfg = &rotary();
    let config = keeping(2, 6);
    let weights = &parameters(cfg, 3);
    let layer = layer(cfg)?;
    let mut cache = AttentionCache::new(&config)?;
    let mut forked = AttentionCache::new(&config)?;
    let mut tokens: Vec<f32> = Vec::new();
    for n in 0..20 {
        let xs = wave(1, 1, WIDTH, n as f32)?;
        let found = layer.forward_with_weights(AttentionInput::new(&xs).with_cache(&mut cache))?;
        let options = StatisticsOptions::default();
        let (_, statistics) =
            layer.forward_with_statistics(AttentionInput::new(&xs).with_cache(&mut forked), &options)?;
        tokens.extend(values(&xs).iter().map(|&x| x as f32));
        let rows = kept(n, &config);
        let alone: Vec<f32> = rows.iter().flat_map(|&row| tokens[row * WIDTH..][..WIDTH].to_vec()).collect();
        let expected = last_of(cfg, weights, &alone);
        let columns = found.weights.dim(3)?;
        // Masked columns lie between the sink tokens and the last keys.
        let masked = columns - rows.len();
        let sinks = rows.len().min(2);
        let of_head = |head: &[f64]| [&head[..sinks], &vec![0.0; masked], &head[sinks..]].concat();
        let all: Vec<f64> = expected.weights.chunks_exact(rows.len()).flat_map(of_head).collect();
        let all = Tensor::new(all, &Device::Cpu)?.reshape((1, 4, 1, columns))?;
        assert_close(&found.weights, &all, 1e-5, &format!("token {n}"));
        assert_close(&statistics.key_weight_sums, &all.squeeze(2)?, 1e-5, &format!("sums of token {n}"));
    }
    Ok(())
}

/// Checks a layer whose context is as long as the window, and frequencies that depend on the length of a call.
fn sink_tokens_count_positions_in_the_cache_for_context_and_frequencies(device: &Device) -> Result<()> {
    let factors = |step: f64| (0..4).map(|i| 1.0 + step * f64::from(i)).collect();
    let scaling = RopeScaling::LongRope {
        short_factor: factors(0.1),
        long_factor: factors(1.7),
        original_context: 9,
        factor: Some(4.0),
        attention_factor: None,
    };
    let cfg = rotary().with_rope(RopeConfig::new(100.0).with_scaling(scaling)).with_context_length(8);
    let layer = layer_on(&cfg, DType::F32, device)?;
    let config = keeping(2, 8);
    let mut cache = AttentionCache::new(&config)?;
    let xs = wave(1, 30, WIDTH, 0.2)?.to_device(device)?;
    let mut start = 0;
    for t in [5, 1, 12, 1, 4, 7] {
        let ys = layer.forward_with(AttentionInput::new(&part(&xs, start, t)?).with_cache(&mut cache))?;
        for i in 0..t {
            let rows: Vec<_> = kept(start + i, &config).into_iter().map(|row| row as u32).collect();
            let alone = xs.index_select(&Tensor::new(rows.as_slice(), device)?, 1)?;
            let expected = layer.forward(&alone)?.narrow(1, rows.len() - 1, 1)?;
            assert_close(&ys.narrow(1, i, 1)?, &expected, 1e-5, &format!("token {}", start + i));
        }
        start += t;
    }
    Ok(())
}

/// Checks an earlier layer's cache with sink tokens, which a later layer reads after long calls and short ones.
#[test]
fn sink_tokens_of_shared_cache_serve_later_layers() -> Result<()> {
    let cfg = rotary();
    let earlier = layer(&cfg)?;
    let later = layer(&cfg.clone().with_kv_sharing(KvSharing::EarlierLayer))?;
    let config = keeping(2, 6);
    let mut cache = AttentionCache::new(&config.clone().with_shared(true))?;
    let xs = wave(2, 26, WIDTH, 0.2)?;
    let mut start = 0;
    for t in [4, 13, 1, 1, 7] {
        let piece = part(&xs, start, t)?;
        earlier.forward_with(AttentionInput::new(&piece).with_cache(&mut cache))?;
        let ys = later.forward_with(AttentionInput::new(&piece).with_shared_cache(&cache))?;
        for i in 0..t {
            let rows: Vec<_> = kept(start + i, &config).into_iter().map(|row| row as u32).collect();
            let alone = xs.index_select(&Tensor::new(rows.as_slice(), &DEVICE)?, 1)?;
            let mut of_alone = AttentionCache::default();
            earlier.forward_with(AttentionInput::new(&alone).with_cache(&mut of_alone))?;
            let whole = later.forward_with(AttentionInput::new(&alone).with_shared_cache(&of_alone))?;
            let expected = whole.narrow(1, rows.len() - 1, 1)?;
            assert_close(&ys.narrow(1, i, 1)?, &expected, 1e-5, &format!("token {}", start + i));
        }
        start += t;
    }
    Ok(())
}

/// Checks that an attended token can have been dropped only after tokens were taken back, which is an error.
#[test]
fn sink_tokens_after_truncation_past_dropped_tokens_are_an_error() -> Result<()> {
    let layer = layer(&rotary())?;
    let mut cache = AttentionCache::new(&keeping(2, 6).with_capacity(6).with_growth(false))?;
    in_calls(&layer, &mut cache, &wave(1, 9, WIDTH, 0.0)?, &[6, 1, 1, 1])?;
    assert_eq!(cache.stored(), std::slice::from_ref(&(5..9)));
    let error = error_text(cache.truncate(3));
    assert!(error.contains("expected 0 or at least 5: the window has dropped the positions before"), "{error}");
    cache.truncate(5)?;
    let xs = wave(1, 1, WIDTH, 0.4)?;
    let dropped = error_text(layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache)));
    assert!(dropped.contains("may attend to the key at position 2, but the cache stores those from 5 on"), "{dropped}");
    assert_eq!((cache.lens(), cache.stored()), (vec![5], std::slice::from_ref(&(5..5))));
    Ok(())
}

#[test]
fn sink_tokens_of_another_cache_are_needed_to_join_it() -> Result<()> {
    let layer = layer(&rotary())?;
    let mut cache = AttentionCache::new(&keeping(2, 6))?;
    let mut other = AttentionCache::new(&AttentionCacheConfig::new().with_window(6))?;
    for batch in [&mut cache, &mut other] {
        in_calls(&layer, batch, &wave(1, 3, WIDTH, 0.0)?, &[3])?;
    }
    let error = error_text(cache.join(&other));
    assert!(error.contains("the other cache keeps 0 sink tokens, expected 2 as this one"), "{error}");
    assert_eq!(cache.lens(), [3]);
    Ok(())
}

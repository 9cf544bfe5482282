//! Sequences in pages: each has the numbers that it has alone in a cache, and errors change nothing.

use std::collections::BTreeSet;

use crate::program::EMBED_DIM;
use crate::*;

const PAGE: usize = 16;
const PAGES: usize = 24;

/// The number of token ids, which is small so that prompts begin alike.
const VOCAB: usize = 3;

fn base() -> Config {
    Config::new(EMBED_DIM, 4).with_num_kv_heads(2).with_head_dim(8).with_causal(true)
}

fn rotated() -> Config {
    base().with_rope(RopeConfig::new(100.0))
}

/// Layers with residuals, each of which has a pool or reads the pool of the layer before.
struct Model {
    layers: Vec<MultiHeadAttention>,
    /// (VOCAB, E).
    embedding: Vec<Vec<f32>>,
    cache: AttentionCacheConfig,
}

impl Model {
    fn new(configs: &[Config], cache: AttentionCacheConfig) -> Result<Self> {
        let mut layers = Vec::new();
        for (seed, cfg) in configs.iter().enumerate() {
            let vb = TorchSeed::new(seed as u64).var_builder(DType::F32, &DEVICE);
            layers.push(MultiHeadAttention::new(cfg, vb)?.freeze()?);
        }
        let random = &mut Random::new(5);
        let mut row = || (0..EMBED_DIM).map(|_| random.between(-1.0, 1.0) as f32).collect();
        Ok(Self { layers, embedding: (0..VOCAB).map(|_| row()).collect(), cache })
    }

    fn shares(layer: &MultiHeadAttention) -> bool {
        layer.config().kv_sharing() == KvSharing::EarlierLayer
    }

    /// Returns a pool for each layer, empty for layers that share an earlier one's.
    fn pools(&self, table: &PageTable) -> Result<Vec<KvPool>> {
        let mut pools = Vec::new();
        for layer in &self.layers {
            let config = KvPoolConfig::for_layer(layer.config(), table);
            let config = config.with_dtype(self.cache.dtype().unwrap_or(DType::F32));
            pools.push(KvPool::new(&config.with_codes(self.cache.codes()), &DEVICE)?);
        }
        Ok(pools)
    }

    fn caches(&self) -> Result<Vec<AttentionCache>> {
        self.layers.iter().map(|_| AttentionCache::new(&self.cache)).collect()
    }

    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let rows: Vec<f32> = ids.iter().flat_map(|&id| self.embedding[id as usize].clone()).collect();
        Tensor::from_vec(rows, (ids.len(), EMBED_DIM), &DEVICE)
    }

    /// Returns the outputs (total, E) of the tokens of a step.
    fn paged(&self, pools: &[KvPool], step: &PagedTokens, ids: &[u32]) -> Result<Tensor> {
        let mut xs = self.embed(ids)?;
        for (n, layer) in self.layers.iter().enumerate() {
            let input = AttentionInput::new(&xs).with_residual(&xs);
            let input = match Self::shares(layer) {
                true => input.with_shared_pages(&pools[n - 1], step),
                false => input.with_pages(&pools[n], step),
            };
            xs = layer.forward_with(input)?;
        }
        Ok(xs)
    }

    /// Returns the outputs (T, E) of the next tokens of one sequence in caches.
    fn alone(&self, caches: &mut [AttentionCache], ids: &[u32]) -> Result<Tensor> {
        let mut xs = self.embed(ids)?;
        for (n, layer) in self.layers.iter().enumerate() {
            let input = AttentionInput::new(&xs).with_residual(&xs);
            let input = match Self::shares(layer) {
                true => input.with_shared_cache(&caches[n - 1]),
                false => input.with_cache(&mut caches[n]),
            };
            xs = layer.forward_with(input)?;
        }
        Ok(xs)
    }
}

/// A sequence of the table, and the same one alone.
struct Live {
    id: SequenceId,
    ids: Vec<u32>,
    caches: Vec<AttentionCache>,
}

/// Random steps over sequences that come and go.
struct Schedule<'a> {
    model: &'a Model,
    table: PageTable,
    pools: Vec<KvPool>,
    live: Vec<Live>,
    /// The window of all layers, outside of which pages are released.
    window: Option<usize>,
    tolerance: f32,
    /// The numbers of steps that needed more pages than there were, and of tokens that were shared.
    full: usize,
    shared: usize,
}

impl<'a> Schedule<'a> {
    fn new(model: &'a Model, window: Option<usize>, tolerance: f32) -> Result<Self> {
        let table = PageTable::new(PAGES, PAGE)?;
        let pools = model.pools(&table)?;
        Ok(Self { model, table, pools, live: Vec::new(), window, tolerance, full: 0, shared: 0 })
    }

    fn run(&mut self, steps: usize, seed: u64) -> Result<()> {
        let random = &mut Random::new(seed);
        for _ in 0..steps {
            match random.up_to(12) {
                0 | 1 => self.add(random)?,
                2 => self.fork(random)?,
                3 => self.truncate(random)?,
                4 => self.free(random)?,
                _ => self.step(random)?,
            }
            self.check_table()?;
        }
        Ok(())
    }

    fn draw(&self, random: &mut Random) -> Option<usize> {
        if self.live.is_empty() { None } else { Some(random.up_to(self.live.len() - 1)) }
    }

    /// Adds a sequence with a prompt that begins like others, and runs its prefix alone.
    fn add(&mut self, random: &mut Random) -> Result<()> {
        let mut ids = vec![0; random.up_to(50)];
        ids.extend((0..1 + random.up_to(3)).map(|_| random.up_to(VOCAB - 1) as u32));
        let SharedPrefix { sequence, tokens } = self.table.add_with_prefix(&ids);
        assert!(tokens.is_multiple_of(PAGE) && tokens < ids.len());
        self.shared += tokens;
        let mut caches = self.model.caches()?;
        if tokens > 0 {
            self.model.alone(&mut caches, &ids[..tokens])?;
        }
        self.live.push(Live { id: sequence, ids: ids[..tokens].to_vec(), caches });
        Ok(())
    }

    fn fork(&mut self, random: &mut Random) -> Result<()> {
        let Some(n) = self.draw(random) else { return Ok(()) };
        let of = &self.live[n];
        let caches = of.caches.iter().map(AttentionCache::fork).collect::<Result<_>>()?;
        let forked = Live { id: self.table.fork(of.id)?, ids: of.ids.clone(), caches };
        self.live.push(forked);
        Ok(())
    }

    fn truncate(&mut self, random: &mut Random) -> Result<()> {
        let Some(n) = self.draw(random) else { return Ok(()) };
        let own = &mut self.live[n];
        let len = own.ids.len() - random.up_to(own.ids.len().min(20));
        let released = self.table.stored(own.id)?.start;
        if len > 0 && len < released {
            let error = error_text(self.table.truncate(own.id, len));
            assert!(error.contains("the pages before were released"), "{error}");
            return Ok(());
        }
        if let Some(window) = self.window
            && len > 0
            && (len + 1).saturating_sub(window) < released
        {
            // The window of the next token would begin in a page that was released.
            return Ok(());
        }
        self.table.truncate(own.id, len)?;
        own.ids.truncate(len);
        for (cache, layer) in own.caches.iter_mut().zip(&self.model.layers) {
            if !Model::shares(layer) {
                cache.truncate(if cache.is_empty() { 0 } else { len })?;
            }
        }
        Ok(())
    }

    fn free(&mut self, random: &mut Random) -> Result<()> {
        let Some(n) = self.draw(random) else { return Ok(()) };
        let gone = self.live.swap_remove(n);
        if self.window.is_none() {
            self.table.share_prefix(gone.id, &gone.ids)?;
        }
        self.table.free(gone.id)?;
        assert!(error_text(self.table.len(gone.id)).starts_with("[page_table] the sequence was freed"));
        Ok(())
    }

    /// Brings tokens to some sequences in a random order. Sometimes the pass fails after the first layer.
    fn step(&mut self, random: &mut Random) -> Result<()> {
        let mut order: Vec<usize> = (0..self.live.len()).filter(|_| random.chance(0.7)).collect();
        let turn = random.up_to(order.len()).min(order.len());
        order.rotate_left(turn);
        let mut entries = Vec::new();
        let mut ids: Vec<Vec<u32>> = Vec::new();
        for &n in &order {
            let count = if random.chance(0.6) { 1 } else { random.up_to(40) };
            // Mostly one id, so that prefixes are found.
            let id = |numbers: &mut Random| if numbers.chance(0.8) { 0 } else { numbers.up_to(VOCAB - 1) as u32 };
            ids.push((0..count).map(|_| id(random)).collect());
            entries.push(self.live[n].id.tokens(count));
        }
        if ids.iter().all(Vec::is_empty) && DEVICE.is_metal() {
            // Metal has no empty buffers.
            return Ok(());
        }
        let needed = entries.iter().map(|entry| self.table.pages_needed(entry.sequence, entry.tokens));
        let needed: usize = needed.collect::<Result<Vec<_>>>()?.into_iter().sum();
        let free = self.table.free_pages();
        if needed > free {
            let expected = format!("[page_table] the step needs {needed} pages, but {free} of {PAGES} are free");
            assert_eq!(error_text(self.table.step(&entries).map(|_| ())), expected);
            self.full += 1;
            return Ok(());
        }
        let step = self.table.step(&entries)?;
        if random.chance(0.1) {
            let xs = self.model.embed(&ids.concat())?;
            self.model.layers[0].forward_with(AttentionInput::new(&xs).with_pages(&self.pools[0], &step))?;
            drop(step);
            assert_eq!(self.table.free_pages(), free);
            return Ok(());
        }
        let found = self.model.paged(&self.pools, &step, &ids.concat())?;
        let ranges: Vec<_> = (0..order.len()).map(|s| step.sequences().queries(s)).collect();
        step.commit();
        for ((&n, new), range) in order.iter().zip(&ids).zip(ranges) {
            let own = &mut self.live[n];
            own.ids.extend(new);
            if new.is_empty() {
                continue;
            }
            let expected = self.model.alone(&mut own.caches, new)?;
            let difference = (found.narrow(0, range.start, range.len())? - expected)?.abs()?.max_all()?;
            let most = difference.to_scalar::<f32>()?;
            assert!(most <= self.tolerance, "off by {most:e} after {} tokens", own.ids.len());
            match self.window {
                None if random.chance(0.3) => self.table.share_prefix(own.id, &own.ids)?,
                None => {}
                Some(window) => {
                    self.table.release_before(own.id, (own.ids.len() + 1).saturating_sub(window))?;
                }
            }
        }
        Ok(())
    }

    /// Checks the lengths of the sequences, and that their pages are the pages in use.
    fn check_table(&self) -> Result<()> {
        let mut used: BTreeSet<u32> = BTreeSet::new();
        for own in &self.live {
            assert_eq!(self.table.len(own.id)?, own.ids.len());
            let pages = self.table.pages_of(own.id)?;
            let stored = self.table.stored(own.id)?;
            assert_eq!(pages.len(), stored.len().div_ceil(PAGE));
            used.extend(pages);
        }
        assert_eq!((self.table.used_pages(), self.table.num_sequences()), (used.len(), self.live.len()));
        Ok(())
    }
}

fn check(configs: &[Config], cache: AttentionCacheConfig, tolerance: f32) -> Result<()> {
    let model = Model::new(configs, cache)?;
    let window = configs[0].window();
    let mut full = 0;
    let mut shared = 0;
    for seed in 0..program::cases(2) {
        let mut schedule = Schedule::new(&model, window, tolerance)?;
        schedule.run(150, seed)?;
        full += schedule.full;
        shared += schedule.shared;
    }
    assert!(full > 0, "no step needed more pages than there were");
    assert!(window.is_some() || shared > 0, "no prefix was shared");
    Ok(())
}

#[test]
fn pages_with_random_schedules_match_sequences_alone() -> Result<()> {
    check(&[rotated(), rotated()], AttentionCacheConfig::new(), 1e-5)
}

#[test]
fn pages_with_windows_and_sinks_match_sequences_alone_after_release() -> Result<()> {
    let cfg = || rotated().with_window(20).with_sinks(true);
    check(&[cfg(), cfg()], AttentionCacheConfig::new(), 1e-5)
}

#[test]
fn pages_with_softcap_alibi_and_norms_match_sequences_alone() -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    let alibi = base().with_alibi(AlibiConfig::Standard).with_softcap(2.0);
    let normed = rotated().with_qk_norm(norm).with_value_head_dim(5).with_chunk(24);
    let warm = rotated().with_attention_temperature(AttentionTemperature { beta: 0.5, interval: 3, first: 1 });
    check(&[alibi, normed, warm], AttentionCacheConfig::new(), 1e-5)
}

#[test]
fn pages_of_an_earlier_layer_match_its_cache() -> Result<()> {
    check(&[rotated(), rotated().with_kv_sharing(KvSharing::EarlierLayer)], AttentionCacheConfig::new(), 1e-5)
}

/// Checks one layer, as for 8 bits.
#[test]
fn pages_of_e4m3_and_4_bits_with_random_schedules_match_caches_alone() -> Result<()> {
    check(&[rotated()], AttentionCacheConfig::new().with_e4m3(), 1e-5)?;
    check(&[rotated().with_head_dim(32)], AttentionCacheConfig::new().with_q4(), 1e-5)?;
    let grouped = rotated().with_head_dim(64).with_value_head_dim(128).with_window(20);
    check(&[grouped], AttentionCacheConfig::new().with_q4(), 1e-5)
}

#[test]
fn pool_of_4_bits_refuses_widths_that_do_not_fit() -> Result<()> {
    let table = PageTable::new(4, PAGE)?;
    let error = KvPool::new(&KvPoolConfig::new(2, 40, &table).with_q4(), &DEVICE).expect_err("40 numbers");
    let expected = "[kv_pool] keys have 40 numbers in each head, expected a multiple of 32 for 4 bits";
    assert!(error.to_string().starts_with(expected), "{error}");
    let memory = |config: KvPoolConfig| Ok::<_, candle_core::Error>(KvPool::new(&config, &DEVICE)?.memory());
    let of_4_bits = memory(KvPoolConfig::new(2, 64, &table).with_q4())?;
    assert!(of_4_bits * 100 <= memory(KvPoolConfig::new(2, 64, &table).with_q8())? * 55);
    Ok(())
}

#[test]
fn pages_of_8_bits_and_bf16_match_caches_of_8_bits_and_bf16() -> Result<()> {
    // One layer: in a second one, the last bits of its inputs decide how keys are rounded.
    check(&[rotated()], AttentionCacheConfig::new().with_q8(), 1e-5)?;
    check(&[rotated()], AttentionCacheConfig::new().with_dtype(DType::BF16), 1e-2)
}

//! Sequences in pages: each has the numbers that it has alone in a cache, and errors change nothing.

use std::collections::BTreeSet;

use crate::paged_model::{Cache, DRAFTS, Kind, Model, Pool, Tokens, VOCAB, base, latent};
use crate::program::EMBED_DIM;
use crate::*;

const PAGE: usize = 16;
const PAGES: usize = 24;

/// The number of states of a model with recurrent layers.
const STATES: usize = 24;

fn rotated() -> Config {
    base().with_rope(RopeConfig::new(100.0))
}

/// A sequence of the table, and the same one alone.
struct Live {
    id: SequenceId,
    ids: Vec<u32>,
    caches: Vec<Cache>,
    /// The number of first tokens that are 0, so that prefixes are found.
    common: usize,
}

/// Random steps over sequences that come and go.
struct Schedule<'a> {
    model: &'a Model,
    table: PageTable,
    pools: Vec<Pool>,
    live: Vec<Live>,
    /// The window of all layers, outside of which pages are released.
    window: Option<usize>,
    tolerance: f32,
    counts: Counts,
}

/// How often the cases occurred that a schedule is for.
#[derive(Default)]
struct Counts {
    /// Steps that needed more pages or states than there were.
    full: usize,
    /// Tokens that were shared.
    shared: usize,
    /// Sequences that were cut, and lengths that no state was stored after.
    cut: usize,
    without_state: usize,
}

impl<'a> Schedule<'a> {
    fn new(model: &'a Model, window: Option<usize>, tolerance: f32) -> Result<Self> {
        let mut table = PageTable::new(PAGES, PAGE)?;
        if model.has_states() {
            table = table.with_states(STATES)?.with_drafts(DRAFTS)?;
        }
        let pools = model.pools(&table)?;
        Ok(Self { model, table, pools, live: Vec::new(), window, tolerance, counts: Counts::default() })
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
        self.counts.shared += tokens;
        let mut caches = self.model.caches()?;
        if tokens > 0 {
            self.model.alone(&mut caches, &ids[..tokens])?;
        }
        let common = if random.chance(0.5) { 2 * PAGE } else { 0 };
        self.live.push(Live { id: sequence, ids: ids[..tokens].to_vec(), caches, common });
        Ok(())
    }

    fn fork(&mut self, random: &mut Random) -> Result<()> {
        let Some(n) = self.draw(random) else { return Ok(()) };
        let of = &self.live[n];
        let caches = of.caches.iter().map(Cache::fork).collect::<Result<_>>()?;
        let forked = Live { id: self.table.fork(of.id)?, ids: of.ids.clone(), caches, common: of.common };
        self.live.push(forked);
        Ok(())
    }

    fn truncate(&mut self, random: &mut Random) -> Result<()> {
        let Some(n) = self.draw(random) else { return Ok(()) };
        let own = &mut self.live[n];
        let most = if self.model.has_states() && random.chance(0.8) { DRAFTS } else { 20 };
        let len = own.ids.len() - random.up_to(own.ids.len().min(most));
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
        let truncated = self.table.truncate(own.id, len);
        if self.model.has_states() && truncated.is_err() {
            let error = error_text(truncated);
            assert!(error.contains(", after which the sequence has a state"), "{error}");
            self.counts.without_state += 1;
            return Ok(());
        }
        truncated?;
        self.counts.cut += usize::from(len < own.ids.len());
        own.ids.truncate(len);
        self.model.truncate(&mut own.caches, &own.ids)
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
            let len = self.live[n].ids.len();
            let count = match random.up_to(9) {
                0..6 => 1,
                6 => random.up_to(DRAFTS),
                // Up to the end of a page.
                7 => PAGE - len % PAGE,
                _ => random.up_to(40),
            };
            let is_first = |i: usize| len + i < self.live[n].common;
            let mut id = |i: usize| if is_first(i) || random.chance(0.8) { 0 } else { random.up_to(VOCAB - 1) as u32 };
            ids.push((0..count).map(&mut id).collect());
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
            self.counts.full += 1;
            return Ok(());
        }
        let states = entries.iter().map(|entry| self.table.states_needed(entry.sequence, entry.tokens));
        let states: usize = states.collect::<Result<Vec<_>>>()?.into_iter().sum();
        let free_states = self.table.free_states();
        if states > free_states {
            let expected =
                format!("[page_table] the step needs {states} states, but {free_states} of {STATES} are free");
            assert_eq!(error_text(self.table.step(&entries).map(|_| ())), expected);
            self.counts.full += 1;
            return Ok(());
        }
        let step = self.table.step(&entries)?;
        if random.chance(0.1) {
            self.model.paged(&self.pools, &step, Tokens { ids: &ids.concat(), tree: None }, 1)?;
            drop(step);
            assert_eq!((self.table.free_pages(), self.table.free_states()), (free, free_states));
            return Ok(());
        }
        let tokens = Tokens { ids: &ids.concat(), tree: None };
        let found = self.model.paged(&self.pools, &step, tokens, self.model.depth())?;
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
                None if random.chance(0.3) || own.ids.len().is_multiple_of(PAGE) => {
                    self.table.share_prefix(own.id, &own.ids)?;
                }
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
    let kinds: Vec<_> = configs.iter().cloned().map(Kind::from).collect();
    check_model(&Model::new(&kinds, cache)?, configs[0].window(), tolerance)
}

fn check_model(model: &Model, window: Option<usize>, tolerance: f32) -> Result<()> {
    let mut found = Counts::default();
    let schedules = program::cases(2);
    for seed in 0..schedules {
        let mut schedule = Schedule::new(model, window, tolerance)?;
        schedule.run(150, seed)?;
        let Counts { full, shared, cut, without_state } = schedule.counts;
        found.full += full;
        found.shared += shared;
        found.cut += cut;
        found.without_state += without_state;
        for own in std::mem::take(&mut schedule.live) {
            schedule.table.free(own.id)?;
        }
        assert_eq!(schedule.table.free_pages(), PAGES);
        assert_eq!(schedule.table.free_states(), schedule.table.states());
    }
    // One schedule alone may lack a kind of step.
    if schedules < 2 {
        return Ok(());
    }
    assert!(found.full > 0, "no step needed more than there was");
    assert!(window.is_some() || found.shared > 0, "no prefix was shared");
    assert!(found.cut > 0, "no sequence was cut");
    assert_eq!(found.without_state > 0, model.has_states());
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

#[test]
fn pages_of_latents_with_random_schedules_match_sequences_alone() -> Result<()> {
    let kinds = [Kind::Latent(latent()), Kind::Latent(latent().with_rotates(false))];
    check_model(&Model::new(&kinds, AttentionCacheConfig::new())?, None, 1e-5)
}

/// Checks one layer, as for 8 bits.
#[test]
fn pages_of_latents_in_codes_and_bf16_match_caches_of_codes_and_bf16() -> Result<()> {
    let of = |cfg: LatentConfig, cache: AttentionCacheConfig, tolerance: f32| {
        check_model(&Model::new(&[Kind::Latent(cfg)], cache)?, None, tolerance)
    };
    of(latent(), AttentionCacheConfig::new().with_q8(), 1e-5)?;
    of(latent(), AttentionCacheConfig::new().with_e4m3(), 1e-5)?;
    of(latent().with_kv_lora_rank(64).with_rope_head_dim(32), AttentionCacheConfig::new().with_q4(), 1e-5)?;
    of(latent(), AttentionCacheConfig::new().with_dtype(DType::BF16), 1e-2)
}

#[test]
fn pages_of_latents_under_a_window_match_sequences_alone_after_release() -> Result<()> {
    let mut model = Model::new(&[Kind::Latent(latent()), Kind::Latent(latent())], AttentionCacheConfig::new())?;
    model.mask = AttentionMask::causal().with_window(20);
    check_model(&model, Some(20), 1e-5)
}

#[test]
fn pages_of_latents_whose_indexer_chooses_keys_match_sequences_alone() -> Result<()> {
    let indexer = IndexerConfig::new(2, 8, 12);
    let model = Model::new(&[Kind::Latent(latent().with_indexer(indexer))], AttentionCacheConfig::new())?;
    check_model(&model, None, 1e-5)
}

/// Checks both scores of blocks, with keys in floats and in codes.
#[test]
fn pages_of_keys_whose_blocks_an_indexer_chooses_match_sequences_alone() -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    for scores in [BlockScores::LargestKey, BlockScores::MeanKey] {
        let local_blocks = usize::from(scores == BlockScores::LargestKey);
        let own = BlockIndexerConfig { num_heads: 2, head_dim: 9, block: 4, top_blocks: 3, local_blocks, norm, scores };
        for cache in [AttentionCacheConfig::new(), AttentionCacheConfig::new().with_q8()] {
            let model = Model::new(&[rotated().with_indexer(own).into()], cache)?;
            check_model(&model, None, 1e-5)?;
        }
    }
    Ok(())
}

fn linear() -> GatedDeltaNetConfig {
    GatedDeltaNetConfig::new(EMBED_DIM, 4).with_num_key_heads(2).with_key_head_dim(6).with_value_head_dim(5)
}

#[test]
fn states_of_linear_attention_beside_pages_match_sequences_alone() -> Result<()> {
    let kinds = [Kind::Linear(linear()), Kind::MultiHead(rotated()), Kind::Linear(linear())];
    check_model(&Model::new(&kinds, AttentionCacheConfig::new())?, None, 1e-5)
}

#[test]
fn states_of_linear_attention_beside_latents_match_sequences_alone() -> Result<()> {
    let channels = linear().with_decay_per_channel(true);
    let kinds = [Kind::Linear(channels), Kind::Latent(latent().with_rotates(false))];
    check_model(&Model::new(&kinds, AttentionCacheConfig::new())?, None, 1e-5)
}

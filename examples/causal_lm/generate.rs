//! Generation: the tokens of a batch, the caches that store them, and the choice of the next tokens.

use std::ops::Range;
use std::time::{Duration, Instant};

use candle_attention::{RopeScaling, TorchSeed};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::ops::softmax_last_dim;

use crate::args::Args;
use crate::model::CausalLm;
use crate::model::attention::Cache;

/// The time that a generation took.
pub struct Times {
    pub prompt: Duration,
    /// All tokens but the first, which comes with the prompt.
    pub tokens: Duration,
}

/// Generates tokens after each prompt, as the arguments say, and calls `generated` with the sequence and the token. A
/// sequence ends at one of the tokens `end`.
///
/// # Errors
/// If a prompt is empty, and as the model.
pub fn generate(
    batch: &mut Batch,
    prompts: &[Vec<u32>],
    args: &Args,
    end: &[u32],
    mut generated: impl FnMut(usize, u32) -> Result<()>,
) -> Result<Times> {
    if let Some(empty) = prompts.iter().position(Vec::is_empty) {
        bail!("[causal_lm] prompt {} has no token", empty + 1)
    }
    let seeds: Vec<_> = (0..prompts.len()).map(|i| TorchSeed::new(args.seed.wrapping_add(i as u64))).collect();
    let choose = |logits: Vec<Tensor>| -> Result<Vec<u32>> {
        logits.iter().zip(&seeds).map(|(logits, seed)| sample(logits, args, seed)).collect()
    };
    let prompt_start = Instant::now();
    let mut next = choose(batch.append(prompts)?)?;
    let prompt = prompt_start.elapsed();
    let start = Instant::now();
    let max_tokens = args.max_tokens.unwrap_or(100);
    let mut has_ended = vec![false; prompts.len()];
    for step in 1..=max_tokens {
        // A sequence that has ended gets no more tokens.
        let mut rows = vec![Vec::new(); prompts.len()];
        for (sequence, &token) in next.iter().enumerate() {
            if has_ended[sequence] {
                continue;
            }
            generated(sequence, token)?;
            if end.contains(&token) {
                has_ended[sequence] = true;
            } else {
                rows[sequence].push(token);
            }
        }
        if step == max_tokens || has_ended.iter().all(|&has_ended| has_ended) {
            break;
        }
        next = choose(batch.append(&rows)?)?;
    }
    Ok(Times { prompt, tokens: start.elapsed() })
}

/// A batch of sequences and the caches of a model that store them.
pub struct Batch<'m> {
    model: &'m CausalLm,
    caches: Vec<Cache>,
    /// All tokens of each sequence.
    tokens: Vec<Vec<u32>>,
    /// The number of tokens of a sequence that go through the model at a time.
    chunk: usize,
}

impl<'m> Batch<'m> {
    pub fn new(model: &'m CausalLm, caches: Vec<Cache>, sequences: usize, chunk: usize) -> Self {
        Self { model, caches, tokens: vec![Vec::new(); sequences], chunk }
    }

    /// Returns the size of all caches in bytes.
    pub fn memory(&self) -> usize {
        self.caches.iter().map(Cache::memory).sum()
    }

    /// Appends tokens to each sequence, none to one that has ended, and returns the logits (V,) after the last token of
    /// each. The logits of a sequence without new tokens mean nothing.
    ///
    /// # Errors
    /// As the model.
    pub fn append(&mut self, new: &[Vec<u32>]) -> Result<Vec<Tensor>> {
        let cached = self.longest();
        for (tokens, row) in self.tokens.iter_mut().zip(new) {
            tokens.extend(row);
        }
        let len = self.longest();
        self.note_scaling(cached, len);
        if cached > 0 && self.model.cached_keys_expire(cached, len) {
            self.caches.iter_mut().for_each(Cache::reset);
        }
        self.next_logits()
    }

    /// Returns the length of the longest sequence.
    fn longest(&self) -> usize {
        self.tokens.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Passes the tokens that are not cached yet through the model, in chunks, and returns the logits (V,) after the
    /// last token of each sequence.
    fn next_logits(&mut self) -> Result<Vec<Tensor>> {
        let mut cached = self.caches.first().map(Cache::lens).unwrap_or_default();
        cached.resize(self.tokens.len(), 0);
        let rows: Vec<&[u32]> = self.tokens.iter().zip(&cached).map(|(tokens, &cached)| &tokens[cached..]).collect();
        let longest_row = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let mut last = Vec::new();
        let mut start = 0;
        while start < longest_row {
            let end = self.chunk_end(&rows, &cached, start);
            let batch = PaddedIds::new(&rows, start..end)?;
            let logits = self.model.next_logits(&batch.ids, &batch.lens, &mut self.caches)?;
            last.resize(rows.len(), logits.get(0)?);
            for (sequence, &len) in batch.lens.iter().enumerate() {
                if len > 0 {
                    last[sequence] = logits.get(sequence)?;
                }
            }
            start = end;
        }
        Ok(last)
    }

    /// Returns the end of the chunk of all rows that begins at `start`. The chunk is longer than usual if a shorter
    /// call would have other rotary frequencies than the whole sequences.
    fn chunk_end(&self, rows: &[&[u32]], cached: &[usize], start: usize) -> usize {
        let longest_row = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let len = self.longest();
        let mut end = start.saturating_add(self.chunk).min(longest_row);
        while end < longest_row {
            let reached = rows.iter().zip(cached).map(|(row, cached)| cached + row.len().min(end)).max().unwrap_or(0);
            if !self.model.frequencies_differ(reached, len) {
                break;
            }
            end = end.saturating_add(self.chunk).min(longest_row);
        }
        end
    }

    /// Prints a note when the sequences first exceed the original context of a scaling whose frequencies depend on the
    /// number of positions: it says which frequencies the keys have.
    fn note_scaling(&self, cached: usize, len: usize) {
        let scaling = self.model.length_dependent_scaling();
        let Some(&RopeScaling::LongRope { original_context, .. } | &RopeScaling::Dynamic { original_context, .. }) =
            scaling
        else {
            return;
        };
        if cached > original_context || len <= original_context {
            return;
        }
        let effect = if let Some(RopeScaling::Dynamic { .. }) = scaling {
            "dynamic scaling changes the rotary frequencies with every position from here on; cached keys keep the \
             frequencies of their own call, as in transformers"
                .to_string()
        } else if cached == 0 {
            "longrope scaling rotates all of them by its long factors".to_string()
        } else {
            format!(
                "longrope scaling changes to its long factors, with which the {cached} cached positions are computed \
                 again, as in transformers' Phi 3"
            )
        };
        let shared = if self.tokens.len() > 1 { "; the longest sequence decides for the whole batch" } else { "" };
        eprintln!("note: {len} positions exceed the original context of {original_context}: {effect}{shared}");
    }
}

/// A batch of token ids.
pub struct PaddedIds {
    /// (B, T) on the CPU, right-padded with 0.
    pub ids: Tensor,
    /// The number of tokens in each row.
    pub lens: Vec<usize>,
}

impl PaddedIds {
    /// Returns the part `range` of each row.
    pub fn new(rows: &[impl AsRef<[u32]>], range: Range<usize>) -> Result<Self> {
        let mut ids = Vec::new();
        let mut lens = Vec::new();
        for row in rows {
            let row = row.as_ref();
            let part = &row[range.start.min(row.len())..range.end.min(row.len())];
            ids.extend(part);
            lens.push(part.len());
            ids.resize(lens.len() * range.len(), 0);
        }
        Ok(Self { ids: Tensor::from_vec(ids, (rows.len(), range.len()), &Device::Cpu)?, lens })
    }
}

/// Chooses a token by its logits (V,): the most likely one, or with a temperature one drawn from the most likely tokens
/// that have the probability `top_p` together.
fn sample(logits: &Tensor, args: &Args, seed: &TorchSeed) -> Result<u32> {
    let logits = logits.to_dtype(DType::F32)?;
    if args.temperature == 0.0 {
        return logits.argmax(0)?.to_scalar();
    }
    let probabilities: Vec<f32> = softmax_last_dim(&(logits / args.temperature)?)?.to_vec1()?;
    let mut candidates: Vec<_> = (0u32..).zip(probabilities).collect();
    candidates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    // The sum of the probabilities up to each token, up to the first sum that reaches `top_p`.
    let top_p = args.top_p.unwrap_or(1.0);
    let mut sums = Vec::new();
    let mut sum = 0.0;
    for &(_, probability) in &candidates {
        sum += f64::from(probability);
        sums.push(sum);
        if sum >= top_p {
            break;
        }
    }
    let drawn = f64::from(seed.rand(1)?.to_vec1::<f32>()?[0]) * sums[sums.len() - 1];
    let chosen = sums.partition_point(|&up_to| up_to <= drawn).min(sums.len() - 1);
    Ok(candidates[chosen].0)
}

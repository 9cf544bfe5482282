//! Prompts through the model, and one token after the other.

use std::ops::Range;
use std::time::{Duration, Instant};

use candle_attention::TorchSeed;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::ops::softmax_last_dim;

use crate::args::Args;
use crate::model::CausalLm;
use crate::model::attention::Cache;

/// How long it took.
#[derive(Debug, Default)]
pub struct Times {
    pub prompt_tokens: usize,
    pub prompt: Duration,
    pub made_tokens: usize,
    pub made: Duration,
}

/// Makes tokens after each prompt, as the arguments say, and tells `made` of each: the sequence and the token. A
/// sequence ends at one of the tokens `end`.
///
/// # Errors
/// For an empty prompt, and as the model.
pub fn generate(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    caches: &mut [Cache],
    args: &Args,
    end: &[u32],
    mut made: impl FnMut(usize, u32) -> Result<()>,
) -> Result<Times> {
    if let Some(empty) = prompts.iter().position(Vec::is_empty) {
        bail!("[causal_lm] prompt {} has no token", empty + 1)
    }
    let mut times = Times { prompt_tokens: prompts.iter().map(Vec::len).sum(), ..Times::default() };
    let rngs: Vec<_> = (0..prompts.len()).map(|i| TorchSeed::new(args.seed.wrapping_add(i as u64))).collect();
    let mut next_after = |rows: &[Vec<u32>]| -> Result<Vec<u32>> {
        let logits = next_logits(model, rows, caches, args.chunk.get())?;
        logits.iter().zip(&rngs).map(|(logits, rng)| sample(logits, args, rng)).collect()
    };
    let (start, mut rows) = (Instant::now(), prompts.to_vec());
    let mut next = next_after(&rows)?;
    times.prompt = start.elapsed();

    let start = Instant::now();
    let max_tokens = args.max_tokens.unwrap_or(100);
    for step in 1..=max_tokens {
        // A sequence that has ended brings no token.
        for (sequence, row) in rows.iter_mut().enumerate().filter(|(_, row)| !row.is_empty()) {
            made(sequence, next[sequence])?;
            times.made_tokens += 1;
            *row = if end.contains(&next[sequence]) { Vec::new() } else { vec![next[sequence]] };
        }
        if step == max_tokens || rows.iter().all(Vec::is_empty) {
            break;
        }
        next = next_after(&rows)?;
    }
    times.made = start.elapsed();
    Ok(times)
}

/// The logits (V,) after the tokens of each sequence, which go through the model in chunks of so many. Those of a
/// sequence without tokens mean nothing.
fn next_logits(model: &CausalLm, rows: &[Vec<u32>], caches: &mut [Cache], chunk: usize) -> Result<Vec<Tensor>> {
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut last = Vec::new();
    for first in (0..longest).step_by(chunk) {
        let (ids, lens) = padded(rows, first..longest.min(first + chunk), model.device())?;
        note_crossing(model, caches, &lens);
        let logits = model.next_logits(&ids, &lens, caches)?;
        last.resize(rows.len(), logits.get(0)?);
        for (sequence, _) in lens.iter().enumerate().filter(|&(_, &len)| len > 0) {
            last[sequence] = logits.get(sequence)?;
        }
    }
    Ok(last)
}

/// Says on stderr when a call of so many tokens first exceeds the original context of a scaling that changes its
/// frequencies there.
fn note_crossing(model: &CausalLm, caches: &[Cache], lens: &[usize]) {
    let Some((original, scaling)) = model.original_context() else { return };
    let before = caches.first().map(Cache::lens).unwrap_or_default();
    let cached = before.iter().copied().max().unwrap_or(0);
    let longest = lens.iter().enumerate().map(|(i, len)| before.get(i).unwrap_or(&0) + len).max().unwrap_or(0);
    if cached <= original && longest > original {
        eprintln!(
            "note: {longest} positions exceed the original context of {original}: {scaling} scaling changes the rotary \
             frequencies from this call on; {cached} cached positions keep those of their own calls, as in transformers"
        );
    }
}

/// Part of each prompt as a batch (B, T), right-padded with 0, and how many of each are tokens.
pub fn padded(prompts: &[Vec<u32>], part: Range<usize>, device: &Device) -> Result<(Tensor, Vec<usize>)> {
    let own = |prompt: &Vec<u32>| prompt[part.start.min(prompt.len())..part.end.min(prompt.len())].to_vec();
    let own: Vec<Vec<u32>> = prompts.iter().map(own).collect();
    let lens = own.iter().map(Vec::len).collect();
    let t = part.len();
    let rows = own.into_iter().flat_map(|mut row| {
        row.resize(t, 0);
        row
    });
    Ok((Tensor::from_vec(rows.collect::<Vec<_>>(), (prompts.len(), t), device)?, lens))
}

/// A token from its logits (V,): the likeliest, or with a temperature one drawn from the likeliest tokens that have the
/// probability `top_p` together.
fn sample(logits: &Tensor, args: &Args, rng: &TorchSeed) -> Result<u32> {
    let (logits, top_p) = (logits.to_dtype(DType::F32)?, args.top_p.unwrap_or(1.0));
    if args.temperature == 0.0 {
        return logits.argmax(0)?.to_scalar();
    }
    let probabilities: Vec<f32> = softmax_last_dim(&(logits / args.temperature)?)?.to_vec1()?;
    let mut candidates: Vec<_> = (0u32..).zip(probabilities).collect();
    candidates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    // The sum of the probabilities up to each token, to the first that reaches `top_p`.
    let mut sum = 0.0;
    let sums = candidates.iter().map(|&(_, p)| {
        sum += f64::from(p);
        sum
    });
    let mut sums: Vec<_> = sums.collect();
    sums.truncate(sums.partition_point(|&sum| sum < top_p) + 1);
    let total = sums.last().copied().unwrap_or_default();
    let drawn = f64::from(rng.rand(1)?.to_vec1::<f32>()?[0]) * total;
    let chosen = sums.partition_point(|&sum| sum <= drawn).min(sums.len() - 1);
    Ok(candidates[chosen].0)
}

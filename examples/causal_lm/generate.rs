//! Prompts through the model, and one token after the other.

use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor, bail};

use crate::model::CausalLm;
use crate::model::attention::Cache;
use crate::sampler::{Sampler, Sampling};

/// How tokens are chosen, and when it ends.
pub struct Options {
    pub sampling: Sampling,
    pub seed: u64,
    pub max_tokens: usize,
    /// Tokens that end a sequence.
    pub end: Vec<u32>,
    /// Prompt tokens that go through the model at a time.
    pub chunk: usize,
    pub device: Device,
}

/// How long it took.
#[derive(Debug, Default)]
pub struct Times {
    pub prompt_tokens: usize,
    pub prompt: Duration,
    pub made_tokens: usize,
    pub made: Duration,
}

/// Makes tokens after each prompt, and tells `made` of each: the sequence and the token.
///
/// # Errors
/// For an empty prompt, and as the model.
pub fn generate(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    caches: &mut [Cache],
    options: &Options,
    mut made: impl FnMut(usize, u32) -> Result<()>,
) -> Result<Times> {
    if let Some(empty) = prompts.iter().position(Vec::is_empty) {
        bail!("[causal_lm] prompt {} has no token", empty + 1)
    }
    let mut times = Times { prompt_tokens: prompts.iter().map(Vec::len).sum(), ..Times::default() };
    let samplers: Vec<_> = (0..prompts.len())
        .map(|sequence| Sampler::new(options.sampling, options.seed.wrapping_add(sequence as u64)))
        .collect();
    let start = Instant::now();
    let mut next = sample(&samplers, &prefill(model, prompts, caches, options)?)?;
    times.prompt = start.elapsed();

    let start = Instant::now();
    let mut goes_on = vec![options.max_tokens > 0; prompts.len()];
    for step in 1..=options.max_tokens {
        for (sequence, &token) in next.iter().enumerate().filter(|&(sequence, _)| goes_on[sequence]) {
            made(sequence, token)?;
            times.made_tokens += 1;
        }
        for (goes_on, token) in goes_on.iter_mut().zip(&next) {
            *goes_on &= !options.end.contains(token);
        }
        if step == options.max_tokens || !goes_on.contains(&true) {
            break;
        }
        // A sequence that has ended brings no token.
        let lens: Vec<usize> = goes_on.iter().map(|&goes_on| usize::from(goes_on)).collect();
        let ids = Tensor::from_vec(next, (prompts.len(), 1), &options.device)?;
        note_crossing(model, caches, &lens);
        next = sample(&samplers, &model.next_logits(&ids, &lens, caches)?)?;
    }
    times.made = start.elapsed();
    Ok(times)
}

/// The logits (B, V) after each prompt, which goes through the model in chunks.
fn prefill(model: &CausalLm, prompts: &[Vec<u32>], caches: &mut [Cache], options: &Options) -> Result<Tensor> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let mut last = vec![None; prompts.len()];
    for first in (0..longest).step_by(options.chunk) {
        let (ids, lens) = padded(prompts, first..longest.min(first + options.chunk), &options.device)?;
        note_crossing(model, caches, &lens);
        let hidden = model.forward(&ids, Some(&lens), caches)?;
        for (sequence, prompt) in prompts.iter().enumerate() {
            // The chunk that brings a prompt's last token.
            if lens[sequence] > 0 && first + lens[sequence] == prompt.len() {
                last[sequence] = Some(hidden.get(sequence)?.get(lens[sequence] - 1)?);
            }
        }
    }
    model.logits(&Tensor::stack(&last.into_iter().flatten().collect::<Vec<_>>(), 0)?)
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
pub fn padded(prompts: &[Vec<u32>], part: std::ops::Range<usize>, device: &Device) -> Result<(Tensor, Vec<usize>)> {
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

fn sample(samplers: &[Sampler], logits: &Tensor) -> Result<Vec<u32>> {
    samplers.iter().enumerate().map(|(sequence, sampler)| sampler.sample(&logits.get(sequence)?)).collect()
}

//! From the command line to text, in one process or in each of several.

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use candle_attention::TorchSeed;
use candle_attention::text::{SimpleTokenizer, SpecialTokens};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::ops::softmax_last_dim;

use crate::args::Args;
use crate::common::page::{PageOfLayers, texts};
use crate::common::{cannot, with_bar};
use crate::files::Files;
use crate::model::CausalLm;
use crate::model::attention::Cache;
use crate::model::weights::Processes;

/// Answers the command line: of several processes, the first one writes.
pub fn run(args: &Args, device: Device, processes: Option<Rc<dyn Processes>>) -> Result<()> {
    let files = Files::open(args, &device)?;
    let tokenizer = if args.ids.is_empty() { Some(files.tokenizer()?) } else { None };
    let prompts = match &tokenizer {
        Some(tokenizer) => args.prompt.iter().map(|text| Ok(tokenizer.encode(text)?.ids)).collect::<Result<_>>()?,
        None => args.ids.iter().map(|ids| ids.0.clone()).collect::<Vec<_>>(),
    };
    let json = files.config()?;
    let writes = processes.as_ref().is_none_or(|processes| processes.shard().rank() == 0);
    let weights = files.weights(args.model.dtype, &device, processes)?;
    let model = with_bar("loading", "blocks", |loaded| CausalLm::load(&json, weights, loaded))?;

    if let Some(path) = &args.logits {
        write_logits(&model, &prompts, writes.then_some(path))?;
        if args.max_tokens.is_none() {
            return Ok(());
        }
    }
    if let Some(path) = &args.model.page {
        write_page(&model, &prompts[0], tokenizer.as_ref(), path)?;
    }
    let end = files.end_tokens(&json)?;
    let mut out: Box<dyn Write> = if writes { Box::new(std::io::stdout().lock()) } else { Box::new(std::io::sink()) };
    let report = answer(&model, &prompts, args, &end, tokenizer.as_ref(), &mut out)?;
    if writes {
        eprintln!("{report}");
    }
    Ok(())
}

/// What the tokens made add to the text of a prompt: decoded after it, since a decoder drops the space before a first
/// word.
fn continuation(tokenizer: &SimpleTokenizer, prompt: &[u32], made: &[u32]) -> Result<String> {
    let decode = |ids: &[u32]| tokenizer.decode_with(ids, SpecialTokens::Without);
    let (before, whole) = (decode(prompt)?, decode(&[prompt, made].concat())?);
    Ok(whole.strip_prefix(&before).unwrap_or(&whole).to_string())
}

/// Streams the text of one prompt, or prints that of several when all have ended; gives what is to be said of the run.
fn answer(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    args: &Args,
    end: &[u32],
    tokenizer: Option<&SimpleTokenizer>,
    out: &mut dyn Write,
) -> Result<String> {
    let mut caches = model.caches(|config| match args.kv_cache.as_ref().map(|name| name.parse()) {
        None => config,
        Some(Ok(dtype)) => config.with_dtype(dtype),
        Some(Err(_)) => config.with_q8(), // the one name that is no dtype
    })?;
    let mut made = vec![Vec::new(); prompts.len()];
    let streamed = tokenizer.filter(|_| prompts.len() == 1);
    let mut shown = 0;
    if streamed.is_some() {
        write!(out, "{}", args.prompt[0])?;
    }
    let [prompt_time, time] = generate(model, prompts, &mut caches, args, end, |sequence, token| {
        made[sequence].push(token);
        if let Some(tokenizer) = streamed
            && !end.contains(&token)
        {
            let text = continuation(tokenizer, &prompts[0], &made[0])?;
            // A character may take several tokens.
            if let (Some(new), false) = (text.get(shown..), text.ends_with('\u{fffd}')) {
                write!(out, "{new}")?;
                out.flush()?;
                shown = text.len();
            }
        }
        Ok(())
    })?;
    for (i, made) in made.iter().enumerate() {
        match tokenizer {
            Some(_) if streamed.is_some() => writeln!(out)?,
            Some(tokenizer) => writeln!(out, "{}{}", args.prompt[i], continuation(tokenizer, &prompts[i], made)?)?,
            None => writeln!(out, "{}", made.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?,
        }
    }
    let [given, made] = [prompts, &made].map(|rows| rows.iter().map(Vec::len).sum::<usize>());
    let held: usize = caches.iter().map(Cache::memory).sum();
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    Ok(format!(
        "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s; cache: {:.1} MiB",
        given,
        rate(given, prompt_time),
        made,
        // The first token comes with the prompt.
        rate(made.saturating_sub(prompts.len()), time),
        held as f64 / f64::from(1 << 20)
    ))
}

/// What every layer attends to in a prompt, of those that have weights.
fn write_page(model: &CausalLm, prompt: &[u32], tokenizer: Option<&SimpleTokenizer>, path: &Path) -> Result<()> {
    let tokens = match tokenizer {
        Some(tokenizer) => texts(tokenizer, prompt),
        None => prompt.iter().map(u32::to_string).collect(),
    };
    let (layers, shape) = (model.blocks.len(), model.blocks.layers_and_heads());
    let linear = layers - shape[0];
    if linear > 0 {
        eprintln!("note: {linear} of {layers} layers have linear attention, which has no weights, and are left out");
    }
    let mut page = PageOfLayers::new(&tokens.concat(), &tokens, &tokens, shape)?;
    let positions: Vec<_> = (0..prompt.len()).collect();
    let xs = model.embed(&Tensor::new(prompt, model.device())?.unsqueeze(0)?, &positions, prompt.len())?;
    model.through_blocks(xs, |layer, attention, input| {
        if attention.is_linear() {
            return attention.forward(input);
        }
        let name = if linear > 0 { format!("layer {layer} of the model") } else { String::new() };
        page.attend(&name, |wanted| attention.forward_with_statistics(input, wanted))
    })?;
    page.write(path)
}

/// The logits of all prompt tokens as one tensor (B, T, V); of a shorter prompt, those past its end mean nothing.
fn write_logits(model: &CausalLm, prompts: &[Vec<u32>], path: Option<&PathBuf>) -> Result<()> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if longest == 0 {
        bail!("[causal_lm] no prompt has a token")
    }
    let (ids, lens) = padded(prompts, 0..longest, model.device())?;
    let mut caches = model.caches(|config| config)?;
    let logits = model.logits(&model.forward(&ids, Some(&lens), &mut caches)?)?;
    let Some(path) = path else { return Ok(()) };
    logits.save_safetensors("logits", path).map_err(cannot("write", path))
}

/// Makes tokens after each prompt, as the arguments say, and tells `made` of each: the sequence and the token. A
/// sequence ends at one of the tokens `end`. Gives the times that prompts and tokens took.
///
/// # Errors
/// For an empty prompt, and as the model.
fn generate(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    caches: &mut [Cache],
    args: &Args,
    end: &[u32],
    mut made: impl FnMut(usize, u32) -> Result<()>,
) -> Result<[Duration; 2]> {
    if let Some(empty) = prompts.iter().position(Vec::is_empty) {
        bail!("[causal_lm] prompt {} has no token", empty + 1)
    }
    let rngs: Vec<_> = (0..prompts.len()).map(|i| TorchSeed::new(args.seed.wrapping_add(i as u64))).collect();
    let mut next_after = |rows: &[Vec<u32>]| -> Result<Vec<u32>> {
        let logits = next_logits(model, rows, caches, args.chunk.get())?;
        logits.iter().zip(&rngs).map(|(logits, rng)| sample(logits, args, rng)).collect()
    };
    let (start, mut rows) = (Instant::now(), prompts.to_vec());
    let mut next = next_after(&rows)?;
    let (prompt, start) = (start.elapsed(), Instant::now());
    let max_tokens = args.max_tokens.unwrap_or(100);
    for step in 1..=max_tokens {
        // A sequence that has ended brings no token.
        for (sequence, row) in rows.iter_mut().enumerate().filter(|(_, row)| !row.is_empty()) {
            made(sequence, next[sequence])?;
            *row = if end.contains(&next[sequence]) { Vec::new() } else { vec![next[sequence]] };
        }
        if step == max_tokens || rows.iter().all(Vec::is_empty) {
            break;
        }
        next = next_after(&rows)?;
    }
    Ok([prompt, start.elapsed()])
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
fn padded(prompts: &[Vec<u32>], part: Range<usize>, device: &Device) -> Result<(Tensor, Vec<usize>)> {
    let (mut ids, mut lens) = (Vec::new(), Vec::new());
    for prompt in prompts {
        let own = &prompt[part.start.min(prompt.len())..part.end.min(prompt.len())];
        ids.extend(own);
        lens.push(own.len());
        ids.resize(lens.len() * part.len(), 0);
    }
    Ok((Tensor::from_vec(ids, (prompts.len(), part.len()), device)?, lens))
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
    let sums = candidates.iter().scan(0.0, |sum, &(_, p)| {
        *sum += f64::from(p);
        Some(*sum)
    });
    let mut sums: Vec<_> = sums.collect();
    sums.truncate(sums.partition_point(|&sum| sum < top_p) + 1);
    let drawn = f64::from(rng.rand(1)?.to_vec1::<f32>()?[0]) * sums[sums.len() - 1];
    let chosen = sums.partition_point(|&sum| sum <= drawn).min(sums.len() - 1);
    Ok(candidates[chosen].0)
}

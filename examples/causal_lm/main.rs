//! Text from a decoder (Llama, Gemma, DeepSeek, GPT-OSS, Falcon and others: all that `hf` knows) on this crate's attention
//! layer: `model/` is the model.
//!
//! ```sh
//! cargo run --release --example causal_lm -- --model path/to/checkpoint --prompt "The capital of France is"
//! ```

mod args;
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
mod generate;
mod model;
mod sampler;

use std::collections::HashMap;
use std::io::Write;
use std::process::ExitCode;

use candle_core::{Device, Error, Result, bail};
use clap::Parser;
use tokenizers::Tokenizer;

use args::{Args, KvCache};
use checkpoint::Files;
use generate::{Options, generate, padded};
use model::CausalLm;
use sampler::Sampling;

fn main() -> ExitCode {
    common::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let device = args.device.open()?;
    let files = Files::of(args)?;
    let tokenizer = if args.ids.is_empty() { Some(files.tokenizer()?) } else { None };
    let prompts = match &tokenizer {
        Some(tokenizer) => encode(tokenizer, &args.prompt)?,
        None => args.ids.iter().map(|ids| ids.0.clone()).collect(),
    };
    let json = files.config()?;
    let (bar, vb) = (common::bar("loading", "blocks"), files.var_builder(args.dtype.dtype(), &device)?);
    let model = CausalLm::load(&json, vb, |layer, layers| {
        bar.set_length(layers as u64);
        bar.set_position(layer as u64);
    })?;
    bar.finish_and_clear();

    if let Some(path) = &args.logits {
        write_logits(&model, &prompts, path, &device)?;
        if args.max_tokens.is_none() {
            return Ok(());
        }
    }
    let options = Options {
        sampling: match args.temperature {
            0.0 => Sampling::Greedy,
            temperature => Sampling::TopP { temperature, top_p: args.top_p.unwrap_or(1.0) },
        },
        seed: args.seed,
        max_tokens: args.max_tokens.unwrap_or(100),
        end: files.end_tokens(&json)?,
        chunk: args.chunk,
        device,
    };
    answer(&model, &prompts, args, &options, tokenizer.as_ref())
}

fn encode(tokenizer: &Tokenizer, texts: &[String]) -> Result<Vec<Vec<u32>>> {
    let ids = |text: &String| Ok(tokenizer.encode(text.as_str(), true).map_err(Error::wrap)?.get_ids().to_vec());
    texts.iter().map(ids).collect()
}

/// Streams the text of one prompt, or prints that of several when all have ended.
fn answer(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    args: &Args,
    options: &Options,
    tokenizer: Option<&Tokenizer>,
) -> Result<()> {
    let mut caches = model.caches(|config| match args.kv_cache {
        None => config,
        Some(KvCache::F32) => config.with_dtype(candle_core::DType::F32),
        Some(KvCache::Bf16) => config.with_dtype(candle_core::DType::BF16),
        Some(KvCache::F16) => config.with_dtype(candle_core::DType::F16),
        Some(KvCache::Q8) => config.with_q8(),
    })?;
    let mut made = vec![Vec::new(); prompts.len()];
    let mut out = std::io::stdout().lock();
    let mut stream = tokenizer.filter(|_| prompts.len() == 1).map(|tokenizer| tokenizer.decode_stream(true));
    if let (Some(_), [prompt]) = (&stream, args.prompt.as_slice()) {
        write!(out, "{prompt}")?;
    }
    let times = generate(model, prompts, &mut caches, options, |sequence, token| {
        made[sequence].push(token);
        if let Some(stream) = &mut stream
            && !options.end.contains(&token)
            && let Some(text) = stream.step(token).map_err(Error::wrap)?
        {
            write!(out, "{text}")?;
            out.flush()?;
        }
        Ok(())
    })?;
    match tokenizer {
        Some(_) if prompts.len() == 1 => writeln!(out)?,
        Some(tokenizer) => {
            for (prompt, made) in args.prompt.iter().zip(&made) {
                writeln!(out, "{prompt}{}", tokenizer.decode(made, true).map_err(Error::wrap)?)?;
            }
        }
        None => {
            for made in &made {
                writeln!(out, "{}", made.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?;
            }
        }
    }
    let held: usize = caches.iter().map(candle_attention::AttentionCache::memory).sum();
    let rate = |tokens: usize, time: std::time::Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    eprintln!(
        "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s; cache: {:.1} MiB",
        times.prompt_tokens,
        rate(times.prompt_tokens, times.prompt),
        times.made_tokens,
        // The first token comes with the prompt.
        rate(times.made_tokens.saturating_sub(prompts.len()), times.made),
        held as f64 / f64::from(1 << 20)
    );
    Ok(())
}

/// The logits of all prompt tokens as one tensor (B, T, V); of a shorter prompt, those past its end mean nothing.
fn write_logits(model: &CausalLm, prompts: &[Vec<u32>], path: &std::path::Path, device: &Device) -> Result<()> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if longest == 0 {
        bail!("[causal_lm] no prompt has a token")
    }
    let (ids, lens) = padded(prompts, 0..longest, device)?;
    let mut caches = model.caches(|config| config)?;
    let logits = model.logits(&model.forward(&ids, Some(&lens), &mut caches)?)?;
    let tensors = HashMap::from([("logits", logits)]);
    candle_core::safetensors::save(&tensors, path)
        .map_err(|error| Error::Msg(format!("[causal_lm] cannot write {}: {error}", path.display())))
}

//! From the command line to text, in one process or in each of several.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use candle_attention::text::SimpleTokenizer;
use candle_attention::{AttentionCacheConfig, KvCodeFormat};
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::args::Args;
use crate::common::page::{PageOfLayers, texts};
use crate::common::{cannot, counted, make_folders, with_bar};
use crate::files::{Files, continuation};
use crate::generate::{Batch, PaddedIds, generate};
use crate::model::CausalLm;
use crate::model::weights::Ranks;

/// Runs the command line. Of several ranks, the first one writes.
pub fn run(args: &Args, device: Device, ranks: Option<Rc<dyn Ranks>>) -> Result<()> {
    make_folders(&[args.logits.as_ref(), args.model.page.as_ref()])?;
    let files = Files::open(args, &device)?;
    let tokenizer = if args.ids.is_empty() { Some(files.tokenizer()?) } else { None };
    let prompts = match &tokenizer {
        Some(tokenizer) => args.prompt.iter().map(|text| Ok(tokenizer.encode(text)?.ids)).collect::<Result<_>>()?,
        None => args.ids.iter().map(|ids| ids.0.clone()).collect::<Vec<_>>(),
    };
    let json = files.config()?;
    let writes = ranks.as_ref().is_none_or(|ranks| ranks.shard().rank() == 0);
    let weights = files.weights(args, &device, ranks)?;
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

/// Streams the text of one prompt, or prints the texts of several when all have ended. Returns a report of the run.
fn answer(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    args: &Args,
    end: &[u32],
    tokenizer: Option<&SimpleTokenizer>,
    out: &mut dyn Write,
) -> Result<String> {
    let caches = model.caches(|config| cache_config(config, args))?;
    let mut made = vec![Vec::new(); prompts.len()];
    let streamed = tokenizer.filter(|_| prompts.len() == 1);
    let mut shown = 0;
    if streamed.is_some() {
        write!(out, "{}", args.prompt[0])?;
    }
    let mut batch = Batch::new(model, caches, prompts.len(), args.chunk.get());
    let times = generate(&mut batch, prompts, args, end, |sequence, token| {
        made[sequence].push(token);
        if let Some(decoder) = streamed
            && !end.contains(&token)
        {
            let text = continuation(decoder, &prompts[0], &made[0])?;
            // A character may take several tokens.
            if let (Some(new), false) = (text.get(shown..), text.ends_with('\u{fffd}')) {
                write!(out, "{new}")?;
                out.flush()?;
                shown = text.len();
            }
        }
        Ok(())
    })?;
    for (i, row) in made.iter().enumerate() {
        match tokenizer {
            Some(_) if streamed.is_some() => writeln!(out)?,
            Some(tokenizer) => writeln!(out, "{}{}", args.prompt[i], continuation(tokenizer, &prompts[i], row)?)?,
            None => writeln!(out, "{}", row.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?,
        }
    }
    let count = |rows: &[Vec<u32>]| rows.iter().map(Vec::len).sum::<usize>();
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    Ok(format!(
        "prompt: {}, {:.1} tokens/s; generation: {}, {:.1} tokens/s; cache: {:.1} MiB",
        counted(count(prompts), "token"),
        rate(count(prompts), times.prompt),
        counted(count(&made), "token"),
        // The first token comes with the prompt.
        rate(count(&made).saturating_sub(prompts.len()), times.tokens),
        batch.memory() as f64 / f64::from(1 << 20)
    ))
}

/// Returns the config of a layer's cache with what the command line asks for.
fn cache_config(mut config: AttentionCacheConfig, args: &Args) -> AttentionCacheConfig {
    if let Some(name) = &args.kv_cache {
        config = match name.parse::<DType>() {
            Ok(dtype) => config.with_dtype(dtype),
            // The other names are of codes.
            Err(_) => config.with_codes(KvCodeFormat::of_name(name)),
        };
    }
    if let Some(window) = args.window {
        let shortest = config.window().map_or(window.get(), |own| own.min(window.get()));
        config = config.with_window(shortest);
    }
    if let Some(sink_tokens) = args.sink_tokens {
        config = config.with_sink_tokens(sink_tokens.get());
    }
    config
}

/// Writes a page of the attention weights of all layers that have them, for one prompt.
fn write_page(model: &CausalLm, prompt: &[u32], tokenizer: Option<&SimpleTokenizer>, path: &Path) -> Result<()> {
    let tokens = match tokenizer {
        Some(tokenizer) => texts(tokenizer, prompt),
        None => prompt.iter().map(u32::to_string).collect(),
    };
    let layers = model.blocks.len();
    let softmax = model.blocks.softmax_attentions().count();
    let linear = layers - softmax;
    if linear > 0 {
        eprintln!("note: {linear} of {layers} layers have linear attention, which has no weights, and are left out");
    }
    let mut page = PageOfLayers::new(&tokens.concat(), &tokens, &tokens, softmax, model.blocks.num_heads())?;
    let positions: Vec<_> = (0..prompt.len()).collect();
    let xs = model.embed(&Tensor::new(prompt, &Device::Cpu)?.unsqueeze(0)?, &positions, prompt.len())?;
    model.through_blocks(xs, |layer, attention, input| {
        if attention.is_linear() {
            return attention.forward(input);
        }
        let name = if linear > 0 { format!("layer {layer} of the model") } else { String::new() };
        page.attend(&name, |wanted| attention.forward_with_statistics(input, wanted))
    })?;
    page.write(path)
}

/// Writes the logits of all prompt tokens as one tensor (B, T, V); those past the end of a shorter prompt mean nothing.
fn write_logits(model: &CausalLm, prompts: &[Vec<u32>], path: Option<&PathBuf>) -> Result<()> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if longest == 0 {
        bail!("[causal_lm] no prompt has a token")
    }
    let batch = PaddedIds::new(prompts, 0..longest)?;
    let mut caches = model.caches(|config| config)?;
    let logits = model.logits(&model.forward(&batch.ids, Some(&batch.lens), &mut caches)?)?;
    let Some(path) = path else { return Ok(()) };
    logits.save_safetensors("logits", path).map_err(cannot("write", path))?;
    eprintln!("{}: logits {:?} in {}", path.display(), logits.dims3()?, logits.dtype().as_str());
    Ok(())
}

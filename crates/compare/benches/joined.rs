//! Requests in one batch of caches, without pages, that sequences join and are removed from: `cargo bench -p
//! candle-attention-compare --bench joined -- --model FOLDER --requests FILE`. `serving.py --join` times it in turn
//! with `serve_requests`, which reads the same files.
//!
//! All requests are there at the start. Each prompt is computed alone and joins the batch; then every step generates a
//! token of each request, and a request that has all of its tokens is removed.

#[path = "../../../examples/causal_lm/model.rs"]
mod model;

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use candle_attention::weights::Checkpoint;
use candle_core::{D, DType, Device, Error, Result, Tensor, bail};
use clap::Parser;
use serde_json::{Value, json};

use model::CausalLm;
use model::attention::Cache;

#[derive(Parser)]
struct Args {
    /// A folder with config.json and weights
    #[arg(long)]
    model: PathBuf,
    /// A file with a request on each line, {"id": "a name", "ids": [1, 2], "max_tokens": 20}
    #[arg(long)]
    requests: PathBuf,
    /// Weights and activations in bf16 instead of f32
    #[arg(long)]
    bf16: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

/// A request in the batch.
struct Request {
    id: Value,
    max_tokens: usize,
    generated: Vec<u32>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let dtype = if args.bf16 { DType::BF16 } else { DType::F32 };
    let json: Value =
        serde_json::from_str(&fs::read_to_string(args.model.join("config.json"))?).map_err(Error::wrap)?;
    let vb = Checkpoint::open(&args.model)?.var_builder(dtype, &Device::Cpu)?;
    let model = CausalLm::load(&json, vb, |_, _| {})?;
    let mut lines = Vec::new();
    for line in fs::read_to_string(&args.requests)?.lines() {
        lines.push(serde_json::from_str::<Value>(line).map_err(Error::wrap)?);
    }

    let start = Instant::now();
    let mut caches: Vec<Cache> = Vec::new();
    let mut batch = Vec::new();
    for line in &lines {
        let ids: Vec<u32> = serde_json::from_value(line["ids"].clone()).map_err(Error::wrap)?;
        let (Some(max_tokens), false) = (line["max_tokens"].as_u64(), ids.is_empty()) else {
            bail!("[joined] a line is {line}, expected \"ids\" and \"max_tokens\"")
        };
        let mut own = model.caches(|config| config)?;
        let prompt = Tensor::new(ids.as_slice(), &Device::Cpu)?.unsqueeze(0)?;
        let generated = next_tokens(&model.next_logits(&prompt, &[ids.len()], &mut own)?)?;
        if caches.is_empty() {
            caches = own;
        } else {
            for (cache, joining) in caches.iter_mut().zip(&own) {
                join(cache, joining)?;
            }
        }
        batch.push(Request { id: line["id"].clone(), max_tokens: max_tokens as usize, generated });
    }
    let mut ended = Vec::new();
    loop {
        for n in (0..batch.len()).rev() {
            if batch[n].generated.len() >= batch[n].max_tokens {
                ended.push(batch.swap_remove(n));
                for cache in &mut caches {
                    remove(cache, n)?;
                }
            }
        }
        if batch.is_empty() {
            break;
        }
        let last: Vec<u32> = batch.iter().filter_map(|request| request.generated.last().copied()).collect();
        let ids = Tensor::from_vec(last, (batch.len(), 1), &Device::Cpu)?;
        let next = next_tokens(&model.next_logits(&ids, &vec![1; batch.len()], &mut caches)?)?;
        for (request, token) in batch.iter_mut().zip(next) {
            request.generated.push(token);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    for request in &ended {
        println!("{}", json!({"id": request.id, "ids": request.generated}));
    }
    eprintln!("{} requests in {seconds:.2} s", ended.len());
    Ok(())
}

/// Returns the most likely tokens of logits (B, V).
fn next_tokens(logits: &Tensor) -> Result<Vec<u32>> {
    logits.argmax(D::Minus1)?.to_vec1()
}

fn join(cache: &mut Cache, joining: &Cache) -> Result<()> {
    match (cache, joining) {
        (Cache::Softmax(cache), Cache::Softmax(joining)) => cache.join(joining),
        (Cache::Linear(cache), Cache::Linear(joining)) => cache.join(joining),
        _ => bail!("[joined] the caches are of different kinds of attention"),
    }
}

fn remove(cache: &mut Cache, sequence: usize) -> Result<()> {
    match cache {
        Cache::Softmax(cache) => cache.swap_remove(sequence),
        Cache::Linear(cache) => cache.swap_remove(sequence),
        Cache::Compressed(_) => bail!("[joined] caches of compressed keys do not join, expected another model"),
    }
}

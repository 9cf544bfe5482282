//! A whole model of 168 million random parameters in the shape of Llama, on this crate and in candle-transformers, in
//! turn in one run: `cargo bench -p candle-attention-compare --bench models`. The model on this crate is the one of
//! `examples/causal_lm`.
//!
//! Both models read the same weights. Their logits are compared before anything is timed.

#[path = "../../../examples/causal_lm/model.rs"]
mod model;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, IndexOp, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use clap::Parser;
use serde_json::{Value, json};

use model::CausalLm;

#[derive(Parser)]
struct Args {
    /// One JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
    /// Tokens of the prompt, which are the context of the generated tokens.
    #[arg(long, default_value_t = 2048)]
    prompt: usize,
    /// Tokens that are generated.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// How often each model has its turn.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only this dtype, `f32` or `bf16`.
    #[arg(long)]
    dtype: Option<String>,
    /// Without candle-transformers' model, to work on this one.
    #[arg(long)]
    ours: bool,
    /// The model's config.json and the ids of the prompt, for another library; times nothing.
    #[arg(long)]
    list: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let json = config();
    let ids: Vec<u32> = (0..args.prompt as u32).map(|i| (i * 7919 + 13) % 16_000).collect();
    if args.list {
        println!("{}", json!({"config": json, "ids": ids}));
        return Ok(());
    }
    let tensors = weights(&json)?;
    if !args.json {
        println!("| dtype | model | prompt of {}, tokens/s | generation, tokens/s |", args.prompt);
        println!("| --- | --- | ---: | ---: |");
    }
    let is_requested = |dtype: &DType| args.dtype.as_ref().is_none_or(|name| name == dtype.as_str());
    for dtype in [DType::F32, DType::BF16].into_iter().filter(is_requested) {
        let vb = || VarBuilder::from_tensors(tensors.clone(), dtype, &Device::Cpu);
        let mut sides = vec![Side {
            name: "candle-attention",
            model: Model::Ours(Box::new(CausalLm::load(&json, vb(), |_, _| {})?)),
        }];
        if !args.ours {
            sides.push(Side { name: "candle-transformers", model: Model::theirs(&json, vb(), dtype)? });
            compare(&sides, &ids[..args.prompt.min(64)], dtype)?;
        }
        let mut best = vec![Times { prompt: f64::INFINITY, generation: f64::INFINITY }; sides.len()];
        for _ in 0..args.rounds {
            for (side, least) in sides.iter().zip(&mut best) {
                let times = side.time(&ids, args.tokens)?;
                least.prompt = least.prompt.min(times.prompt);
                least.generation = least.generation.min(times.generation);
            }
        }
        for (side, times) in sides.iter().zip(best) {
            let prompt = args.prompt as f64 / times.prompt;
            let generation = args.tokens as f64 / times.generation;
            if args.json {
                println!(
                    "{}",
                    json!({"name": side.name, "dtype": dtype.as_str(), "prompt": args.prompt,
                        "prompt_tokens_s": prompt, "generation_tokens_s": generation})
                );
            } else {
                println!("| {} | {} | {prompt:.0} | {generation:.1} |", dtype.as_str(), side.name);
            }
        }
    }
    Ok(())
}

fn config() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 16_000,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "max_position_embeddings": 4096, "tie_word_embeddings": false,
    })
}

fn weights(json: &Value) -> Result<HashMap<String, Tensor>> {
    let size = |key: &str| json[key].as_u64().unwrap_or_default() as usize;
    let e = size("hidden_size");
    let inner = size("intermediate_size");
    let vocab = size("vocab_size");
    let kv = e / size("num_attention_heads") * size("num_key_value_heads");
    let mut tensors = HashMap::new();
    let mut add = |name: String, (o, i): (usize, usize)| -> Result<()> {
        tensors.insert(name, Tensor::randn(0f32, (i as f32).powf(-0.5), (o, i), &Device::Cpu)?);
        Ok(())
    };
    add("model.embed_tokens.weight".into(), (vocab, e))?;
    add("lm_head.weight".into(), (vocab, e))?;
    for layer in 0..size("num_hidden_layers") {
        for (name, shape) in [
            ("self_attn.q_proj", (e, e)),
            ("self_attn.k_proj", (kv, e)),
            ("self_attn.v_proj", (kv, e)),
            ("self_attn.o_proj", (e, e)),
            ("mlp.gate_proj", (inner, e)),
            ("mlp.up_proj", (inner, e)),
            ("mlp.down_proj", (e, inner)),
        ] {
            add(format!("model.layers.{layer}.{name}.weight"), shape)?;
        }
    }
    let norms = (0..size("num_hidden_layers"))
        .flat_map(|layer| ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("layers.{layer}.{norm}")))
        .chain(["norm".into()]);
    for norm in norms {
        tensors.insert(format!("model.{norm}.weight"), Tensor::ones(e, DType::F32, &Device::Cpu)?);
    }
    Ok(tensors)
}

struct Side {
    name: &'static str,
    model: Model,
}

enum Model {
    Ours(Box<CausalLm>),
    Theirs(Box<Llama>, Config, DType),
}

enum Held {
    Ours(Vec<model::attention::Cache>),
    Theirs(Cache),
}

impl Model {
    fn theirs(json: &Value, vb: VarBuilder, dtype: DType) -> Result<Self> {
        let Ok(config) = serde_json::from_value::<LlamaConfig>(json.clone()) else { bail!("[models] a Llama config") };
        let config = config.into_config(false);
        Ok(Self::Theirs(Box::new(Llama::load(vb, &config)?), config, dtype))
    }

    fn cache(&self) -> Result<Held> {
        match self {
            Self::Ours(model) => Ok(Held::Ours(model.caches(|config| config)?)),
            Self::Theirs(_, config, dtype) => Ok(Held::Theirs(Cache::new(true, *dtype, config, &Device::Cpu)?)),
        }
    }

    /// Returns the logits (V,) after the last of `ids`, the first of which is at position `position`.
    fn step(&self, ids: &[u32], position: usize, held: &mut Held) -> Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        match (self, held) {
            (Self::Ours(model), Held::Ours(caches)) => model.next_logits(&ids, &[ids.dim(1)?], caches)?.i(0),
            (Self::Theirs(model, ..), Held::Theirs(cache)) => model.forward(&ids, position, cache)?.i(0),
            _ => bail!("[models] another model's cache"),
        }
    }
}

/// Seconds.
#[derive(Clone, Copy)]
struct Times {
    prompt: f64,
    generation: f64,
}

impl Side {
    /// Times the prompt, and `tokens` tokens after it.
    fn time(&self, ids: &[u32], tokens: usize) -> Result<Times> {
        let mut held = self.model.cache()?;
        let prompt_start = Instant::now();
        self.model.step(ids, 0, &mut held)?;
        let prompt = prompt_start.elapsed().as_secs_f64();
        let start = Instant::now();
        for token in 0..tokens {
            self.model.step(&ids[token..=token], ids.len() + token, &mut held)?;
        }
        Ok(Times { prompt, generation: start.elapsed().as_secs_f64() })
    }
}

/// Compares both sides on a few tokens at once and one by one.
fn compare(sides: &[Side], ids: &[u32], dtype: DType) -> Result<()> {
    let logits = |side: &Side| -> Result<Tensor> {
        let mut held = side.model.cache()?;
        side.model.step(&ids[..ids.len() - 1], 0, &mut held)?;
        side.model.step(&ids[ids.len() - 1..], ids.len() - 1, &mut held)?.to_dtype(DType::F32)
    };
    let ours = logits(&sides[0])?;
    let theirs = logits(&sides[1])?;
    let largest = |tensor: &Tensor| tensor.abs()?.max_all()?.to_scalar::<f32>();
    let gap = largest(&(&ours - &theirs)?)? / largest(&theirs)?;
    let most = if dtype == DType::F32 { 1e-4 } else { 0.1 };
    if gap.is_nan() || gap > most {
        bail!("[models] in {dtype:?} the logits differ by {gap:.1e} of the largest, expected at most {most:.0e}")
    }
    Ok(())
}

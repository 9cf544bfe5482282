//! A model of 1.1 billion random parameters in the shape of Llama: the model of `examples/causal_lm`.

#[path = "../../../../../examples/causal_lm/model.rs"]
mod model;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::{Value, json};

use self::model::CausalLm;
use self::model::attention::Cache;
use super::cell::ModelStep;
use super::clock::Clock;
use super::outcome::Outcome;

/// The tokens that are generated in turn before the prompt is computed again.
const TOKENS: usize = 64;

/// The sizes of a model.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    hidden: usize,
    intermediate: usize,
    vocabulary: usize,
    layers: usize,
    heads: usize,
    key_heads: usize,
    pub prompt: usize,
}

impl Sizes {
    /// Returns the sizes of TinyLlama-1.1B, or of a small model for short prompts.
    pub fn new(longest: usize) -> Self {
        if longest < 2048 {
            return Self {
                hidden: 64,
                intermediate: 96,
                vocabulary: 100,
                layers: 2,
                heads: 4,
                key_heads: 2,
                prompt: longest,
            };
        }
        Self { hidden: 2048, intermediate: 5632, vocabulary: 32_000, layers: 22, heads: 32, key_heads: 4, prompt: 2048 }
    }

    /// Returns the config.json of the model.
    pub fn config(&self) -> Value {
        json!({
            "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
            "max_position_embeddings": 4096, "tie_word_embeddings": false,
        })
    }

    /// Draws the weights on the device.
    fn weights(&self, device: &Device) -> Result<HashMap<String, Tensor>> {
        let mut tensors = HashMap::new();
        let mut add = |name: String, rows: usize, columns: usize| -> Result<()> {
            let drawn = Tensor::randn(0f32, (columns as f32).powf(-0.5), (rows, columns), device)?;
            tensors.insert(name, drawn.to_dtype(DType::BF16)?);
            Ok(())
        };
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let key_width = hidden / self.heads * self.key_heads;
        add("model.embed_tokens.weight".into(), self.vocabulary, hidden)?;
        add("lm_head.weight".into(), self.vocabulary, hidden)?;
        for layer in 0..self.layers {
            for (name, rows, columns) in [
                ("self_attn.q_proj", hidden, hidden),
                ("self_attn.k_proj", key_width, hidden),
                ("self_attn.v_proj", key_width, hidden),
                ("self_attn.o_proj", hidden, hidden),
                ("mlp.gate_proj", intermediate, hidden),
                ("mlp.up_proj", intermediate, hidden),
                ("mlp.down_proj", hidden, intermediate),
            ] {
                add(format!("model.layers.{layer}.{name}.weight"), rows, columns)?;
            }
        }
        let ones = || Tensor::ones(hidden, DType::BF16, device);
        for layer in 0..self.layers {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.insert(format!("model.layers.{layer}.{norm}.weight"), ones()?);
            }
        }
        tensors.insert("model.norm.weight".into(), ones()?);
        Ok(tensors)
    }

    /// Returns the ids of the prompt, (1, T) on the CPU.
    fn ids(&self) -> Result<Tensor> {
        let ids: Vec<u32> = (0..self.prompt).map(|i| ((i * 7919 + 13) % self.vocabulary) as u32).collect();
        Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)
    }
}

/// A model with the ids of its prompt.
struct Llama {
    model: CausalLm,
    ids: Tensor,
}

impl Llama {
    fn new(sizes: &Sizes, device: &Device) -> Result<Self> {
        let vb = VarBuilder::from_tensors(sizes.weights(device)?, DType::BF16, device);
        Ok(Self { model: CausalLm::load(&sizes.config(), vb, |_, _| {})?, ids: sizes.ids()? })
    }

    /// Computes the logits after the prompt.
    fn prompt(&self) -> Result<(Tensor, Vec<Cache>)> {
        let mut caches = self.model.caches(|config| config.with_capacity(self.ids.dims()[1] + TOKENS))?;
        let logits = self.model.next_logits(&self.ids, &[self.ids.dim(1)?], &mut caches)?;
        Ok((logits, caches))
    }
}

pub fn time(step: ModelStep, sizes: &Sizes, clock: &Clock) -> Result<Outcome> {
    let llama = Llama::new(sizes, &clock.device)?;
    let ms = match step {
        ModelStep::Prompt => clock.milliseconds(|_| llama.prompt())?,
        ModelStep::Token => time_token(&llama, &clock.device)?,
    };
    Ok(Outcome::Milliseconds { ms, path: "causal_lm".into() })
}

/// Returns the milliseconds of a token: of some tokens one after the other, without waiting in between.
fn time_token(llama: &Llama, device: &Device) -> Result<f64> {
    let token = llama.ids.narrow(1, 0, 1)?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let (_, mut caches) = llama.prompt()?;
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..TOKENS {
            llama.model.next_logits(&token, &[1], &mut caches)?;
        }
        device.synchronize()?;
        best = best.min(1e3 * start.elapsed().as_secs_f64() / TOKENS as f64);
    }
    Ok(best)
}

/// Times the first prompt of a process from the first use of the device on, and prints its parts.
pub fn first_call(sizes: &Sizes, open: impl FnOnce() -> Result<Device>) -> Result<Value> {
    let start = Instant::now();
    let milliseconds = || 1e3 * start.elapsed().as_secs_f64();
    let device = open()?;
    let opened = milliseconds();
    let llama = Llama::new(sizes, &device)?;
    device.synchronize()?;
    let loaded = milliseconds();
    llama.prompt()?;
    device.synchronize()?;
    let first = milliseconds();
    llama.prompt()?;
    device.synchronize()?;
    let second = milliseconds();
    Ok(json!({
        "name": "Llama, bf16: first call of a process", "ms": first,
        "parts": {
            "device": opened, "weights": loaded - opened, "first prompt": first - loaded, "second prompt": second - first,
        },
    }))
}

//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use candle_attention::QuantizationFormat;
use clap::{ArgGroup, Parser};

use crate::common::{ModelArgs, count, quantization};

/// Generates text with a decoder: Llama, Gemma, DeepSeek, GPT-OSS, Qwen3.5, Falcon and others.
///
/// Text goes to stdout as it is generated, everything else to stderr. Prompts are used as they are: apply the model's
/// chat template yourself. --model also accepts a GGUF file, which contains config, tokenizer and weights.
#[derive(Debug, Clone, Parser)]
#[command(name = "causal_lm")]
#[command(group = ArgGroup::new("checkpoint").args(["model", "model_id"]).required(true))]
#[command(group = ArgGroup::new("input").required(true))]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,

    /// A text to continue; several texts are one batch
    #[arg(long, value_name = "TEXT", group = "input")]
    pub prompt: Vec<String>,

    /// Token ids instead of text, `5,7,9`; several lists are one batch
    #[arg(long, value_name = "IDS", value_parser = ids, group = "input")]
    pub ids: Vec<Ids>,

    /// Writes the logits of every prompt token (B, T, V) as safetensors, to compare with PyTorch; generates nothing
    /// unless --max-tokens is given too
    #[arg(long, value_name = "FILE")]
    pub logits: Option<PathBuf>,

    /// The most tokens to generate after each prompt [default: 100]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,

    /// The temperature of sampling; 0 always chooses the most likely token
    #[arg(long, default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f64,

    /// Samples from the most likely tokens that have this probability together
    #[arg(long, value_name = "P", requires = "temperature", value_parser = probability)]
    pub top_p: Option<f64>,

    /// The seed of sampling
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Quantises plain weights as they are read: to 8 bits with a scale for each output, to 4 bits with a scale and a
    /// minimum for each group of 32, 64 or 128 inputs, or to NF4
    #[arg(long, value_name = "FORMAT", value_parser = quantization())]
    pub quantize: Option<QuantizationFormat>,

    /// The type of cached keys and values [default: the type of the activations]. q8 stores 8 bits and a scale for each
    /// row, e4m3 floats of 8 bits and such a scale, q4 4 bits and a scale for each 64 numbers. States of linear
    /// attention are f32
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "bf16", "f16", "q8", "e4m3", "q4"])]
    pub kv_cache: Option<String>,

    /// The number of tokens that each token attends to: the sink tokens and the last ones. Caches drop the others, and
    /// count positions among those that are left
    #[arg(long, value_name = "N", requires = "sink_tokens", value_parser = count)]
    pub window: Option<NonZeroUsize>,

    /// The number of first tokens that caches never drop (StreamingLLM), a part of --window. The text may become longer
    /// than those that the model was trained for
    #[arg(long, value_name = "N", requires = "window", value_parser = count)]
    pub sink_tokens: Option<NonZeroUsize>,

    /// The prompt tokens that go through the model at a time; more if its rotary frequencies depend on the length of a
    /// call
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count)]
    pub chunk: NonZeroUsize,
}

/// One prompt as ids.
#[derive(Debug, Clone)]
pub struct Ids(pub Vec<u32>);

fn ids(text: &str) -> Result<Ids, String> {
    let id = |id: &str| id.trim().parse().map_err(|_| format!("{id:?} is no token id"));
    text.split(',').map(id).collect::<Result<_, _>>().map(Ids)
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, "of 0 or more", |x| (0.0..f64::INFINITY).contains(&x))
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, "above 0 and up to 1", |x| x > 0.0 && x <= 1.0)
}

fn number(text: &str, expected: &str, fits: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.parse().ok().filter(|&x| fits(x)).ok_or_else(|| format!("expected a number {expected}"))
}

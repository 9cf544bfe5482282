//! The command line.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use candle_attention::QuantizationFormat;
use clap::{ArgGroup, Parser};

use crate::common::{ModelArgs, count, quantization};
use crate::scheduler::Limits;

/// Serves requests with a decoder by continuous batching: they come and go at every step, share the pages of equal
/// beginnings, and return pages when too few are free.
///
/// The tokens of each request are the most likely ones, as if it were alone. When a request ends, a line of JSON goes
/// to stdout; a table goes to stderr at the end. --model also accepts a GGUF file, which contains config, tokenizer and
/// weights.
#[derive(Debug, Clone, Parser)]
#[command(name = "serve_requests")]
#[command(group = ArgGroup::new("checkpoint").args(["model", "model_id"]).required(true))]
#[command(mut_arg("page", |arg| arg.help("Writes a page with a picture of the pool over time, FILE.html")))]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,

    /// A file with a request on each line, {"prompt": "a text", "max_tokens": 20}. A line may have "ids", a list of
    /// token ids, instead of "prompt", and may have an "id" and an "arrival" in seconds after the start
    #[arg(long, value_name = "FILE")]
    pub requests: PathBuf,

    /// The most tokens that go through the model in a step
    #[arg(long, value_name = "N", default_value = "512", value_parser = count)]
    pub token_budget: NonZeroUsize,

    /// The most tokens of one prompt in a step
    #[arg(long, value_name = "N", default_value = "256", value_parser = count)]
    pub chunk: NonZeroUsize,

    /// The most requests that are served at a time; never more than the token budget
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    pub batch: NonZeroUsize,

    /// The number of pages of the pool of each layer
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count)]
    pub pages: NonZeroUsize,

    /// The number of positions of a page, a multiple of 16
    #[arg(long, value_name = "N", default_value = "16", value_parser = count)]
    pub page_size: NonZeroUsize,

    /// The number of states of linear attention, at least two for each request of a batch; the others keep the states
    /// after common beginnings [default: four for each]
    #[arg(long, value_name = "N", value_parser = count)]
    pub states: Option<NonZeroUsize>,

    /// The type of stored keys and values [default: the type of the activations]. q8 stores 8 bits and a scale for each
    /// row, e4m3 floats of 8 bits and such a scale, q4 4 bits and a scale for each 64 numbers
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "bf16", "f16", "q8", "e4m3", "q4"])]
    pub kv_cache: Option<String>,

    /// Quantises plain weights as they are read
    #[arg(long, value_name = "FORMAT", value_parser = quantization())]
    pub quantize: Option<QuantizationFormat>,

    /// Counts S seconds for each step instead of measuring the time, so that every run has the same table
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub step_time: Option<f64>,
}

impl Args {
    /// Returns the number of states of a model with linear attention.
    pub fn states(&self) -> usize {
        self.states.map_or(self.limits().running().saturating_mul(4), NonZeroUsize::get)
    }

    /// Returns the limits of the scheduler.
    pub fn limits(&self) -> Limits {
        Limits { tokens: self.token_budget.get(), chunk: self.chunk.get(), requests: self.batch.get() }
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|&seconds: &f64| seconds > 0.0 && seconds <= 1e6);
    seconds.ok_or_else(|| "expected a number above 0 and up to 1000000".to_string())
}

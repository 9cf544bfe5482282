//! The command line.

use std::path::PathBuf;

use clap::Parser;

use crate::common::{DeviceChoice, Precision};
use crate::texts;

/// Orders passages by how well they answer a question, by the score that a cross-encoder gives each pair.
#[derive(Debug, Parser)]
#[command(name = "rerank")]
pub struct Args {
    /// The question
    #[arg(value_name = "QUESTION")]
    pub question: String,

    /// Passages, in front of those of --file
    #[arg(value_name = "PASSAGE", required_unless_present = "file")]
    pub passages: Vec<String>,

    /// A text file with a passage on each line; blank lines count for none
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// A folder with config.json, tokenizer.json and weights (safetensors or .bin)
    #[arg(long, value_name = "DIR", required_unless_present = "model_id", conflicts_with = "model_id")]
    pub model: Option<PathBuf>,

    /// A checkpoint of the Hugging Face hub, `organisation/name[@revision]` (needs `--features hub`)
    #[arg(long, value_name = "ID")]
    pub model_id: Option<String>,

    /// How many of the best are shown; all unless given
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,

    /// Pairs that go through the model at a time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = |text: &str| texts::batch(text, "pairs"))]
    pub batch: usize,

    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,

    /// The type of weights and activations; scores are in f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
}

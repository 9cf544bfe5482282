//! The command line.

use std::path::PathBuf;

use clap::Parser;

use crate::common::{DeviceChoice, Precision};
use crate::texts;

/// Turns sentences into vectors with an encoder of BERT's family, and shows how similar they are.
///
/// Pooling, normalisation and the longest input are as the checkpoint's sentence-transformers files say (modules.json and
/// what it names); a checkpoint without them gets the mean over tokens, normalised.
#[derive(Debug, Parser)]
#[command(name = "sentence_embedding")]
pub struct Args {
    /// Sentences, in front of those of --file
    #[arg(value_name = "SENTENCE", required_unless_present = "file")]
    pub sentences: Vec<String>,

    /// A text file with a sentence on each line; blank lines count for none
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// A folder with config.json, tokenizer.json and weights (safetensors or .bin)
    #[arg(long, value_name = "DIR", required_unless_present = "model_id", conflicts_with = "model_id")]
    pub model: Option<PathBuf>,

    /// A checkpoint of the Hugging Face hub, `organisation/name[@revision]` (needs `--features hub`)
    #[arg(long, value_name = "ID")]
    pub model_id: Option<String>,

    /// Writes the embeddings (N, E) in f32, in the order of the sentences, which stand in the metadata as a JSON list
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Sentences that go through the model at a time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = |text: &str| texts::batch(text, "sentences"))]
    pub batch: usize,

    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,

    /// The type of weights and activations; pooling is in f32
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
}

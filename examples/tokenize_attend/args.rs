//! The command line.

use std::path::PathBuf;

use candle_attention::WeightLayout;
use candle_core::DType;
use clap::Parser;

use crate::common::DeviceChoice;

/// Runs text through one attention layer and shows what attends to what.
///
/// The layer comes from --model, --weights or --model-id; without one of them it is the tutorial's (hidden size 1536,
/// 16 heads) with PyTorch's seeded weights.
#[derive(Debug, Parser)]
#[command(name = "tokenize_attend")]
pub struct Args {
    /// One text, or several to run as a padded batch
    #[arg(required = true)]
    pub texts: Vec<String>,

    /// A folder with weights and a config.json: one of `models/` (its name will do), or a Hugging Face checkpoint
    #[arg(long, value_name = "DIR", group = "source")]
    pub model: Option<PathBuf>,

    /// An attention layer exported from PyTorch: safetensors or .pth, alone or within a model
    #[arg(long, value_name = "FILE", group = "source")]
    pub weights: Option<PathBuf>,

    /// A checkpoint of the Hugging Face hub, `organisation/name[@revision]` (needs `--features hub`)
    #[arg(long, value_name = "ID", group = "source")]
    pub model_id: Option<String>,

    /// The seed of whatever has no weights of its own
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// How --weights names its parameters, where detection finds two readings
    #[arg(long, value_name = "LAYOUT", requires = "weights")]
    pub layout: Option<WeightLayout>,

    /// The number of heads of --weights, which a file does not tell
    #[arg(long, value_name = "N", requires = "weights")]
    pub heads: Option<usize>,

    /// A Hugging Face tokenizer.json instead of the source's own
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,

    /// Split punctuation off words: takes "hello world how are you?" too
    #[arg(long, conflicts_with = "tokenizer")]
    pub punctuation: bool,

    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    /// The type of weights and activations: f32, f16, bf16 or f64
    #[arg(long, value_parser = dtype, default_value = "f32")]
    pub dtype: DType,

    /// Hide later tokens from each token
    #[arg(long)]
    pub causal: bool,

    /// Which attention layer of a checkpoint, from 0; the last of a model that is attention alone, else 0, unless given
    #[arg(long, value_name = "N")]
    pub layer: Option<usize>,

    /// Show this head, from 0, instead of the mean of all
    #[arg(long, value_name = "N")]
    pub head: Option<usize>,

    /// Write the heat map as a picture: FILE.svg or FILE.png, all heads unless --head is given (needs `--features plot`)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Print JSON: tokens, ids, output, weights, times
    #[arg(long)]
    pub json: bool,
}

fn dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        "f64" => Ok(DType::F64),
        _ => Err("expected f32, f16, bf16 or f64".into()),
    }
}

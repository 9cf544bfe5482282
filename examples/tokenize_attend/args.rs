//! The command line.

use std::path::PathBuf;

use candle_attention::WeightLayout;
use clap::Parser;

use crate::common::ModelArgs;
use crate::common::page::PageArgs;

/// Runs text through one attention layer and shows what attends to what.
///
/// The layer comes from --model (a name in `models/` will do), --model-id or --weights; without one of them it is the
/// tutorial's: hidden size 1536, 16 heads, and the weights of `torch.manual_seed(0)`.
#[derive(Debug, Parser)]
#[command(name = "tokenize_attend")]
pub struct Args {
    /// One text, or several to run as a padded batch
    #[arg(required = true)]
    pub texts: Vec<String>,

    #[command(flatten)]
    pub model: ModelArgs,

    /// An attention layer exported from PyTorch: safetensors or .pth, alone or within a model
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "model_id"])]
    pub weights: Option<PathBuf>,

    /// The number of heads of --weights, which a file does not tell
    #[arg(long, value_name = "N", requires = "weights")]
    pub heads: Option<usize>,

    /// How --weights names its parameters, where detection finds two readings
    #[arg(long, value_name = "LAYOUT", requires = "weights")]
    pub layout: Option<WeightLayout>,

    /// Which attention layer, from 0; the first unless given, of a model that is attention alone the last
    #[arg(long, value_name = "N")]
    pub layer: Option<usize>,

    /// Draw the weights of each head: FILE.svg or FILE.png, for one text (needs `--features plot`)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Of one text
    #[command(flatten)]
    pub page: PageArgs,
}

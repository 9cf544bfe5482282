//! The command line.

use std::path::PathBuf;

use clap::Parser;

use crate::common::{DeviceChoice, Precision};

/// Turns a picture into a vector with an encoder of images (ViT, DINOv2, CLIP), and shows what its class token attends
/// to.
///
/// Size, crop and colours are as the checkpoint's preprocessor_config.json says.
#[derive(Debug, Parser)]
#[command(name = "image_embedding")]
pub struct Args {
    /// A picture, PNG
    #[arg(value_name = "PNG")]
    pub picture: PathBuf,

    /// A folder with config.json, preprocessor_config.json and weights (safetensors or .bin)
    #[arg(long, value_name = "DIR", required_unless_present = "model_id", conflicts_with = "model_id")]
    pub model: Option<PathBuf>,

    /// A checkpoint of the Hugging Face hub, `organisation/name[@revision]` (needs `--features hub`)
    #[arg(long, value_name = "ID")]
    pub model_id: Option<String>,

    /// The layer whose attention is shown, from 1; the last unless given
    #[arg(long, value_name = "N")]
    pub layer: Option<usize>,

    /// The head whose attention is shown, from 1; the mean of all unless given
    #[arg(long, value_name = "N")]
    pub head: Option<usize>,

    /// Writes the picture as the model sees it, with the attention over it, as PNG
    #[arg(long, value_name = "FILE")]
    pub attention: Option<PathBuf>,

    /// Writes the embedding (E,) in f32, and the weights (H, rows, columns) of the class token to patches
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,

    /// The type of weights and activations
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub dtype: Precision,
}

//! Computes the embedding of a picture with an image encoder (clip, dinov2, vit) on this crate's attention layer, and
//! draws the attention of the class token over the picture. `model.rs` is the model.
//!
//! ```sh
//! cargo run --release --features plot --example image_embedding -- --model DIR cat.png --attention attention.png
//! ```

#[path = "../common/mod.rs"]
mod common;
mod model;
mod picture;
mod resample;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_core::{Result, Tensor, bail};
use clap::{ArgGroup, Parser};

use common::page::PageOfLayers;
use common::{EXAMPLE, Files, ModelArgs, cannot, counted, make_folders, read_json, with_bar};
use model::{Encoder, Output};
use picture::{Picture, Preprocessor};

const PREPROCESSOR: &str = "preprocessor_config.json";

/// Computes the embedding of a picture with an image encoder (ViT, DINOv2, CLIP), and shows the attention of its class
/// token.
///
/// Size, crop and colours follow the checkpoint's preprocessor_config.json.
#[derive(Debug, Parser)]
#[command(name = "image_embedding", group = ArgGroup::new("checkpoint").args(["model", "model_id"]).required(true))]
struct Args {
    /// A PNG file
    #[arg(value_name = "PNG")]
    picture: PathBuf,

    #[command(flatten)]
    model: ModelArgs,

    /// The layer whose attention is shown, from 0 [default: the last]
    #[arg(long, value_name = "N")]
    layer: Option<usize>,

    /// The head whose attention is shown, from 0 [default: the mean of all]
    #[arg(long, value_name = "N")]
    head: Option<usize>,

    /// Writes the picture in the model's size, with the attention over it, as PNG
    #[arg(long, value_name = "FILE", value_parser = common::file_name(&["png"]))]
    attention: Option<PathBuf>,

    /// Writes the embedding (E,) in f32, and the weights (H, rows, columns) of the class token to patches, as
    /// safetensors
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    make_folders(&[args.attention.as_ref(), args.out.as_ref(), args.model.page.as_ref()])?;
    let original = Picture::open(&args.picture)?;
    let Files { folder, config, vb } = args.model.open(&[PREPROCESSOR])?;
    let preprocessor = Preprocessor::read(&read_json(&folder.join(PREPROCESSOR))?)?;
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, vb, loaded))?;

    let size = original.size()?;
    let picture = preprocessor.apply(original)?;
    let layers = model.blocks.len();
    let width = model.blocks.width;
    let layer = args.layer.unwrap_or(layers.saturating_sub(1));
    if layer >= layers {
        bail!("[{EXAMPLE}] there is no layer {layer}, expected 0 to {}", layers.saturating_sub(1))
    }
    let pixels = preprocessor.pixels(&picture)?;
    let Output { embedding, attention } = model.forward(&pixels, layer)?;
    if let Some(path) = &args.model.page {
        write_page(&model, &picture, &pixels, path)?;
    }
    let (heads, rows, columns) = attention.dims3()?;
    let (weights, of) = match args.head {
        None => (attention.mean(0)?, format!("the mean of {heads} heads")),
        Some(head) if head < heads => (attention.get(head)?, format!("head {head} of {heads}")),
        Some(head) => bail!("[{EXAMPLE}] there is no head {head}, expected 0 to {}", heads - 1),
    };
    if let Some(path) = &args.attention {
        std::fs::write(path, picture.with_heat(&weights)?.to_png()?).map_err(cannot("write", path))?;
    }
    let patch_weights = weights.flatten_all()?.to_vec1::<f32>()?;
    if let Some(path) = &args.out {
        let tensors = HashMap::from([("embedding", embedding.clone()), ("attention", attention)]);
        candle_core::safetensors::save(&tensors, path).map_err(cannot("write", path))?;
    }
    let largest = |&a: &usize, &b: &usize| patch_weights[a].total_cmp(&patch_weights[b]);
    let most = (0..patch_weights.len()).max_by(largest).unwrap_or(0);
    let percent = |weight: f32| format!("{:.1} %", 100.0 * weight);
    let length = embedding.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
    Ok(format!(
        "model      {}, {} of width {width}\n\
         picture    {} x {}, resized to {} x {} in {columns} x {rows} patches\n\
         embedding  ({},) of length {length:.4}\n\
         attention  of the class token in layer {layer}, {of}: {} to patches,\n           \
         most to row {}, column {} ({})\n",
        config["model_type"].as_str().unwrap_or_default(),
        counted(layers, "layer"),
        size.columns,
        size.rows,
        picture.size()?.columns,
        picture.size()?.rows,
        embedding.dim(0)?,
        percent(patch_weights.iter().sum()),
        most / columns + 1,
        most % columns + 1,
        percent(patch_weights[most]),
    ))
}

/// Writes a page of the attention of every layer, over the picture in the model's size.
fn write_page(model: &Encoder, picture: &Picture, pixels: &Tensor, path: &Path) -> Result<()> {
    let grid = model.grid(pixels)?;
    let place = |patch: usize| format!("row {}, column {}", patch / grid.columns + 1, patch % grid.columns + 1);
    let patches = (0..grid.rows * grid.columns).map(place);
    let tokens: Vec<_> = std::iter::once("[CLS]".to_string()).chain(patches).collect();
    let mut page = PageOfLayers::new("a picture", &tokens, &tokens, model.blocks.len(), model.blocks.num_heads())?
        .over_picture(&picture.to_png()?, [grid.rows, grid.columns])?;
    model.through_blocks(pixels, |_, attention, input| {
        page.attend("", |wanted| attention.forward_with_statistics(input, wanted))
    })?;
    page.write(path)
}

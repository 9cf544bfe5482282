//! Tokenizes texts, embeds them, runs them through one attention layer, and shows which tokens attend to which.
//!
//! ```sh
//! cargo run --example tokenize_attend "hello world how are you ?"
//! ```

#[path = "../common/attention_only.rs"]
mod attention_only;
#[path = "../common/mod.rs"]
mod common;
#[path = "../causal_lm/model.rs"]
mod decoder;
#[path = "../sentence_embedding/model.rs"]
mod encoder;
mod report;
mod source;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use candle_attention::plot::Heads;
use candle_attention::{AttentionInput, WeightLayout};
use candle_core::{Error, Result, bail};
use clap::{ArgGroup, Parser};

use common::ModelArgs;
use report::Report;
use source::Source;

/// Runs text through one attention layer and shows which tokens attend to which.
///
/// The layer comes from --model (a folder, or a name in `models/`), --model-id or --weights. The default is the
/// tutorial's layer: hidden size 1536, 16 heads, and the weights of `torch.manual_seed(0)`.
#[derive(Debug, Parser)]
#[command(name = "tokenize_attend", group = ArgGroup::new("source").args(["model", "model_id", "weights"]))]
struct Args {
    /// One text, or several to run as a padded batch
    #[arg(required = true)]
    pub texts: Vec<String>,

    #[command(flatten)]
    pub model: ModelArgs,

    /// An attention layer exported from PyTorch: safetensors or .pth, alone or within a model
    #[arg(long, value_name = "FILE")]
    pub weights: Option<PathBuf>,

    /// The number of heads of --weights, which the file does not contain
    #[arg(long, value_name = "N", requires = "weights")]
    pub heads: Option<usize>,

    /// The layout of the parameters of --weights, if detection finds two
    #[arg(long, value_name = "LAYOUT", requires = "weights")]
    #[arg(value_parser = |name: &str| name.parse::<WeightLayout>().map_err(|error| common::one_line(&error)))]
    pub layout: Option<WeightLayout>,

    /// The attention layer, from 0 [default: the first; the last of a model of attention layers alone]
    #[arg(long, value_name = "N", requires = "source")]
    pub layer: Option<usize>,

    /// Draws the weights of each head of the first text, FILE.svg or FILE.png (needs `--features plot`)
    #[arg(long, value_name = "FILE", value_parser = common::file_name(&["svg", "png"]))]
    pub plot: Option<PathBuf>,
}

fn main() -> ExitCode {
    common::main(|args| run(&args))
}

fn run(args: &Args) -> Result<()> {
    if args.plot.is_some() && cfg!(not(feature = "plot")) {
        bail!(
            "[tokenize_attend] --plot needs pictures: run again with `cargo run --features plot --example \
             tokenize_attend ..`"
        )
    }
    common::make_folders(&[args.plot.as_ref(), args.model.page.as_ref()])?;
    let device = args.model.device.open(0)?;
    let mut times = Vec::new();
    let mut start = Instant::now();
    let mut lap = |step| {
        device.synchronize()?;
        times.push((step, start.elapsed()));
        start = Instant::now();
        Ok::<_, Error>(())
    };

    let source = Source::open(args, &device)?;
    lap("weights")?;

    let batch = source.tokenizer.encode_batch(&args.texts)?;
    if batch.lens().contains(&0) {
        bail!("[tokenize_attend] expected texts of at least one word, found an empty one")
    }
    let ids = batch.ids_tensor(&device)?;
    let mask = batch.mask();
    lap("tokens")?;

    let hidden = (source.input)(&ids, &mask)?;
    lap("embedding")?;

    let output = source.layer.forward_with_weights(AttentionInput::new(&hidden).with_mask(&mask))?;
    lap("attention")?;

    let report = Report { source, batch, hidden, output, times };
    common::print(&report.to_text()?)?;
    common::print(&report.heat_maps()?)?;
    if let Some(file) = &args.plot {
        report.heat_map(0)?.with_title(&args.texts[0]).save(file, Heads::All)?;
    }
    match &args.model.page {
        Some(file) => report.write_page(&args.texts[0], file),
        None => Ok(()),
    }
}

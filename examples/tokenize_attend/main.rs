//! Text to tokens, tokens to vectors, vectors through one attention layer, and a look at what attends to what.
//!
//! ```sh
//! cargo run --example tokenize_attend "hello world how are you ?"
//! ```
//!
//! Without further options the layer is the tutorial's: hidden size 1536, 16 heads, weights drawn as PyTorch draws them
//! after `torch.manual_seed(0)`. `--help` lists the other sources.

mod args;
mod checkpoint;
mod hugging_face;
mod report;
mod system;

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use candle_attention::text::{PaddingSide, TokenizerError};
use candle_attention::{AttentionInput, AttentionMask};
use candle_core::{Device, Error, Result, bail};

use args::{Args, DeviceChoice};
use report::{Report, Times};
use system::System;

fn main() -> ExitCode {
    let args = match args::parse() {
        Ok(args) => args,
        Err(exit) => return exit,
    };
    match run(&args).and_then(|text| print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::from(1)
        }
    }
}

fn run(args: &Args) -> Result<String> {
    let mut times = Times::default();
    let device = device(args.device)?;

    let start = Instant::now();
    let system = System::open(args, &device)?;
    times.weights = start.elapsed();

    let start = Instant::now();
    let batch = system.tokenizer.encode_batch(&args.texts).map_err(|error| unknown_word(error, args))?;
    if let Some(empty) = batch.lens().iter().position(|&len| len == 0) {
        bail!("text {} is empty; give at least one word", empty + 1)
    }
    let ids = batch.ids_tensor(&device)?;
    times.tokens = start.elapsed();

    let start = Instant::now();
    let hidden = system.hidden_states(&ids)?;
    device.synchronize()?;
    times.embedding = start.elapsed();

    let mut mask = if args.causal { AttentionMask::causal() } else { AttentionMask::none() };
    if batch.lens().iter().any(|&len| len < batch.seq_len()) {
        mask = match batch.padding_side() {
            PaddingSide::Right => mask.with_valid_lens(batch.valid_lens()?),
            PaddingSide::Left => mask.with_starts(batch.starts()),
        };
    }
    let start = Instant::now();
    let output = system.layer.forward_with_weights(AttentionInput::new(&hidden).with_mask(&mask))?;
    device.synchronize()?;
    times.attention = start.elapsed();

    let report = Report { args, system: &system, batch: &batch, hidden: &hidden, output: &output, times };
    report.plot()?;
    if args.json { report.to_json() } else { report.to_text() }
}

/// The tokenizer's error; with one text its number is left out, and with a word that ends in punctuation the remedy stands.
fn unknown_word(error: TokenizerError, args: &Args) -> Error {
    let error = match error {
        TokenizerError::InBatch { source, .. } if args.texts.len() == 1 => *source,
        error => error,
    };
    let splits = matches!(&error, TokenizerError::UnknownWord { word, .. }
        if word.len() > 1 && word.ends_with(|c: char| c.is_ascii_punctuation()));
    if splits && !args.punctuation && args.tokenizer.is_none() {
        return Error::msg(format!("{error}; or run with --punctuation, which splits it off"));
    }
    error.into()
}

fn device(choice: DeviceChoice) -> Result<Device> {
    let absent = |name: &str, error: Error| {
        Error::msg(format!(
            "no {name} device: {}; try `--device cpu`, or build with `--features {name}`",
            one_line(&error)
        ))
    };
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Cuda => Device::new_cuda(0).map_err(|error| absent("cuda", error)),
        DeviceChoice::Metal => Device::new_metal(0).map_err(|error| absent("metal", error)),
        DeviceChoice::Auto => Ok(Device::new_cuda(0).or_else(|_| Device::new_metal(0)).unwrap_or(Device::Cpu)),
    }
}

/// Writes the report at once; a reader that went away (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The message without the backtrace that Candle appends where `RUST_BACKTRACE` is set.
fn one_line(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => one_line(inner),
        error => error.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" "),
    }
}

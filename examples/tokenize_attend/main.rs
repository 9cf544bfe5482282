//! Text to tokens, tokens to vectors, vectors through one attention layer, and a look at what attends to what.
//!
//! ```sh
//! cargo run --example tokenize_attend "hello world how are you ?"
//! ```
//!
//! Without further options the layer is the tutorial's: hidden size 1536, 16 heads, weights drawn as PyTorch draws them
//! after `torch.manual_seed(0)`. `--help` lists the other sources.

mod args;
#[path = "../common/attention_only.rs"]
#[allow(dead_code, reason = "what the training uses")]
mod attention_only;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "what other examples use")]
mod common;
mod hugging_face;
mod report;
mod system;

use std::process::ExitCode;
use std::time::Instant;

use candle_attention::AttentionMask;
use candle_attention::text::TokenizerError;
use candle_core::{Error, Result, bail};

use args::Args;
use report::{Report, Times};
use system::System;

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let mut times = Times::default();
    let device = args.device.open()?;

    let start = Instant::now();
    let system = System::open(args, &device)?;
    times.weights = start.elapsed();
    let (heads, ..) = system.layer.heads();
    if let Some(head) = args.head.filter(|&head| head >= heads) {
        bail!("--head {head} is out of range: there are {heads}, numbered from 0")
    }

    let start = Instant::now();
    let batch = system.words.tokenizer.encode_batch(&args.texts).map_err(|error| in_options(error, args))?;
    if let Some(empty) = batch.lens().iter().position(|&len| len == 0) {
        bail!("text {} is empty; give at least one word", empty + 1)
    }
    let ids = batch.ids_tensor(&device)?;
    times.tokens = start.elapsed();

    let start = Instant::now();
    let hidden = system.hidden_states(&ids)?;
    device.synchronize()?;
    times.embedding = start.elapsed();

    let mask = if args.causal { AttentionMask::causal() } else { AttentionMask::none() };
    let mask = mask.and(&batch.mask());
    let start = Instant::now();
    let attention = system.layer.attend(&hidden, &mask)?;
    device.synchronize()?;
    times.attention = start.elapsed();

    let report = Report { args, system: &system, batch: &batch, hidden: &hidden, attention: &attention, times };
    report.plot()?;
    if args.json { report.to_json() } else { report.to_text() }
}

/// The tokenizer's error in the words of the command line.
fn in_options(error: TokenizerError, args: &Args) -> Error {
    let (text, error) = match error {
        TokenizerError::InBatch { index, source } => (index + 1, *source),
        error => (1, error),
    };
    let of = if args.texts.len() == 1 { String::new() } else { format!(" of text {text}") };
    Error::msg(match error {
        TokenizerError::UnknownWord { word, position, nearest, vocabulary, .. } => {
            let list = |words: &[String], between| {
                words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(between)
            };
            let hint = match nearest.as_slice() {
                [] => format!("its words begin with {};", list(&vocabulary, ", ")),
                nearest => format!("did you mean {}?", list(nearest, " or ")),
            };
            let ends = word.len() > 1 && word.ends_with(|c: char| c.is_ascii_punctuation()) && !args.punctuation;
            let split = if ends { "--punctuation splits punctuation off, " } else { "" };
            let (position, word) = (position + 1, word.chars().take(60).collect::<String>());
            format!(
                "word {position}{of}, {word:?}, is not in the tokenizer's vocabulary: {hint} {split}--tokenizer gives another tokenizer"
            )
        }
        TokenizerError::NoPadding { shortest, longest } => format!(
            "the texts have {shortest} to {longest} tokens, and the tokenizer has no token to pad with; give texts of one length, or another --tokenizer"
        ),
        error => format!("{error}{}", if of.is_empty() { of } else { format!(" ({})", of.trim_start_matches(" of ")) }),
    })
}

//! Text to tokens, tokens to vectors, vectors through one attention layer, and a look at what attends to what.
//!
//! ```sh
//! cargo run --example tokenize_attend "hello world how are you ?"
//! ```

mod args;
#[path = "../common/attention_only.rs"]
mod attention_only;
#[path = "../common/mod.rs"]
mod common;
#[path = "../causal_lm/model/mod.rs"]
mod decoder;
#[path = "../sentence_embedding/model.rs"]
mod encoder;
mod report;
mod source;

use std::process::ExitCode;
use std::time::Instant;

use candle_attention::AttentionInput;
use candle_attention::plot::Heads;
use candle_core::{Error, Result, bail};

use args::Args;
use report::Report;
use source::Source;

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let device = args.model.device.open()?;
    let (mut times, mut start) = (Vec::new(), Instant::now());
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
    let text = match &args.texts[..] {
        [_, _, ..] if args.plot.is_some() || args.page.page.is_some() => {
            bail!("[tokenize_attend] --plot and --page show one text, found several")
        }
        texts => &texts[0],
    };
    if let Some(file) = &args.plot {
        report.heat_map(0)?.with_title(text).save(file, Heads::All)?;
    }
    if let Some(file) = &args.page.page {
        report.write_page(text, file)?;
    }
    report.to_text()
}

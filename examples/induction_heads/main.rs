//! Training of an induction head: two layers of attention learn to continue sequences that repeat.
//!
//! ```sh
//! cargo run --features plot --example induction_heads
//! ```
//!
//! The first layer learns to attend to the previous token, and the second, with that, to the token after the previous
//! copy of the current one (Olsson et al., "In-context Learning and Induction Heads", 2022). `--out` gets
//! `model.safetensors` with its `config.json` and `tokenizer.json`, for `tokenize_attend --model DIR`;
//! `checkpoint.safetensors`, for `--resume`; and with the feature `plot` pictures of the loss and of the second layer's
//! weights before and after the training.

#[path = "../common/attention_only.rs"]
mod attention_only;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod train;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use candle_attention::plot::{Heads, HeatMap, TerminalOptions};
use candle_attention::text::SimpleTokenizer;
use candle_attention::{MultiHeadAttentionConfig, RopeConfig};
use candle_core::{Device, Error, Result, bail};
use clap::Parser;

use attention_only::{AttentionOnly, AttentionOnlyConfig};
use common::page::PageOfLayers;
use data::WORDS;
use train::{Measurement, Training, checkpoint};

/// The sentence of the pictures, which repeats itself.
const SENTENCE: &str = "the cat sat on my red mat and the dog sat on my blue book and the cat sat on my red mat";
const WIDTH: usize = 64;
const HEADS: usize = 2;
/// The share of its weight that the best head puts on tokens after a previous copy when training ends.
const FORMED: f32 = 0.95;

/// Trains a transformer of two attention layers on random sequences that repeat, until an induction head forms: a head
/// that attends to the token after the previous copy of the current one.
#[derive(Debug, Parser)]
#[command(name = "induction_heads")]
struct Args {
    /// The folder for the model, its checkpoints and its pictures
    #[arg(long, value_name = "DIR", default_value = "target/induction_heads")]
    pub out: PathBuf,

    /// Continues from the last checkpoint in --out, which is at most --save-every steps old. Without this option, a
    /// folder that has a checkpoint is an error
    #[arg(long)]
    pub resume: bool,

    /// The most steps of training
    #[arg(long, value_name = "N", default_value = "3000", value_parser = common::count)]
    pub steps: NonZeroUsize,

    /// Steps between two checkpoints
    #[arg(long, value_name = "N", default_value = "50", value_parser = common::count)]
    pub save_every: NonZeroUsize,

    /// Writes a page to explore the attention of every head after training, FILE.html
    #[arg(long, value_name = "FILE", value_parser = common::file_name(&["html"]))]
    pub page: Option<PathBuf>,
}

fn main() -> ExitCode {
    common::main(|args| run(&args))
}

fn run(args: &Args) -> Result<()> {
    let layer = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_causal(true).with_rope(RopeConfig::new(10_000.0));
    let cfg = AttentionOnlyConfig { vocab_size: WORDS.len(), num_layers: 2, layer };
    let tokenizer = SimpleTokenizer::from_words(WORDS)?;
    let saved = checkpoint(args);
    if saved.exists() && !args.resume {
        bail!("[induction_heads] there is a {}: continue it with --resume, or give another --out", saved.display())
    }

    let sentence = tokenizer.encode_batch(&[SENTENCE])?;
    let tokens = &sentence.tokens()[0];
    let ids = sentence.ids_tensor(&Device::Cpu)?;
    let heat_map = |model: &AttentionOnly, when: &str| {
        let map = HeatMap::new(&model.attention_weights(&ids)?)?.with_tokens(tokens)?;
        Ok::<_, Error>(map.with_title(format!("Second layer {when}")))
    };
    let mut training = Training::new(&cfg)?;
    let before = heat_map(&training.model, "before training")?;
    if args.resume {
        training.resume(&saved)?;
    }
    common::make_folders(&[Some(&saved), args.page.as_ref()])?;
    train(&mut training, args)?;

    training.save(&args.out.join("model.safetensors"), false)?;
    tokenizer.save(args.out.join("tokenizer.json"))?;
    let json = serde_json::to_string_pretty(&cfg).map_err(Error::wrap)?;
    std::fs::write(args.out.join("config.json"), json + "\n")?;
    let after = heat_map(&training.model, &format!("after {}", common::counted(training.next_step(), "step")))?;
    common::print(&format!("\n{}\n", after.to_terminal(Heads::All, &TerminalOptions::detect())?))?;
    if let Some(path) = &args.page {
        let mut page = PageOfLayers::new(SENTENCE, tokens, tokens, cfg.num_layers, HEADS)?;
        training.model.through_blocks(&ids, cfg.num_layers, |attention, input| {
            page.attend("", |wanted| attention.forward_with_statistics(input, wanted))
        })?;
        page.write(path)?;
    }
    common::print(&format!("{}\n", pictures(args, &training.history, &before, &after)?))
}

/// Trains until a head has formed or all steps are done.
fn train(training: &mut Training, args: &Args) -> Result<()> {
    let bar = common::bar("training", args.steps.get(), "steps");
    let say = |text: &str| bar.suspend(|| common::print(text));
    say(" step   loss  copied  on the token after the previous copy\n")?;
    let mut step = training.next_step();
    bar.set_position(step as u64);
    if training.history.is_empty() {
        say(&row(training.measure(step)?))?;
    }
    let has_formed = |history: &[Measurement]| history.last().is_some_and(|last| last.induction >= FORMED);
    while step < args.steps.get() && !has_formed(&training.history) {
        training.step(step)?;
        step += 1;
        bar.set_position(step as u64);
        if step.is_multiple_of(args.save_every.get()) || step == args.steps.get() {
            say(&row(training.measure(step)?))?;
            training.save(&checkpoint(args), true)?;
        }
    }
    bar.finish_and_clear();
    let end =
        if has_formed(&training.history) { "an induction head has formed" } else { "no induction head has formed yet" };
    common::print(&format!("{end} after {}\n", common::counted(step, "step")))
}

fn row(measured: &Measurement) -> String {
    let Measurement { step, loss, copied, induction } = measured;
    format!("{step:>5} {loss:>6.3} {:>5.1} %  {induction:.2}\n", 100.0 * copied)
}

/// Draws the pictures, and returns a list of the files.
#[cfg(feature = "plot")]
fn pictures(args: &Args, history: &[Measurement], before: &HeatMap, after: &HeatMap) -> Result<String> {
    use candle_attention::plot::LineChart;

    let points: Vec<_> = history.iter().map(|m| [m.step as f64, f64::from(m.loss)]).collect();
    let ends = [points[0][0], points[points.len() - 1][0]];
    let guess = (WORDS.len() as f64).ln();
    let chart = LineChart::new("Continuing what repeats", "step", "loss (nats)")
        .with_line("a guess", &ends.map(|step| [step, guess]))?
        .with_line("the model", &points)?;
    for extension in ["svg", "png"] {
        let file = |name: &str| args.out.join(name).with_extension(extension);
        chart.save(file("loss"))?;
        before.save(file("before"), Heads::All)?;
        after.save(file("after"), Heads::All)?;
    }
    Ok(format!("model, checkpoint, loss.svg, before.svg and after.svg (and .png) are in {}", args.out.display()))
}

#[cfg(not(feature = "plot"))]
fn pictures(args: &Args, _: &[Measurement], _: &HeatMap, _: &HeatMap) -> Result<String> {
    let out = args.out.display();
    Ok(format!(
        "model and checkpoint are in {out}; pictures need `cargo run --features plot --example induction_heads`"
    ))
}

//! Orders passages by how well they answer a question, with a cross-encoder, which reads question and passage together:
//! an encoder with a head (ms-marco-MiniLM, bge-reranker, gte-reranker-modernbert) or a decoder that answers yes or no
//! (Qwen3-Reranker). The model is in `sentence_embedding`; this folder adds how a pair becomes one text (`pairs.rs`),
//! and the heads that turn a pair into a score (`head.rs`).
//!
//! ```sh
//! cargo run --release --example rerank -- --model path/to/bge-reranker-base \
//!     "What do pandas eat?" "Bamboo is most of what a panda eats." "The sky is blue."
//! ```

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/embedding/mod.rs"]
mod embedding;
mod head;
mod late;
mod late_settings;
#[path = "../sentence_embedding/model.rs"]
mod model;
mod older_late;
mod pairs;
mod settings;
#[path = "../common/texts.rs"]
mod texts;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use candle_attention::QuantizationFormat;
use candle_attention::text::Encoding;
use candle_core::{Device, Result, Tensor, bail};
use clap::{ArgGroup, Parser};
use rayon::prelude::*;
use serde_json::Value;

use common::{EXAMPLE, Files, ModelArgs, cannot, counted, make_folders, quantization, with_bar};
use embedding::modules;
use embedding::template::TEMPLATE;
use head::Head;
use late::Late;
use late_settings::LateSettings;
use model::Encoder;
use older_late::METADATA;
use pairs::Pairs;
use settings::Settings;
use texts::{TextArgs, in_batches, rate, shown, write_page};

/// Orders passages by how well they answer a question, with the scores of a cross-encoder.
///
/// How a question and a passage are put together, prompts and the longest input follow the checkpoint's files. A score
/// is the model's output before any activation; the probability is its sigmoid.
#[derive(Debug, Parser)]
#[command(name = "rerank", group = ArgGroup::new("checkpoint").args(["model", "model_id"]).required(true))]
struct Args {
    /// The question
    #[arg(value_name = "QUESTION")]
    question: String,

    #[command(flatten)]
    passages: TextArgs,

    #[command(flatten)]
    model: ModelArgs,

    /// The number of passages to show, the best first [default: all]
    #[arg(long, value_name = "N", value_parser = common::count)]
    top: Option<NonZeroUsize>,

    /// The checkpoint's prompt of this name: an instruction in a chat template, else a text before the question
    /// [default: the checkpoint's default]
    #[arg(long, value_name = "NAME")]
    prompt_name: Option<String>,

    /// A prompt in place of the checkpoint's
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_name")]
    prompt: Option<String>,

    /// Reads question and passages apart, for checkpoints with a vector for each token (ColBERT): a score is the sum
    /// over the question's tokens of the largest dot product with a token of the passage
    #[arg(long)]
    late: bool,

    /// Quantises the weights of linear layers as they are read
    #[arg(long, value_name = "FORMAT", value_parser = quantization())]
    quantize: Option<QuantizationFormat>,

    /// Writes the scores (N,) in f32 as safetensors, in the order of the passages
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let passages = args.passages.read()?;
    if args.question.trim().is_empty() {
        bail!("[{EXAMPLE}] the question is empty, expected a text")
    }
    make_folders(&[args.out.as_ref(), args.model.page.as_ref()])?;
    let folder = modules::fetch(&args.model, None, &[TEMPLATE, METADATA])?;
    let ranking = if args.late { by_tokens(args, &folder, &passages)? } else { by_pairs(args, &folder, &passages)? };
    if let Some(path) = &args.out {
        write_scores(&ranking.scores, path)?;
    }
    let mut text = format!("{}passages  {}{}\n\n", ranking.about, passages.len(), ranking.cut);
    text += if args.late { "   score\n" } else { "   score  probability\n" };
    for i in ranking.order().into_iter().take(args.top.map_or(usize::MAX, NonZeroUsize::get)) {
        let score = ranking.scores[i];
        let passage = shown(&passages[i]);
        let probability = 1.0 / (1.0 + (-score).exp());
        let second = if args.late { String::new() } else { format!("  {probability:>11.4}") };
        text += &format!("{score:>8.4}{second}  {passage}\n");
    }
    Ok(text)
}

/// The scores of passages, and the parts of the report that come before them.
struct Ranking {
    scores: Vec<f32>,
    /// Lines about the model.
    about: String,
    /// The number of passages that were cut.
    cut: String,
}

impl Ranking {
    /// Makes a ranking; `lines` are about the head, the template and the prompt.
    fn new(scores: Vec<f32>, model: &Encoder, config: &Value, lines: &[(&str, Option<String>)], cut: String) -> Self {
        let model_type = config["model_type"].as_str().unwrap_or_default();
        let mut about = format!(
            "model     {model_type}, {} of width {}\n",
            counted(model.blocks.len(), "layer"),
            model.blocks.width
        );
        for (name, line) in lines {
            if let Some(line) = line {
                about += &format!("{name:<8}  {line}\n");
            }
        }
        Self { scores, about, cut }
    }

    /// Returns the passages from the best to the worst.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.scores.len()).collect();
        order.sort_by(|&a, &b| self.scores[b].total_cmp(&self.scores[a]));
        order
    }
}

/// Scores passages with a cross-encoder.
fn by_pairs(args: &Args, folder: &Path, passages: &[String]) -> Result<Ranking> {
    let settings = Settings::read(folder)?;
    // As in sentence-transformers, the empty prompt is none.
    let prompt = settings.prompt(args.prompt.as_deref(), args.prompt_name.as_deref())?.filter(|it| !it.is_empty());
    let own = folder.join(&settings.model);
    let Files { config, vb, .. } = args.model.open_folder(&own, args.quantize)?;
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, vb.clone(), loaded))?;
    let pairs = Pairs::read(&own, &config, &settings, &model)?;
    let token = |id| pairs.tokenizer.id_to_token(id).unwrap_or_default();
    let head = Head::load(pairs.kind, &model, &config, vb, token)?;
    let start = Instant::now();
    let question = pairs.of(&args.question, prompt.as_deref())?;
    let encodings = passages.par_iter().map(|passage| question.encode(passage)).collect::<Result<Vec<_>>>()?;
    let scores = scored(args, &encodings, |batch| {
        let ids: Vec<_> = batch.iter().map(|pair| pair.ids.as_slice()).collect();
        let segments: Vec<_> = batch.iter().flat_map(|pair| pair.type_ids.clone()).collect();
        let lens: Vec<_> = ids.iter().map(|ids| ids.len()).collect();
        let hidden = model.through_blocks(&ids, &segments, |attention, input| attention.forward(input))?;
        head.forward(&hidden, &lens)?.to_vec1()
    })?;
    report_rate(&encodings, start);
    let lines = [
        ("head", Some(head.shown.clone())),
        ("template", pairs.shown().map(str::to_string)),
        ("prompt", prompt.as_ref().map(|prompt| format!("{prompt:?}"))),
    ];
    let ranking = Ranking::new(scores, &model, &config, &lines, cut(&encodings, pairs.most));
    if let Some(path) = &args.model.page {
        write_page(&model, &pairs.tokenizer, &args.question, &encodings[ranking.order()[0]], path)?;
    }
    Ok(ranking)
}

/// Scores passages with a model that has a vector for each token.
fn by_tokens(args: &Args, folder: &Path, passages: &[String]) -> Result<Ranking> {
    let settings = LateSettings::read(folder, &args.model.device.open(0)?)?;
    let prompt = settings.question_prompt(args.prompt.as_deref(), args.prompt_name.as_deref())?;
    let prompt = prompt.filter(|it| !it.is_empty());
    let own = folder.join(&settings.model);
    let Files { config, vb, .. } = args.model.open_folder(&own, args.quantize)?;
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, vb, loaded))?;
    let late = Late::read(&own, &settings, &model)?;
    let start = Instant::now();
    let question = late.question(&args.question, prompt.as_deref())?;
    let encodings = late.encode(passages)?;
    let scores = scored(args, &encodings, |batch| {
        let ids: Vec<_> = batch.iter().map(|passage| passage.ids.as_slice()).collect();
        late.scores(&question, &ids)
    })?;
    report_rate(&encodings, start);
    let lines = [
        ("head", Some(format!("MaxSim of {} vectors of width {}", question.dim(0)?, question.dim(1)?))),
        ("prompt", prompt.as_ref().map(|prompt| format!("{prompt:?}"))),
    ];
    let ranking = Ranking::new(scores, &model, &config, &lines, cut(&encodings, late.most));
    if let Some(path) = &args.model.page {
        let best = ranking.order()[0];
        write_page(&model, &late.passages, &passages[best], &encodings[best], path)?;
    }
    Ok(ranking)
}

fn report_rate(texts: &[Encoding], start: Instant) {
    let lens: Vec<_> = texts.iter().map(|text| text.ids.len()).collect();
    eprintln!("{}", rate(&lens, start.elapsed()));
}

/// Returns the part of the report about texts that were cut at `most` tokens.
fn cut(texts: &[Encoding], most: Option<usize>) -> String {
    let num_cut = texts.iter().filter(|text| text.num_truncated > 0).count();
    most.map_or(String::new(), |most| format!(", {num_cut} cut at {most} tokens"))
}

/// Computes the scores of texts, in their order.
fn scored(args: &Args, texts: &[Encoding], score: impl FnMut(&[&Encoding]) -> Result<Vec<f32>>) -> Result<Vec<f32>> {
    with_bar("reading", "passages", |done| in_batches(texts, args.passages.batch, done, score))
}

fn write_scores(scores: &[f32], path: &Path) -> Result<()> {
    let scores = Tensor::new(scores, &Device::Cpu)?;
    safetensors::serialize_to_file([("scores", &scores)], None, path).map_err(cannot("write", path))
}

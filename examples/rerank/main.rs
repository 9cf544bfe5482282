//! Orders passages by how well they answer a question, with a cross-encoder, which reads question and passage together:
//! an encoder with a head (ms-marco-MiniLM, bge-reranker, gte-reranker-modernbert) or a decoder that answers yes or no
//! (Qwen3-Reranker). The model is in `sentence_embedding`; this folder adds how a pair becomes one text (`pairs.rs`,
//! `template.rs`), and the heads that turn a pair into a score (`head.rs`).
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
#[path = "../sentence_embedding/model.rs"]
mod model;
mod pairs;
mod settings;
mod template;
#[path = "../common/texts.rs"]
mod texts;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use candle_attention::QuantizationFormat;
use candle_attention::text::Encoding;
use candle_core::{Device, Result, Tensor, bail};
use clap::Parser;
use rayon::prelude::*;

use common::{EXAMPLE, Files, ModelArgs, cannot, make_folders, quantization, with_bar};
use embedding::modules::{self, MODULES};
use embedding::prompts::PROMPTS;
use embedding::transformer::SETTINGS;
use head::Head;
use model::Encoder;
use pairs::Pairs;
use settings::Settings;
use template::TEMPLATE;
use texts::{TOKENIZER, TextArgs, rate, shown, write_page};

/// Orders passages by how well they answer a question, with the scores of a cross-encoder.
///
/// How a question and a passage are put together, prompts and the longest input follow the checkpoint's files. A score
/// is the model's output before any activation; the probability is its sigmoid.
#[derive(Debug, Parser)]
#[command(name = "rerank")]
struct Args {
    /// The question
    #[arg(value_name = "QUESTION")]
    question: String,

    #[command(flatten)]
    passages: TextArgs,

    #[command(flatten)]
    model: ModelArgs,

    /// The number of passages to show, the best first [default: all]
    #[arg(long, value_name = "N")]
    top: Option<NonZeroUsize>,

    /// The checkpoint's prompt of this name: an instruction in a chat template, else a text before the question
    /// [default: the checkpoint's default]
    #[arg(long, value_name = "NAME")]
    prompt_name: Option<String>,

    /// A prompt in place of the checkpoint's
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_name")]
    prompt: Option<String>,

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
    let folder = folder(args)?;
    let settings = Settings::read(&folder)?;
    let given = args.prompt.as_ref().map(|prompt| Ok(Some(prompt.clone())));
    // As in sentence-transformers, the empty prompt is none.
    let prompt = given.unwrap_or_else(|| settings.prompt(args.prompt_name.as_deref()))?.filter(|it| !it.is_empty());
    let own = folder.join(&settings.model);
    let Files { config, vb, .. } = args.model.open_folder(&own, args.quantize)?;
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, vb.clone(), loaded))?;
    let pairs = Pairs::read(&own, &config, &settings, &model)?.of(&args.question, prompt.as_deref());
    let kind = settings.kind(&config, pairs.tokenizer())?;
    let token = |id| pairs.tokenizer().id_to_token(id).unwrap_or_default();
    let head = Head::load(kind, &model, &config, vb, token)?;
    let start = Instant::now();
    let encodings = passages.par_iter().map(|passage| pairs.encode(passage)).collect::<Result<Vec<_>>>()?;
    let batch = args.passages.batch.get();
    let scores = with_bar("reading", "passages", |done| scores(&model, &head, &encodings, batch, done))?;
    let lens: Vec<_> = encodings.iter().map(|pair| pair.ids.len()).collect();
    eprintln!("{}", rate(&lens, start.elapsed()));
    if let Some(path) = &args.out {
        write_scores(&scores, path)?;
    }

    let mut order: Vec<usize> = (0..passages.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    if let (Some(path), Some(&best)) = (&args.model.page, order.first()) {
        write_page(&model, pairs.tokenizer(), &args.question, &encodings[best], path)?;
    }
    let num_cut = encodings.iter().filter(|pair| pair.num_truncated > 0).count();
    let cut = pairs.most.map_or(String::new(), |most| format!(", {num_cut} cut at {most} tokens"));
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let mut text = format!(
        "model     {model_type}, {} layers of width {}\nhead      {}\n",
        model.blocks.len(),
        model.blocks.width,
        head.shown
    );
    if let Some(template) = pairs.shown() {
        text += &format!("template  {template}\n");
    }
    if let Some(prompt) = &prompt {
        text += &format!("prompt    {prompt:?}\n");
    }
    text += &format!("passages  {}{cut}\n\n   score  probability\n", passages.len());
    for i in order.into_iter().take(args.top.map_or(usize::MAX, NonZeroUsize::get)) {
        let score = scores[i];
        let passage = shown(&passages[i]);
        text += &format!("{score:>8.4}  {:>11.4}  {passage}\n", 1.0 / (1.0 + (-score).exp()));
    }
    Ok(text)
}

/// Returns the folder of the checkpoint, after the files of all modules are fetched if it is on the hub.
fn folder(args: &Args) -> Result<PathBuf> {
    let files = [&[MODULES, PROMPTS, TOKENIZER, TEMPLATE][..], &SETTINGS].concat();
    let folder = args.model.folder(&files)?;
    if args.model.model_id.is_some() {
        let more = modules::files(&folder, None)?;
        args.model.folder(&more.iter().map(String::as_str).collect::<Vec<_>>())?;
    }
    Ok(folder)
}

/// Computes the scores of pairs, in their order; `done` is called with the number of pairs done and in all.
fn scores(
    model: &Encoder,
    head: &Head,
    pairs: &[Encoding],
    batch: usize,
    done: &mut dyn FnMut(usize, usize),
) -> Result<Vec<f32>> {
    // A batch has texts of about one length, so that no thread waits for a long one.
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_by_key(|&pair| pairs[pair].ids.len());
    let mut scores = vec![0.0; pairs.len()];
    let mut num_done = 0;
    for chosen in order.chunks(batch) {
        let ids: Vec<_> = chosen.iter().map(|&pair| pairs[pair].ids.as_slice()).collect();
        let segments: Vec<_> = chosen.iter().flat_map(|&pair| pairs[pair].type_ids.clone()).collect();
        let lens: Vec<_> = ids.iter().map(|ids| ids.len()).collect();
        let hidden = model.through_blocks(&ids, &segments, |attention, input| attention.forward(input))?;
        for (&pair, score) in chosen.iter().zip(head.forward(&hidden, &lens)?.to_vec1::<f32>()?) {
            scores[pair] = score;
        }
        num_done += chosen.len();
        done(num_done, pairs.len());
    }
    Ok(scores)
}

fn write_scores(scores: &[f32], path: &Path) -> Result<()> {
    let scores = Tensor::new(scores, &Device::Cpu)?;
    safetensors::serialize_to_file([("scores", &scores)], None, path).map_err(cannot("write", path))
}

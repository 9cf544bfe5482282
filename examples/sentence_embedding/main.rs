//! Computes the embeddings of sentences with a checkpoint of sentence-transformers on this crate's attention layer: an
//! encoder of BERT's family (MiniLM, E5, BGE, Nomic, ModernBERT) or a decoder (Qwen3-Embedding, EmbeddingGemma),
//! and the modules after it. `model.rs` is the model.
//!
//! ```sh
//! cargo run --release --example sentence_embedding -- --model path/to/all-MiniLM-L6-v2 \
//!     "A man is eating food." "Someone eats a meal." "The sky is blue."
//! ```

mod chat;
#[path = "../common/mod.rs"]
mod common;
mod embed;
#[path = "../common/embedding/mod.rs"]
mod embedding;
mod model;
#[path = "../common/texts.rs"]
mod texts;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use candle_attention::QuantizationFormat;
use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use clap::{ArgGroup, Parser};

use chat::ChatTexts;
use common::{EXAMPLE, Files, ModelArgs, cannot, counted, make_folders, quantization, read_json, with_bar};
use embed::{Embedder, Embeddings, Sentences};
use embedding::layers::normalized;
use embedding::modules;
use embedding::pipeline::Pipeline;
use embedding::prompts::{CheckpointSettings, Similarity};
use embedding::task_adapters::{self, TaskAdapters};
use embedding::template::{ChatTemplate, TEMPLATE};
use embedding::transformer::TransformerSettings;
use model::Encoder;
use texts::{TextArgs, cutting, max_tokens, rate, shown, tokenizer, write_page};

/// The most sentences for a table of all pairs that fits a screen; more sentences make a list of the nearest ones.
const TABLE: usize = 12;

/// Computes the embeddings of sentences with an encoder or a decoder, and shows how similar they are.
///
/// Pooling, the layers after it, prompts and the longest input follow the checkpoint's sentence-transformers files
/// (modules.json and the files that it names). Without these files, the embedding is the normalised mean over tokens.
#[derive(Debug, Parser)]
#[command(name = "sentence_embedding", group = ArgGroup::new("checkpoint").args(["model", "model_id"]).required(true))]
struct Args {
    #[command(flatten)]
    sentences: TextArgs,

    #[command(flatten)]
    model: ModelArgs,

    /// The checkpoint's prompt of this name, put before every sentence [default: the checkpoint's default]
    #[arg(long, value_name = "NAME")]
    prompt_name: Option<String>,

    /// A text before every sentence, instead of one of the checkpoint's prompts
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_name")]
    prompt: Option<String>,

    /// The task of the vectors, for checkpoints that have parts for some tasks: an adapter with its instruction, a
    /// route of a router, a variable of a chat template, or a length
    #[arg(long, value_name = "NAME")]
    task: Option<String>,

    /// The number of dimensions after which embeddings are cut, for models that were trained for it [default: the
    /// checkpoint's]
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,

    /// Normalises the embeddings to length 1 after they are cut
    #[arg(long)]
    normalize: bool,

    /// Quantises the weights of linear layers as they are read
    #[arg(long, value_name = "FORMAT", value_parser = quantization())]
    quantize: Option<QuantizationFormat>,

    /// Writes the embeddings (N, E) in f32 as safetensors, in the order of the sentences, which are in the metadata as
    /// a JSON list
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let sentences = args.sentences.read()?;
    make_folders(&[args.out.as_ref(), args.model.page.as_ref()])?;
    let task = args.task.as_deref();
    let of_adapters = task_adapters::files(task);
    let others: Vec<_> = of_adapters.iter().map(String::as_str).chain([TEMPLATE]).collect();
    let folder = modules::fetch(&args.model, task, &others)?;
    let settings = CheckpointSettings::read(&folder)?;
    let prompt = settings.prompt(args.prompt.as_deref(), args.prompt_name.as_deref())?;
    let pipeline = Pipeline::read(&folder, task, &args.model.device.open(0)?)?;
    let own = folder.join(&pipeline.model);
    let template = chat::read(&own, &pipeline.settings, task)?;
    let adapters = TaskAdapters::read(&read_json(&own.join("config.json"))?, &own)?;
    if args.quantize.is_some() && adapters.as_ref().is_some_and(|found| found.are_merged(task)) {
        bail!("[{EXAMPLE}] the checkpoint has adapters for tasks, which are added to floats, expected no --quantize")
    }
    let Files { config, vb, .. } = args.model.open_folder(&own, args.quantize)?;
    let weights = match adapters {
        Some(adapters) => of_task(&adapters, &vb, task)?,
        None => {
            check_task(task, &folder, &pipeline.settings, template.as_ref())?;
            TaskWeights { vb, instruction: None, shown: String::new() }
        }
    };
    let prompt = prompt.or(weights.instruction);
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, weights.vb, loaded))?;
    let most = max_tokens(task_tokens(task, &pipeline.settings), &own, model.max_tokens)?;
    let whole = tokenizer(&own)?;
    let chat = match &template {
        Some(template) => Some(ChatTexts::new(template, &whole, prompt.as_deref(), most)?),
        None => None,
    };
    let tokenizer = cutting(whole, most)?;
    let texts = Sentences { tokenizer: &tokenizer, pipeline: &pipeline, prompt: prompt.as_deref(), chat };
    let embedder = Embedder { model: &model, sentences: texts, batch: args.sentences.batch };
    let start = Instant::now();
    let Embeddings { vectors, lens, cut } =
        with_bar("embedding", "sentences", |done| embedder.embed(&sentences, done))?;
    eprintln!("{}", rate(&lens, start.elapsed()));
    let vectors = finished(vectors, args.dimensions.or(settings.dimensions), args.normalize)?;
    if let Some(path) = &args.out {
        write_vectors(&vectors, &sentences, path)?;
    }
    if let Some(path) = &args.model.page {
        write_page(&model, &tokenizer, &sentences[0], &embedder.sentences.encode(&sentences[0])?, path)?;
    }

    let layers = counted(model.blocks.len(), "layer");
    let width = model.blocks.width;
    let shortest = lens.iter().min().unwrap_or(&0);
    let longest = lens.iter().max().unwrap_or(&0);
    let most = most.map_or(String::new(), |most| format!(", {cut} cut at {most}"));
    let after = embedder.sentences.shown_prompt();
    let model_type = config["model_type"].as_str().unwrap_or_default();
    Ok(format!(
        "model       {model_type}, {layers} of width {width}{}\n\
         pooling     {} ({})\n\
         sentences   {} of {shortest} to {longest} tokens{most}{after}\n\
         embeddings  {:?} f32\n\n{}",
        weights.shown,
        pipeline.shown(),
        pipeline.source,
        sentences.len(),
        vectors.dims2()?,
        similarity(settings.similarity, &vectors, &sentences)?
    ))
}

/// Returns the most tokens of a text with this task, if the settings have a number.
fn task_tokens(task: Option<&str>, settings: &TransformerSettings) -> Option<usize> {
    let own = match task {
        Some("query") => settings.query_tokens,
        Some("document") => settings.document_tokens,
        _ => None,
    };
    own.or(settings.max_tokens)
}

/// The weights of a model for a task.
struct TaskWeights {
    vb: VarBuilder<'static>,
    /// The text before each text of the task.
    instruction: Option<String>,
    /// The end of the line about the model in the report.
    shown: String,
}

/// Returns the weights with the adapter of a task, if there is one.
fn of_task(adapters: &TaskAdapters, vb: &VarBuilder<'static>, task: Option<&str>) -> Result<TaskWeights> {
    let weights = adapters.weights(vb, task)?;
    let Some(task) = task else {
        return Ok(TaskWeights { vb: weights, instruction: None, shown: String::new() });
    };
    let instruction = adapters.instruction(task)?.map(str::to_string);
    Ok(TaskWeights { vb: weights, instruction, shown: format!(", with the adapter for {task}") })
}

/// Checks that the checkpoint has a use for the task, if one is given.
fn check_task(
    task: Option<&str>,
    folder: &Path,
    settings: &TransformerSettings,
    template: Option<&ChatTemplate>,
) -> Result<()> {
    let has_lengths = settings.query_tokens.is_some() || settings.document_tokens.is_some();
    if task.is_none() || has_lengths || modules::has_router(folder)? || chat::reads_task(template)? {
        return Ok(());
    }
    bail!("[{EXAMPLE}] the checkpoint has no parts for tasks, expected no --task; --prompt-name chooses a prompt")
}

/// Cuts vectors (N, E) after a number of dimensions, and normalises them on request.
fn finished(vectors: Tensor, dimensions: Option<usize>, normalizes: bool) -> Result<Tensor> {
    let (_, width) = vectors.dims2()?;
    let cut = match dimensions {
        None => vectors,
        Some(dimensions) if (1..=width).contains(&dimensions) => vectors.narrow(1, 0, dimensions)?.contiguous()?,
        Some(dimensions) => bail!("[{EXAMPLE}] --dimensions is {dimensions}, expected 1 to the vectors' {width}"),
    };
    if normalizes { normalized(&cut) } else { Ok(cut) }
}

fn write_vectors(vectors: &Tensor, sentences: &[String], path: &Path) -> Result<()> {
    let Ok(list) = serde_json::to_string(sentences) else { bail!("[{EXAMPLE}] sentences as JSON") };
    let metadata = HashMap::from([("sentences".to_string(), list)]);
    safetensors::serialize_to_file([("embeddings", vectors)], Some(metadata), path).map_err(cannot("write", path))
}

/// Formats the similarities of all pairs of vectors (N, E) as a table, or the nearest sentence to each.
fn similarity(measure: Similarity, vectors: &Tensor, sentences: &[String]) -> Result<String> {
    let name = measure.shown();
    // Rounded to the digits that are shown, so that of equal sentences the first is the nearest on every processor.
    let numbers: Vec<Vec<f32>> = ((measure.of(vectors)? * 1e4)?.round()? / 1e4)?.to_vec2()?;
    let digits = sentences.len().to_string().len();
    let rows = numbers.iter().zip(sentences).enumerate();
    if sentences.len() > TABLE {
        let nearest = rows.filter_map(|(i, (row, sentence))| {
            let others = row.iter().enumerate().filter(|&(j, _)| j != i).rev();
            let (j, number) = others.max_by(|a, b| a.1.total_cmp(b.1))?;
            Some(format!("{:>digits$}  {number:>7.4}  to {:>digits$}  {}\n", i + 1, j + 1, shown(sentence)))
        });
        return Ok(format!("the nearest to each, by {name}\n{}", nearest.collect::<String>()));
    }
    let heads: String = (1..=sentences.len()).map(|i| format!("{i:>8}")).collect();
    let table = rows.map(|(i, (row, sentence))| {
        let cells: String = row.iter().map(|number| format!(" {number:>7.4}")).collect();
        format!("{:>digits$}{cells}  {}\n", i + 1, shown(sentence))
    });
    Ok(format!("{name}\n{:digits$}{heads}\n{}", "", table.collect::<String>()))
}

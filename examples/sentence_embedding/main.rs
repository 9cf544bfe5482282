//! Sentences to vectors with an encoder of BERT's family (bert, distilbert, modernbert, mpnet, nomic_bert, roberta,
//! xlm-roberta: MiniLM, E5, BGE and their kin) on this crate's attention layer; `model.rs` is the model, and short.
//!
//! ```sh
//! cargo run --release --example sentence_embedding -- --model path/to/all-MiniLM-L6-v2 \
//!     "A man is eating food." "Someone eats a meal." "The sky is blue."
//! ```

mod args;
#[path = "../common/mod.rs"]
mod common;
mod embed;
mod model;
mod recipe;
mod report;
#[path = "../common/texts.rs"]
mod texts;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_attention::text::SimpleTokenizer;
use candle_attention::weights::Checkpoint;
use candle_core::{Error, Result, Tensor, bail};

use args::Args;
use common::{checkpoint, fetch, read_json};
use embed::{Embedder, Embeddings};
use model::Encoder;
use recipe::{EXAMPLE, Pooling, Recipe};

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let sentences = sentences(args)?;
    let device = args.device.open()?;
    let folder = folder(args)?;
    let json = read_json(EXAMPLE, &folder.join("config.json"))?;
    let vb = Checkpoint::open(&folder)?.var_builder(args.dtype.dtype(), &device)?;
    let bar = common::bar("loading", "blocks");
    let model = Encoder::load(&json, vb, |layer, layers| {
        bar.set_length(layers as u64);
        bar.set_position(layer as u64);
    })?;
    bar.finish_and_clear();

    let recipe = Recipe::read(&folder, model.max_tokens())?;
    let mut tokenizer = SimpleTokenizer::from_file(folder.join("tokenizer.json"))?;
    if let Some(max_tokens) = recipe.max_tokens {
        tokenizer = tokenizer.with_truncation(max_tokens)?;
    }
    let embedder = Embedder { model: &model, tokenizer: &tokenizer, recipe: &recipe, batch: args.batch };
    let bar = common::bar("embedding", "sentences");
    let Embeddings { vectors, lens, cut } = embedder.embed(&sentences, &bar)?;
    bar.finish_and_clear();
    if let Some(path) = &args.out {
        write_vectors(&vectors, &sentences, path)?;
    }

    let (layers, width) = model.size()?;
    let pooling = match recipe.pooling {
        Pooling::Mean => "mean over tokens",
        Pooling::Cls => "first token",
    };
    let normalized = if recipe.normalize { ", normalised" } else { "" };
    let (shortest, longest) = (lens.iter().min().unwrap_or(&0), lens.iter().max().unwrap_or(&0));
    let most = recipe.max_tokens.map_or(String::new(), |most| format!(", {cut} cut at {most}"));
    let prompt = if recipe.prompt.is_empty() { String::new() } else { format!(", each after {:?}", recipe.prompt) };
    let model_type = json["model_type"].as_str().unwrap_or_default();
    Ok(format!(
        "model       {model_type}, {layers} layers of width {width}\n\
         pooling     {pooling}{normalized} ({})\n\
         sentences   {} of {shortest} to {longest} tokens{most}{prompt}\n\
         embeddings  {:?} f32\n\n{}",
        recipe.said_by,
        sentences.len(),
        vectors.dims2()?,
        report::similarity(&vectors, &sentences)?
    ))
}

/// The folder of the checkpoint, which has a tokenizer and, from the hub, the files that its modules.json names.
fn folder(args: &Args) -> Result<PathBuf> {
    let (model, id) = (args.model.as_deref(), args.model_id.as_deref());
    let mut folder = checkpoint(EXAMPLE, model, id, &recipe::FILES.map(str::to_string))?;
    if let Some(id) = id {
        let (id, commit) = (id.split('@').next().unwrap_or(id), folder.file_name().unwrap_or_default());
        folder = fetch(EXAMPLE, &format!("{id}@{}", commit.display()), &recipe::module_files(&folder)?)?;
    }
    if !folder.join("tokenizer.json").is_file() {
        bail!("[{EXAMPLE}] {} has no tokenizer.json", folder.display())
    }
    Ok(folder)
}

/// The arguments, then the lines of the file.
fn sentences(args: &Args) -> Result<Vec<String>> {
    let mut sentences = args.sentences.clone();
    if let Some(path) = &args.file {
        sentences.extend(texts::lines(EXAMPLE, path)?);
    }
    if sentences.is_empty() {
        bail!("[{EXAMPLE}] there is no sentence")
    }
    Ok(sentences)
}

fn write_vectors(vectors: &Tensor, sentences: &[String], path: &Path) -> Result<()> {
    let Ok(list) = serde_json::to_string(sentences) else { bail!("[{EXAMPLE}] sentences as JSON") };
    let metadata = HashMap::from([("sentences".to_string(), list)]);
    safetensors::serialize_to_file([("embeddings", vectors)], Some(metadata), path)
        .map_err(|error| Error::Msg(format!("[{EXAMPLE}] cannot write {}: {error}", path.display())))
}

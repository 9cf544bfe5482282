//! Sentences to vectors with an encoder of BERT's family (bert, distilbert, modernbert, nomic_bert, roberta: MiniLM and its
//! kin) on this crate's attention layer; `model.rs` is the model, and short.
//!
//! ```sh
//! cargo run --release --example sentence_embedding -- --model path/to/all-MiniLM-L6-v2 \
//!     "A man is eating food." "Someone eats a meal." "The sky is blue."
//! ```

mod args;
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
mod embed;
mod model;
mod recipe;
mod report;

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use candle_core::{Error, Result, Tensor, bail};
use clap::Parser;

use args::Args;
use checkpoint::Files;
use embed::{Embeddings, embed};
use model::Encoder;
use recipe::{Pooling, Recipe};

fn main() -> ExitCode {
    common::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let sentences = sentences(args)?;
    let device = args.device.open()?;
    let files = Files::of(args)?;
    let json = files.config()?;
    let vb = files.var_builder(args.dtype.dtype(), &device)?;
    let bar = common::bar("loading", "blocks");
    let model = Encoder::load(&json, vb, |layer, layers| {
        bar.set_length(layers as u64);
        bar.set_position(layer as u64);
    })?;
    bar.finish_and_clear();

    let recipe = Recipe::read(&files.folder, model.max_tokens())?;
    let tokenizer = files.tokenizer(&recipe)?;
    let bar = common::bar("embedding", "sentences");
    let Embeddings { vectors, lens, cut } = embed(&model, &tokenizer, &recipe, &sentences, (args.batch, &bar))?;
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
    let text = format!(
        "model       {model_type}, {layers} layers of width {width}\n\
         pooling     {pooling}{normalized} ({})\n\
         sentences   {} of {shortest} to {longest} tokens{most}{prompt}\n\
         embeddings  {:?} f32\n\n{}",
        recipe.said_by,
        sentences.len(),
        vectors.dims2()?,
        report::similarity(&vectors, &sentences)?
    );
    match std::io::stdout().write_all(text.as_bytes()) {
        // A reader that went away (`| head`) is no error.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The arguments, then the lines of the file.
fn sentences(args: &Args) -> Result<Vec<String>> {
    let mut sentences = args.sentences.clone();
    if let Some(path) = &args.file {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Msg(format!("[sentence_embedding] cannot read {}: {error}", path.display())))?;
        sentences.extend(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_string));
    }
    if sentences.is_empty() {
        bail!("[sentence_embedding] there is no sentence")
    }
    Ok(sentences)
}

fn write_vectors(vectors: &Tensor, sentences: &[String], path: &Path) -> Result<()> {
    let Ok(list) = serde_json::to_string(sentences) else { bail!("[sentence_embedding] sentences as JSON") };
    let metadata = HashMap::from([("sentences".to_string(), list)]);
    safetensors::serialize_to_file([("embeddings", vectors)], Some(metadata), path)
        .map_err(|error| Error::Msg(format!("[sentence_embedding] cannot write {}: {error}", path.display())))
}

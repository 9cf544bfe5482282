//! Computes the embeddings of sentences with an encoder of BERT's family (bert, distilbert, modernbert, mpnet,
//! nomic_bert, roberta, xlm-roberta; for example MiniLM, E5 and BGE) on this crate's attention layer. `model.rs` is the
//! model.
//!
//! ```sh
//! cargo run --release --example sentence_embedding -- --model path/to/all-MiniLM-L6-v2 \
//!     "A man is eating food." "Someone eats a meal." "The sky is blue."
//! ```

#[path = "../common/mod.rs"]
mod common;
mod embed;
mod model;
#[path = "../common/texts.rs"]
mod texts;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_core::{Result, Tensor, bail};
use clap::Parser;

use common::{EXAMPLE, Files, ModelArgs, cannot, with_bar};
use embed::{Embedder, Embeddings, FILES, Pooling, Recipe};
use model::Encoder;
use texts::{TextArgs, shown, tokenizer, write_page};

/// The most sentences for a table of all pairs that fits a screen; more sentences make a list of the nearest ones.
const TABLE: usize = 12;

/// Computes the embeddings of sentences with an encoder of BERT's family, and shows how similar they are.
///
/// Pooling, normalisation and the longest input follow the checkpoint's sentence-transformers files (modules.json and
/// the files that it names). Without these files, the embedding is the normalised mean over tokens.
#[derive(Debug, Parser)]
#[command(name = "sentence_embedding")]
struct Args {
    #[command(flatten)]
    sentences: TextArgs,

    #[command(flatten)]
    model: ModelArgs,

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
    let Files { folder, config, vb } = args.model.open(&FILES)?;
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, vb, loaded))?;
    let recipe = Recipe::read(&folder, model.max_tokens)?;
    let tokenizer = tokenizer(&folder, recipe.max_tokens)?;
    let batch = args.sentences.batch.get();
    let embedder = Embedder { model: &model, tokenizer: &tokenizer, recipe: &recipe, batch };
    let Embeddings { vectors, lens, cut } =
        with_bar("embedding", "sentences", |done| embedder.embed(&sentences, done))?;
    if let Some(path) = &args.out {
        write_vectors(&vectors, &sentences, path)?;
    }
    if let Some(path) = &args.model.page {
        write_page(&model, &tokenizer, &sentences[0], &recipe.encode(&tokenizer, &sentences[0])?, path)?;
    }

    let layers = model.blocks.len();
    let width = model.blocks.width;
    let pooling = match recipe.steps.pooling {
        Pooling::Mean => "mean over tokens",
        Pooling::Cls => "first token",
    };
    let normalized = if recipe.steps.normalize { ", normalised" } else { "" };
    let shortest = lens.iter().min().unwrap_or(&0);
    let longest = lens.iter().max().unwrap_or(&0);
    let most = recipe.max_tokens.map_or(String::new(), |most| format!(", {cut} cut at {most}"));
    let prompt = match recipe.prompt.as_deref() {
        None | Some("") => String::new(),
        Some(prompt) if recipe.steps.includes_prompt => format!(", each after {prompt:?}"),
        Some(prompt) => format!(", each after {prompt:?}, which is not pooled"),
    };
    let model_type = config["model_type"].as_str().unwrap_or_default();
    Ok(format!(
        "model       {model_type}, {layers} layers of width {width}\n\
         pooling     {pooling}{normalized} ({})\n\
         sentences   {} of {shortest} to {longest} tokens{most}{prompt}\n\
         embeddings  {:?} f32\n\n{}",
        recipe.steps.source,
        sentences.len(),
        vectors.dims2()?,
        similarity(&vectors, &sentences)?
    ))
}

fn write_vectors(vectors: &Tensor, sentences: &[String], path: &Path) -> Result<()> {
    let Ok(list) = serde_json::to_string(sentences) else { bail!("[{EXAMPLE}] sentences as JSON") };
    let metadata = HashMap::from([("sentences".to_string(), list)]);
    safetensors::serialize_to_file([("embeddings", vectors)], Some(metadata), path).map_err(cannot("write", path))
}

/// Formats the cosines of all pairs of vectors (N, E) as a table, or the nearest sentence to each.
fn similarity(vectors: &Tensor, sentences: &[String]) -> Result<String> {
    let unit = embed::normalized(vectors)?;
    // Rounded to the digits that are shown, so that of equal sentences the first is the nearest on every processor.
    let cosines: Vec<Vec<f32>> = ((unit.matmul(&unit.t()?)? * 1e4)?.round()? / 1e4)?.to_vec2()?;
    let digits = sentences.len().to_string().len();
    let rows = cosines.iter().zip(sentences).enumerate();
    if sentences.len() > TABLE {
        let nearest = rows.filter_map(|(i, (row, sentence))| {
            let others = row.iter().enumerate().filter(|&(j, _)| j != i).rev();
            let (j, cosine) = others.max_by(|a, b| a.1.total_cmp(b.1))?;
            Some(format!("{:>digits$}  {cosine:>7.4}  to {:>digits$}  {}\n", i + 1, j + 1, shown(sentence)))
        });
        return Ok(format!("the nearest to each, by cosine similarity\n{}", nearest.collect::<String>()));
    }
    let heads: String = (1..=sentences.len()).map(|i| format!("{i:>8}")).collect();
    let table = rows.map(|(i, (row, sentence))| {
        let cells: String = row.iter().map(|cosine| format!(" {cosine:>7.4}")).collect();
        format!("{:>digits$}{cells}  {}\n", i + 1, shown(sentence))
    });
    Ok(format!("cosine similarity\n{:digits$}{heads}\n{}", "", table.collect::<String>()))
}

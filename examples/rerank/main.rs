//! Orders passages by how well they answer a question, with a cross-encoder (bert, distilbert, mpnet, roberta,
//! xlm-roberta; for example ms-marco-MiniLM and bge-reranker), which reads question and passage together. The model is
//! that of `sentence_embedding`; this file adds the head that turns a pair into a score.
//!
//! ```sh
//! cargo run --release --example rerank -- --model path/to/bge-reranker-base \
//!     "What do pandas eat?" "Bamboo is most of what a panda eats." "The sky is blue."
//! ```

#[path = "../common/mod.rs"]
mod common;
#[path = "../sentence_embedding/model.rs"]
mod model;
#[path = "../common/texts.rs"]
mod texts;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::{Sequential, VarBuilder, linear, seq};
use clap::Parser;

use common::{EXAMPLE, Files, ModelArgs, with_bar};
use model::Encoder;
use texts::{TOKENIZER, TextArgs, max_tokens, rate, shown, tokenizer, write_page};

/// Orders passages by how well they answer a question, with the scores of a cross-encoder.
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
    top: Option<usize>,
}

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let passages = args.passages.read()?;
    let Files { folder, config, vb } = args.model.open(&[TOKENIZER])?;
    let model = with_bar("loading", "blocks", |loaded| Encoder::load(&config, vb.clone(), loaded))?;
    let layers = model.blocks.len();
    let width = model.blocks.width;
    let head = head(width, &vb)?;
    let most = max_tokens(&folder, model.max_tokens)?;
    let tokenizer = tokenizer(&folder, most)?;
    let mut scores = Vec::with_capacity(passages.len());
    let mut num_cut = 0;
    let mut lens = Vec::with_capacity(passages.len());
    let start = Instant::now();
    with_bar("reading", "passages", |done| {
        for batch in passages.chunks(args.passages.batch.get()) {
            let pairs = batch.iter().map(|passage| tokenizer.encode_pair(&args.question, passage));
            let pairs = pairs.collect::<std::result::Result<Vec<_>, _>>()?;
            let ids: Vec<_> = pairs.iter().map(|pair| pair.ids.as_slice()).collect();
            let segments: Vec<_> = pairs.iter().flat_map(|pair| pair.type_ids.clone()).collect();
            let hidden = model.through_blocks(&ids, &segments, |attention, input| attention.forward(input))?;
            let starts = ids.iter().scan(0, |next, ids| Some(std::mem::replace(next, *next + ids.len() as u32)));
            let starts = Tensor::from_iter(starts, hidden.device())?;
            let own = head.forward(&hidden.index_select(&starts, 0)?)?.squeeze(1)?;
            scores.extend(own.to_dtype(DType::F32)?.to_vec1::<f32>()?);
            lens.extend(ids.iter().map(|ids| ids.len()));
            num_cut += pairs.iter().filter(|pair| pair.num_truncated > 0).count();
            done(scores.len(), passages.len());
        }
        Ok(())
    })?;
    eprintln!("{}", rate(&lens, start.elapsed()));

    let mut order: Vec<usize> = (0..passages.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    if let (Some(path), Some(&best)) = (&args.model.page, order.first()) {
        let pair = tokenizer.encode_pair(&args.question, &passages[best])?;
        write_page(&model, &tokenizer, &args.question, &pair, path)?;
    }
    let cut = most.map_or(String::new(), |most| format!(", {num_cut} cut at {most} tokens"));
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let mut text = format!(
        "model     {model_type}, {layers} layers of width {width}\n\
         passages  {}{cut}\n\n   score  probability\n",
        passages.len()
    );
    for i in order.into_iter().take(args.top.unwrap_or(usize::MAX)) {
        let score = scores[i];
        let passage = shown(&passages[i]);
        text += &format!("{score:>8.4}  {:>11.4}  {passage}\n", 1.0 / (1.0 + (-score).exp()));
    }
    Ok(text)
}

/// The names of a head's layers, and its activation.
struct HeadNames {
    dense: &'static str,
    score: &'static str,
    activation: fn(&Tensor) -> Result<Tensor>,
}

/// RoBERTa's and MPNet's, DistilBERT's, BERT's.
const HEADS: [HeadNames; 4] = [
    HeadNames { dense: "classifier.dense", score: "classifier.out_proj", activation: Tensor::tanh },
    HeadNames { dense: "pre_classifier", score: "classifier", activation: Tensor::relu },
    HeadNames { dense: "bert.pooler.dense", score: "classifier", activation: Tensor::tanh },
    HeadNames { dense: "pooler.dense", score: "classifier", activation: Tensor::tanh },
];

/// Loads the head, from hidden states (N, E) to scores (N, 1), from a builder at the checkpoint's root.
///
/// # Errors
/// If the checkpoint has no head, or one of several classes.
fn head(width: usize, vb: &VarBuilder) -> Result<Sequential> {
    let has = |name: &str| vb.contains_tensor(&format!("{name}.weight"));
    let Some(names) = HEADS.into_iter().find(|names| has(names.dense) && has(names.score)) else {
        let known = HEADS.map(|names| format!("{} with {}", names.dense, names.score)).join(", ");
        bail!("[{EXAMPLE}] no head in the checkpoint, looked for {known}")
    };
    let Ok(score) = linear(width, 1, vb.pp(names.score)) else {
        bail!("[{EXAMPLE}] {} has no single score: the checkpoint is of another kind, expected one label", names.score)
    };
    Ok(seq().add(linear(width, width, vb.pp(names.dense))?).add_fn(names.activation).add(score))
}

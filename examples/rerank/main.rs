//! Passages in the order in which they answer a question, by a cross-encoder (bert, distilbert, mpnet, roberta,
//! xlm-roberta: ms-marco-MiniLM, bge-reranker and their kin), which reads question and passage together. The model is
//! that of `sentence_embedding`; what stands here is the head that turns a pair into a score.
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

use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::{Sequential, VarBuilder, linear, seq};
use clap::Parser;

use common::{EXAMPLE, Files, ModelArgs, with_bar};
use model::Encoder;
use texts::{TOKENIZER, TextArgs, max_tokens, shown, tokenizer, write_page};

/// Orders passages by how well they answer a question, by the score that a cross-encoder gives each pair.
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

    /// How many of the best are shown; all unless given
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
    let (layers, width) = (model.blocks.len(), model.blocks.width);
    let head = head(width, &vb)?;
    let most = max_tokens(&folder, model.max_tokens)?;
    let tokenizer = tokenizer(&folder, most)?;
    let (mut scores, mut cut) = (Vec::with_capacity(passages.len()), 0);
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
            cut += pairs.iter().filter(|pair| pair.num_truncated > 0).count();
            done(scores.len(), passages.len());
        }
        Ok(())
    })?;

    let mut order: Vec<usize> = (0..passages.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    if let (Some(path), Some(&best)) = (&args.model.page, order.first()) {
        let pair = tokenizer.encode_pair(&args.question, &passages[best])?;
        write_page(&model, &tokenizer, &args.question, &pair, path)?;
    }
    let cut = most.map_or(String::new(), |most| format!(", {cut} cut at {most} tokens"));
    let model_type = config["model_type"].as_str().unwrap_or_default();
    let mut text = format!(
        "model     {model_type}, {layers} layers of width {width}\n\
         passages  {}{cut}\n\n   score  probability\n",
        passages.len()
    );
    for i in order.into_iter().take(args.top.unwrap_or(usize::MAX)) {
        let (score, passage) = (scores[i], shown(&passages[i]));
        text += &format!("{score:>8.4}  {:>11.4}  {passage}\n", 1.0 / (1.0 + (-score).exp()));
    }
    Ok(text)
}

/// The dense and the last layer of a head: of RoBERTa and MPNet, of DistilBERT, of BERT.
const HEADS: [[&str; 2]; 4] = [
    ["classifier.dense", "classifier.out_proj"],
    ["pre_classifier", "classifier"],
    ["bert.pooler.dense", "classifier"],
    ["pooler.dense", "classifier"],
];

/// Hidden states (N, E) to scores (N, 1), from a builder at the checkpoint's root.
///
/// # Errors
/// For a checkpoint without a head, or with one of several classes.
fn head(width: usize, vb: &VarBuilder) -> Result<Sequential> {
    let has = |name: &&str| vb.contains_tensor(&format!("{name}.weight"));
    let Some([dense, last]) = HEADS.into_iter().find(|names| names.iter().all(has)) else {
        let names = HEADS.map(|names| names.join(" with ")).join(", ");
        bail!("[{EXAMPLE}] no head in the checkpoint, looked for {names}")
    };
    let Ok(score) = linear(width, 1, vb.pp(last)) else {
        bail!("[{EXAMPLE}] {last} gives no single score: the checkpoint is of another kind, expected one label")
    };
    // DistilBERT's has no negative numbers, the others have a tangent.
    let activation = if dense == "pre_classifier" { Tensor::relu } else { Tensor::tanh };
    Ok(seq().add(linear(width, width, vb.pp(dense))?).add_fn(activation).add(score))
}

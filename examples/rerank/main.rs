//! Passages in the order in which they answer a question, by a cross-encoder (bert, distilbert, mpnet, roberta,
//! xlm-roberta: ms-marco-MiniLM, bge-reranker and their kin), which reads question and passage together. The model is
//! that of
//! `sentence_embedding`; what stands here is the head that turns a pair into a score.
//!
//! ```sh
//! cargo run --release --example rerank -- --model path/to/bge-reranker-base \
//!     "What do pandas eat?" "Bamboo is most of what a panda eats." "The sky is blue."
//! ```

mod args;
#[path = "../common/mod.rs"]
mod common;
mod head;
#[path = "../sentence_embedding/model.rs"]
#[allow(dead_code, reason = "the other example's part")]
mod model;
#[path = "../common/texts.rs"]
mod texts;

use std::fmt::Write;
use std::process::ExitCode;

use candle_attention::text::SimpleTokenizer;
use candle_attention::weights::Checkpoint;
use candle_core::{Error, Result, Tensor, bail};

use args::Args;
use common::{checkpoint, read_json};
use head::Head;
use model::Encoder;

const EXAMPLE: &str = "rerank";
const TOKENIZER: &str = "tokenizer_config.json";

fn main() -> ExitCode {
    common::main(|args| common::print(&run(&args)?))
}

fn run(args: &Args) -> Result<String> {
    let passages = passages(args)?;
    let files = [TOKENIZER.to_string()];
    let folder = checkpoint(EXAMPLE, args.model.as_deref(), args.model_id.as_deref(), &files)?;
    if !folder.join("tokenizer.json").is_file() {
        bail!("[{EXAMPLE}] {} has no tokenizer.json", folder.display())
    }
    let json = read_json(EXAMPLE, &folder.join("config.json"))?;
    let vb = Checkpoint::open(&folder)?.var_builder(args.dtype.dtype(), &args.device.open()?)?;
    let bar = common::bar("loading", "blocks");
    let model = Encoder::load(&json, vb.clone(), |layer, layers| {
        bar.set_length(layers as u64);
        bar.set_position(layer as u64);
    })?;
    bar.finish_and_clear();
    let (layers, width) = model.size()?;
    let head = Head::load(width, &vb)?;

    let said = match folder.join(TOKENIZER).is_file() {
        true => read_json(EXAMPLE, &folder.join(TOKENIZER))?["model_max_length"].as_u64(),
        false => None,
    };
    // Where there is no limit, the file has a number of thirty digits.
    let most = said.and_then(|most| usize::try_from(most).ok()).into_iter().chain(model.max_tokens()).min();
    let mut tokenizer = SimpleTokenizer::from_file(folder.join("tokenizer.json"))?;
    if let Some(most) = most {
        tokenizer = tokenizer.with_truncation(most)?;
    }
    let bar = common::bar("reading", "passages");
    bar.set_length(passages.len() as u64);
    let (mut scores, mut cut) = (Vec::with_capacity(passages.len()), 0);
    for passages in passages.chunks(args.batch) {
        let pairs = passages.iter().map(|passage| tokenizer.encode_pair(&args.question, passage));
        let pairs = pairs.collect::<std::result::Result<Vec<_>, _>>()?;
        let ids: Vec<_> = pairs.iter().map(|pair| pair.ids.as_slice()).collect();
        let segments: Vec<_> = pairs.iter().flat_map(|pair| pair.type_ids.clone()).collect();
        let hidden = model.forward_in_segments(&ids, &segments)?;
        let starts = ids.iter().scan(0, |next, ids| {
            let start = *next;
            *next += ids.len() as u32;
            Some(start)
        });
        let starts: Vec<u32> = starts.collect();
        scores.extend(head.scores(&hidden.index_select(&Tensor::new(starts, hidden.device())?, 0)?)?);
        cut += pairs.iter().filter(|pair| pair.num_truncated > 0).count();
        bar.inc(pairs.len() as u64);
    }
    bar.finish_and_clear();

    let mut order: Vec<usize> = (0..passages.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let cut = most.map_or(String::new(), |most| format!(", {cut} cut at {most} tokens"));
    let model_type = json["model_type"].as_str().unwrap_or_default();
    let mut text = format!(
        "model     {model_type}, {layers} layers of width {width}\n\
         passages  {}{cut}\n\n   score  probability\n",
        passages.len()
    );
    for i in order.into_iter().take(args.top.unwrap_or(usize::MAX)) {
        let (score, passage) = (scores[i], texts::shown(&passages[i]));
        writeln!(text, "{score:>8.4}  {:>11.4}  {passage}", 1.0 / (1.0 + (-score).exp())).map_err(Error::wrap)?;
    }
    Ok(text)
}

/// The arguments, then the lines of the file.
fn passages(args: &Args) -> Result<Vec<String>> {
    let mut passages = args.passages.clone();
    if let Some(path) = &args.file {
        passages.extend(texts::lines(EXAMPLE, path)?);
    }
    if passages.is_empty() {
        bail!("[{EXAMPLE}] there is no passage")
    }
    Ok(passages)
}

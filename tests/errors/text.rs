//! Words that do not fit a vocabulary (`tests/tokenizer` has more), ids, tables and positions that do not fit an
//! [`EmbeddingLayer`], and weights, labels and limits that no heat map can be drawn with.

use candle_attention::plot::{Heads, HeatMap, TerminalOptions};
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer, SpecialTokens};
use candle_core::Module;
use candle_nn::Embedding;

use crate::words::dtype_and_shape;
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("embedding", |_, call| {
        let layer = EmbeddingLayer::new(&call.need("config")?, call.builder("zeros")?)?;
        let ids = call.tensor("ids")?;
        match call.get("offset")? {
            None => layer.forward(&ids).map(accepted),
            Some(offset) => layer.forward_at(&ids, offset).map(accepted),
        }
    }),
    ("heat map", |line, _| {
        let (dtype, shape) = dtype_and_shape(line).expect("a dtype and a shape");
        HeatMap::new(&of(dtype, shape)).map(accepted)
    }),
    ("text calls", |line, _| named(CALLS, line)),
];

fn seven() -> Result<SimpleTokenizer> {
    Ok(SimpleTokenizer::from_words(["<pad>", "hello", "world", "how", "are", "you", "?"])?)
}

/// Returns a map of 16 heads, 2 queries and 3 keys.
fn map() -> Result<HeatMap> {
    HeatMap::new(&zeros((16, 2, 3)))
}

fn drawn(max_width: Option<usize>, max_rows: Option<usize>) -> Result<String> {
    let map = HeatMap::new(&zeros((2, 2)))?.with_tokens(&["hello", "world"])?;
    map.to_terminal(Heads::Mean, &TerminalOptions { max_width, max_rows, ..TerminalOptions::default() })
}

fn wrap(table: Tensor, width: usize) -> Result<EmbeddingLayer> {
    EmbeddingLayer::from_embedding(Embedding::new(table, width))
}

const CALLS: &[Named] = calls! {
    "an id behind the table, in a view" => {
        let layer = EmbeddingLayer::new(&EmbeddingConfig::new(7, 3), any_weights())?;
        layer.forward(&Tensor::new(&[[1u32, 2, 3], [4, 9, 8]], &CPU)?.t()?)
    },
    "a table of another width than it says" => wrap(zeros((7, 3)), 4),
    "a table with a batch" => wrap(zeros((1, 7, 3)), 3),
    "a table of ids" => wrap(of(DType::U32, (7, 3)), 3),
    "a table of no words" => wrap(zeros((0, 3)), 3),
    "an unknown word of a batch" => seven()?.encode_batch(&["hello", "how zzzzz"]),
    "an id that is no word's" => seven()?.decode(&[1, 7]),
    "an id that is no word's, without special tokens" => seven()?.decode_with(&[1, 0, 7], SpecialTokens::Without),
    "a sequence out of range" => HeatMap::from_batch(&zeros((2, 2, 3, 3)), 2),
    "a batch of rank 3" => HeatMap::from_batch(&zeros((2, 3, 3)), 0),
    "a head out of range" => map()?.to_terminal(Heads::One(16), &TerminalOptions::default()),
    "too few query tokens" => map()?.with_query_tokens(&["a"]),
    "too many key tokens" => map()?.with_key_tokens(&["a"; 4]),
    "one list of tokens for two lengths" => map()?.with_tokens(&["a", "b"]),
    "a scale that ends at zero" => map()?.with_scale_max(0.0),
    "a scale that ends below zero" => map()?.with_scale_max(-1.0),
    "a scale that ends at no number" => map()?.with_scale_max(f64::NAN),
    "a scale without an end" => map()?.with_scale_max(f64::INFINITY),
    "too few columns" => drawn(Some(9), None),
    "no columns" => drawn(Some(0), None),
    "no rows" => drawn(None, Some(0)),
    "a tokenizer saved into no folder" =>
        SimpleTokenizer::from_words(["a"])?.save(in_folder("missing/tokenizer.json")),
    "a tokenizer that is not there" => SimpleTokenizer::from_file(in_folder("nothing.json")),
    "a tokenizer that is no tokenizer" => SimpleTokenizer::from_file(file("config.json", b"{}")),
    "words as a tokenizer" => SimpleTokenizer::from_file(file("vocab.txt", b"hello\nworld\n")),
    "a model without a vocabulary as a tokenizer" =>
        SimpleTokenizer::from_bytes(br#"{"model": {"type": "WordLevel"}}"#),
    "weights as a tokenizer" => SimpleTokenizer::from_bytes(files::valid()),
};

//! Words and vocabularies that do not fit, ids, tables and positions that do not fit an [`EmbeddingLayer`], and
//! weights, labels and limits that no heat map can be drawn with.

use candle_attention::plot::{Heads, HeatMap, TerminalOptions};
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, PaddingSide, SimpleTokenizer, SpecialTokens};
use candle_core::Module;
use candle_nn::Embedding;
use serde::Deserialize;

use crate::words::{Of, Tensors, builder, dtype};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("tokenizer", run::<Words>),
    ("embedding", run::<Embedded>),
    ("heat map", run::<Drawn>),
    ("text calls", |line, _| named(CALLS, line)),
];

/// A tokenizer, and what it is asked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    words: Vec<String>,
    padding: Option<String>,
    unknown: Option<String>,
    #[serde(default)]
    left: bool,
    encode: Option<String>,
    batch: Option<Vec<String>>,
    decode: Option<Vec<u32>>,
    #[serde(default)]
    without_special: bool,
}

impl Call for Words {
    fn call(self) -> Result<String> {
        let mut tokenizer = SimpleTokenizer::from_words(self.words)?;
        if let Some(padding) = self.padding {
            tokenizer = tokenizer.with_padding(&padding)?;
        }
        if let Some(unknown) = self.unknown {
            tokenizer = tokenizer.with_unknown(&unknown)?;
        }
        if self.left {
            tokenizer = tokenizer.with_padding_side(PaddingSide::Left)?;
        }
        if let Some(text) = self.encode {
            tokenizer.encode(&text)?;
        }
        if let Some(texts) = self.batch {
            let batch = tokenizer.encode_batch(&texts.iter().map(String::as_str).collect::<Vec<_>>())?;
            batch.valid_lens()?;
        }
        match self.decode {
            Some(ids) if self.without_special => tokenizer.decode_with(&ids, SpecialTokens::Without)?,
            Some(ids) => tokenizer.decode(&ids)?,
            None => String::new(),
        };
        Ok(accepted(tokenizer))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Embedded {
    config: Of<EmbeddingConfig>,
    dtype: Option<String>,
    #[serde(default)]
    weights: Value,
    ids: Tensors,
    #[serde(default)]
    offset: usize,
}

impl Call for Embedded {
    fn call(self) -> Result<String> {
        let layer = EmbeddingLayer::new(&self.config.0, builder(&self.weights, dtype(&self.dtype))?)?;
        match self.offset {
            0 => layer.forward(&self.ids).map(accepted),
            offset => layer.forward_at(&self.ids, offset).map(accepted),
        }
    }
}

/// The words of a heat map of the mean of heads, or of one head.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Drawn {
    weights: Tensors,
    /// Of which this sequence is drawn.
    sequence: Option<usize>,
    head: Option<usize>,
    queries: Option<Vec<String>>,
    keys: Option<Vec<String>>,
    tokens: Option<Vec<String>>,
    scale_max: Option<Of<f64>>,
    max_width: Option<usize>,
    max_rows: Option<usize>,
}

impl Call for Drawn {
    fn call(self) -> Result<String> {
        let mut map = match self.sequence {
            Some(sequence) => HeatMap::from_batch(&self.weights, sequence)?,
            None => HeatMap::new(&self.weights)?,
        };
        if let Some(tokens) = self.queries {
            map = map.with_query_tokens(&tokens)?;
        }
        if let Some(tokens) = self.keys {
            map = map.with_key_tokens(&tokens)?;
        }
        if let Some(tokens) = self.tokens {
            map = map.with_tokens(&tokens)?;
        }
        if let Some(Of(end)) = self.scale_max {
            map = map.with_scale_max(end)?;
        }
        let options =
            TerminalOptions { max_width: self.max_width, max_rows: self.max_rows, ..TerminalOptions::default() };
        map.to_terminal(self.head.map_or(Heads::Mean, Heads::One), &options).map(accepted)
    }
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
    "an unknown token in a BPE file" => {
        let model = br#"{"model": {"type": "BPE", "vocab": {"<unk>": 0, "a": 1}, "merges": []}}"#;
        SimpleTokenizer::from_bytes(model)?.with_unknown("<unk>")
    },
    "a tokenizer saved into no folder" =>
        SimpleTokenizer::from_words(["a"])?.save(DIR.path().join("missing/tokenizer.json")),
    "a tokenizer that is not there" => SimpleTokenizer::from_file(DIR.path().join("nothing.json")),
    "a tokenizer that is no tokenizer" => SimpleTokenizer::from_file(file("config.json", b"{}")),
    "words as a tokenizer" => SimpleTokenizer::from_file(file("vocab.txt", b"hello\nworld\n")),
    "a model without a vocabulary as a tokenizer" =>
        SimpleTokenizer::from_bytes(br#"{"model": {"type": "WordLevel"}}"#),
    "weights as a tokenizer" => SimpleTokenizer::from_bytes(files::valid()),
};

//! Words, vocabularies and ids that do not fit.

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, PaddingSide, SimpleTokenizer};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;

use crate::{CPU, Misuse, check, file, of, zeros};

fn seven() -> Result<SimpleTokenizer> {
    Ok(SimpleTokenizer::from_words(["<pad>", "hello", "world", "how", "are", "you", "?"])?)
}

fn without_padding() -> Result<SimpleTokenizer> {
    Ok(SimpleTokenizer::from_words(["hello", "world"])?)
}

fn embedding(cfg: EmbeddingConfig) -> Result<EmbeddingLayer> {
    EmbeddingLayer::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))
}

fn embed(ids: &Tensor) -> Result<()> {
    embedding(EmbeddingConfig::new(7, 4))?.forward(ids).map(drop)
}

const TOKENIZER: &[Misuse] = &[
    (
        "no words",
        || Ok(SimpleTokenizer::from_words(Vec::<String>::new()).map(drop)?),
        "[tokenizer] the vocabulary is empty: give at least one word",
    ),
    (
        "an empty word",
        || Ok(SimpleTokenizer::from_words(["a", ""]).map(drop)?),
        "[tokenizer] the vocabulary's word 1 (counted from 0) is empty, and no text contains an empty word: remove it",
    ),
    (
        "a word twice",
        || Ok(SimpleTokenizer::from_words(["a", "b", "a"]).map(drop)?),
        "[tokenizer] the word \"a\" is in the vocabulary twice, at positions 0 and 2 (counted from 0): remove one",
    ),
    (
        "an unknown word",
        || Ok(seven()?.encode("hello wrld").map(drop)?),
        "[tokenizer] word 1 (counted from 0), \"wrld\", is not in the vocabulary: did you mean \"world\"? Otherwise add it, or choose a word for all unknown ones with with_unknown",
    ),
    (
        "a word in capitals",
        || Ok(seven()?.encode("Hello").map(drop)?),
        "[tokenizer] word 0 (counted from 0), \"Hello\", is not in the vocabulary: did you mean \"hello\"? Otherwise add it, or choose …",
    ),
    (
        "an unknown word of a batch",
        || Ok(seven()?.encode_batch(&["hello", "how zzzzz"]).map(drop)?),
        "[tokenizer] word 1 (counted from 0), \"zzzzz\", is not in the vocabulary: add it, or choose a word for all unknown ones with with_unknown (text 1 of the batch, counted from 0)",
    ),
    (
        "no texts",
        || Ok(seven()?.encode_batch::<&str>(&[]).map(drop)?),
        "[tokenizer] the batch is empty: give at least one text",
    ),
    (
        "texts of different lengths without a padding token",
        || Ok(without_padding()?.encode_batch(&["hello", "hello world"]).map(drop)?),
        "[tokenizer] the batch's texts have 1 to 2 tokens, which takes a padding token: choose one with with_padding, or give texts of one length",
    ),
    (
        "a padding token that is no word",
        || Ok(without_padding()?.with_padding("[PAD]").map(drop)?),
        "[tokenizer] the padding token \"[PAD]\" is not in the vocabulary: add it",
    ),
    (
        "an unknown token that is no word",
        || Ok(without_padding()?.with_unknown("<unk>").map(drop)?),
        "[tokenizer] the unknown token \"<unk>\" is not in the vocabulary: add it",
    ),
    (
        "a padding side without a padding token",
        || Ok(without_padding()?.with_padding_side(PaddingSide::Left).map(drop)?),
        "[tokenizer] there is no padding token to put on a side: choose one with with_padding first",
    ),
    (
        "lengths of a batch that is padded on the left",
        || Ok(seven()?.with_padding_side(PaddingSide::Left)?.encode_batch(&["how"])?.valid_lens().map(drop)?),
        "[tokenizer] the batch is padded on the left, so lengths would hide the wrong tokens: use starts() for the mask, or with_padding_side(PaddingSide::Right)",
    ),
    (
        "an id that is no word's",
        || Ok(seven()?.decode(&[1, 7]).map(drop)?),
        "[tokenizer] id 7 at position 1 (counted from 0) is not in the vocabulary of 7 words: give ids that this tokenizer made",
    ),
    (
        "a tokenizer that is not there",
        || Ok(SimpleTokenizer::from_file(crate::DIR.path().join("nothing.json")).map(drop)?),
        "[tokenizer] cannot read \"DIR/nothing.json\": …(os error 2)",
    ),
    (
        "a tokenizer that is no tokenizer",
        || Ok(SimpleTokenizer::from_file(file("config.json", b"{}")).map(drop)?),
        "[tokenizer] \"DIR/config.json\" is not a tokenizer.json that can be used: …",
    ),
    (
        "weights as a tokenizer",
        || Ok(SimpleTokenizer::from_bytes(crate::files::valid()).map(drop)?),
        "[tokenizer] the input is not a tokenizer.json that can be used: …",
    ),
];

const EMBEDDING: &[Misuse] = &[
    (
        "no words",
        || embedding(EmbeddingConfig::new(0, 4)).map(drop),
        "[embedding] vocab_size 0 and embed_dim 4 must be at least 1",
    ),
    (
        "vectors of no width",
        || embedding(EmbeddingConfig::new(7, 0)).map(drop),
        "[embedding] vocab_size 7 and embed_dim 0 must be at least 1",
    ),
    (
        "a padding row behind the table",
        || embedding(EmbeddingConfig::new(7, 4).with_padding_idx(7)).map(drop),
        "[embedding] padding_idx 7 is not below the vocabulary size 7",
    ),
    (
        "no positions",
        || embedding(EmbeddingConfig::new(7, 4).with_max_positions(0)).map(drop),
        "[embedding] max_positions must be at least 1, found 0; leave it out for no positions",
    ),
    (
        "an id behind the table",
        || embed(&Tensor::new(&[[0u32, 6], [7, 0]], &CPU)?),
        "[embedding] id 7 at position 0 of sequence 1 is not below the vocabulary size 7",
    ),
    ("a negative id", || embed(&Tensor::new(&[3i64, -1], &CPU)?), "[embedding] id -1 at position 1 is negative"),
    (
        "the id that Candle takes for padding",
        || embed(&Tensor::new(&[u32::MAX], &CPU)?),
        "[embedding] id 4294967295 at position 0 is not below the vocabulary size 7",
    ),
    ("vectors for ids", || embed(&zeros((1, 3))), "[embedding] expected ids of an integer dtype, found F32"),
    (
        "ids with heads",
        || embed(&of(DType::U32, (1, 2, 3))),
        "[embedding] expected ids (T,) or (B, T), found [1, 2, 3]",
    ),
    (
        "more tokens than positions",
        || embedding(EmbeddingConfig::new(7, 4).with_max_positions(2))?.forward(&of(DType::U32, 3)).map(drop),
        "[embedding] 3 tokens from position 0 on do not fit into 2 positions",
    ),
    (
        "positions beyond counting",
        || {
            let layer = embedding(EmbeddingConfig::new(7, 4).with_max_positions(2))?;
            layer.forward_at(&of(DType::U32, 1), usize::MAX).map(drop)
        },
        "[embedding] 1 tokens from position 18446744073709551615 on do not fit into 2 positions",
    ),
    (
        "integer vectors from a seed",
        || EmbeddingLayer::new(&EmbeddingConfig::new(7, 4), TorchSeed::new(0).var_builder(DType::U32, &CPU)).map(drop),
        "[embedding] the builder gives weights as U32, expected F32, F16, BF16 or F64",
    ),
];

#[test]
fn words_and_ids_that_do_not_fit_are_named() {
    check(TOKENIZER);
}

#[test]
fn tables_and_ids_that_do_not_fit_are_named() {
    check(EMBEDDING);
}

//! Words and vocabularies that do not fit, and ids, tables and positions that do not fit an [`EmbeddingLayer`].

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, PaddingSide, SimpleTokenizer, SpecialTokens};
use candle_core::Module;
use candle_nn::Embedding;

use crate::wrong::Shapes;
use crate::*;

#[test]
fn tokenizers() {
    let seven = || SimpleTokenizer::from_words(["<pad>", "hello", "world", "how", "are", "you", "?"]);
    let two = || SimpleTokenizer::from_words(["hello", "world"]);
    let unknown =
        each("", ["hello wrld", "Hello", "hello world how are you?", "我爱自然"], |text| Ok(seven()?.encode(text)?));
    let cases = cases! {
        "no words" => SimpleTokenizer::from_words(Vec::<String>::new()),
        "an empty word" => SimpleTokenizer::from_words(["a", ""]),
        "a word twice" => SimpleTokenizer::from_words(["a", "b", "a"]),
        "an unknown word of a batch" => seven()?.encode_batch(&["hello", "how zzzzz"]),
        "no texts" => seven()?.encode_batch::<&str>(&[]),
        "texts of different lengths without a padding token" => two()?.encode_batch(&["hello", "hello world"]),
        "a padding token that is nearly a word" => seven()?.with_padding("[PAD]"),
        "a padding token that is no word" => two()?.with_padding("[PAD]"),
        "an unknown token that is no word" => two()?.with_unknown("<unk>"),
        "an unknown token in a BPE file" => {
            let model = br#"{"model": {"type": "BPE", "vocab": {"<unk>": 0, "a": 1}, "merges": []}}"#;
            SimpleTokenizer::from_bytes(model)?.with_unknown("<unk>")
        },
        "a padding side without a padding token" => two()?.with_padding_side(PaddingSide::Left),
        "lengths of a batch that is padded on the left" =>
            seven()?.with_padding_side(PaddingSide::Left)?.encode_batch(&["how"])?.valid_lens(),
        "an id that is no word's" => seven()?.decode(&[1, 7]),
        "an id that is no word's, without special tokens" => seven()?.decode_with(&[1, 0, 7], SpecialTokens::Without),
        "a tokenizer saved into no folder" => seven()?.save(DIR.path().join("missing/tokenizer.json")),
        "a tokenizer that is not there" => SimpleTokenizer::from_file(DIR.path().join("nothing.json")),
        "a tokenizer that is no tokenizer" => SimpleTokenizer::from_file(file("config.json", b"{}")),
        "words as a tokenizer" => SimpleTokenizer::from_file(file("vocab.txt", b"hello\nworld\n")),
        "a model without a vocabulary as a tokenizer" =>
            SimpleTokenizer::from_bytes(br#"{"model": {"type": "WordLevel"}}"#),
        "weights as a tokenizer" => SimpleTokenizer::from_bytes(files::valid()),
    };
    assert_reviewed("tokenizers", &[unknown, cases]);
}

#[test]
fn embeddings() {
    let embedding = |cfg| EmbeddingLayer::new(&cfg, any_weights());
    let seven = || EmbeddingConfig::new(7, 3);
    let embed = |ids: Result<Tensor>| embedding(seven())?.forward(&ids?);
    let wrap = |table: Tensor, width| EmbeddingLayer::from_embedding(Embedding::new(table, width));
    let cases = cases! {
        "no words" => embedding(EmbeddingConfig::new(0, 4)),
        "vectors of no width" => embedding(EmbeddingConfig::new(7, 0)),
        "a padding row behind the table" => embedding(seven().with_padding_idx(7)),
        "no positions" => embedding(seven().with_max_positions(0)),
        "integer vectors from a seed" => EmbeddingLayer::new(&seven(), TorchSeed::new(0).var_builder(DType::U32, &CPU)),
        "an id behind the table" => embed(Tensor::new(&[[0u32, 6], [7, 0]], &CPU)),
        "an id behind the table, in one sequence" => embed(Tensor::new(&[1u32, 2, 7], &CPU)),
        "an id behind the table, in a view" => embed(Tensor::new(&[[1u32, 2, 3], [4, 9, 8]], &CPU)?.t()),
        "a negative id" => embed(Tensor::new(&[3i64, -1], &CPU)),
        "the id that Candle takes for padding" => embed(Tensor::new(&[u32::MAX], &CPU)),
        "the largest byte" => embed(Tensor::new(&[u8::MAX], &CPU)),
        "the largest id" => embed(Tensor::new(&[i64::MAX], &CPU)),
        "vectors for ids" => embed(Ok(zeros((1, 3)))),
        "ids with heads" => embed(Ok(of(DType::U32, (1, 2, 3)))),
        "one id" => embed(Tensor::new(1u32, &CPU)),
        "more tokens than positions" => embedding(seven().with_max_positions(2))?.forward(&of(DType::U32, 3)),
        "a table of another width than it says" => wrap(zeros((7, 3)), 4),
        "a table with a batch" => wrap(zeros((1, 7, 3)), 3),
        "a table of ids" => wrap(of(DType::U32, (7, 3)), 3),
        "a table of no words" => wrap(zeros((0, 3)), 3),
    };
    let at = each("of four positions, so many from", [(5, 0), (2, 3), (0, 5), (1, usize::MAX)], |(t, offset)| {
        embedding(seven().with_max_positions(4))?.forward_at(&of(DType::U32, t), offset)
    });
    let shapes = wrong::shapes(&[("embedding.weight", &[7, 3]), ("position_embedding.weight", &[2, 3])]);
    let load = |shapes: &Shapes| EmbeddingLayer::new(&seven().with_max_positions(2), wrong::builder(shapes));
    assert_reviewed("embeddings", &[cases, at, wrong::weights(&shapes, load)]);
}

//! Words and vocabularies that do not fit.

use candle_attention::text::{PaddingSide, SimpleTokenizer, SpecialTokens};
use candle_core::Result;

use crate::{Case, file};

fn seven() -> Result<SimpleTokenizer> {
    Ok(SimpleTokenizer::from_words(["<pad>", "hello", "world", "how", "are", "you", "?"])?)
}

fn without_padding() -> Result<SimpleTokenizer> {
    Ok(SimpleTokenizer::from_words(["hello", "world"])?)
}

pub const CASES: &[Case] = cases! {
    "no words" => SimpleTokenizer::from_words(Vec::<String>::new()),
    "an empty word" => SimpleTokenizer::from_words(["a", ""]),
    "a word twice" => SimpleTokenizer::from_words(["a", "b", "a"]),
    "an unknown word" => seven()?.encode("hello wrld"),
    "a word in capitals" => seven()?.encode("Hello"),
    "a word with punctuation" => seven()?.encode("hello world how are you?"),
    "a word in another script" => seven()?.encode("我爱自然"),
    "an unknown word of a batch" => seven()?.encode_batch(&["hello", "how zzzzz"]),
    "no texts" => seven()?.encode_batch::<&str>(&[]),
    "texts of different lengths without a padding token" => without_padding()?.encode_batch(&["hello", "hello world"]),
    "a padding token that is nearly a word" => seven()?.with_padding("[PAD]"),
    "a padding token that is no word" => without_padding()?.with_padding("[PAD]"),
    "an unknown token that is no word" => without_padding()?.with_unknown("<unk>"),
    "an unknown token in a BPE file" => {
        let model = br#"{"model": {"type": "BPE", "vocab": {"<unk>": 0, "a": 1}, "merges": []}}"#;
        SimpleTokenizer::from_bytes(model)?.with_unknown("<unk>")
    },
    "a padding side without a padding token" => without_padding()?.with_padding_side(PaddingSide::Left),
    "lengths of a batch that is padded on the left" =>
        seven()?.with_padding_side(PaddingSide::Left)?.encode_batch(&["how"])?.valid_lens(),
    "an id that is no word's" => seven()?.decode(&[1, 7]),
    "an id that is no word's, without special tokens" => seven()?.decode_with(&[1, 0, 7], SpecialTokens::Without),
    "a tokenizer saved into no folder" => seven()?.save(crate::DIR.path().join("missing/tokenizer.json")),
    "a tokenizer that is not there" => SimpleTokenizer::from_file(crate::DIR.path().join("nothing.json")),
    "a tokenizer that is no tokenizer" => SimpleTokenizer::from_file(file("config.json", b"{}")),
    "words as a tokenizer" => SimpleTokenizer::from_file(file("vocab.txt", b"hello\nworld\n")),
    "a model without a vocabulary as a tokenizer" =>
        SimpleTokenizer::from_bytes(br#"{"model": {"type": "WordLevel"}}"#),
    "weights as a tokenizer" => SimpleTokenizer::from_bytes(crate::files::valid()),
};

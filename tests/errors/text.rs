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

pub const CASES: &[Case] = &[
    ("no words", || Ok(SimpleTokenizer::from_words(Vec::<String>::new()).map(drop)?)),
    ("an empty word", || Ok(SimpleTokenizer::from_words(["a", ""]).map(drop)?)),
    ("a word twice", || Ok(SimpleTokenizer::from_words(["a", "b", "a"]).map(drop)?)),
    ("an unknown word", || Ok(seven()?.encode("hello wrld").map(drop)?)),
    ("a word in capitals", || Ok(seven()?.encode("Hello").map(drop)?)),
    ("a word with punctuation", || Ok(seven()?.encode("hello world how are you?").map(drop)?)),
    ("a word in another script", || Ok(seven()?.encode("我爱自然").map(drop)?)),
    ("an unknown word of a batch", || Ok(seven()?.encode_batch(&["hello", "how zzzzz"]).map(drop)?)),
    ("no texts", || Ok(seven()?.encode_batch::<&str>(&[]).map(drop)?)),
    ("texts of different lengths without a padding token", || {
        Ok(without_padding()?.encode_batch(&["hello", "hello world"]).map(drop)?)
    }),
    ("a padding token that is nearly a word", || Ok(seven()?.with_padding("[PAD]").map(drop)?)),
    ("a padding token that is no word", || Ok(without_padding()?.with_padding("[PAD]").map(drop)?)),
    ("an unknown token that is no word", || Ok(without_padding()?.with_unknown("<unk>").map(drop)?)),
    ("an unknown token in a BPE file", || {
        let model = br#"{"model": {"type": "BPE", "vocab": {"<unk>": 0, "a": 1}, "merges": []}}"#;
        Ok(SimpleTokenizer::from_bytes(model)?.with_unknown("<unk>").map(drop)?)
    }),
    ("a padding side without a padding token", || {
        Ok(without_padding()?.with_padding_side(PaddingSide::Left).map(drop)?)
    }),
    ("lengths of a batch that is padded on the left", || {
        Ok(seven()?.with_padding_side(PaddingSide::Left)?.encode_batch(&["how"])?.valid_lens().map(drop)?)
    }),
    ("an id that is no word's", || Ok(seven()?.decode(&[1, 7]).map(drop)?)),
    ("an id that is no word's, without special tokens", || {
        Ok(seven()?.decode_with(&[1, 0, 7], SpecialTokens::Without).map(drop)?)
    }),
    ("a tokenizer saved into no folder", || Ok(seven()?.save(crate::DIR.path().join("missing/tokenizer.json"))?)),
    ("a tokenizer that is not there", || {
        Ok(SimpleTokenizer::from_file(crate::DIR.path().join("nothing.json")).map(drop)?)
    }),
    ("a tokenizer that is no tokenizer", || Ok(SimpleTokenizer::from_file(file("config.json", b"{}")).map(drop)?)),
    ("words as a tokenizer", || Ok(SimpleTokenizer::from_file(file("vocab.txt", b"hello\nworld\n")).map(drop)?)),
    ("a model without a vocabulary as a tokenizer", || {
        Ok(SimpleTokenizer::from_bytes(br#"{"model": {"type": "WordLevel"}}"#).map(drop)?)
    }),
    ("weights as a tokenizer", || Ok(SimpleTokenizer::from_bytes(crate::files::valid()).map(drop)?)),
];

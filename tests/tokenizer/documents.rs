//! Small tokenizer.json documents, and what the `tokenizers` crate makes of them.

use candle_attention::text::{Encoding, SimpleTokenizer, SpecialTokens};
use serde_json::{Value, json};

/// A tokenizer.json around `model`, with the keys of `parts` on top.
pub fn file(model: Value, parts: Value) -> Vec<u8> {
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null, "model": model,
    });
    for (key, value) in parts.as_object().unwrap() {
        file[key] = value.clone();
    }
    serde_json::to_vec(&file).unwrap()
}

pub fn load(model: Value, parts: Value) -> SimpleTokenizer {
    SimpleTokenizer::from_bytes(file(model, parts)).unwrap()
}

pub fn letters() -> Value {
    json!({"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "c": 5, "d": 6}})
}

pub fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
}

pub fn cls_and_sep() -> Value {
    json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]},
            "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]},
        },
    })
}

pub fn padding(direction: &str, strategy: Value, multiple: Option<usize>) -> Value {
    json!({"strategy": strategy, "direction": direction, "pad_to_multiple_of": multiple, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"})
}

pub fn truncation(direction: &str, max_length: usize, stride: usize) -> Value {
    json!({"direction": direction, "max_length": max_length, "strategy": "LongestFirst", "stride": stride})
}

/// "lo", "low" and "er" merge; no token for any other letter.
pub fn bpe(unk_token: Option<&str>) -> Value {
    json!({
        "type": "BPE", "dropout": null, "unk_token": unk_token, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": {"<unk>": 0, "l": 1, "o": 2, "w": 3, "e": 4, "r": 5, "lo": 6, "low": 7, "er": 8},
        "merges": [["l", "o"], ["lo", "w"], ["e", "r"]],
    })
}

pub fn wordpiece(unk_token: &str) -> Value {
    json!({
        "type": "WordPiece", "unk_token": unk_token, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "play": 4, "##ing": 5, "##ed": 6, "the": 7, "!": 8},
    })
}

pub fn unigram(unk_id: Option<usize>) -> Value {
    json!({
        "type": "Unigram", "unk_id": unk_id, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["▁he", -1.0], ["▁hell", -2.0], ["llo", -1.5], ["o", -3.0], ["▁", -4.0], ["h", -5.0], ["e", -5.0], ["l", -5.0]],
    })
}

/// What the `tokenizers` crate itself makes of the file, its padding of single texts apart.
pub fn reference(file: &[u8], text: &str, special: bool) -> (Vec<u32>, Vec<String>) {
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(file).unwrap();
    tokenizer.with_padding(None);
    let encoding = tokenizer.encode(text, special).unwrap();
    (encoding.get_ids().to_vec(), encoding.get_tokens().to_vec())
}

/// The tokenizer of such a file, which gives what the crate gives.
pub fn assert_follows_the_crate(model: Value, parts: Value, texts: &[&str]) -> SimpleTokenizer {
    let file = file(model, parts);
    let tokenizer = SimpleTokenizer::from_bytes(&file).unwrap();
    for text in texts {
        for (special, flag) in [(SpecialTokens::With, true), (SpecialTokens::Without, false)] {
            let Encoding { ids, tokens, .. } = tokenizer.encode_with(text, special).unwrap();
            assert_eq!((ids, tokens), reference(&file, text, flag), "{text:?} {special:?}");
        }
    }
    tokenizer
}

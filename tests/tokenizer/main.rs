//! `SimpleTokenizer`: words to ids and back, batches, and tokenizer.json files.

mod batches;
mod documents;
mod files;
mod models;
mod properties;
mod words;

use candle_attention::text::{SimpleTokenizer, SpecialTokens, Split, TokenizerError};
use serde_json::json;

use documents::{letters, load, padding, special};

const WORDS: [&str; 7] = ["<pad>", "hello", "world", "how", "are", "you", "?"];

fn tutorial() -> SimpleTokenizer {
    SimpleTokenizer::from_words(WORDS).unwrap()
}

fn message<T: std::fmt::Debug>(result: Result<T, TokenizerError>) -> String {
    let text = result.unwrap_err().to_string();
    assert!(!text.contains('\n'), "more than one line: {text}");
    text
}

fn ids(tokenizer: &SimpleTokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text).unwrap().ids
}

fn save_and_load(tokenizer: &SimpleTokenizer) -> SimpleTokenizer {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    tokenizer.save(&path).unwrap();
    SimpleTokenizer::from_file(&path).unwrap()
}

#[test]
fn decoding_joins_words_with_spaces() {
    assert_eq!(tutorial().decode(&[1, 2, 6]).unwrap(), "hello world ?");
    assert_eq!(tutorial().decode(&[]).unwrap(), "");
}

#[test]
fn decoding_can_leave_padding_out() {
    let tokenizer = tutorial();
    assert_eq!(tokenizer.decode(&[1, 0, 0]).unwrap(), "hello <pad> <pad>");
    assert_eq!(tokenizer.decode_with(&[1, 0, 0], SpecialTokens::Without).unwrap(), "hello");
}

#[test]
fn a_padding_id_that_is_another_words_leaves_that_word_in() {
    let model = json!({"type": "WordLevel", "unk_token": "", "vocab": {"a": 0, "b": 1}});
    let tokenizer = load(model, json!({"padding": padding("Right", json!("BatchLongest"), None)}));
    assert_eq!(tokenizer.decode_with(&[0, 1], SpecialTokens::Without).unwrap(), "a b");
}

#[test]
fn the_vocabulary_can_be_looked_up() {
    let tokenizer = tutorial();
    assert_eq!(tokenizer.vocab_size(), 7);
    assert_eq!(tokenizer.token_to_id("world"), Some(2));
    assert_eq!(tokenizer.token_to_id("World"), None);
    assert_eq!(tokenizer.id_to_token(6).as_deref(), Some("?"));
    assert_eq!(tokenizer.id_to_token(7), None);
    assert_eq!(tokenizer.words(), WORDS);
    let with_added = load(letters(), json!({"added_tokens": [special(7, "<extra>"), special(1, "[CLS]")]}));
    assert_eq!(with_added.vocab_size(), 8);
    assert_eq!(with_added.words(), ["[PAD]", "[CLS]", "[SEP]", "a", "b", "c", "d", "<extra>"]);
    assert_eq!(ids(&with_added, "a<extra>b"), [3, 7, 4]);
}

#[test]
fn errors_pass_through_candles_result() {
    fn model_code() -> candle_core::Result<Vec<u32>> {
        Ok(tutorial().encode("you you?")?.ids)
    }
    let error = model_code().unwrap_err().to_string();
    assert!(error.starts_with("[tokenizer] word 2, \"you?\", is not in the vocabulary"), "{error}");
}

#[test]
fn it_can_be_shared_between_threads() {
    fn shared<T: Send + Sync + Clone>(_: &T) {}
    let tokenizer = tutorial();
    shared(&tokenizer);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(ids(&tokenizer, "hello you"), [1, 5]));
        }
    });
    fn error<T: std::error::Error + Send + Sync + 'static>() {}
    error::<TokenizerError>();
}

#[test]
fn it_shows_what_it_is_and_not_its_vocabulary() {
    let debug = format!("{:?}", tutorial());
    assert!(debug.contains("vocab_size: 7") && !debug.contains("hello"), "{debug}");
}

#[test]
fn the_words_of_texts_can_be_the_vocabulary() {
    let tokenizer =
        SimpleTokenizer::from_texts(&["the cat sat on the mat", "", "a\u{3000}mat <pad>"], Split::Whitespace).unwrap();
    assert_eq!(tokenizer.words(), ["<pad>", "the", "cat", "sat", "on", "mat", "a"]);
    assert_eq!(ids(&tokenizer, "the cat sat on the mat"), [1, 2, 3, 4, 1, 5]);
    let tokenizer = SimpleTokenizer::from_texts(&["you?"], Split::Punctuation).unwrap();
    assert_eq!(ids(&tokenizer, "?you"), [2, 1]);
    assert_eq!(SimpleTokenizer::from_texts::<&str>(&[], Split::Whitespace).unwrap().vocab_size(), 1);
}

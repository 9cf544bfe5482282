//! `SimpleTokenizer`: words to ids and back.

mod byte_level;
#[path = "../common/mod.rs"]
mod common;
mod gguf;
mod properties;
mod reviewed;

use candle_attention::text::{SimpleTokenizer, TokenizerError};
use common::Golden;
use serde_json::json;

const WORDS: [&str; 7] = ["<pad>", "hello", "world", "how", "are", "you", "?"];

fn words(words: &[&str]) -> SimpleTokenizer {
    SimpleTokenizer::from_words(words.to_vec()).unwrap()
}

fn tutorial() -> SimpleTokenizer {
    words(&WORDS)
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
fn tokenizer_matches_golden_cases() {
    let config = Golden::open_config("frontend_tokenizer");
    let vocab: Vec<String> = serde_json::from_value(config["vocab"].clone()).unwrap();
    let tokenizer = SimpleTokenizer::from_words(vocab.clone()).unwrap();
    assert_eq!(tokenizer.words(), vocab);
    let cases = config["cases"].as_array().unwrap();
    assert!(cases.len() >= 7);
    for case in cases {
        match tokenizer.encode(case["text"].as_str().unwrap()) {
            Ok(encoding) => assert_eq!(json!(encoding.ids), case["ids"], "{case}"),
            Err(TokenizerError::UnknownWord { word, .. }) => assert_eq!(word, case["token"], "{case}"),
            Err(other) => panic!("{case}: {other}"),
        }
    }
}

#[test]
fn tokenizer_splits_at_white_space_of_python() {
    let tokenizer = words(&["a", "b"]);
    let ranges = [0x09..=0x0d, 0x1c..=0x20, 0x85..=0x85, 0xa0..=0xa0, 0x1680..=0x1680, 0x2000..=0x200a];
    let others = [0x2028..=0x2029, 0x202f..=0x202f, 0x205f..=0x205f, 0x3000..=0x3000];
    let white: Vec<char> = ranges.into_iter().chain(others).flatten().filter_map(char::from_u32).collect();
    assert_eq!(white.len(), 29);
    for c in (0..=0x3100).filter_map(char::from_u32).filter(|c| !"ab".contains(*c)) {
        let encoded = tokenizer.encode(&format!("{c}a{c}{c}b{c}")).ok().map(|encoding| encoding.ids);
        assert_eq!(encoded, white.contains(&c).then_some(vec![0, 1]), "{c:?}");
    }
    assert!(ids(&tokenizer, &white.iter().collect::<String>()).is_empty());
}

/// Checks that a long word is shortened in the message and whole in the error, and that of a batch, the first text that
/// fails is named.
#[test]
fn tokenizer_error_names_unknown_word_and_its_position() {
    let long = "x".repeat(100_000);
    match tutorial().encode(&format!("you {long}")).unwrap_err() {
        TokenizerError::UnknownWord { word, position, vocabulary, .. } => {
            assert_eq!((word, position, vocabulary), (long.clone(), 1, WORDS.map(String::from).to_vec()));
        }
        other => panic!("{other}"),
    }
    let text = tutorial().encode(&long).unwrap_err().to_string();
    assert!(text.len() < 300 && !text.contains('\n'), "{text}");
    let texts: Vec<_> = (0..100).map(|i| if i < 40 { "hello" } else { "you you?" }).collect();
    let error = tutorial().encode_batch(&texts).unwrap_err();
    assert!(matches!(error, TokenizerError::InBatch { index: 40, .. }), "{error}");
}

#[test]
fn tokenizer_is_send_and_sync_and_debug_hides_vocabulary() {
    fn shared<T: Send + Sync + Clone>(_: &T) {}
    fn error<T: std::error::Error + Send + Sync + 'static>() {}
    fn model_code() -> candle_core::Result<Vec<u32>> {
        Ok(tutorial().encode("you you?")?.ids)
    }
    error::<TokenizerError>();
    let tokenizer = tutorial();
    shared(&tokenizer);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(ids(&tokenizer, "hello you"), [1, 5]));
        }
    });
    let text = model_code().unwrap_err().to_string();
    assert!(text.starts_with("[tokenizer] word 2, \"you?\", is not in the vocabulary"), "{text}");
    let debug = format!("{tokenizer:?}");
    assert!(debug.contains("vocab_size: 7") && !debug.contains("hello"), "{debug}");
}

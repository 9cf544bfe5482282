//! `SimpleTokenizer`: words to ids and back.

mod batches;
mod documents;
mod files;
mod properties;

use candle_attention::text::{SimpleTokenizer, SpecialTokens, Split, TokenizerError};
use serde_json::Value;

use documents::{letters, load, special};

const WORDS: [&str; 7] = ["<pad>", "hello", "world", "how", "are", "you", "?"];

fn words(words: &[&str]) -> SimpleTokenizer {
    SimpleTokenizer::from_words(words.to_vec()).unwrap()
}

fn tutorial() -> SimpleTokenizer {
    words(&WORDS)
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
fn the_golden_cases_hold() {
    let models =
        std::env::var("CANDLE_ATTENTION_MODELS").unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/models").into());
    let text = std::fs::read_to_string(format!("{models}/frontend_tokenizer/config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let vocab: Vec<String> = serde_json::from_value(config["vocab"].clone()).unwrap();
    let tokenizer = SimpleTokenizer::from_words(vocab.clone()).unwrap();
    assert_eq!(tokenizer.words(), vocab);
    let cases = config["cases"].as_array().unwrap();
    assert!(cases.len() >= 7);
    for case in cases {
        match tokenizer.encode(case["text"].as_str().unwrap()) {
            Ok(encoding) => assert_eq!(serde_json::json!(encoding.ids), case["ids"], "{case}"),
            Err(TokenizerError::UnknownWord { word, .. }) => assert_eq!(word, case["token"], "{case}"),
            Err(other) => panic!("{case}: {other}"),
        }
    }
}

#[test]
fn words_become_ids_and_tokens_and_back() {
    let encoding = tutorial().encode("hello world").unwrap();
    assert_eq!((encoding.ids, encoding.tokens), (vec![1, 2], vec!["hello".to_owned(), "world".to_owned()]));
    assert_eq!(ids(&words(&["b", "a"]), "a b"), [1, 0]);
    for text in ["", " ", "\n\t\u{3000}"] {
        let encoding = tutorial().encode(text).unwrap();
        assert!(encoding.ids.is_empty() && encoding.tokens.is_empty());
    }
    assert_eq!(tutorial().decode(&[]).unwrap(), "");
    assert_eq!(tutorial().decode(&[1, 0, 0]).unwrap(), "hello <pad> <pad>");
    assert_eq!(tutorial().decode_with(&[1, 0, 0], SpecialTokens::Without).unwrap(), "hello");
}

#[test]
fn white_space_is_pythons() {
    let tokenizer = words(&["a", "b"]);
    let white: Vec<char> = (0x09..=0x0d)
        .chain(0x1c..=0x20)
        .chain([0x85, 0xa0, 0x1680])
        .chain(0x2000..=0x200a)
        .chain([0x2028, 0x2029, 0x202f, 0x205f, 0x3000])
        .map(|c| char::from_u32(c).unwrap())
        .collect();
    assert_eq!(white.len(), 29);
    for c in (0..=0x3100).filter_map(char::from_u32).filter(|c| !"ab".contains(*c)) {
        let encoded = tokenizer.encode(&format!("{c}a{c}{c}b{c}")).ok().map(|encoding| encoding.ids);
        assert_eq!(encoded, white.contains(&c).then_some(vec![0, 1]), "{c:?}");
    }
    assert!(ids(&tokenizer, &white.iter().collect::<String>()).is_empty());
}

#[test]
fn punctuation_can_be_words_of_their_own() {
    let tokenizer = tutorial().with_split(Split::Punctuation);
    assert_eq!(ids(&tokenizer, "hello world how are you?"), ids(&tutorial(), "hello world how are you ?"));
    assert_eq!(ids(&tokenizer, "you??\x1fyou ?"), [5, 6, 6, 5, 6]);
    assert!(message(tokenizer.encode("<pad>")).contains("word 1, \"<\""));
    let tokenizer = words(&["我", "，", "$"]).with_split(Split::Punctuation);
    assert_eq!(ids(&tokenizer, "我，我$"), [0, 1, 0, 2]);
    assert!(tokenizer.with_split(Split::Whitespace).encode("我，我").is_err());
}

#[test]
fn unknown_words_name_their_place_and_their_neighbours() {
    let near = |vocab: &[&str], text: &str| match words(vocab).encode(text).unwrap_err() {
        TokenizerError::UnknownWord { word, position, nearest, vocabulary, .. } => {
            assert_eq!(vocabulary, vocab);
            (word, position, nearest)
        }
        other => panic!("{other}"),
    };
    let vocab = ["Hallo", "hello", "hell", "help", "jelly", "zoo"];
    let nearest = ["hello", "Hallo", "hell"].map(String::from).to_vec();
    assert_eq!(near(&vocab, "zoo Hello"), ("Hello".to_owned(), 1, nearest));
    // Swapped letters are one edit.
    assert_eq!(near(&["ba", "cd"], "ab").2, ["ba"]);
    // A long word is cut in the message and whole in the error.
    let long = "x".repeat(100_000);
    assert_eq!(near(&WORDS, &long).0, long);
    assert!(message(tutorial().encode(&long)).len() < 300);
}

#[test]
fn unknown_words_are_errors_unless_a_word_is_chosen_for_them() {
    for word in ["<unk>", "[UNK]"] {
        let tokenizer = words(&["a", word]);
        assert!(message(tokenizer.encode("x")).contains("word 1, \"x\""));
        assert_eq!(tokenizer.unknown_token(), None);
        let tokenizer = tokenizer.with_unknown(word).unwrap();
        let encoding = tokenizer.encode("a x a").unwrap();
        assert_eq!((encoding.ids, encoding.tokens), (vec![0, 1, 0], ["a", word, "a"].map(String::from).to_vec()));
        assert_eq!(tokenizer.unknown_token(), Some(word));
    }
}

#[test]
fn the_vocabulary_can_be_looked_up() {
    let tokenizer = tutorial();
    assert_eq!(tokenizer.vocab_size(), 7);
    assert_eq!((tokenizer.token_to_id("world"), tokenizer.token_to_id("World")), (Some(2), None));
    assert_eq!((tokenizer.id_to_token(6).as_deref(), tokenizer.id_to_token(7)), (Some("?"), None));
    assert_eq!(tokenizer.words(), WORDS);
    let with_added = load(letters(), serde_json::json!({"added_tokens": [special(7, "<extra>"), special(1, "[CLS]")]}));
    assert_eq!(with_added.vocab_size(), 8);
    assert_eq!(with_added.words(), ["[PAD]", "[CLS]", "[SEP]", "a", "b", "c", "d", "<extra>"]);
    assert_eq!(ids(&with_added, "a<extra>b"), [3, 7, 4]);
}

#[test]
fn the_words_of_texts_can_be_the_vocabulary() {
    let texts = ["the cat sat on the mat", "", "a\u{3000}mat <pad>"];
    let tokenizer = SimpleTokenizer::from_texts(&texts, Split::Whitespace).unwrap();
    assert_eq!(tokenizer.words(), ["<pad>", "the", "cat", "sat", "on", "mat", "a"]);
    assert_eq!(ids(&tokenizer, texts[0]), [1, 2, 3, 4, 1, 5]);
    let tokenizer = SimpleTokenizer::from_texts(&["you?"], Split::Punctuation).unwrap();
    assert_eq!(ids(&tokenizer, "?you"), [2, 1]);
    assert_eq!(SimpleTokenizer::from_texts::<&str>(&[], Split::Whitespace).unwrap().vocab_size(), 1);
}

#[test]
fn it_passes_between_threads_and_through_candles_result_and_shows_no_vocabulary() {
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

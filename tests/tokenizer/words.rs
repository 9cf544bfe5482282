//! From a list of words: what splits, what is known, and what an error says.

use std::path::PathBuf;

use candle_attention::text::{SimpleTokenizer, Split, TokenizerError};
use serde_json::Value;

use super::{ids, message, tutorial};

#[test]
fn the_golden_cases_hold() {
    let root = std::env::var_os("CANDLE_ATTENTION_MODELS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models"), PathBuf::from);
    let path = root.join("frontend_tokenizer/config.json");
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let config: Value = serde_json::from_slice(&bytes).unwrap();
    let strings = |v: &Value| -> Vec<String> { serde_json::from_value(v.clone()).unwrap() };
    let tokenizer = SimpleTokenizer::from_words(strings(&config["vocab"])).unwrap();
    assert_eq!(tokenizer.words(), strings(&config["vocab"]));
    let cases = config["cases"].as_array().unwrap();
    assert!(cases.len() >= 7);
    for case in cases {
        let encoded = tokenizer.encode(case["text"].as_str().unwrap());
        match case.get("ids") {
            Some(ids) => {
                let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
                assert_eq!(encoded.unwrap().ids, ids, "{case}");
            }
            None => match encoded.unwrap_err() {
                TokenizerError::UnknownWord { word, .. } => {
                    assert_eq!(word, case["token"].as_str().unwrap())
                }
                other => panic!("{case}: {other}"),
            },
        }
    }
}

#[test]
fn ids_are_the_positions_of_the_words_and_tokens_go_with_them() {
    let encoding = tutorial().encode("hello world").unwrap();
    assert_eq!((encoding.ids, encoding.tokens), (vec![1, 2], vec!["hello".to_owned(), "world".to_owned()]));
    assert_eq!(ids(&SimpleTokenizer::from_words(vec!["b".to_owned(), "a".to_owned()]).unwrap(), "a b"), [1, 0]);
}

#[test]
fn white_space_is_pythons() {
    let tokenizer = SimpleTokenizer::from_words(["a", "b"]).unwrap();
    let white: Vec<char> = (0x09..=0x0d)
        .chain(0x1c..=0x20)
        .chain([0x85, 0xa0, 0x1680])
        .chain(0x2000..=0x200a)
        .chain([0x2028, 0x2029, 0x202f, 0x205f, 0x3000])
        .map(|c| char::from_u32(c).unwrap())
        .collect();
    assert_eq!(white.len(), 29);
    for c in (0..=0x3100).filter_map(char::from_u32).filter(|c| !"ab".contains(*c)) {
        let encoded = tokenizer.encode(&format!("{c}a{c}{c}b{c}"));
        if white.contains(&c) {
            assert_eq!(encoded.unwrap().ids, [0, 1], "{c:?}");
        } else {
            assert!(encoded.is_err(), "{c:?}");
        }
    }
    assert!(ids(&tokenizer, &white.iter().collect::<String>()).is_empty());
}

#[test]
fn punctuation_can_be_words_of_their_own() {
    let tokenizer = tutorial().with_split(Split::Punctuation);
    assert_eq!(ids(&tokenizer, "hello world how are you?"), ids(&tutorial(), "hello world how are you ?"));
    assert_eq!(ids(&tokenizer, "you??\x1fyou ?"), [5, 6, 6, 5, 6]);
    assert!(message(tokenizer.encode("<pad>")).contains("word 1, \"<\""));
    let tokenizer = SimpleTokenizer::from_words(["我", "，", "$"]).unwrap().with_split(Split::Punctuation);
    assert_eq!(ids(&tokenizer, "我，我$"), [0, 1, 0, 2]);
    assert!(tokenizer.with_split(Split::Whitespace).encode("我，我").is_err());
}

#[test]
fn text_without_words_has_no_ids() {
    for text in ["", " ", "\n\t\u{3000}"] {
        let encoding = tutorial().encode(text).unwrap();
        assert!(encoding.ids.is_empty() && encoding.tokens.is_empty());
    }
}

#[test]
fn unknown_words_name_their_place_and_their_neighbours() {
    let tokenizer = SimpleTokenizer::from_words(["Hallo", "hello", "hell", "help", "jelly", "zoo"]).unwrap();
    match tokenizer.encode("zoo Hello").unwrap_err() {
        TokenizerError::UnknownWord { word, position, nearest, vocabulary, .. } => {
            assert_eq!((word.as_str(), position), ("Hello", 1));
            assert_eq!(nearest, ["hello", "Hallo", "hell"]);
            assert_eq!(vocabulary, ["Hallo", "hello", "hell", "help", "jelly", "zoo"]);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn swapped_letters_are_one_edit() {
    let error = SimpleTokenizer::from_words(["ba", "cd"]).unwrap().encode("ab").unwrap_err();
    assert!(matches!(error, TokenizerError::UnknownWord { nearest, .. } if nearest == ["ba"]));
}

#[test]
fn long_words_are_cut_in_the_message_and_whole_in_the_error() {
    let long = "x".repeat(100_000);
    let error = tutorial().encode(&long).unwrap_err();
    assert!(error.to_string().len() < 300, "{error}");
    assert!(matches!(error, TokenizerError::UnknownWord { word, .. } if word == long));
}

#[test]
fn an_unknown_token_takes_unknown_words() {
    let tokenizer = SimpleTokenizer::from_words(["a", "<unk>"]).unwrap().with_unknown("<unk>").unwrap();
    let encoding = tokenizer.encode("a x a").unwrap();
    assert_eq!((encoding.ids, encoding.tokens), (vec![0, 1, 0], ["a", "<unk>", "a"].map(String::from).to_vec()));
    assert_eq!(tokenizer.unknown_token(), Some("<unk>"));
}

#[test]
fn a_word_called_unk_is_no_unknown_token_unless_chosen() {
    for word in ["<unk>", "[UNK]"] {
        let tokenizer = SimpleTokenizer::from_words(["a", word]).unwrap();
        assert!(message(tokenizer.encode("x")).contains("word 1, \"x\""));
        assert_eq!(tokenizer.unknown_token(), None);
    }
}

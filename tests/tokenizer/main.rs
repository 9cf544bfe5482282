//! `SimpleTokenizer`: words to ids and back.

mod properties;
mod reviewed;

use candle_attention::AttentionMask;
use candle_attention::text::{PaddingSide, SimpleTokenizer, TokenizerError};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

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
            Ok(encoding) => assert_eq!(json!(encoding.ids), case["ids"], "{case}"),
            Err(TokenizerError::UnknownWord { word, .. }) => assert_eq!(word, case["token"], "{case}"),
            Err(other) => panic!("{case}: {other}"),
        }
    }
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

/// A long word is cut in the message and whole in the error; of a batch, the first text that fails is named.
#[test]
fn an_unknown_word_is_told_with_its_place() {
    let long = "x".repeat(100_000);
    match tutorial().encode(&format!("you {long}")).unwrap_err() {
        TokenizerError::UnknownWord { word, position, vocabulary, .. } => {
            assert_eq!((word, position, vocabulary), (long.clone(), 1, WORDS.map(String::from).to_vec()));
        }
        other => panic!("{other}"),
    }
    assert!(message(tutorial().encode(&long)).len() < 300);
    let texts: Vec<_> = (0..100).map(|i| if i < 40 { "hello" } else { "you you?" }).collect();
    let error = tutorial().encode_batch(&texts).unwrap_err();
    assert!(matches!(error, TokenizerError::InBatch { index: 40, .. }), "{error}");
}

#[test]
fn the_vocabulary_can_be_looked_up() {
    let tokenizer = tutorial();
    assert_eq!((tokenizer.token_to_id("world"), tokenizer.token_to_id("World")), (Some(2), None));
    assert_eq!((tokenizer.id_to_token(6).as_deref(), tokenizer.id_to_token(7)), (Some("?"), None));
    assert_eq!(tokenizer.decode(&[]).unwrap(), "");
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

/// On either side, what transformers' attention mask of the same batch is.
#[test]
fn a_batch_gives_its_ids_and_the_mask_of_its_padding() {
    for side in [PaddingSide::Right, PaddingSide::Left] {
        let tokenizer = tutorial().with_padding_side(side).unwrap();
        let batch = tokenizer.encode_batch(&["hello", "how are you", ""]).unwrap();
        let tensor = batch.ids_tensor(&Device::Cpu).unwrap();
        assert_eq!((tensor.dtype(), tensor.to_vec2::<u32>().unwrap().as_slice()), (DType::U32, batch.ids()));
        assert_eq!((batch.batch_size(), batch.seq_len()), (3, 3));
        let ones =
            batch.tokens().iter().map(|row| row.iter().map(|token| u8::from(token != "<pad>")).collect::<Vec<_>>());
        let ones = Tensor::new(ones.collect::<Vec<_>>(), &Device::Cpu).unwrap();
        let expected = AttentionMask::from_attention_mask(&ones).unwrap();
        let drawn = |mask: &AttentionMask| mask.resolve(3, 2, 3).unwrap().to_string();
        assert_eq!(drawn(&batch.mask()), drawn(&expected), "{side:?}");
        let other = batch.mask().resolve(3, 1, 4).unwrap_err().to_string();
        assert!(other.starts_with("[attention_mask] the attention mask has 3 columns, expected"), "{other}");
    }
    let empty = tutorial().encode_batch(&["", " "]).unwrap();
    assert_eq!(empty.ids_tensor(&Device::Cpu).unwrap().dims(), [2, 0]);
}

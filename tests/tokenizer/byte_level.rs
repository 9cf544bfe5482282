//! Byte-level tokenizers, in which each letter of a token is that of a byte, with added tokens, which are texts.

use std::collections::BTreeSet;

use candle_attention::gguf;
use candle_attention::text::{SimpleTokenizer, SpecialTokens};
use candle_core::quantized::gguf_file::Value;
use proptest::prelude::*;

use super::save_and_load;
use crate::common::gguf::File;
use crate::common::read_json;

/// The kinds of tokens in `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Returns the letters of the bytes: printable characters of Latin-1 for themselves, and letters from U+0100 on
/// for the other bytes in order.
fn letters() -> Vec<char> {
    let mut others = '\u{100}'..;
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    (0..=u8::MAX).map(|byte| if is_printable(byte) { byte.into() } else { others.next().expect("letters") }).collect()
}

/// Returns the tokenizer of a GGUF file with a token for each byte, no merges, and these added tokens.
fn tokenizer(pre: &str, added: &[String], kind: i32) -> SimpleTokenizer {
    let bytes = letters().into_iter().map(String::from);
    let tokens: Vec<_> = bytes.chain(added.iter().cloned()).map(Value::String).collect();
    let types = (0..tokens.len()).map(|id| Value::I32(if id < 256 { NORMAL } else { kind })).collect();
    let mut file = File::default();
    file.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    file.set("tokenizer.ggml.pre", Value::String(pre.into()));
    file.set("tokenizer.ggml.tokens", Value::Array(tokens));
    file.set("tokenizer.ggml.token_type", Value::Array(types));
    file.set("tokenizer.ggml.merges", Value::Array(Vec::new()));
    file.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    gguf::tokenizer(&file.open().expect("a file").0).expect("a tokenizer")
}

/// Returns the tokenizer whose decoder is a sequence with the byte-level decoder in it.
fn with_sequence_of_decoders(tokenizer: &SimpleTokenizer) -> SimpleTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tokenizer.json");
    tokenizer.save(&path).expect("a file");
    let mut json: serde_json::Value = read_json(&path);
    json["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [json["decoder"], {"type": "Fuse"}]});
    SimpleTokenizer::from_bytes(json.to_string()).expect("a tokenizer")
}

#[test]
fn added_tokens_with_letters_of_byte_map_decode_to_themselves() {
    let added = ["größe", "<čau>", "ilÖve", "aĠb", "ÿö"].map(String::from);
    let tokenizer = tokenizer("gpt-2", &added, USER_DEFINED);
    for token in &added {
        let ids = tokenizer.encode(token).expect("ids").ids;
        assert_eq!(ids, [tokenizer.token_to_id(token).expect("an added token")]);
        assert_eq!(&tokenizer.decode(&ids).expect("a text"), token);
    }
    let text = "Eine Größe, größe<čau> ilÖve?aĠb a b";
    assert_eq!(tokenizer.decode(&tokenizer.encode(text).expect("ids").ids).expect("a text"), text);
}

/// A part of a text: the added token of an index, or other characters.
#[derive(Debug, Clone)]
enum Part {
    Added(prop::sample::Index),
    Other(String),
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let added = any::<prop::sample::Index>().prop_map(Part::Added);
    let other = "(?s).{0,6}|[ a-zäöüß\n]{0,6}".prop_map(Part::Other);
    proptest::collection::vec(prop_oneof![added, other], 0..8)
}

/// Draws tokens of letters of bytes, most of which are no ASCII, and of a few other letters.
fn added_tokens() -> impl Strategy<Value = BTreeSet<String>> {
    let known = prop::sample::select(letters());
    let letter =
        prop_oneof![6 => known, 1 => "[a-z]".prop_map(|text| text.chars().next().expect("one")), 1 => any::<char>()];
    let token = proptest::collection::vec(letter, 2..6).prop_map(|letters| letters.into_iter().collect());
    proptest::collection::btree_set(token, 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Checks whole texts, and the beginnings of a stream of ids: each adds to the text before, or ends in the
    /// replacement character, since a character may take several ids.
    #[test]
    fn byte_level_texts_with_added_tokens_round_trip_whole_and_in_streams(
        added in added_tokens(),
        parts in parts(),
        pre in prop::sample::select(vec!["gpt-2", "llama-bpe", "stablelm2"]),
        kind in prop::sample::select(vec![CONTROL, USER_DEFINED]),
    ) {
        let added: Vec<_> = added.into_iter().collect();
        let mut text = String::new();
        for part in &parts {
            match part {
                Part::Added(index) => text += &added[index.index(added.len())],
                Part::Other(other) => text += other,
            }
        }
        let gguf = tokenizer(pre, &added, kind);
        for tokenizer in [&gguf, &save_and_load(&gguf), &with_sequence_of_decoders(&gguf)] {
            let ids = tokenizer.encode(&text).unwrap().ids;
            prop_assert_eq!(&tokenizer.decode(&ids).unwrap(), &text);
            for end in 0..=ids.len() {
                let shown = tokenizer.decode(&ids[..end]).unwrap();
                prop_assert!(text.starts_with(&shown) || shown.ends_with('\u{fffd}'), "{:?} of {:?}", shown, text);
            }
            if kind == CONTROL {
                let special = tokenizer.decode_with(&ids, SpecialTokens::Without).unwrap();
                prop_assert!(special.len() <= text.len());
            }
        }
    }
}

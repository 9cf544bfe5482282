//! To a file and back, and what a file may ask for.

use candle_attention::ValidLens;
use candle_attention::text::{PaddingSide, SimpleTokenizer, Split, TokenizerError};
use serde_json::json;

use super::documents::{cls_and_sep, file, letters, load, padding};
use super::{ids, message, save_and_load};

#[test]
fn a_strict_tokenizer_stays_strict_through_a_file() {
    let tokenizer = save_and_load(&SimpleTokenizer::from_words(["<unk>", "<pad>", "a"]).unwrap());
    assert_eq!(tokenizer.words(), ["<unk>", "<pad>", "a"]);
    assert_eq!(ids(&tokenizer, "a\x1ca"), [2, 2]);
    assert!(matches!(tokenizer.encode("a b").unwrap_err(), TokenizerError::UnknownWord { position: 1, .. }));
    assert!(tokenizer.encode("").unwrap().ids.is_empty());
    assert_eq!(tokenizer.decode(&[2, 1]).unwrap(), "a <pad>");
}

#[test]
fn all_choices_survive_a_file() {
    let tokenizer = SimpleTokenizer::from_words(["<unk>", "<pad>", "a", "?"])
        .unwrap()
        .with_split(Split::Punctuation)
        .with_unknown("<unk>")
        .unwrap()
        .with_padding("?")
        .unwrap()
        .with_padding_side(PaddingSide::Left)
        .unwrap();
    let loaded = save_and_load(&tokenizer);
    for tokenizer in [&tokenizer, &loaded] {
        let batch = tokenizer.encode_batch(&["a?x", "a"]).unwrap();
        assert_eq!(batch.ids(), [[2, 3, 0], [3, 3, 2]]);
        assert_eq!(batch.starts(), ValidLens::from(vec![0, 2]));
    }
    assert_eq!(format!("{loaded:?}"), format!("{tokenizer:?}"));
}

#[test]
fn a_loaded_file_is_saved_with_its_padding() {
    let bytes = file(letters(), json!({"padding": padding("Left", json!({"Fixed": 4}), None)}));
    let tokenizer = save_and_load(&SimpleTokenizer::from_bytes(&bytes).unwrap());
    assert_eq!(tokenizer.encode_batch(&["a", "b c"]).unwrap().ids(), [[0, 3], [4, 5]]);
}

#[test]
fn faults_on_which_the_crate_panics_are_errors() {
    let mut undefined = cls_and_sep();
    undefined["special_tokens"].as_object_mut().unwrap().remove("[SEP]");
    let mut second = cls_and_sep();
    second["single"][1]["Sequence"]["id"] = json!("B");
    for post_processor in [undefined, second] {
        let error = message(SimpleTokenizer::from_bytes(file(letters(), json!({"post_processor": post_processor}))));
        assert!(error.contains("its post-processor cannot be applied"), "{error}");
    }
    let strip = load(letters(), json!({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 2}}));
    let error = message(strip.decode(&[3]));
    assert!(
        error.starts_with("[tokenizer] the file's tokenizer failed to decode: the tokenizers crate panicked: "),
        "{error}"
    );
}

#[test]
fn split_and_padding_can_be_chosen_for_a_loaded_file() {
    let tokenizer =
        load(letters(), json!({"pre_tokenizer": null})).with_split(Split::Whitespace).with_padding("d").unwrap();
    assert_eq!(tokenizer.encode_batch(&["a b", "c"]).unwrap().ids(), [[3, 4], [5, 6]]);
}

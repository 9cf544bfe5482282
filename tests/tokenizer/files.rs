//! tokenizer.json: its four kinds of models, what a file may ask for, and what is saved.

use candle_attention::ValidLens;
use candle_attention::text::{PaddingSide, SimpleTokenizer, SpecialTokens, Split, TokenizerError};
use serde_json::json;

use super::documents::{
    assert_follows_the_crate, bpe, cls_and_sep, file, letters, load, padding, reference, special, unigram, wordpiece,
};
use super::{ids, message, save_and_load, words};

#[test]
fn word_level_files_load() {
    let with_unk = json!({"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1}});
    assert_eq!(assert_follows_the_crate(with_unk, json!({}), &["a x", "", "x  a"]).unknown_token(), Some("[UNK]"));
    assert!(message(load(letters(), json!({})).encode("a e")).contains("word 2, \"e\", is not"));
}

#[test]
fn bpe_files_load() {
    assert_follows_the_crate(bpe(None), json!({}), &["low lower", "", "ole"]);
    assert_follows_the_crate(bpe(Some("<unk>")), json!({}), &["low xyz", "löw"]);
    let tokenizer = load(bpe(None), json!({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}));
    assert_eq!(tokenizer.encode("lower").unwrap().tokens, ["low", "er"]);
    assert_eq!(tokenizer.decode(&[7, 8]).unwrap(), "lower");
    assert_eq!(tokenizer.decode(&[]).unwrap(), "");
}

#[test]
fn byte_level_and_byte_fallback_leave_nothing_out() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut model = bpe(None);
    model["vocab"] = json!({"l": 0, "o": 1, "w": 2, "Ġ": 3, "Ã": 4, "¶": 5, "lo": 6});
    model["merges"] = json!([["l", "o"]]);
    let parts = json!({"pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": byte_level});
    let tokenizer = assert_follows_the_crate(model, parts, &["low löw", " lo"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "low löw")).unwrap(), "low löw");
    assert!(matches!(tokenizer.encode("low é").unwrap_err(), TokenizerError::DroppedCharacters { position: 1, .. }));

    let mut model = bpe(None);
    model["byte_fallback"] = json!(true);
    model["vocab"]["<0xC3>"] = json!(9);
    model["vocab"]["<0xB6>"] = json!(10);
    let tokenizer = assert_follows_the_crate(model, json!({"decoder": {"type": "ByteFallback"}}), &["löw", "ö"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "löw")).unwrap(), "löw");
    assert!(tokenizer.encode("lé").is_err());
}

#[test]
fn characters_that_bpe_would_drop_are_an_error() {
    let tokenizer = load(bpe(None), json!({}));
    for word in ["xlow", "lxow", "lowx", "x"] {
        let text = format!("low {word}");
        assert!(reference(&file(bpe(None), json!({})), &text, true).0.len() < text.len());
        let expected = format!(
            "[tokenizer] word 2, {word:?}, has characters that the file's BPE model has no token for: \
             remove them, or use a file with an unknown token or byte fallback"
        );
        assert_eq!(message(tokenizer.encode(&text)), expected);
    }
}

#[test]
fn unknown_tokens_that_a_file_names_but_lacks_make_unknown_words_errors() {
    for (model, text) in
        [(bpe(Some("[MASK]")), "low xow"), (wordpiece("[MASK]"), "play xow"), (unigram(None), "he xow")]
    {
        let error = load(model, json!({})).encode(text).unwrap_err();
        assert!(matches!(&error, TokenizerError::UnknownWord { word, .. } if word.contains("xow")), "{error}");
    }
}

#[test]
fn wordpiece_files_load_with_their_special_tokens() {
    let parts = json!({
        "added_tokens": [special(0, "[PAD]"), special(1, "[CLS]"), special(2, "[SEP]"), special(3, "[UNK]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": cls_and_sep(),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
    });
    let texts = ["Playing the!", "", "xyz played", "the [SEP] play"];
    let tokenizer = assert_follows_the_crate(wordpiece("[UNK]"), parts, &texts);
    let encoding = tokenizer.encode("Playing the!").unwrap();
    assert_eq!(encoding.tokens, ["[CLS]", "play", "##ing", "the", "!", "[SEP]"]);
    assert_eq!(encoding.ids, [1, 4, 5, 7, 8, 2]);
    assert_eq!(tokenizer.encode_with("Playing the!", SpecialTokens::Without).unwrap().ids, [4, 5, 7, 8]);
    assert_eq!(ids(&tokenizer, ""), [1, 2]);
    assert_eq!(tokenizer.decode(&encoding.ids).unwrap(), "[CLS] playing the! [SEP]");
    assert_eq!(tokenizer.decode_with(&encoding.ids, SpecialTokens::Without).unwrap(), "playing the!");
    let batch = tokenizer.encode_batch(&["the", "played the"]).unwrap();
    assert_eq!(batch.ids(), [[1, 7, 2, 0, 0], [1, 4, 6, 7, 2]]);
    assert_eq!(batch.lens(), [3, 5]);
    let batch = tokenizer.encode_batch_with(&["the", "played the"], SpecialTokens::Without).unwrap();
    assert_eq!(batch.ids(), [[7, 0, 0], [4, 6, 7]]);
}

#[test]
fn unigram_files_load() {
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let parts = json!({"pre_tokenizer": metaspace, "decoder": metaspace});
    let tokenizer = assert_follows_the_crate(unigram(Some(0)), parts, &["hello hell", "hexo", ""]);
    assert_eq!(tokenizer.encode("hello").unwrap().tokens, ["▁he", "llo"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "hello hello")).unwrap(), "hello hello");
}

#[test]
fn a_strict_tokenizer_stays_strict_through_a_file() {
    let tokenizer = save_and_load(&words(&["<unk>", "<pad>", "a"]));
    assert_eq!(tokenizer.words(), ["<unk>", "<pad>", "a"]);
    assert_eq!(ids(&tokenizer, "a\x1ca"), [2, 2]);
    assert!(matches!(tokenizer.encode("a b").unwrap_err(), TokenizerError::UnknownWord { position: 1, .. }));
    assert!(ids(&tokenizer, "").is_empty());
    assert_eq!(tokenizer.decode(&[2, 1]).unwrap(), "a <pad>");
}

#[test]
fn all_choices_survive_a_file() -> Result<(), TokenizerError> {
    let tokenizer = words(&["<unk>", "<pad>", "a", "?"]).with_split(Split::Punctuation).with_unknown("<unk>")?;
    let tokenizer = tokenizer.with_padding("?")?.with_padding_side(PaddingSide::Left)?;
    let loaded = save_and_load(&tokenizer);
    for tokenizer in [&tokenizer, &loaded] {
        let batch = tokenizer.encode_batch(&["a?x", "a"])?;
        assert_eq!(batch.ids(), [[2, 3, 0], [3, 3, 2]]);
        assert_eq!(batch.starts(), ValidLens::from(vec![0, 2]));
    }
    assert_eq!(format!("{loaded:?}"), format!("{tokenizer:?}"));

    let of_a_file = load(letters(), json!({"padding": padding("Left", json!({"Fixed": 4}), None)}));
    assert_eq!(save_and_load(&of_a_file).encode_batch(&["a", "b c"])?.ids(), [[0, 3], [4, 5]]);
    let chosen = load(letters(), json!({"pre_tokenizer": null})).with_split(Split::Whitespace).with_padding("d")?;
    assert_eq!(chosen.encode_batch(&["a b", "c"])?.ids(), [[3, 4], [5, 6]]);
    Ok(())
}

#[test]
fn a_padding_id_that_is_another_words_leaves_that_word_in() {
    let model = json!({"type": "WordLevel", "unk_token": "", "vocab": {"a": 0, "b": 1}});
    let tokenizer = load(model, json!({"padding": padding("Right", json!("BatchLongest"), None)}));
    assert_eq!(tokenizer.decode_with(&[0, 1], SpecialTokens::Without).unwrap(), "a b");
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
    let start = "[tokenizer] the file's tokenizer failed to decode: the tokenizers crate panicked: ";
    assert!(error.starts_with(start), "{error}");
}

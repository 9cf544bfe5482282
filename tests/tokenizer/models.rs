//! The four kinds of models that a tokenizer.json can hold.

use candle_attention::text::{SimpleTokenizer, SpecialTokens, TokenizerError};
use serde_json::json;

use super::documents::{
    assert_follows_the_crate, bpe, cls_and_sep, file, letters, load, reference, special, unigram, wordpiece,
};
use super::{ids, message};

#[test]
fn word_level_files_load() {
    let with_unk = json!({"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1}});
    assert_follows_the_crate(&file(with_unk.clone(), json!({})), &["a x", "", "x  a"]);
    assert_eq!(load(with_unk, json!({})).unknown_token(), Some("[UNK]"));
    assert!(message(load(letters(), json!({})).encode("a e")).contains("word 2, \"e\", is not"));
}

#[test]
fn bpe_files_load() {
    assert_follows_the_crate(&file(bpe(None), json!({})), &["low lower", "", "ole"]);
    assert_follows_the_crate(&file(bpe(Some("<unk>")), json!({})), &["low xyz", "löw"]);
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
    let bytes = file(model, json!({"pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": byte_level}));
    assert_follows_the_crate(&bytes, &["low löw", " lo"]);
    let tokenizer = SimpleTokenizer::from_bytes(&bytes).unwrap();
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "low löw")).unwrap(), "low löw");
    assert!(matches!(tokenizer.encode("low é").unwrap_err(), TokenizerError::DroppedCharacters { position: 1, .. }));

    let mut model = bpe(None);
    model["byte_fallback"] = json!(true);
    model["vocab"]["<0xC3>"] = json!(9);
    model["vocab"]["<0xB6>"] = json!(10);
    let bytes = file(model, json!({"decoder": {"type": "ByteFallback"}}));
    assert_follows_the_crate(&bytes, &["löw", "ö"]);
    let tokenizer = SimpleTokenizer::from_bytes(&bytes).unwrap();
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "löw")).unwrap(), "löw");
    assert!(tokenizer.encode("lé").is_err());
}

#[test]
fn characters_that_bpe_would_drop_are_an_error() {
    let bytes = file(bpe(None), json!({}));
    let tokenizer = SimpleTokenizer::from_bytes(&bytes).unwrap();
    for text in ["low xlow", "low lxow", "low lowx", "low x"] {
        assert!(reference(&bytes, text, true).0.len() < text.len());
        let word = text.split_once(' ').unwrap().1;
        assert_eq!(
            message(tokenizer.encode(text)),
            format!(
                "[tokenizer] word 2, {word:?}, has characters that the file's BPE model has no token for: \
                 remove them, or use a file with an unknown token or byte fallback"
            )
        );
    }
}

#[test]
fn unknown_tokens_that_a_file_names_but_lacks_make_unknown_words_errors() {
    let dangling = [
        (load(bpe(Some("[MASK]")), json!({})), "low xow"),
        (load(wordpiece("[MASK]"), json!({})), "play xow"),
        (load(unigram(None), json!({})), "he xow"),
    ];
    for (tokenizer, text) in dangling {
        let error = tokenizer.encode(text).unwrap_err();
        assert!(
            matches!(&error, TokenizerError::UnknownWord { word, .. } if word.contains("xow")),
            "{tokenizer:?}: {error}"
        );
    }
}

#[test]
fn wordpiece_files_load_with_their_special_tokens() {
    let bytes = file(
        wordpiece("[UNK]"),
        json!({
            "added_tokens": [special(0, "[PAD]"), special(1, "[CLS]"), special(2, "[SEP]"), special(3, "[UNK]")],
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": cls_and_sep(),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        }),
    );
    assert_follows_the_crate(&bytes, &["Playing the!", "", "xyz played", "the [SEP] play"]);
    let tokenizer = SimpleTokenizer::from_bytes(&bytes).unwrap();
    let encoding = tokenizer.encode("Playing the!").unwrap();
    assert_eq!(encoding.tokens, ["[CLS]", "play", "##ing", "the", "!", "[SEP]"]);
    assert_eq!(encoding.ids, [1, 4, 5, 7, 8, 2]);
    assert_eq!(tokenizer.encode_with("Playing the!", SpecialTokens::Without).unwrap().ids, [4, 5, 7, 8]);
    assert_eq!(tokenizer.encode("").unwrap().ids, [1, 2]);
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
    let bytes = file(unigram(Some(0)), json!({"pre_tokenizer": metaspace, "decoder": metaspace}));
    assert_follows_the_crate(&bytes, &["hello hell", "hexo", ""]);
    let tokenizer = SimpleTokenizer::from_bytes(&bytes).unwrap();
    assert_eq!(tokenizer.encode("hello").unwrap().tokens, ["▁he", "llo"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "hello hello")).unwrap(), "hello hello");
}

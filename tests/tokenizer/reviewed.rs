//! What tokenizers make of texts, one by one and in a batch: `texts.txt` is what was reviewed, and `UPDATE_EXPECT=1
//! cargo test --test tokenizer` writes it.

use std::fmt::Write;

use candle_attention::text::{PaddingSide, SimpleTokenizer, SpecialTokens, Split, TokenizerError};
use serde_json::{Value, json};

use super::documents::{file, load, named, padding, special};
use super::{message, save_and_load, tutorial, words};

/// Without special tokens where that is something else.
fn report(tokenizer: &SimpleTokenizer, texts: &[&str]) -> String {
    let (size, words) = (tokenizer.vocab_size(), tokenizer.words());
    let [padding, unknown] = [tokenizer.padding_token(), tokenizer.unknown_token().map(String::from)];
    let mut report = format!("    {size} words {words:?}, padding {padding:?}, unknown {unknown:?}\n");
    let of = |special| {
        let (mut report, mut known) = (String::new(), Vec::new());
        for text in texts {
            let said = match tokenizer.encode_with(text, special) {
                Ok(found) => {
                    known.push(*text);
                    let back = tokenizer.decode_with(&found.ids, special).unwrap_or_else(|error| error.to_string());
                    format!("{:?} {:?} cut {}, back {back:?}", found.ids, found.tokens, found.num_truncated)
                }
                Err(error) => error.to_string(),
            };
            writeln!(report, "    {text:?}: {said}").expect("memory");
        }
        match tokenizer.encode_batch_with(&known, special) {
            Ok(batch) => {
                let (rows, cut, lens) = (batch.ids(), batch.num_truncated(), batch.lens());
                let valid = batch.valid_lens().map_or_else(|error| error.to_string(), |lens| format!("{lens:?}"));
                let (tokens, starts, side) = (batch.tokens(), batch.starts(), batch.padding_side());
                report += &format!("    {rows:?} {tokens:?} cut {cut:?} lens {lens:?} {side:?} {starts:?} {valid}\n");
            }
            Err(error) => report += &format!("    {error}\n"),
        }
        report
    };
    let [with, without] = [of(SpecialTokens::With), of(SpecialTokens::Without)];
    report += &with;
    if without != with {
        report += &format!("    without special tokens\n{without}");
    }
    report
}

/// What the tokenizers crate makes of a file and of texts, unless words are errors here.
fn assert_follows_the_crate(file: &[u8], texts: &[&str]) {
    let mut theirs = tokenizers::Tokenizer::from_bytes(file).expect("a tokenizer");
    theirs.with_padding(None).with_truncation(None).expect("no truncation");
    let ours = SimpleTokenizer::from_bytes(file).expect("a tokenizer");
    for (text, flag) in texts.iter().flat_map(|text| [(text, true), (text, false)]) {
        let special = if flag { SpecialTokens::With } else { SpecialTokens::Without };
        match (ours.encode_with(text, special), theirs.encode(*text, flag)) {
            (Ok(found), Ok(expected)) => {
                assert_eq!((&found.ids[..], &found.tokens[..]), (expected.get_ids(), expected.get_tokens()));
            }
            (Err(TokenizerError::DroppedCharacters { .. }), Ok(dropped)) => assert!(dropped.len() < text.len()),
            (found, _) => assert!(matches!(found, Err(TokenizerError::UnknownWord { .. })), "{text}: {found:?}"),
        }
    }
}

#[test]
fn texts_become_what_was_reviewed() -> Result<(), TokenizerError> {
    let of_texts = ["the cat sat on the mat", "", "a\u{3000}mat <pad>"];
    let choices = words(&["<unk>", "<pad>", "a", "?"]).with_split(Split::Punctuation).with_unknown("<unk>")?;
    let left = |tokenizer: SimpleTokenizer| tokenizer.with_padding_side(PaddingSide::Left);
    let own = [
        (
            "the tutorial's words",
            tutorial(),
            &["hello world", "", " ", "\n\t\u{3000}", "how are you", "hello you?"][..],
        ),
        ("padded on the left", left(tutorial())?, &["you", "are you"]),
        ("padded with another word", tutorial().with_padding("?")?, &["you", "are you"]),
        ("two usual padding tokens", words(&["a", "[PAD]", "<pad>"]), &["a", "a a"]),
        ("one", words(&["a", "[PAD]"]), &["a", "a a"]),
        ("none", words(&["a", "<PAD>"]), &["a", "a a"]),
        ("one length", words(&["b", "a"]), &["a b", "b b"]),
        ("no tokens", words(&["a"]), &["", " "]),
        (
            "punctuation",
            tutorial().with_split(Split::Punctuation),
            &["hello world how are you?", "you??\x1fyou ?", "<pad>"],
        ),
        ("punctuation of others", words(&["我", "，", "$"]).with_split(Split::Punctuation), &["我，我$"]),
        ("no punctuation", words(&["我", "，", "$"]).with_split(Split::Whitespace), &["我，我"]),
        ("neighbours", words(&["Hallo", "hello", "hell", "help", "jelly", "zoo"]), &["zoo Hello", "helo"]),
        ("swapped letters", words(&["ba", "cd"]), &["ab"]),
        ("an unknown token that is not chosen", words(&["a", "<unk>"]), &["a", "x"]),
        ("chosen", words(&["a", "<unk>"]).with_unknown("<unk>")?, &["a x a"]),
        ("another", words(&["a", "[UNK]"]).with_unknown("[UNK]")?, &["a x a"]),
        ("strict", words(&["<unk>", "<pad>", "a"]), &["a\x1ca", "a b", "", "a <pad>"]),
        ("all choices", left(choices.with_padding("?")?)?, &["a?x", "a"]),
        ("the words of texts", SimpleTokenizer::from_texts(&of_texts, Split::Whitespace)?, &of_texts),
        ("with punctuation", SimpleTokenizer::from_texts(&["you?"], Split::Punctuation)?, &["?you"]),
        ("of no texts", SimpleTokenizer::from_texts::<&str>(&[], Split::Whitespace)?, &[""]),
    ];
    let byte_level = named("byte_level_text");
    let metaspace = named("metaspace");
    let added = [(0, "[PAD]"), (1, "[CLS]"), (2, "[SEP]"), (3, "[UNK]")].map(|(id, token)| special(id, token));
    let cut = |strategy: Value| {
        let truncation = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 5});
        let padding = padding("Right", strategy, Some(8));
        json!({"padding": padding, "truncation": truncation, "post_processor": named("cls_and_sep")})
    };
    let long = ["a", "b c", "a b c d a b c d a b"];
    let files = [
        ("a word-level file", "letters", json!({}), &["a e", "a b"][..]),
        ("its unknown token", "letters", json!({"model": {"vocab": {"[UNK]": 0, "a": 1}}}), &["a x", "", "x  a"]),
        (
            "added tokens",
            "letters",
            json!({"added_tokens": [special(7, "<extra>"), special(1, "[CLS]")]}),
            &["a<extra>b"],
        ),
        (
            "padded on the left",
            "letters",
            json!({"padding": padding("Left", json!({"Fixed": 4}), None)}),
            &["a", "b c d", ""],
        ),
        (
            "a padding id that is another word's",
            "letters",
            json!({"model": {"unk_token": "", "vocab": {"a": 0, "b": 1}}, "padding": padding("Right", json!("BatchLongest"), None)}),
            &["a b"],
        ),
        ("a fixed length", "letters", cut(json!({"Fixed": 4})), &long),
        ("an endless length", "letters", cut(json!({"Fixed": usize::MAX})), &long),
        ("the longest of a batch", "letters", cut(json!("BatchLongest")), &long),
        (
            "BPE, and what it would drop",
            "bpe",
            json!({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}),
            &["low lower", "", "ole", "low xlow", "low lxow", "low lowx", "low x"],
        ),
        ("its unknown token", "bpe", json!({"model": {"unk_token": "<unk>"}}), &["low xyz", "löw"]),
        ("which it lacks", "bpe", json!({"model": {"unk_token": "[MASK]"}}), &["low xow"]),
        (
            "bytes",
            "byte_level",
            json!({"pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": byte_level}),
            &["low löw", " lo", "low é"],
        ),
        (
            "bytes where letters lack",
            "bpe",
            json!({"model": {"byte_fallback": true}, "decoder": {"type": "ByteFallback"}}),
            &["löw", "ö", "lé"],
        ),
        (
            "WordPiece with special tokens",
            "wordpiece",
            json!({
                "added_tokens": added, "normalizer": named("bert"), "pre_tokenizer": {"type": "BertPreTokenizer"},
                "post_processor": named("cls_and_sep"),
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            }),
            &["Playing the!", "", "xyz played", "the [SEP] play", "the", "played the"],
        ),
        ("an unknown token that it lacks", "wordpiece", json!({"model": {"unk_token": "[MASK]"}}), &["play xow"]),
        (
            "Unigram",
            "unigram",
            json!({"pre_tokenizer": metaspace, "decoder": metaspace}),
            &["hello hell", "hexo", "", "hello hello"],
        ),
        ("without an unknown token", "unigram", json!({"model": {"unk_id": null}}), &["he xow"]),
    ];
    let mut text = String::new();
    for (name, tokenizer, texts) in &own {
        let report = report(tokenizer, texts);
        assert_eq!(report, self::report(&save_and_load(tokenizer), texts), "{name}");
        text += &format!("{name}\n{report}");
    }
    for (name, model, parts, texts) in files {
        let file = file(model, parts);
        assert_follows_the_crate(&file, texts);
        let tokenizer = SimpleTokenizer::from_bytes(&file)?;
        let report = report(&tokenizer, texts);
        assert_eq!(report, self::report(&save_and_load(&tokenizer), texts), "{name}");
        text += &format!("{name}\n{report}");
    }
    let special = || load("letters", json!({"post_processor": named("cls_and_sep")}));
    let left = || load("letters", json!({"padding": padding("Left", json!("BatchLongest"), None)}));
    let chosen = load("letters", json!({"pre_tokenizer": null})).with_split(Split::Whitespace).with_padding("d")?;
    text +=
        &format!("a file cut at 4\n{}", report(&special().with_truncation(4)?, &["a b c d a", "a", "a b", "a b c"]));
    text +=
        &format!("padded on the right\n{}", report(&left().with_padding_side(PaddingSide::Right)?, &["a", "b c d"]));
    text += &format!("split and padded otherwise\n{}", report(&chosen, &["a b", "c"]));
    text += &format!("words cut at 1\n{}", report(&tutorial().with_truncation(1)?, &["how are you"]));
    for most in 0..3 {
        text += &format!("a file cut at {most}\n    {}\n", message(special().with_truncation(most)));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizer/texts.txt");
    expect_test::expect_file![path].assert_eq(&text);
    Ok(())
}

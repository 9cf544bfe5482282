//! Reports of tokenizers on texts, one by one and in a batch. A line of `texts.txt` has a tokenizer and texts, and the
//! reviewed report is below it; `UPDATE_EXPECT=1 cargo test --test tokenizer` writes the reports.

use std::fmt::Write;

use candle_attention::text::{PaddingSide, SimpleTokenizer, SpecialTokens, Split, TokenizerError};
use serde::Deserialize;
use serde_json::{Value, json};

use super::save_and_load;

/// A tokenizer of the words of `texts` unless it says others, or of a file, with what is chosen after that.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    is: String,
    words: Option<Vec<String>>,
    /// A model of `models.json`. Parts that are texts name entries of that file too.
    model: Option<String>,
    /// Fields of the file, next to the model or in it.
    #[serde(default)]
    file: serde_json::Map<String, Value>,
    split: Option<String>,
    unknown: Option<String>,
    padding: Option<String>,
    side: Option<String>,
    truncation: Option<usize>,
    texts: Vec<String>,
}

/// Returns a tokenizer.json with a model of `models.json` and these parts.
fn file(model: &str, parts: &serde_json::Map<String, Value>) -> Vec<u8> {
    let known: Value = serde_json::from_str(include_str!("models.json")).expect("JSON");
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null, "model": known[model],
    });
    for (key, value) in parts {
        if key == "padding" {
            file[key] = known[key].clone();
        }
        match (&mut file[key], value) {
            (Value::Object(part), Value::Object(own)) if key == "model" || key == "padding" => part.extend(own.clone()),
            (place, Value::String(name)) => *place = known[name].clone(),
            (place, value) => *place = value.clone(),
        }
    }
    file.to_string().into_bytes()
}

impl Case {
    fn tokenizer(&self) -> Result<SimpleTokenizer, TokenizerError> {
        let split = self.split.as_ref().map(|split| match split.as_str() {
            "punctuation" => Split::Punctuation,
            _ => Split::Whitespace,
        });
        let mut tokenizer = match (&self.model, &self.words) {
            (Some(model), _) => SimpleTokenizer::from_bytes(file(model, &self.file))?,
            (_, Some(words)) => SimpleTokenizer::from_words(words.clone())?,
            _ => SimpleTokenizer::from_texts(&self.texts, split.unwrap_or_default())?,
        };
        if let Some(split) = split {
            tokenizer = tokenizer.with_split(split);
        }
        if let Some(unknown) = &self.unknown {
            tokenizer = tokenizer.with_unknown(unknown)?;
        }
        if let Some(padding) = &self.padding {
            tokenizer = tokenizer.with_padding(padding)?;
        }
        if let Some(side) = &self.side {
            let side = if side == "left" { PaddingSide::Left } else { PaddingSide::Right };
            tokenizer = tokenizer.with_padding_side(side)?;
        }
        self.truncation.map_or(Ok(tokenizer.clone()), |most| tokenizer.with_truncation(most))
    }

    /// Returns the report. It includes encodings without special tokens if these differ.
    fn report(&self, tokenizer: &SimpleTokenizer) -> String {
        let size = tokenizer.vocab_size();
        let words = tokenizer.words();
        let [padding, unknown] = [tokenizer.padding_token(), tokenizer.unknown_token().map(String::from)];
        let mut report = format!("    {size} words {words:?}, padding {padding:?}, unknown {unknown:?}\n");
        let of = |special| {
            let mut lines = String::new();
            let mut known = Vec::new();
            for text in &self.texts {
                let said = match tokenizer.encode_with(text, special) {
                    Ok(found) => {
                        known.push(text);
                        let back = tokenizer.decode_with(&found.ids, special).unwrap_or_else(|error| error.to_string());
                        format!("{:?} {:?} cut {}, back {back:?}", found.ids, found.tokens, found.num_truncated)
                    }
                    Err(error) => error.to_string(),
                };
                writeln!(lines, "    {text:?}: {said}").expect("memory");
            }
            match tokenizer.encode_batch_with(&known, special) {
                Ok(batch) => {
                    let rows = batch.ids();
                    let cut = batch.num_truncated();
                    let lens = batch.lens();
                    let valid = batch.valid_lens().map_or_else(|error| error.to_string(), |valid| format!("{valid:?}"));
                    let tokens = batch.tokens();
                    let starts = batch.starts();
                    let side = batch.padding_side();
                    lines +=
                        &format!("    {rows:?} {tokens:?} cut {cut:?} lens {lens:?} {side:?} {starts:?} {valid}\n");
                }
                Err(error) => lines += &format!("    {error}\n"),
            }
            lines
        };
        let [with, without] = [of(SpecialTokens::With), of(SpecialTokens::Without)];
        report += &with;
        if without != with {
            report += &format!("    without special tokens\n{without}");
        }
        report
    }

    /// Compares with the tokenizers crate over a file and texts, unless words are errors here.
    fn assert_follows_the_crate(&self, file: &[u8]) {
        let mut theirs = tokenizers::Tokenizer::from_bytes(file).expect("a tokenizer");
        theirs.with_padding(None).with_truncation(None).expect("no truncation");
        let ours = SimpleTokenizer::from_bytes(file).expect("a tokenizer");
        for (text, flag) in self.texts.iter().flat_map(|text| [(text, true), (text, false)]) {
            let special = if flag { SpecialTokens::With } else { SpecialTokens::Without };
            match (ours.encode_with(text, special), theirs.encode(text.as_str(), flag)) {
                (Ok(found), Ok(expected)) => {
                    let expected = (expected.get_ids(), expected.get_tokens());
                    assert_eq!((&found.ids[..], &found.tokens[..]), expected, "{}", self.is);
                }
                (Err(TokenizerError::DroppedCharacters { .. }), Ok(dropped)) => assert!(dropped.len() < text.len()),
                (found, _) => assert!(matches!(found, Err(TokenizerError::UnknownWord { .. })), "{text}: {found:?}"),
            }
        }
    }
}

#[test]
fn tokenizer_reports_match_reviewed_texts() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tokenizer/texts.txt");
    let reviewed = std::fs::read_to_string(path).expect("the texts");
    let mut text = String::new();
    for line in reviewed.lines().filter(|line| !line.starts_with("    ")) {
        let case: Case = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        let answer = case.tokenizer().map_or_else(
            |error| format!("    {error}\n"),
            |tokenizer| {
                let report = case.report(&tokenizer);
                // Truncation is not saved.
                if case.truncation.is_none() {
                    assert_eq!(report, case.report(&save_and_load(&tokenizer)), "{}", case.is);
                }
                case.model.iter().for_each(|model| case.assert_follows_the_crate(&file(model, &case.file)));
                report
            },
        );
        assert!(answer.lines().all(|row| row.starts_with("    ")), "{answer}");
        text += &format!("{line}\n");
        // What the crate below says where it panics is its own.
        for said in answer.lines() {
            let (said, rest) = said.split_once(" panicked: ").map_or((said, ""), |(said, _)| (said, " panicked: …"));
            text += &format!("{said}{rest}\n");
        }
    }
    expect_test::expect_file![path].assert_eq(&text);
}

//! Tokenizers of GGUF files compared with llama.cpp, whose tokens `crates/compare/conformance/gguf_tokenizers.py`
//! recorded.

use candle_attention::SimpleTokenizer;
use candle_attention::gguf;
use candle_attention::text::SpecialTokens;
use candle_core::Result;
use candle_core::quantized::gguf_file::Value;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::common::gguf::File;
use crate::common::{error_text, recorded};

#[derive(Deserialize)]
struct Recorded {
    texts: Vec<String>,
    byte_level: Map<String, Json>,
    divisions: Vec<Division>,
    others: Vec<Other>,
}

#[derive(Deserialize)]
struct Division {
    /// The values of `tokenizer.ggml.pre`.
    pre: Vec<String>,
    /// The ids of each text.
    ids: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Other {
    keys: Map<String, Json>,
    ids: Vec<Vec<u32>>,
}

fn read() -> Recorded {
    let text = std::fs::read_to_string(recorded("tokenizer/gguf.json")).expect("the file is there");
    serde_json::from_str(&text).expect("the form of the file")
}

fn value(key: &str, json: &Json) -> Value {
    match json {
        Json::Bool(flag) => Value::Bool(*flag),
        Json::String(text) => Value::String(text.clone()),
        Json::Array(list) => Value::Array(list.iter().map(|entry| value(key, entry)).collect()),
        Json::Number(number) if key == "precompiled_charsmap" => Value::U8(number.as_u64().expect("a byte") as u8),
        Json::Number(number) => match number.as_u64() {
            Some(whole) => Value::U32(whole as u32),
            None => Value::F32(number.as_f64().expect("a number") as f32),
        },
        _ => panic!("{key} is {json}"),
    }
}

fn file(keys: &Map<String, Json>) -> File {
    let mut file = File::default();
    for (key, json) in keys {
        file.set(&format!("tokenizer.ggml.{key}"), value(key, json));
    }
    file
}

fn check(tokenizer: &SimpleTokenizer, texts: &[String], expected: &[Vec<u32>], what: &str) -> Result<()> {
    for (text, ids) in texts.iter().zip(expected) {
        let encoding = tokenizer.encode(text)?;
        assert_eq!(&encoding.ids, ids, "{what}: {text:?} is {:?}", encoding.tokens);
    }
    Ok(())
}

#[test]
fn gguf_divisions_have_the_tokens_of_llama_cpp() -> Result<()> {
    let recorded = read();
    let mut names = 0;
    for division in &recorded.divisions {
        for pre in &division.pre {
            names += 1;
            let mut described = file(&recorded.byte_level);
            described.set("tokenizer.ggml.pre", Value::String(pre.clone()));
            let tokenizer = gguf::tokenizer(&described.open()?.0)?;
            check(&tokenizer, &recorded.texts, &division.ids, pre)?;
            if *pre == division.pre[0] {
                for (text, ids) in recorded.texts.iter().zip(&division.ids) {
                    assert_eq!(&tokenizer.decode_with(ids, SpecialTokens::Without)?, text, "{pre}");
                }
            }
        }
    }
    // The error for a name that is not known lists the known ones.
    let mut unknown = file(&recorded.byte_level);
    unknown.set("tokenizer.ggml.pre", Value::String("?".into()));
    let error = error_text(gguf::tokenizer(&unknown.open()?.0));
    // Three divisions are of characters, not of bytes.
    assert_eq!(error.matches(", ").count(), names + 3, "{error}");
    Ok(())
}

#[test]
fn gguf_tokenizers_of_other_kinds_have_the_tokens_of_llama_cpp() -> Result<()> {
    let recorded = read();
    for Other { keys, ids } in &recorded.others {
        let tokenizer = gguf::tokenizer(&file(keys).open()?.0)?;
        check(&tokenizer, &recorded.texts, ids, keys["model"].as_str().expect("a name"))?;
    }
    Ok(())
}

#[test]
fn gguf_table_of_characters_that_leads_out_of_bounds_is_an_error() -> Result<()> {
    let recorded = read();
    let keys = &recorded.others[1].keys;
    let Value::Array(table) = value("precompiled_charsmap", &keys["precompiled_charsmap"]) else { panic!("a list") };
    let refused = |changed: Vec<Value>| -> Result<String> {
        let mut described = file(keys);
        described.set("tokenizer.ggml.precompiled_charsmap", Value::Array(changed));
        Ok(error_text(gguf::tokenizer(&described.open()?.0)))
    };
    let mut lost = table.clone();
    // The upper bits of the root: nodes far behind the end.
    lost[7] = Value::U8(0x7f);
    for broken in [table[..table.len() / 2].to_vec(), vec![Value::U8(255); 16], lost] {
        let error = refused(broken)?;
        assert!(error.contains("precompiled_charsmap has another table"), "{error}");
    }
    Ok(())
}
